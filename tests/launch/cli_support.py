"""What the tests of the real binary share: seeded text, runs with a deadline, pictures of a folder.

Called as `python3 NAME_test.py BINARY WORKDIR [MPIEXEC]`. Every run starts in WORKDIR, which is
made anew, and nothing outside it is read or written.
"""
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import unittest

BINARY, WORK = sys.argv[1], pathlib.Path(sys.argv[2])
MPIEXEC = sys.argv[3] if len(sys.argv) > 3 and sys.argv[3] else None

TINY = ["--layers", 2, "--heads", 2, "--channels", 32, "--seq-len", 16, "--dropout", 0.1]
PRECISIONS = ["fp32", "bf16", "fp16", "bf16-true"]


def environment(extra=None):
  """Ours without traces of a launcher, ready for mpirun as root on few cores."""
  env = {k: v for k, v in os.environ.items() if not re.match("OMPI_COMM|PMI|SLURM|MPI_LOCAL", k)}
  env.update(
      OMPI_ALLOW_RUN_AS_ROOT="1",
      OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
      OMPI_MCA_btl_vader_single_copy_mechanism="none",
      OMPI_MCA_rmaps_base_oversubscribe="1")
  env.update(extra or {})
  return env


def command(words, ranks=None):
  """The binary itself, or `ranks` of it under mpirun."""
  launcher = [] if ranks is None else [
      MPIEXEC, "--oversubscribe", "--allow-run-as-root", "--bind-to", "none", "-n", ranks]
  return [str(word) for word in [*launcher, BINARY, *words]]


def run(*words, ranks=None, env=None, timeout=60):
  """(exit code, stdout, stderr), as bytes. A hang fails the test that asked."""
  process = subprocess.Popen(
      command(words, ranks), cwd=WORK, env=environment(env), stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  try:
    out, err = process.communicate(timeout=timeout)
  except subprocess.TimeoutExpired:
    process.kill()
    out, err = process.communicate()
    raise AssertionError(f"no end after {timeout} s: {words}\n{out.decode()}\n{err.decode()}")
  return process.returncode, out, err


def succeed(*words, expect=0, **how):
  """Standard output of a run that must leave with `expect`."""
  code, out, err = run(*words, **how)
  if code != expect:
    raise AssertionError(f"exit code {code}, wanted {expect}: {words} {how}\n"
                         f"{out.decode(errors='replace')}\n{err.decode(errors='replace')}")
  return out


def checkpoint_hash(folder):
  return succeed("checkpoint", "hash", folder).decode().strip()


NUMBERS = ["step", "applied_steps", "loss", "grad_norm", "lr", "loss_scale", "skipped", "tokens",
           "val_loss"]


def numbers(folder):
  """The fields of metrics.jsonl that a run's bits decide, as they are written."""
  lines = []
  for line in (WORK / folder / "metrics.jsonl").read_text().splitlines():
    found = dict(re.findall(r'"(\w+)": ([^,}]+)', line))
    lines.append(" ".join(f"{name}={found[name]}" for name in NUMBERS if name in found))
  return lines


def write_text(name, words=6000, seed=1):
  """Text in which every place differs: drawn words, so that no two sequences are alike."""
  draw = random.Random(seed)
  letters = "abcdefghijklmnopqrstuvwxyz"
  vocabulary = ["".join(draw.choices(letters, k=draw.randint(2, 8))) for _ in range(300)]
  text = "".join(draw.choice(vocabulary) + draw.choice([" ", " ", ", ", ".\n"])
                 for _ in range(words))
  (WORK / name).write_text(text)
  return name


def picture(folder=WORK):
  """Every path below `folder` with its content and its time of change."""
  return {str(path.relative_to(folder)): (path.lstat().st_mtime_ns,
                                          path.read_bytes() if path.is_file() else None)
          for path in folder.rglob("*")}


def main():
  shutil.rmtree(WORK, ignore_errors=True)
  WORK.mkdir(parents=True)
  unittest.main(argv=sys.argv[:1], verbosity=2)
