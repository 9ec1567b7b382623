"""Signals from outside: they end a process as they do by default, training stops in order, and no
thread that computes takes one.
"""
import os
import pathlib
import re
import signal
import subprocess
import time
import unittest

import cli_support as cli

OURS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
MASK = sum(1 << (number - 1) for number in OURS)


def start(*words, ranks=None):
  return subprocess.Popen(cli.command(words, ranks), cwd=cli.WORK, env=cli.environment(),
                          stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL)


def wait_until(process, condition):
  deadline = time.monotonic() + 40
  while not condition():
    assert process.poll() is None, f"left with {process.returncode}"
    assert time.monotonic() < deadline
    time.sleep(0.02)


def processes(word):
  """Folders in /proc of the binary's processes whose command line holds `word`."""
  found = []
  for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      words = (folder / "cmdline").read_bytes().split(b"\0")
      if os.path.samefile(folder / "exe", cli.BINARY) and word.encode() in words:
        found.append(folder)
    except OSError:  # gone, or another user's
      pass
  return found


def masks(folder, name):
  """The three signals' bits in the field `name`, of each thread of a process."""
  return [int(re.search(rf"^{name}:\s*(\w+)$", (task / "status").read_text(), re.M)[1], 16) & MASK
          for task in (folder / "task").iterdir()]


class SignalsTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    cls.text = cli.write_text("text.txt")
    cls.tiny = ["train", "--data", cls.text, *cli.TINY, "--micro-batch", 2]
    cls.trained = "trained"
    cli.succeed(*cls.tiny, "--global-batch", 12, "--steps", 2, "--out", cls.trained)

  def train(self, out, *more, ranks=None):
    """A run without an end, in its second step or later."""
    process = start(*self.tiny, "--steps", 10**6, "--schedule", "constant", "--eval-every", 0,
                    "--out", out, *more, ranks=ranks)
    self.addCleanup(lambda: process.poll() is None and process.kill())
    metrics = cli.WORK / out / "metrics.jsonl"
    wait_until(process, lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 1)
    return process

  @unittest.skipUnless(os.path.exists("/proc/self/task"), "needs /proc")
  def test_one_thread_takes_signals(self):
    """In every process all threads but the one that waits block them, and there is no handler."""
    for ranks in [None, 2] if cli.MPIEXEC else [None]:
      with self.subTest(ranks=ranks):
        out = f"masks-{ranks}"
        process = self.train(out, "--global-batch", 12, "--threads", 2,
                             "--comm", "mpi" if ranks else "thread:2", ranks=ranks)
        found = processes(out)
        self.assertEqual(len(found), ranks or 1)
        for folder in found:
          blocked = masks(folder, "SigBlk")
          self.assertGreaterEqual(len(blocked), 3)
          self.assertEqual(sorted(blocked), [0] + [MASK] * (len(blocked) - 1))
          self.assertEqual(set(masks(folder, "SigCgt")), {0})
        process.send_signal(signal.SIGUSR1)
        self.assertEqual(process.wait(timeout=40), 75)

  def test_the_first_asks_to_stop(self):
    for number in OURS:
      with self.subTest(number=number):
        process = self.train(f"first-{number}", "--global-batch", 12)
        process.send_signal(number)
        self.assertEqual(process.wait(timeout=40), 75)

  def test_the_second_leaves_at_once(self):
    """Both are there long before the step is over; the lower number is taken first."""
    process = self.train("second", "--global-batch", 6000)
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)
    self.assertEqual(process.wait(timeout=40), 128 + signal.SIGTERM)
    self.assertFalse(list((cli.WORK / "second" / "checkpoints").iterdir()))

  def test_max_time_leaves_room_for_the_save(self):
    """A save takes three seconds here: one that no longer fits into eight is not begun."""
    out = "timed"
    begin = time.monotonic()
    text = cli.succeed(*self.tiny, "--global-batch", 12, "--steps", 10**6, "--schedule", "constant",
                       "--eval-every", 0, "--save", "sync", "--save-every", 40, "--out", out,
                       "--max-time", "00:00:08", expect=75,
                       env={"SHARDRUN_FAULT": "phase=sync,kind=delay,seconds=3"}).decode()
    self.assertGreaterEqual(text.count("saved "), 2)  # one to measure, and the last
    last = re.findall(r"saved \S+ in ([0-9.]+) s", text)[-1]
    self.assertGreater(float(last), 3)
    self.assertLess(time.monotonic() - begin, 8 + 2.5)  # the limit, and what start and end take

  def test_elsewhere_they_end_the_process(self):
    """Whether the thread that waits is there yet or not."""
    for delay in [0, 0.2]:
      for number in OURS:
        with self.subTest(delay=delay, number=number):
          process = start("generate", "--checkpoint", self.trained, "--prompt", "the ",
                          "--tokens", 10**7)
          time.sleep(delay)
          process.send_signal(number)
          self.assertEqual(process.wait(timeout=40), -number)

  def test_one_that_is_ignored_stays_ignored(self):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process inherits it
    try:
      process = self.train("ignored", "--global-batch", 12)
    finally:
      signal.signal(signal.SIGINT, signal.default_int_handler)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    self.assertIsNone(process.poll())
    process.send_signal(signal.SIGTERM)
    self.assertEqual(process.wait(timeout=40), 75)


if __name__ == "__main__":
  cli.main()
