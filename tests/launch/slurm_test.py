"""Batch scripts: what launch/slurm/ holds is what `slurm-script` prints, and a real SLURM runs it: a
time limit, checkpoint, requeue and resume lose nothing, members of arrays and cancelled jobs end as
they should.

The parts that need SLURM's daemons (slurm_support.py) are skipped where those are missing.
"""
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import time
import unittest

import cli_support as cli
import slurm_support

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "launch" / "slurm"


def printed_by(text):
  """The words of the comment in a script that says how it was printed."""
  return shlex.split(re.search(r"^# Printed by: shardrun (slurm-script.*)$", text, re.M)[1])


class ScriptTest(unittest.TestCase):
  def test_the_files_are_what_is_printed(self):
    files = sorted(SCRIPTS.glob("*.sbatch"))
    self.assertGreaterEqual(len(files), 5)
    for file in files:
      with self.subTest(file=file.name):
        text = file.read_text()
        self.assertEqual(cli.succeed(*printed_by(text)).decode(), text)

  def test_shellcheck(self):
    if not shutil.which("shellcheck"):
      self.skipTest("shellcheck is not installed")
    awkward = cli.WORK / "awkward.sbatch"
    awkward.write_bytes(cli.succeed("slurm-script", "--array", "0-3%2", "--module", "a b", "--module",
                                    "c", "--", "train", "--data", "it's a \"text\".txt"))
    done = subprocess.run(["shellcheck", *sorted(SCRIPTS.glob("*.sbatch")), awkward],
                          capture_output=True, text=True)
    self.assertEqual(done.returncode, 0, done.stdout)

  def test_words_come_through(self):
    words = ["it's", "$HOME", "`x` \"y\"", "a b", "\\", "*", "", "plain"]
    text = cli.succeed("slurm-script", "--", *words).decode()
    line = re.search(r"^\[ \$# -gt 0 \] \|\| (set -- .*)$", text, re.M)[1]
    done = subprocess.run(["bash", "-c", f"{line}\nprintf '%s\\0' \"$@\""], capture_output=True, text=True)
    self.assertEqual(done.stdout.split("\0")[:-1], words)

  def test_wrong_flags(self):
    for words, part in ((["--node", 2], "--nodes"), (["--nodes", 0], "--nodes"),
                        (["--time", "1h; rm"], "--time"), (["--array", "x"], "--array"),
                        (["--job-name", "a b"], "--job-name"), (["train"], "after --"),
                        (["--gpus-per-node", 4, "--tasks-per-node", 2], "wanted a rank for each")):
      with self.subTest(words=words):
        code, out, err = cli.run("slurm-script", *words)
        self.assertEqual((code, out, err.count(b"\n")), (64, b"", 1))
        self.assertIn(part, err.decode())


