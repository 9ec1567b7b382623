"""A SLURM of one's own: munged, slurmctld and slurmd as children, in a folder and on ports of their own.

Used by slurm_test.py. Debian's packages are looked for where they put things; no service is started,
nothing outside the folder is read or written.
"""
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time

PROGRAMS = ["munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue"]
PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"


def missing():
  """What hinders a SLURM here, or nothing."""
  if os.geteuid() != 0:
    return "needs root: slurmd starts other users' jobs"
  absent = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
  if absent:
    return f"{', '.join(absent)} missing: install slurmctld slurmd slurm-client munge"
  return ""


def free_ports(count):
  sockets = [socket.socket() for _ in range(count)]
  for each in sockets:
    each.bind(("127.0.0.1", 0))
  ports = [each.getsockname()[1] for each in sockets]
  for each in sockets:
    each.close()
  return ports


CONF = """
ClusterName=shardrun
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
GresTypes=gpu
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
NodeName=here NodeHostname={host} NodeAddr=127.0.0.1 Port={daemon} CPUs=8 State=UNKNOWN
NodeName=far[1-4] NodeAddr=127.0.0.1 Port={nowhere} CPUs=64 Gres=gpu:8 State=CLOUD
PartitionName=here Nodes=here Default=YES MaxTime=INFINITE State=UP
PartitionName=far Nodes=far[1-4] MaxTime=INFINITE State=UP
"""


class Slurm:
  """One node `here` of 8 CPUs that runs jobs; partition `far` has 4 nodes with GPUs on paper only."""

  def __init__(self):
    self.folder = pathlib.Path(tempfile.mkdtemp(prefix="shardrun-slurm-"))
    self.folder.chmod(0o755)  # munge's clients must reach its socket
    (self.folder / "state").mkdir()
    (self.folder / "munge.key").write_bytes(os.urandom(128))
    (self.folder / "munge.key").chmod(0o400)
    controller, daemon, nowhere = free_ports(3)
    host = socket.gethostname().split(".")[0]
    (self.folder / "slurm.conf").write_text(CONF.format(
        host=host, folder=self.folder, controller=controller, daemon=daemon, nowhere=nowhere))
    (self.folder / "gres.conf").write_text("NodeName=far[1-4] Name=gpu Count=8\n")
    self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "OMPI_", "PMI"))}
    self.environment.update(PATH=PATH, SLURM_CONF=str(self.folder / "slurm.conf"),
                            OMPI_MCA_btl_vader_single_copy_mechanism="none")
    self.daemons = []
    self.start("munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key",
               f"--socket={self.folder}/munge.socket", f"--pid-file={self.folder}/munged.pid",
               f"--log-file={self.folder}/munged.log", f"--seed-file={self.folder}/munged.seed")
    self.wait(lambda: (self.folder / "munge.socket").exists(), "munged")
    self.start("slurmctld", "-D", "-c")
    self.start("slurmd", "-D", "-N", "here")
    self.wait(lambda: "idle" in self.run("sinfo", "-h", "-n", "here", "-o", "%T", check=False), "slurmd")

  def start(self, name, *words):
    with open(self.folder / f"{name}.out", "wb") as log:
      self.daemons.append(subprocess.Popen([shutil.which(name, path=PATH), *words], cwd=self.folder,
                                           env=self.environment, stdin=subprocess.DEVNULL,
                                           stdout=log, stderr=log, start_new_session=True))

  def stop(self):
    """Ends jobs before those who look after them."""
    try:
      self.run("scancel", "--full", "--signal=KILL", "--user=root", check=False)
      self.run("scancel", "--user=root", check=False)
      self.wait(lambda: not self.run("squeue", "-h", check=False).strip(), "the end of jobs")
    finally:
      for daemon in reversed(self.daemons):
        daemon.terminate()
      for daemon in self.daemons:
        try:
          daemon.wait(timeout=15)
        except subprocess.TimeoutExpired:
          daemon.kill()
      shutil.rmtree(self.folder, ignore_errors=True)

  def run(self, *words, check=True, cwd=None, **environment):
    """What a command prints; with check=None the whole result."""
    done = subprocess.run([str(word) for word in words], env={**self.environment, **environment},
                          cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    if check and done.returncode != 0:
      raise AssertionError(f"{words}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr if check is not None else done

  def wait(self, condition, what, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
      for daemon in self.daemons:
        if daemon.poll() is not None:
          raise AssertionError(f"waited for {what}; {daemon.args[0]} left\n{self.logs()}")
      if time.monotonic() > deadline:
        raise AssertionError(f"waited {seconds} s for {what}\n{self.logs()}")
      time.sleep(0.1)

  def wait_for_steps_to_leave(self, number):
    """A job may wait again while the daemon of its step before still lives; a step of the same name
    could not listen on the socket that this one has, and srun would leave with 0."""
    steps = f"spool-here/stepd.slurm.pmix.{self.job(number)['JobId']}.*"
    self.wait(lambda: not list(self.folder.glob(steps)), f"the step of job {number} to leave")

  def logs(self):
    return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
                     for path in sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("*.out")))

  def job(self, number):
    """A job as scontrol shows it."""
    text = self.run("scontrol", "--oneliner", "show", "job", number)
    return dict(word.split("=", 1) for word in text.split() if "=" in word)
