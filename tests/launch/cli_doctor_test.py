"""`doctor` on this machine: what it tells must hold together, whatever the machine is like."""
import json
import unittest

import cli_support as cli


class DoctorTest(unittest.TestCase):
  def test_here(self):
    (cli.WORK / "out").mkdir()
    for ranks in [None, 3] if cli.MPIEXEC else [None]:
      with self.subTest(ranks=ranks):
        code, out, err = cli.run("doctor", "--json", "--out", "out/run", ranks=ranks)
        told = json.loads(out)
        wrong = any(finding["wrong"] for finding in told["findings"])
        self.assertEqual((told["ok"], code), (not wrong, 69 if wrong else 0), err)
        self.assertEqual([rank["rank"] for rank in told["ranks"]], list(range(ranks or 1)))
        for rank in told["ranks"]:
          self.assertEqual(rank["size"], ranks or 1)
          self.assertEqual(rank["launcher"], "mpirun" if ranks else "")
          self.assertGreater(rank["copy_rate"], 1e7)
          self.assertEqual(rank["send_rate"] > 0, bool(ranks))
          self.assertLessEqual(abs(rank["clock_ahead"]), rank["clock_error"])  # one machine, one clock
          self.assertEqual(rank["out"]["path"], str(cli.WORK / "out"))
          self.assertEqual(rank["out"]["error"], "")
        self.assertFalse(list((cli.WORK / "out").iterdir()))

  def test_text(self):
    code, out, _ = cli.run("doctor", env={"SLURM_NTASKS": "4", "SLURM_PROCID": "0"})
    self.assertEqual(code, 69)
    self.assertIn(b"WRONG [0]    the SLURM job has 4 tasks", out)
    self.assertIn(b"change: start it by srun --mpi=pmix", out)

  def test_bad_out(self):
    (cli.WORK / "file").write_text("in the way")
    code, out, _ = cli.run("doctor", "--out", "file/run")
    self.assertEqual(code, 69)
    self.assertIn(b"file: cannot make a folder: Not a directory", out)


if __name__ == "__main__":
  cli.main()
