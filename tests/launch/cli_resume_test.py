"""A run that was cut anywhere ends in the bits of one that was not, also on other ranks, stages,
threads and transports; what `generate` and `checkpoint` do with what such runs leave.
"""
import json
import os
import signal
import subprocess
import time
import unittest

import cli_support as cli

STEPS = 20


def place(ranks, zero, threads, mpi):
  """Where a part of a run computes: words for the command line, and mpirun's number of ranks."""
  mpi = mpi and cli.MPIEXEC
  words = ["--zero", zero, "--threads", threads, "--comm", "mpi" if mpi else f"thread:{ranks}"]
  return words, ranks if mpi else None


PLACES = [place(3, 3, 1, True), place(2, 1, 2, False), place(2, 0, 1, True), place(1, 0, 2, False),
          place(5, 2, 1, False), place(4, 2, 2, True), place(3, 3, 2, False), place(1, 3, 1, True)]


class ResumeTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    cls.text = cli.write_text("resume.txt")
    cls.undisturbed = {}

  def words(self, out, precision="fp32", steps=STEPS):
    return ["train", "--data", self.text, *cli.TINY, "--steps", steps, "--precision", precision,
            "--micro-batch", 2, "--global-batch", 14, "--eval-every", 10, "--eval-steps", 2,
            "--out", out]

  def train(self, out, at, *more, expect=0, precision="fp32"):
    words, ranks = at
    return cli.succeed(*self.words(out, precision), *words, *more, ranks=ranks, expect=expect)

  def whole(self, precision):
    if precision not in self.undisturbed:
      out = f"whole-{precision}"
      self.train(out, place(1, 0, 1, False), precision=precision)
      self.undisturbed[precision] = cli.checkpoint_hash(out), cli.numbers(out)
    return self.undisturbed[precision]

  def check(self, out, precision):
    digest, numbers = self.whole(precision)
    self.assertEqual(cli.numbers(out), numbers)
    self.assertEqual(cli.checkpoint_hash(out), digest)

  def test_cut_after_seven_steps(self):
    for i, precision in enumerate(cli.PRECISIONS):
      for j in (0, 3):
        before, after = PLACES[(2 * i + j) % 8], PLACES[(2 * i + j + 1) % 8]
        with self.subTest(precision=precision, before=before, after=after):
          out = f"cut-{precision}-{j}"
          self.train(out, before, "--stop-after", 7, expect=75, precision=precision)
          self.assertEqual(len(cli.numbers(out)), 7)
          text = self.train(out, after, "--resume", "auto", precision=precision)
          self.assertIn(b"7 steps done", text)
          self.check(out, precision)

  def test_cut_twice(self):
    for precision in cli.PRECISIONS:
      with self.subTest(precision=precision):
        out = f"twice-{precision}"
        self.train(out, PLACES[1], "--stop-after", 1, expect=75, precision=precision)
        self.train(out, PLACES[6], "--stop-after", 12, expect=75, precision=precision)
        self.train(out, PLACES[3], precision=precision)
        self.check(out, precision)
        self.assertIn(b"nothing to do", self.train(out, PLACES[4], precision=precision))
        self.check(out, precision)

  def test_from_an_older_set(self):
    """Lines of metrics after the set's step are written anew."""
    self.train("older", PLACES[3], "--save-every", 8, "--keep-last", 0)
    self.train("older", PLACES[4], "--resume", "older/checkpoints/step-00000008")
    self.check("older", "fp32")

  def test_signal(self):
    """Asked to leave, ranks stop after the same step, save and leave with 75."""
    for ranks in [None, 2] if cli.MPIEXEC else [None]:
      with self.subTest(ranks=ranks):
        out = f"signal-{ranks}"
        words = self.words(out, steps=10**6) + ["--comm", "mpi" if ranks else "thread:2"]
        metrics = cli.WORK / out / "metrics.jsonl"
        log = cli.WORK / f"{out}.log"
        with open(log, "wb") as errors:
          process = subprocess.Popen(
              cli.command([*words, "--schedule", "constant"], ranks), cwd=cli.WORK,
              env=cli.environment(), stdout=subprocess.DEVNULL, stderr=errors)
        deadline = time.monotonic() + 40
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
          self.assertLess(time.monotonic(), deadline)
          time.sleep(0.02)
        os.kill(process.pid, signal.SIGUSR1)
        self.assertEqual(process.wait(timeout=40), 75, log.read_text())
        done = len(cli.numbers(out))
        cli.succeed(*self.words(f"{out}-again", steps=10**6), "--schedule", "constant",
                    "--stop-after", done, expect=75)
        self.assertEqual(cli.checkpoint_hash(out), cli.checkpoint_hash(f"{out}-again"))

  def test_used_out_is_refused(self):
    self.train("used", PLACES[3])
    before = cli.picture()
    for words, ranks in [PLACES[0], PLACES[1]]:
      code, _, err = cli.run(*self.words("used"), *words, "--resume", "no", ranks=ranks)
      self.assertEqual(code, 78)
      self.assertIn(b"--resume auto", err)
      self.assertEqual(cli.picture(), before)

  def test_generate(self):
    for precision in cli.PRECISIONS:
      self.whole(precision)
      words = ["generate", "--checkpoint", f"whole-{precision}", "--prompt", "the ", "--tokens", 24]
      with self.subTest(precision=precision):
        text = cli.succeed(*words)
        self.assertTrue(text.startswith(b"the "))
        self.assertGreaterEqual(len(text), 4 + 24)
        self.assertEqual(cli.succeed(*words), text)
        self.assertEqual(cli.succeed(*words, "--comm", "thread:3"), text)
        self.assertNotEqual(cli.succeed(*words, "--seed", 5), text)
        if cli.MPIEXEC and precision == "fp32":
          self.assertEqual(cli.succeed(*words, ranks=2), text)

  def test_bench(self):
    small = ["--layers", 1, "--heads", 2, "--channels", 32, "--seq-len", 16]
    text = cli.succeed("bench", "checkpoint", *small, "--comm", "thread:2", "--json", "--out", "bench")
    rows = {row["name"]: row for row in json.loads(text)["rows"]}
    for name in ("save", "load", "step while a save is written"):
      self.assertGreater(rows[name]["ratio"], 0)
      self.assertIn("target", rows[name])
    for name in ("memory of save", "memory of load", "memory of export"):
      self.assertTrue(rows[name]["met"], rows[name])
    self.assertFalse((cli.WORK / "bench/bench-checkpoint").exists())
    for words, part in ((["memory"], b"not built yet"), (["checkpiont"], b"checkpoint"), ([], b"wanted")):
      code, _, err = cli.run("bench", *words)
      self.assertEqual(code, 64, err)
      self.assertIn(part, err)

  def test_checkpoint_command(self):
    self.train("kept", PLACES[3], "--save-every", 4, "--keep-last", 3)
    listed = cli.succeed("checkpoint", "ls", "kept").decode().splitlines()
    self.assertEqual([line.split()[0] for line in listed],
                     [f"kept/checkpoints/step-000000{step}" for step in (12, 16, 20)])
    newest = "kept/checkpoints/step-00000020"
    self.assertEqual(cli.checkpoint_hash("kept"), cli.checkpoint_hash(newest))
    self.assertNotEqual(cli.checkpoint_hash("kept"),
                        cli.checkpoint_hash("kept/checkpoints/step-00000016"))
    self.assertEqual(cli.succeed("checkpoint", "verify", newest), b"sound\n")
    data = cli.WORK / newest / "data-00000.bin"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    self.assertIn(b"data-00000.bin", cli.succeed("checkpoint", "verify", newest, expect=65))
    code, _, err = cli.run("checkpoint", "ls", "nowhere")
    self.assertEqual((code, err.count(b"\n")), (66, 1))


if __name__ == "__main__":
  cli.main()
