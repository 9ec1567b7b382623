"""Where progress goes: one line rewritten on a person's terminal, plain lines everywhere else, also
where mpirun gives its ranks pseudo-terminals.
"""
import os
import pty
import subprocess
import unittest

import cli_support as cli


class ProgressTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    cls.words = ["train", "--data", cli.write_text("text.txt", words=1500), *cli.TINY,
                 "--micro-batch", 2, "--global-batch", 12, "--steps", 5]

  def on_terminal(self, *words, ranks=None):
    """What a terminal is sent by the launcher, or by the binary itself."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        cli.command([*self.words, *words], ranks), cwd=cli.WORK, env=cli.environment(),
        stdin=subprocess.DEVNULL, stdout=slave, stderr=subprocess.PIPE)
    os.close(slave)
    text = b""
    while True:
      try:
        piece = os.read(master, 65536)
      except OSError:  # the other end is closed
        break
      if not piece:
        break
      text += piece
    os.close(master)
    self.assertEqual(process.wait(timeout=40), 0, process.stderr.read())
    process.stderr.close()
    return text

  def check_plain(self, text):
    self.assertNotIn(b"\r", text)
    self.assertNotIn(b"\x1b", text)
    for step in range(1, 6):
      self.assertEqual(text.count(b"\nstep %d/5 " % step), 1, text)

  def test_pipe(self):
    self.check_plain(cli.succeed(*self.words, "--out", "pipe"))

  def test_terminal(self):
    self.assertIn(b"\r\x1b[Kstep 3/5 ", self.on_terminal("--out", "terminal"))

  @unittest.skipUnless(cli.MPIEXEC, "needs mpirun")
  def test_mpirun_into_a_pipe(self):
    self.check_plain(cli.succeed(*self.words, "--out", "mpi-pipe", ranks=2))

  @unittest.skipUnless(cli.MPIEXEC, "needs mpirun")
  def test_mpirun_into_a_file(self):
    with open(cli.WORK / "log", "wb") as log:
      subprocess.run(cli.command([*self.words, "--out", "mpi-file"], 2), cwd=cli.WORK, stdout=log,
                     env=cli.environment(), check=True, timeout=60)
    self.check_plain((cli.WORK / "log").read_bytes())

  @unittest.skipUnless(cli.MPIEXEC, "needs mpirun")
  def test_mpirun_on_a_terminal(self):
    self.assertIn(b"\r\x1b[Kstep 3/5 ", self.on_terminal("--out", "mpi-terminal", ranks=2))


if __name__ == "__main__":
  cli.main()
