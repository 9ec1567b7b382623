"""launch/supervise: a job that died is started again and loses nothing; what cannot help is not tried,
what makes no headway is given up, and signals reach the job.
"""
import os
import pathlib
import shutil
import signal
import subprocess
import time
import unittest

import cli_support as cli

SUPERVISE = pathlib.Path(__file__).resolve().parents[2] / "launch" / "supervise"


def start(flags, command, out="out"):
  with open(cli.WORK / f"{out}.log", "wb") as log:
    return subprocess.Popen([str(word) for word in [SUPERVISE, *flags, "--", *command]], cwd=cli.WORK,
                            env=cli.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def script(name, text):
  """A job in place of a launcher: how often it ran is the length of NAME.runs."""
  file = cli.WORK / name
  file.write_text(f"#!/bin/bash\necho >>{name}.runs\n{text}\n")
  file.chmod(0o755)
  return [f"./{name}"]


def runs(name):
  return (cli.WORK / f"{name}.runs").read_text().count("\n")


def wait_until(condition, what):
  deadline = time.monotonic() + 40
  while not condition():
    assert time.monotonic() < deadline, f"no {what}"
    time.sleep(0.01)


def steps_of(out):
  file = cli.WORK / out / "metrics.jsonl"
  return file.read_bytes().count(b"\n") if file.exists() else 0


class SuperviseTest(unittest.TestCase):
  def supervise(self, flags, command, out="out"):
    process = start(flags, command, out)
    self.addCleanup(lambda: process.poll() is None and process.kill())
    return process.wait(timeout=60), (cli.WORK / f"{out}.log").read_text()

  def test_what_is_not_tried_again(self):
    for code in (0, 64, 65, 66, 73, 78, 75):
      with self.subTest(code=code):
        left, log = self.supervise(["--backoff", 0], script(f"code-{code}", f"exit {code}"))
        self.assertEqual((left, runs(f"code-{code}")), (code, 1), log)
    self.assertEqual(self.supervise([], ["./nowhere"])[0], 127)

  def test_budget(self):
    for code in (69, 70, 74, 137):
      with self.subTest(code=code):
        left, log = self.supervise(["--backoff=0", "--max-restarts=2"],
                                   script(f"dies-{code}", f"exit {code}"))
        self.assertEqual((left, runs(f"dies-{code}")), (code, 3), log)
        self.assertIn("brought no new step", log)
    left, _ = self.supervise(["--backoff", 0, "--max-restarts", 2, "--again"], script("again", "exit 75"))
    self.assertEqual((left, runs("again")), (75, 3))

  def test_a_new_step_gives_the_budget_back(self):
    """Seven runs, each one step further, then none: two more."""
    text = ('mkdir -p ahead-out; n=$(wc -l <ahead.runs); [ "$n" -le 7 ] || n=7\n'
            'echo "{\\"step\\": $n, \\"loss\\": 1}" >>ahead-out/metrics.jsonl; exit 70')
    for words in (["--out", "ahead-out"], ["--out_dir=ahead-out"]):
      with self.subTest(words=words):
        shutil.rmtree(cli.WORK / "ahead-out", ignore_errors=True)
        (cli.WORK / "ahead.runs").unlink(missing_ok=True)
        left, log = self.supervise(["--backoff", 0, "--max-restarts", 2], [*script("ahead", text), *words])
        self.assertEqual((left, runs("ahead")), (70, 9), log)

  def test_back_off_grows(self):
    text = "date +%s.%N >>times; exit 70"
    self.supervise(["--backoff", 1, "--max-backoff", 2, "--max-restarts", 3], script("slow", text))
    times = [float(line) for line in (cli.WORK / "times").read_text().split()]
    gaps = [after - before for before, after in zip(times, times[1:])]
    for gap, wanted in zip(gaps, (1, 2, 2)):
      self.assertGreaterEqual(gap, wanted)
      self.assertLess(gap, wanted + 1)

  def test_signals_are_passed_on(self):
    """And nothing is started again after one, though the job would have been."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
      with self.subTest(number=number):
        name = f"signal-{number}"
        job = script(name, f'trap "exit 75" {number.name[3:]}; touch {name}.ready\n'
                           'while :; do sleep 0.05; done')
        process = start(["--again"], job)
        self.addCleanup(lambda: process.poll() is None and process.kill())
        wait_until((cli.WORK / f"{name}.ready").exists, "job")
        process.send_signal(number)
        self.assertEqual((process.wait(timeout=20), runs(name)), (75, 1))
    process = start(["--backoff", 100], script("pausing", "exit 70"), "pausing")
    wait_until(lambda: "in 100 s" in (cli.WORK / "pausing.log").read_text(), "pause")
    process.send_signal(signal.SIGTERM)
    self.assertEqual((process.wait(timeout=20), runs("pausing")), (70, 1))

  def test_wrong_flags(self):
    for flags, command in ((["--max-restart", 1], ["true"]), (["--backoff", "x"], ["true"]), ([], [])):
      with self.subTest(flags=flags):
        left, log = self.supervise(flags, command)
        self.assertEqual((left, log.count("\n")), (64, 1), log)

  @unittest.skipUnless(cli.MPIEXEC, "needs MPI")
  def test_a_killed_rank(self):
    """gpt-nano in three ranks; one is killed twice. All ends in the bits of a run without a fault."""
    cli.write_text("text.txt", 20000)
    words = ["train", "--data", "text.txt", "--model", "gpt-nano", "--seq-len", 32, "--micro-batch", 2,
             "--global-batch", 6, "--steps", 40, "--eval-every", 0, "--save-every", 5]
    process = start(["--max-restarts", 1], cli.command([*words, "--out", "killed"], 3), "killed")
    self.addCleanup(lambda: process.poll() is None and process.kill())
    for at in (8, 23):
      wait_until(lambda: steps_of("killed") >= at, f"step {at}")
      rank = next(folder for folder in pathlib.Path("/proc").glob("[0-9]*") if self.is_rank(folder))
      furthest = steps_of("killed")
      os.kill(int(rank.name), signal.SIGKILL)
      killed = time.monotonic()
      wait_until(lambda: steps_of("killed") < furthest or steps_of("killed") > furthest + 3, "resumption")
      wait_until(lambda: steps_of("killed") > furthest, "new step")
      seconds = time.monotonic() - killed
      print(f"from the kill at step {furthest} to the next new step: {seconds:.1f} s")
      self.assertLess(seconds, 15)
    self.assertEqual(process.wait(timeout=60), 0, (cli.WORK / "killed.log").read_text())
    cli.succeed(*words, "--out", "undisturbed", "--comm", "thread:2")
    self.assertEqual(cli.numbers("killed"), cli.numbers("undisturbed"))
    self.assertEqual(cli.checkpoint_hash("killed"), cli.checkpoint_hash("undisturbed"))
    self.assertEqual((cli.WORK / "killed.log").read_text().count("restart 1 of 1"), 2)

  def is_rank(self, folder):
    try:
      return (os.path.samefile(folder / "exe", cli.BINARY) and
              b"killed" in (folder / "cmdline").read_bytes().split(b"\0"))
    except OSError:
      return False


if __name__ == "__main__":
  cli.main()
