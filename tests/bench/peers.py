"""What people would use instead: Slurm of Debian on the same hosts, Ray's own ways. A peer that is not installed is named."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raycontrol import raysettings
from tests.cluster_state import LASTING_ACTORS
from tests.hosts.conftest import Cluster
from tests.hosts.network import HostProcess, Hosts
from tests.support import wait_until

SBIN = "/usr/sbin:/usr/bin"
SLURM_CONF = """
ClusterName=bench
SlurmctldHost={head}({ip})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
{more}
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
UP_S = 60
SRUN = """
import subprocess, sys, time
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    subprocess.run(["srun", "--immediate=30", "-N3", "true"], check=True)
    print(time.perf_counter() - began, flush=True)
"""
"""For ``tables.waiting``, with the environment that ``slurm`` gives."""


def no_slurm() -> str | None:
    """Return what of Slurm is not installed, None where all is."""
    names = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
    lacking = [name for name in names if not shutil.which(name, path=SBIN)]
    return f"Slurm (Debian's slurmctld, slurmd, slurm-client, munge): no {lacking[0]}" if lacking else None


@contextmanager
def slurm(hosts: Hosts, folder: Path, *, cpus: int = 4, more: str = "") -> Iterator[dict[str, str]]:
    """Run Slurm on the hosts, as Debian configures it but for ``more``; give the environment of its clients.

    ``folder`` is one that all hosts see.
    """
    nodes = "\n".join(
        f"NodeName={hosts.name(i)} NodeHostname={hosts.name(i)} NodeAddr={hosts.ip(i)} CPUs={cpus} State=UNKNOWN"
        for i in range(hosts.count)
    )
    (folder / "state").mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(
        SLURM_CONF.format(head=hosts.name(0), ip=hosts.ip(0), folder=folder, nodes=nodes, more=more)
    )
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    env = {"SLURM_CONF": str(conf), "PATH": f"{SBIN}:/bin:{os.environ['PATH']}"}
    munged = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    daemons = [(0, ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munged])]
    daemons += [(0, ["slurmctld", "-D", "-f", str(conf)])]
    daemons += [(i, ["slurmd", "-D", "-N", hosts.name(i), "-f", str(conf)]) for i in range(hosts.count)]
    running: list[HostProcess] = []
    try:
        for i, argv in daemons:
            running.append(
                hosts.popen(i, argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
        ready = ["srun", "--immediate=1", f"-N{hosts.count}", "true"]
        wait_until(lambda: hosts.run(0, ready, env=env).returncode == 0, UP_S, "Slurm runs a job")
        yield env
    finally:
        for daemon in reversed(running):
            daemon.end()


def lasting(hosts: Hosts, cluster: Cluster) -> dict[str, int]:
    """Return the processes of the actors that outlive jobs, by the actors' names: those of nodes end with their hosts' numbers."""
    found: dict[str, int] = {}
    for actor in cluster.ask()["actors"]:
        if actor["state"] == "ALIVE" and actor["name"].startswith(LASTING_ACTORS):
            i = next(i for i in range(hosts.count) if hosts.ip(i) == actor["ip"])
            pid = next(pid for pid in hosts.pids(i) if _inner_pid(pid) == actor["pid"])
            found[f"{actor['name'].partition(':')[0]}{i if 'node' in actor['name'] else ''}"] = pid
    return found


def _inner_pid(pid: int) -> int | None:
    """Return the pid that a process has in its host's own numbering; None for one that has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1])


def recommended() -> dict[str, str]:
    """Return what `raycontrol ray-env` says that `ray start` should be given; so all that use this Ray have it."""
    return {**raysettings.variables(head=True), "RAY_AUTH_MODE": "disabled"}
