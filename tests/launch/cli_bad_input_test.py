"""What a person gets wrong: one message that says what, got and wanted, the agreed exit code, no
hang, no file left; alone and under mpirun, where exactly one rank speaks.
"""
import unittest

import cli_support as cli

USAGE, DATA, NO_INPUT, UNAVAILABLE, CANNOT_CREATE, CONFIG = 64, 65, 66, 69, 73, 78

GOOD = ["--data", "text.txt", *cli.TINY, "--micro-batch", 2, "--global-batch", 12, "--steps", 2,
        "--out", "out"]

# What is added to a good `train`, the exit code, and what the message must hold.
CASES = {
    "unknown flag": (["--micro-bacth", 4], USAGE, ["--micro-bacth", "--micro-batch"]),
    "unknown flag with one dash": (["-steps", 4], USAGE, ["-steps", "--steps"]),
    "unknown field": (["field.textproto"], USAGE, ["field.textproto:2:", "stepz", "steps"]),
    "unknown JSON field": (["field.json"], USAGE, ["field.json", "stepz", "steps"]),
    "config file missing": (["no.textproto"], NO_INPUT, ["no.textproto"]),
    "stray word": (["stray"], USAGE, ["stray"]),
    "word for a number": (["--steps", "many"], USAGE, ["--steps", "many", "whole number"]),
    "fraction for a count": (["--steps", "1.5"], USAGE, ["--steps", "1.5"]),
    "type in a file": (["type.textproto"], USAGE, ["type.textproto:1:"]),
    "no value": (["--steps"], USAGE, ["--steps"]),
    "nan": (["--lr", "nan"], USAGE, ["--lr", "nan"]),
    "choice": (["--precision", "fp61"], USAGE, ["fp61", "fp16"]),
    "refused precision": (["--precision", "16-true"], USAGE, ["16-true", "bf16-true"]),
    "stage": (["--zero", 4], USAGE, ["--zero", "4", "3"]),
    "batches do not fit": (["--micro-batch", 5], CONFIG, ["12 = 2 x 5 + 2"]),
    "accumulation conflicts": (["--grad-accum", 4, "--global-batch", 26], CONFIG,
                               ["--grad-accum", "2 x grad-accum 4 x", "26"]),
    "heads do not divide": (["--heads", 3], CONFIG, ["32", "3"]),
    "sum block does not fit": (["--reduce-every", "step", "--sum-block", 5], CONFIG,
                               ["--reduce-every step", "--sum-block"]),
    "wire of another type": (["--reduce-dtype", "fp16"], CONFIG, ["--reduce-dtype", "fp16"]),
    "scale without fp16": (["--loss-scale", 8], CONFIG, ["--loss-scale", "fp16"]),
    "vocabulary below the tokenizer's": (["--vocab", 100], CONFIG, ["100", "256"]),
    "data missing": (["--data", "nowhere.txt"], NO_INPUT, ["nowhere.txt"]),
    "data is a folder": (["--data", "folder"], NO_INPUT, ["folder"]),
    "data empty": (["--data", "empty.txt"], DATA, ["empty.txt", "empty"]),
    "data too short": (["--data", "short.txt"], DATA, ["short.txt", "seq-len 16"]),
    "validation data missing": (["--val-data", "nowhere.txt"], NO_INPUT, ["nowhere.txt"]),
    "validation data short": (["--val-data", "letter.txt"], DATA, ["letter.txt"]),
    "odd token file": (["--data", "odd.bin"], DATA, ["odd.bin", "even"]),
    "out below a file": (["--out", "text.txt/out"], CANNOT_CREATE, ["text.txt/out"]),
    "out in /proc": (["--out", "/proc/shardrun"], CANNOT_CREATE, ["/proc/shardrun"]),
    "out is a file": (["--out", "text.txt"], CANNOT_CREATE, ["text.txt"]),
    "resume from nothing": (["--resume", "folder"], NO_INPUT, ["folder"]),
    "init from nothing": (["--init-from", "folder"], NO_INPUT, ["folder"]),
    "model": (["--model", "gpt-nana"], USAGE, ["gpt-nana", "gpt-nano"]),
    "tokenizer": (["--tokenizer", "bite"], USAGE, ["bite", "byte"]),
    "device": (["--device", "cuda"], UNAVAILABLE, ["cuda"]),
    "transport of GPUs": (["--device", "cpu", "--comm", "nccl"], CONFIG, ["nccl", "--device cuda"]),
    "no thread ranks": (["--comm", "thread:0"], USAGE, ["thread:0", "1"]),
    "transport": (["--comm", "thraed:2"], USAGE, ["thraed:2", "thread:N"]),
    "recompute": (["--recompute", "often"], USAGE, ["--recompute", "often"]),
    "time": (["--max-time", "soon"], USAGE, ["--max-time", "soon"]),
    **{f"{flag} {value}": ([flag, value], USAGE, [flag, str(value)])
       for flag in ["--layers", "--heads", "--channels", "--vocab", "--seq-len", "--micro-batch",
                    "--global-batch", "--grad-accum", "--sum-block", "--steps", "--lr",
                    "--log-every"]
       for value in (0, -1)},
    **{f"{flag} -1": ([flag, -1], USAGE, [flag, "-1"])
       for flag in ["--threads", "--zero", "--warmup", "--weight-decay", "--seed", "--save-every"]},
}
# mpirun takes a second for each: what stops at the same door is seen alone.
UNDER_MPIRUN = [
    "unknown flag", "unknown field", "config file missing", "word for a number", "choice",
    "batches do not fit", "accumulation conflicts", "heads do not divide", "sum block does not fit",
    "scale without fp16", "vocabulary below the tokenizer's", "data missing", "data empty",
    "data too short", "out below a file", "out in /proc", "resume from nothing",
    "init from nothing", "model", "device", "transport of GPUs", "no thread ranks", "--steps 0"]