@unittest.skipIf(slurm_support.missing(), slurm_support.missing())
class SlurmTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    cls.slurm = slurm_support.Slurm()
    cls.addClassCleanup(cls.slurm.stop)
    cls.text = cli.write_text("text.txt")

  def train(self, steps):
    """Words that say the same in every run; a global batch that makes steps of some 20 ms."""
    return ["train", "--data", self.text, *cli.TINY, "--precision", "bf16", "--micro-batch", 2,
            "--global-batch", 14, "--schedule", "constant", "--eval-every", 0, "--steps", steps]

  def submit(self, *flags_and_words, sbatch=()):
    """The number of a job of 2 ranks."""
    script = cli.WORK / f"job-{len(list(cli.WORK.glob('job-*')))}.sbatch"
    script.write_bytes(cli.succeed("slurm-script", "--tasks-per-node", 2, *flags_and_words))
    return int(self.slurm.run("sbatch", "--parsable", *sbatch, script, cwd=cli.WORK,
                              SHARDRUN=cli.BINARY))

  def wait_for(self, job, *states, seconds=60):
    self.slurm.wait(lambda: self.slurm.job(job)["JobState"] in states, f"{job} to be {states}", seconds)
    return self.slurm.job(job)

  def steps_of(self, out):
    file = cli.WORK / out / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0

  def log(self, job):
    return (cli.WORK / f"shardrun-{job}.log").read_text()

  def test_scripts_would_be_taken(self):
    for file in sorted(SCRIPTS.glob("*.sbatch")):
      with self.subTest(file=file.name):
        self.assertIn("to start at", self.slurm.run("sbatch", "--test-only", "-p", "far", file))

  def test_smoke(self):
    job = self.submit("--", "smoke")
    self.wait_for(job, "COMPLETED")
    self.assertIn("0 failed, 2 ranks over mpi", self.log(job))

  def await_requeue(self, job, out, times):
    """Waits until the job waits again, `times` times in all, with a checkpoint; returns its steps."""
    def queued_again():
      state = self.slurm.job(job)
      self.assertIn(state["JobState"], ("RUNNING", "COMPLETING", "PENDING"), state)
      return (state["JobState"], state["Restarts"]) == ("PENDING", str(times))
    self.slurm.wait(queued_again, f"requeue {times} of job {job}")
    done = self.steps_of(out)
    self.assertTrue((cli.WORK / out / f"checkpoints/step-{done:08}").is_dir())
    return done

  def go_on(self, job, out, done):
    """Lets a job that waits start now; returns when it has made steps."""
    self.slurm.wait_for_steps_to_leave(job)
    time.sleep(2)  # within a second of its end slurmd takes a job's new credential for its old one
    self.slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    self.slurm.wait(lambda: self.steps_of(out) > done + 5, f"steps of {out} after {done}")

  def check(self, out, *more):
    """All of `out` is what a run in one piece elsewhere writes."""
    cli.succeed(*self.train(10**7), *more, "--out", f"{out}-whole", "--comm", "thread:1",
                "--stop-after", self.steps_of(out), expect=75)
    self.assertEqual(cli.numbers(out), cli.numbers(f"{out}-whole"))
    self.assertEqual(cli.checkpoint_hash(out), cli.checkpoint_hash(f"{out}-whole"))

  def test_time_limit(self):
    """The limit's signal, checkpoint, 75, requeue, resume: to the last digit as if undisturbed."""
    job = self.submit("--time", "00:03:00", "--", *self.train(10**7), "--out", "limit",
                      sbatch=["--signal=USR1@172"])
    done = self.await_requeue(job, "limit", 1)
    self.assertGreater(done, 0)
    self.go_on(job, "limit", done)
    self.slurm.run("scancel", "--signal=USR1", job)
    self.assertGreater(self.await_requeue(job, "limit", 2), done + 5)
    self.slurm.run("scancel", job)
    self.assertIn(f"{done} steps done", self.log(job))
    self.check("limit")

  def test_array_member(self):
    """One member is queued again, alone; each has its folder and seed."""
    job = self.submit("--array", "1-2", "--", *self.train(10**7))
    for member in (1, 2):
      self.slurm.wait(lambda: self.steps_of(f"out/{member}") > 5, f"steps of member {member}")
    self.slurm.run("scancel", "--signal=USR1", f"{job}_2")
    done = self.await_requeue(f"{job}_2", "out/2", 1)
    self.assertEqual(self.slurm.job(f"{job}_1")["JobState"], "RUNNING")
    self.go_on(f"{job}_2", "out/2", done)
    self.slurm.run("scancel", "--signal=USR1", f"{job}_2")
    self.await_requeue(f"{job}_2", "out/2", 2)
    self.slurm.run("scancel", job)
    self.check("out/2", "--seed", 2)

  def test_cancelled(self):
    """A job that is cancelled saves, and does not come back."""
    job = self.submit("--", *self.train(10**7), "--out", "cancelled")
    self.slurm.wait(lambda: self.steps_of("cancelled") > 5, "steps")
    self.slurm.run("scancel", job)
    state = self.wait_for(job, "CANCELLED")
    self.slurm.wait(lambda: not self.slurm.run("squeue", "-h", "-j", job).strip(), "its end")
    self.assertEqual(self.slurm.job(job)["JobState"], "CANCELLED")
    self.assertEqual(state["Restarts"], "0")
    done = self.steps_of("cancelled")
    self.assertTrue((cli.WORK / f"cancelled/checkpoints/step-{done:08}").is_dir(), self.log(job))

  def test_without_pmix(self):
    """Ranks that cannot find each other are refused; one rank needs no other."""
    words = ["--mpi=none", cli.BINARY, "smoke"]
    done = self.slurm.run("srun", "-n", 2, *words, check=None)
    self.assertEqual(done.returncode, 69)
    self.assertIn("2 processes", done.stderr)
    self.assertIn("srun --mpi=pmix", done.stderr)
    self.assertIn("0 failed, 1 rank over thread", self.slurm.run("srun", "-n", 1, *words))

  def test_doctor(self):
    """It knows srun and its PMIx, and one process that stands outside of a job's tasks."""
    done = self.slurm.run("srun", "--mpi=pmix", "-n", 2, cli.BINARY, "doctor", "--json", check=None)
    for rank in json.loads(done.stdout)["ranks"]:
      self.assertEqual((rank["launcher"], rank["size"], rank["transport"]), ("srun", 2, "mpi"))
      self.assertNotEqual(rank["pmix"], "")
    done = self.slurm.run(cli.BINARY, "doctor", check=None, SLURM_NTASKS="2", SLURM_PROCID="0")
    self.assertEqual(done.returncode, 69)
    self.assertIn("the SLURM job has 2 tasks", done.stdout)


if __name__ == "__main__":
  cli.main()
