"""Two hosts on one machine: namespaces with their own network, name, /dev/shm and System V memory,
joined by one link. mpirun reaches them by an agent of ours, as it reaches others by ssh.
"""
import os
import pathlib
import shutil
import signal
import subprocess

import cli_support as cli

ADDRESS = "10.77.0."
SHARED = ["-n", "-u", "-m", "-i"]  # what nsenter enters

AGENT = """#!/bin/bash
# AGENT HOST COMMAND...: as `ssh HOST COMMAND...` would
folder=$(dirname "$(readlink -f "$0")")
host=$1
shift
exec nsenter -t "$(cat "$folder/${host##*.}")" -n -u -m -i /bin/sh -c "$*"
"""


class Hosts:
  """Raises Unavailable where the system allows no namespaces or links."""

  class Unavailable(Exception):
    pass

  def __init__(self, folder):
    """`folder` holds the agent, and a folder `private` that each host has for itself."""
    self.folder = pathlib.Path(folder)
    (self.folder / "private").mkdir(parents=True)
    self.agent = self.folder / "agent"
    self.agent.write_text(AGENT)
    self.agent.chmod(0o755)
    self.processes = []
    if not shutil.which("ip", path=os.environ["PATH"] + ":/usr/sbin:/sbin"):
      raise self.Unavailable("`ip` is missing: install iproute2")
    try:
      for host in (1, 2):
        self.start(host)
      self.ip("link", "add", "shardrun1", "netns", self.pid(1), "type", "veth",
              "peer", "name", "shardrun2", "netns", self.pid(2))
      for host in (1, 2):
        self.ip("addr", "add", f"{ADDRESS}{host}/24", "dev", f"shardrun{host}", on=host)
        self.link(host, "up")
    except (OSError, subprocess.CalledProcessError) as error:
      self.stop()
      raise self.Unavailable(f"no namespaces here ({error})")

  def start(self, host):
    made = (f"hostname node{host} && mount --make-rprivate / && mount -t tmpfs tmpfs /dev/shm && "
            f"mount -t tmpfs tmpfs '{self.folder}/private' && ip link set lo up && echo ready && "
            "exec sleep 600")
    process = subprocess.Popen(["unshare", "--net", "--uts", "--mount", "--ipc", "sh", "-c", made],
                               env=self.environment(), stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    self.processes.append(process)
    if process.stdout.readline() != b"ready\n":
      raise OSError(f"unshare left with {process.wait()}")
    (self.folder / str(host)).write_text(str(process.pid))

  def stop(self):
    """Whatever a failed test left there ends, too."""
    nets = [os.readlink(f"/proc/{process.pid}/ns/net") for process in self.processes
            if process.poll() is None]
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
      try:
        if os.readlink(folder / "ns/net") in nets:
          os.kill(int(folder.name), signal.SIGKILL)
      except OSError:  # gone
        pass
    for process in self.processes:
      process.kill()
      process.wait()
      process.stdout.close()

  def pid(self, host):
    return str(self.processes[host - 1].pid)

  def environment(self):
    env = cli.environment()
    env["PATH"] += ":/usr/sbin:/sbin"
    env.pop("OMPI_MCA_plm", None)  # which forbids other hosts
    return env

  def ip(self, *words, on=None):
    enter = [] if on is None else ["nsenter", "-t", self.pid(on), *SHARED]
    subprocess.run([*enter, "ip", *words], env=self.environment(), check=True,
                   stdin=subprocess.DEVNULL, capture_output=True)

  def link(self, host, state):
    self.ip("link", "set", f"shardrun{host}", state, on=host)

  def command(self, words, ranks=2):
    """The binary in `ranks` ranks on each host; mpirun runs on the first."""
    net = ADDRESS + "0/24"
    mca = {"plm": "rsh", "plm_rsh_agent": self.agent, "oob_tcp_if_include": net,
           "btl_tcp_if_include": net,
           # A host that is gone is noticed in seconds, not in the ten minutes that are the default.
           "oob_tcp_keepalive_time": 3, "oob_tcp_keepalive_intvl": 1, "oob_tcp_keepalive_probes": 3}
    flags = [word for name, value in mca.items() for word in ("--mca", name, value)]
    launcher = ["nsenter", "-t", self.pid(1), *SHARED, cli.MPIEXEC, *flags, "--allow-run-as-root",
                "--bind-to", "none", "--host", f"{ADDRESS}1:{ranks},{ADDRESS}2:{ranks}",
                "-n", 2 * ranks, "--wdir", cli.WORK]
    return [str(word) for word in [*launcher, cli.BINARY, *words]]
