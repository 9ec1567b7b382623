"""Whatever happens to a save, the next start finds the last good set or says what is wrong: processes
that die at every phase, disks that fill up, files that are cut, changed, gone or mixed up, and two
jobs in one folder.
"""
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import time
import unittest

import cli_support as cli

STEPS, EVERY = 12, 4
PHASES = ["open", "write", "sync", "rename", "commit"]
DATA, CANNOT_CREATE, IO, INTERNAL = 65, 73, 74, 70


class Base(unittest.TestCase):
  @classmethod
  def setUpClass(cls):
    cls.text = cli.write_text("text.txt", words=3000)
    cli.succeed(*cls.words("whole"))
    cls.digest, cls.numbers = cli.checkpoint_hash("whole"), cli.numbers("whole")

  @classmethod
  def words(cls, out, *more, comm="thread:1"):
    return ["train", "--data", cls.text, *cli.TINY, "--steps", STEPS, "--save-every", EVERY,
            "--keep-last", 0, "--micro-batch", 2, "--global-batch", 10, "--eval-every", 0,
            "--zero", 3, "--threads", 1, "--comm", comm, "--out", out, *more]

  def sets(self, out):
    return sorted(int(path.name[5:]) for path in (cli.WORK / out / "checkpoints").glob("step-*"))

  def goes_on(self, out, steps, comm="thread:2"):
    """From one of the sets `steps` to the bits of a run that nothing happened to."""
    text = cli.succeed(*self.words(out, comm=comm)).decode()
    self.assertTrue(any(f"step-{step:08}, {step} steps done" in text for step in steps), text)
    self.assertEqual(cli.checkpoint_hash(out), self.digest)
    self.assertEqual(cli.numbers(out), self.numbers)


class KillTest(Base):
  def kill(self, kind, fault, out, *more):
    ranks = 3 if cli.MPIEXEC else None
    words = self.words(out, *more, comm="mpi" if ranks else "thread:1")
    code, _, err = cli.run(*words, ranks=ranks, env={"SHARDRUN_FAULT": f"{fault},kind={kind}"})
    self.assertIn(b"fault: rank", err)
    return code, err.decode()

  def test_killed_at_each_phase(self):
    who = ["rank=0,", "rank=1,", ""] if cli.MPIEXEC else [""]
    for p, phase in enumerate(PHASES):
      for w, rank in enumerate(who):
        save = ["async", "sync"][(p + w) % 2]
        with self.subTest(phase=phase, who=rank or "all", save=save):
          out = f"killed-{phase}-{w}"
          self.assertNotEqual(self.kill("kill", f"{rank}step=8,phase={phase}", out, "--save", save)[0],
                              0)
          self.assertIn(4, self.sets(out))
          self.assertEqual(cli.succeed("checkpoint", "verify", f"{out}/checkpoints/step-00000004"),
                           b"sound\n")
          early = phase in ("open", "write", "sync")
          late = phase == "commit" and rank != "rank=1,"
          self.goes_on(out, [4] if early else [8] if late else [4, 8])

  def test_killed_while_a_set_is_replaced(self):
    """A run goes on from step 4 and writes step 8 anew over a set that is there."""
    for phase in ("write", "rename", "commit"):
      with self.subTest(phase=phase):
        out = f"replaced-{phase}"
        cli.succeed(*self.words(out, "--stop-after", 8), expect=75)
        self.kill("kill", f"step=8,phase={phase}", out, "--resume", f"{out}/checkpoints/step-00000004")
        self.assertEqual(self.sets(out), [4, 8])
        self.goes_on(out, [8])

  def test_an_error_of_one_rank_is_everyones(self):
    for kind, code in {"nospace": IO, "throw": INTERNAL}.items():
      for save in ("async", "sync"):
        with self.subTest(kind=kind, save=save):
          out = f"{kind}-{save}"
          rank = "rank=1" if cli.MPIEXEC else "rank=0"
          got, err = self.kill(kind, f"{rank},step=8,phase=write", out, "--save", save)
          self.assertEqual(got, code, err)
          ours = [line for line in err.splitlines() if line.startswith(("[rank", "shardrun:"))]
          self.assertEqual(len(ours), 1, err)
          self.assertIn("checkpoint not saved, rank 1 of 3" if cli.MPIEXEC else "not saved", ours[0])
          if kind == "nospace":
            self.assertIn("No space left", ours[0])
            self.assertIn("data-0000", ours[0])
          self.assertEqual(self.sets(out), [4])
          self.assertFalse(any(path.name.startswith(".step")
                               for path in (cli.WORK / out / "checkpoints").iterdir()))
          self.goes_on(out, [4])

  def test_a_short_write_is_taken_up_again(self):
    out = "short"
    code, err = self.kill("short-write", "phase=write", out)
    self.assertEqual(code, 0, err)
    self.assertEqual(cli.checkpoint_hash(out), self.digest)

  def test_training_goes_on_while_a_set_is_written(self):
    """The writer of each save sleeps: beside training that costs it little, in front of it all."""
    stood = {}
    for save in ("async", "sync"):
      text = cli.succeed(*self.words(f"slow-{save}", "--save", save, "--steps", 40, "--save-every", 20,
                                     "--schedule", "constant"),
                         env={"SHARDRUN_FAULT": "step=20,phase=sync,kind=delay,seconds=0.4"}).decode()
      line = next(line for line in text.splitlines() if "step-00000020" in line)
      wrote, stood[save] = (float(part.split(" s")[0]) for part in line.split(" in ")[1].split(" for "))
      self.assertGreaterEqual(wrote, 0.4)
    self.assertGreaterEqual(stood["sync"], 0.4)
    # Steps of the model take far less than the sleep: the save is waited for at the end, if at all.
    self.assertLess(stood["async"], stood["sync"])
    self.assertEqual(cli.checkpoint_hash("slow-async"), cli.checkpoint_hash("slow-sync"))

  def test_faults_are_spelled_right(self):
    for fault in ("phase=write", "kind=kill", "phase=wrte,kind=kill", "phase=write,kind=kil",
                  "rank=x,phase=write,kind=kill", "what=5,phase=write,kind=kill"):
      code, _, err = cli.run(*self.words("unspelled"), env={"SHARDRUN_FAULT": fault})
      self.assertEqual(code, 64, err)
      self.assertIn(b"SHARDRUN_FAULT", err)
    self.assertFalse((cli.WORK / "unspelled").exists())