def messages(err):
  """Lines of ours: mpirun adds its own about the exit code."""
  return [line for line in err.decode().splitlines() if line.startswith(("[rank", "shardrun:"))]


class BadInputTest(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    cli.write_text("text.txt", words=1500)
    work = cli.WORK
    (work / "field.textproto").write_text("steps: 2\nstepz: 3\n")
    (work / "field.json").write_text('{"steps": 2, "stepz": 3}')
    (work / "type.textproto").write_text('steps: "many"\n')
    (work / "empty.txt").write_text("")
    (work / "short.txt").write_text("too short")
    (work / "letter.txt").write_text("a")
    (work / "large.bin").write_bytes(b"".join(
        (256 + i % 44).to_bytes(2, "little") for i in range(1000)))
    (work / "odd.bin").write_bytes(bytes(1001))
    (work / "folder").mkdir()

  def refuse(self, words, code, parts, **how):
    before = cli.picture()
    got, out, err = cli.run(*words, timeout=40, **how)
    text = err.decode()
    ours = messages(err)
    self.assertEqual(got, code, text)
    self.assertEqual(len(ours), 1, text)
    for part in parts:
      self.assertIn(part, ours[0])
    self.assertEqual(out, b"")
    self.assertEqual(cli.picture(), before)
    return text

  def test_alone(self):
    for name, (words, code, parts) in CASES.items():
      with self.subTest(name):
        text = self.refuse(["train", *GOOD, *words], code, parts)
        self.assertEqual(text.count("\n"), 1, text)

  def test_thread_ranks(self):
    for name, (words, code, parts) in CASES.items():
      if not name.startswith("--") and "--comm" not in words:
        with self.subTest(name):
          text = self.refuse(["train", *GOOD, "--comm", "thread:3", *words], code, parts)
          self.assertEqual(text.count("\n"), 1, text)

  @unittest.skipUnless(cli.MPIEXEC, "needs mpirun")
  def test_under_mpirun(self):
    for name in UNDER_MPIRUN:
      with self.subTest(name):
        words, code, parts = CASES[name]
        self.refuse(["train", *GOOD, *words], code, parts, ranks=2)

  def test_token_outside_the_vocabulary(self):
    """Tokens are read when they are needed: the run has begun, all ranks fail in its first step."""
    for comm, ranks in [("thread:1", None), ("thread:3", None), ("mpi", 3)]:
      if ranks and not cli.MPIEXEC:
        continue
      with self.subTest(comm=comm):
        out = f"large-{comm[:6]}-{comm[-1]}"
        code, _, err = cli.run("train", *GOOD, "--data", "large.bin", "--comm", comm, "--out", out,
                               ranks=ranks)
        ours = messages(err)
        self.assertEqual((code, len(ours)), (DATA, 1), err.decode())
        self.assertRegex(ours[0], r"large\.bin: token \d+, .*got 2\d\d, wanted 0 to 255")
        self.assertEqual(list((cli.WORK / out / "checkpoints").iterdir()), [])

  @unittest.skipUnless(cli.MPIEXEC, "needs mpirun")
  def test_thread_ranks_under_mpirun(self):
    self.refuse(["train", *GOOD, "--comm", "thread:2"], CONFIG, ["thread:2", "2 processes"],
                ranks=2)

  def test_subcommands(self):
    cases = [(["trian"], USAGE, ["trian", "train"]),
             (["checkpoint", "sl", "x"], USAGE, ["sl", "ls | verify | hash"]),
             (["checkpoint", "hash", "folder"], NO_INPUT, ["folder"]),
             (["generate"], USAGE, ["--checkpoint"]),
             (["generate", "--checkpoint", "folder"], NO_INPUT, ["folder"]),
             (["train", *GOOD[2:]], USAGE, ["--data"]),
             (["train", *GOOD[:-2]], USAGE, ["--out"]),
             (["smoke", "--zreo", 1], USAGE, ["--zreo", "--zero"]),
             (["plan", "--wrold-size", 8], USAGE, ["--wrold-size", "--world-size"])]
    for words, code, parts in cases:
      with self.subTest(words=words):
        self.refuse(words, code, parts)
    if cli.MPIEXEC:
      for words, code, parts in (cases[0], cases[3], cases[4]):
        with self.subTest(words=words, ranks=3):
          self.refuse(words, code, parts, ranks=3)

  @unittest.skipUnless(cli.MPIEXEC, "needs MPI")
  def test_launcher_without_pmix(self):
    """srun whose MPI plugin does not fit starts processes that each believe to be alone."""
    slurm = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
    for comm in ("mpi", "auto"):
      self.refuse(["train", *GOOD, "--comm", comm], UNAVAILABLE, ["2 processes", "--mpi=pmix"],
                  env=slurm)
    # The second process leaves with the same code and is silent.
    before = cli.picture()
    code, out, err = cli.run("train", *GOOD, env={**slurm, "SLURM_PROCID": "1"})
    self.assertEqual((code, out, err), (UNAVAILABLE, b"", b""))
    self.assertEqual(cli.picture(), before)

  def test_good_input_is_good(self):
    """What the cases above add to: else any of them could fail for another reason."""
    cli.succeed("train", *GOOD[:-1], "good")
    cli.succeed("train", *GOOD, "--dry-run")
    self.assertFalse((cli.WORK / "out").exists())


if __name__ == "__main__":
  cli.main()
