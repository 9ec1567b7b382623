"""mpirun over two hosts (hosts_support.py): the bits of one host, and what is lost when a rank on the
other host dies, or the link does: nothing, after the ranks of both have ended in time.
"""
import json
import os
import pathlib
import signal
import subprocess
import time
import unittest

import cli_support as cli
from hosts_support import Hosts

STEPS = 30
SUPERVISE = pathlib.Path(__file__).resolve().parents[2] / "launch" / "supervise"


def ranks_of(word):
  """(process, host) of the binary's processes whose command line holds `word`."""
  found = []
  for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      if (os.path.samefile(folder / "exe", cli.BINARY) and
          word.encode() in (folder / "cmdline").read_bytes().split(b"\0")):
        found.append((int(folder.name), os.readlink(folder / "ns/uts")))
    except OSError:  # gone
      pass
  return found


def steps_of(out):
  file = cli.WORK / out / "metrics.jsonl"
  return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_until(condition, what, seconds=40):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, f"no {what}"
    time.sleep(0.02)


class HostsTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    try:
      cls.hosts = Hosts(cli.WORK / "hosts")
    except Hosts.Unavailable as error:
      raise unittest.SkipTest(str(error))
    cls.addClassCleanup(cls.hosts.stop)
    cls.text = cli.write_text("text.txt")
    cli.succeed(*cls.words("undisturbed"), "--comm", "thread:1", "--zero", 0)

  @classmethod
  def words(cls, out, steps=STEPS):
    return ["train", "--data", cls.text, *cli.TINY, "--precision", "bf16", "--micro-batch", 2,
            "--global-batch", 14, "--schedule", "constant", "--steps", steps, "--save-every", 5,
            "--eval-every", 0, "--out", out]

  def start(self, words, name, before=()):
    with open(cli.WORK / f"{name}.log", "wb") as log:
      process = subprocess.Popen([str(word) for word in [*before, *self.hosts.command(words)]],
                                 cwd=cli.WORK, env=self.hosts.environment(),
                                 stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    self.addCleanup(lambda: process.poll() is None and process.kill())
    return process

  def run_here(self, words, name):
    code = self.start(words, name).wait(timeout=60)
    return code, (cli.WORK / f"{name}.log").read_text()

  def check(self, out):
    self.assertEqual(cli.numbers(out), cli.numbers("undisturbed"))
    self.assertEqual(cli.checkpoint_hash(out), cli.checkpoint_hash("undisturbed"))

  def test_ranks_and_hosts(self):
    code, log = self.run_here(["doctor", "--json", "--out", "out"], "doctor")
    ranks = json.loads(log)["ranks"]
    self.assertEqual([(rank["host"], rank["local_rank"], rank["local_size"]) for rank in ranks],
                     [("node1", 0, 2), ("node1", 1, 2), ("node2", 0, 2), ("node2", 1, 2)])
    self.assertEqual([rank["next_is_here"] for rank in ranks], [True, False, True, False])
    self.assertEqual(code, 0, log)

  def test_a_folder_that_is_not_shared(self):
    code, log = self.run_here(["doctor", "--out", "hosts/private/out"], "private")
    self.assertEqual(code, 69, log)
    self.assertRegex(log, "node2: .*/private .* is not the folder that rank 0 writes to")

  def test_bits(self):
    """Begun on one host with three ranks, ended on two with four."""
    cli.succeed(*self.words("moved"), "--zero", 2, "--stop-after", 11, ranks=3, expect=75)
    code, log = self.run_here([*self.words("moved"), "--zero", 3], "moved")
    self.assertEqual(code, 0, log)
    self.assertIn("11 steps done", log)
    self.check("moved")

  def test_signal(self):
    process = self.start([*self.words("signal", 10**6), "--stop-after", 10**6], "signal")
    wait_until(lambda: steps_of("signal") > 5, "steps")
    launcher = process.pid  # nsenter has become mpirun
    os.kill(launcher, signal.SIGUSR1)
    self.assertEqual(process.wait(timeout=40), 75)
    self.assertTrue((cli.WORK / f"signal/checkpoints/step-{steps_of('signal'):08}").is_dir())

  def test_a_rank_dies_on_the_other_host(self):
    process = self.start(self.words("died"), "died", [SUPERVISE, "--max-restarts", 1, "--"])
    wait_until(lambda: steps_of("died") >= 8, "steps")
    other = os.readlink(f"/proc/{self.hosts.pid(2)}/ns/uts")
    os.kill(next(pid for pid, host in ranks_of("died") if host == other), signal.SIGKILL)
    self.assertEqual(process.wait(timeout=60), 0, (cli.WORK / "died.log").read_text())
    self.assertEqual((cli.WORK / "died.log").read_text().count("restart 1 of 1"), 1)
    self.check("died")

  def test_the_link_goes_down(self):
    """All ranks on both hosts end, in a stated time, and the run goes on when the link is back."""
    process = self.start(self.words("cut", 10**6) + ["--stop-after", 10**6], "cut")
    wait_until(lambda: steps_of("cut") >= 8, "steps")
    self.assertEqual(len(ranks_of("cut")), 4)
    self.hosts.link(2, "down")
    cut = time.monotonic()
    try:
      code = process.wait(timeout=40)
      wait_until(lambda: not ranks_of("cut"), "end of all ranks")
      print(f"all ranks ended {time.monotonic() - cut:.1f} s after the link")
    finally:
      self.hosts.link(2, "up")
    self.assertNotEqual(code, 0)
    kept = sorted(path.name for path in (cli.WORK / "cut/checkpoints").glob("step-*"))[-1]
    end = ["--stop-after", int(kept[5:]) + 3]
    code, log = self.run_here([*self.words("cut", 10**6), *end], "cut-again")
    self.assertEqual(code, 75, log)
    cli.succeed(*self.words("uncut", 10**6), *end, "--comm", "thread:2", expect=75)
    self.assertEqual(cli.numbers("cut"), cli.numbers("uncut"))
    self.assertEqual(cli.checkpoint_hash("cut"), cli.checkpoint_hash("uncut"))


if __name__ == "__main__":
  cli.main()