class DamageTest(Base):
  def damages(self):
    def resize(change):
      return lambda path: os.truncate(path, change(path.stat().st_size))

    def flip(path):
      content = bytearray(path.read_bytes())
      content[len(content) // 3] ^= 16
      path.write_bytes(content)

    return {"a byte less": resize(lambda n: n - 1), "a page less": resize(lambda n: max(0, n - 4096)),
            "half": resize(lambda n: n // 2), "a bit": flip, "gone": lambda path: path.unlink(),
            "empty": resize(lambda n: 0), "a byte more": resize(lambda n: n + 1),
            "of another set": lambda path: shutil.copy(
                path.parent.parent / "step-00000004" / path.name, path)}

  def test_falls_back(self):
    cli.succeed(*self.words("sound", "--stop-after", 8, comm="thread:2"), expect=75)
    for file in ("data-00001.bin", "manifest.pb"):
      for name, damage in self.damages().items():
        with self.subTest(file=file, damage=name):
          shutil.rmtree(cli.WORK / "damaged", ignore_errors=True)
          shutil.copytree(cli.WORK / "sound", cli.WORK / "damaged", symlinks=True)
          newest = "damaged/checkpoints/step-00000008"
          damage(cli.WORK / newest / file)
          if file == "manifest.pb" and name in ("gone", "of another set"):
            said = newest  # no set at all; a set that says step 4
          else:
            said = f"{newest}/{file}"
          self.assertIn(said, cli.succeed("checkpoint", "verify", newest, expect=65)
                        .decode())
          before = cli.picture()
          code, _, err = cli.run(*self.words("damaged", "--resume", newest))
          self.assertIn(code, (65, 66))
          self.assertIn(said, err.decode())
          self.assertEqual(cli.picture(), before)
          code, out, err = cli.run(*self.words("damaged", comm="thread:3"))
          self.assertEqual(code, 0, err)
          self.assertIn(f"warning: {newest} is not sound", err.decode())
          self.assertIn(said, err.decode())
          self.assertIn(b"step-00000004, 4 steps done", out)
          self.assertEqual(cli.checkpoint_hash("damaged"), self.digest)

  def test_never_from_zero(self):
    cli.succeed(*self.words("all", "--stop-after", 8), expect=75)
    for step in (4, 8):
      os.truncate(cli.WORK / f"all/checkpoints/step-0000000{step}/data-00000.bin", 100)
    self.refused(["all"], DATA, ["none of 2 checkpoints is sound", "choose another --out"])
    cli.succeed(*self.words("lost", "--stop-after", 8), expect=75)
    for step in (4, 8):
      shutil.rmtree(cli.WORK / f"lost/checkpoints/step-0000000{step}")
    self.refused(["lost"], DATA, ["`latest` names, step-00000008, is gone"])
    # Told to: the folder is removed, or no set that is complete is in the way.
    shutil.rmtree(cli.WORK / "lost/checkpoints")
    self.assertNotIn(b"steps done", cli.succeed(*self.words("lost")))
    self.assertEqual(cli.checkpoint_hash("lost"), self.digest)
    self.assertNotIn(b"steps done", cli.succeed(*self.words("all", "--resume", "no")))
    self.assertEqual(cli.checkpoint_hash("all"), self.digest)

  def test_another_model_is_not_damage(self):
    cli.succeed(*self.words("other", "--stop-after", 8), expect=75)
    self.refused(["other", "--channels", 34], DATA, ["got shape", "34"])

  def test_rotation_is_of_this_run(self):
    cli.succeed(*self.words("theirs", "--stop-after", 8), expect=75)
    cli.succeed(*self.words("ours", "--keep-last", 1, "--stop-after", 5), expect=75)
    shutil.copytree(cli.WORK / "theirs/checkpoints/step-00000004",
                    cli.WORK / "ours/checkpoints/step-00000003x")
    shutil.copytree(cli.WORK / "theirs/checkpoints/step-00000004",
                    cli.WORK / "ours/checkpoints/step-00000004")
    cli.succeed(*self.words("ours", "--keep-last", 1))
    self.assertEqual(self.sets_named("ours"), ["step-00000003x", "step-00000004", "step-00000012"])

  def sets_named(self, out):
    return sorted(path.name for path in (cli.WORK / out / "checkpoints").glob("step-*"))

  def refused(self, words, code, parts):
    before = cli.picture()
    got, _, err = cli.run(*self.words(*words))
    self.assertEqual(got, code, err)
    for part in parts:
      self.assertIn(part, err.decode())
    self.assertEqual(cli.picture(), before)


class DiskTest(Base):
  def test_file_size_limit(self):
    size = max(path.stat().st_size for path in (cli.WORK / "whole").rglob("data-*.bin"))
    process = subprocess.run(
        cli.command(self.words("limited")), cwd=cli.WORK, env=cli.environment(), timeout=60,
        capture_output=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, size - 1)))
    self.assertEqual(process.returncode, IO, process.stderr)
    self.assertIn(b"File too large", process.stderr)
    self.assertEqual(self.sets("limited"), [])
    text = cli.succeed(*self.words("limited"))
    self.assertNotIn(b"steps done", text)
    self.assertEqual(cli.checkpoint_hash("limited"), self.digest)

  def test_full_disk(self):
    size = sum(path.stat().st_size for path in
               (cli.WORK / "whole/checkpoints/step-00000004").iterdir())
    disk = cli.WORK / "disk"
    disk.mkdir()

    def mount(bytes_):
      return subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={bytes_}", "tmpfs", disk],
                            capture_output=True).returncode == 0

    if not mount(size // 2):
      self.skipTest("cannot mount a tmpfs here")
    try:
      before = cli.picture()
      code, _, err = cli.run(*self.words("disk/out"))
      self.assertEqual(code, CANNOT_CREATE, err)
      self.assertIn(b"a set takes", err)
      self.assertEqual(cli.picture(), before)
      subprocess.run(["umount", disk], check=True)
      self.assertTrue(mount(size * 5 // 2))
      code, _, err = cli.run(*self.words("disk/out"))
      self.assertEqual(code, IO, err)
      self.assertIn(b"No space left", err)
      self.assertEqual(self.sets("disk/out"), [4, 8])
      self.assertEqual(cli.succeed("checkpoint", "verify", "disk/out"), b"sound\n")
      # With room again it goes on where it was.
      shutil.rmtree(disk / "out/checkpoints/step-00000004")
      self.goes_on("disk/out", [8])
    finally:
      subprocess.run(["umount", disk], check=True)


class TwoJobsTest(Base):
  def test_the_second_names_the_first(self):
    words = self.words("shared", "--steps", 10**6, "--schedule", "constant", "--save-every", 0)
    with open(cli.WORK / "shared.log", "wb") as log:
      first = subprocess.Popen(cli.command(words), cwd=cli.WORK, env=cli.environment(), stdout=log,
                               stderr=log)
    try:
      metrics = cli.WORK / "shared/metrics.jsonl"
      deadline = time.monotonic() + 30
      while not (metrics.exists() and metrics.stat().st_size):
        self.assertLess(time.monotonic(), deadline)
        time.sleep(0.02)
      files = {path: path.read_bytes() for path in (cli.WORK / "shared").glob("*.textproto")}
      for more, ranks in [([], None), (["--comm", "mpi"], 2)]:
        if ranks and not cli.MPIEXEC:
          continue
        code, _, err = cli.run(*words, *more, ranks=ranks)
        self.assertEqual(code, CANNOT_CREATE, err)
        self.assertIn(f"process {first.pid} on {os.uname().nodename}", err.decode())
      self.assertEqual(files, {path: path.read_bytes() for path in files})
    finally:
      first.send_signal(signal.SIGKILL)
      first.wait()
    cli.succeed(*words, "--stop-after", 2, expect=75)


class PeerSnapshotTest(Base):
  """Killed with nothing on the disk since step 0, a run goes on from the newest step."""

  def left(self):
    return [path.name for path in pathlib.Path("/dev/shm").glob("shardrun-*")
            if any(run in path.name for run in self.runs)]

  def setUp(self):
    self.runs = []

  def tearDown(self):
    for name in self.left():
      os.unlink(f"/dev/shm/{name}")

  @classmethod
  def words(cls, out, *more, comm="thread:1"):
    return [*super().words(out, "--save-every", 0, "--peer-snapshot", *more, comm=comm)]

  def killed(self, out, fault, comm, ranks):
    code, _, err = cli.run(*self.words(out, comm=comm), ranks=ranks,
                           env={"SHARDRUN_FAULT": fault + ",kind=kill"})
    self.assertNotEqual(code, 0)
    self.assertIn(b"fault: rank", err)
    self.runs.append((cli.WORK / out / "run").read_text().split()[1])
    self.assertEqual(list((cli.WORK / out / "checkpoints").iterdir()), [])
    self.assertTrue(self.left())

  def test_killed(self):
    mpi = [("mpi", 3)] if cli.MPIEXEC else []
    cases = [("rank=1,step=7,phase=step", 6), ("rank=1,step=7,phase=peer", 6),
             ("step=8,phase=peer", 7), ("rank=0,step=1,phase=peer", None)]
    for (fault, step), (comm, ranks), after in zip(
        cases, mpi * 3 + [("thread:3", None)] * 4, ["thread:3", "thread:2", "thread:4", "thread:1"]):
      with self.subTest(fault=fault, comm=comm, after=after):
        if comm != "mpi":
          fault = fault.replace("rank=1", "rank=2")
        out = "peers-" + fault.replace(",", "-").replace("=", "-")
        self.killed(out, fault, comm, ranks)
        text = cli.succeed(*self.words(out, comm=after)).decode()
        if step:
          self.assertIn(f"resumed from the memory of the ranks' nodes, {step} steps done", text)
        else:
          self.assertNotIn("steps done", text)
        self.assertEqual(cli.checkpoint_hash(out), self.digest)
        self.assertEqual(cli.numbers(out), self.numbers)
        self.assertEqual(self.left(), [])

  def test_a_newer_set_on_the_disk_counts(self):
    out = "peers-and-disk"
    self.killed(out, "rank=0,step=5,phase=peer", "thread:2", None)
    self.runs = [(cli.WORK / out / "run").read_text().split()[1]]
    kept = {name: pathlib.Path(f"/dev/shm/{name}").read_bytes() for name in self.left()}
    cli.succeed(*self.words(out, "--stop-after", 9), expect=75)
    for name, content in kept.items():
      pathlib.Path(f"/dev/shm/{name}").write_bytes(content)
    self.assertIn(b"step-00000009, 9 steps done", cli.succeed(*self.words(out)))
    self.assertEqual(cli.checkpoint_hash(out), self.digest)

  def test_another_run_takes_nothing(self):
    out = "peers-new"
    self.killed(out, "rank=0,step=5,phase=peer", "thread:2", None)
    shutil.rmtree(cli.WORK / out)
    self.assertNotIn(b"steps done", cli.succeed(*self.words(out)))
    self.assertEqual(cli.checkpoint_hash(out), self.digest)
    self.assertTrue(self.left())  # nobody's now


del Base
if __name__ == "__main__":
  cli.main()
