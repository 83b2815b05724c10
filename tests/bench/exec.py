"""How long ``exec("true")`` over three hosts takes a connected client, beside `srun -N3 true` of Slurm on the same hosts.

``python -m tests.bench.exec [--rounds N]``, as root, with Debian's slurmctld, slurmd, slurm-client and munge: three hosts,
Ray and a slurmd on each, then rounds in which each way takes its turn. Both are measured by a process on the first host.
Prints the median of each, its spread, and the ratio; the goal is 0.3 s, and twice as long as Slurm.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.launch import expect, measure, report
from tests.hosts.network import HostProcess, Hosts, why_no_hosts
from tests.support import wait_until

SBIN = "/usr/sbin:/usr/bin"
SDK = """
import sys, time
from raycontrol import Client
with Client() as client:
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        with client.exec("true", all=True) as outcomes:
            assert len(outcomes) == 3 and outcomes.status == 0
        print(time.perf_counter() - began, flush=True)
"""
SRUN = """
import subprocess, sys, time
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    subprocess.run(["srun", "--immediate=30", "-N3", "true"], check=True)
    print(time.perf_counter() - began, flush=True)
"""
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
SchedulerParameters=batch_sched_delay=0
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
UP_S = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="how often each takes its turn (default 20)")
    rounds = parser.parse_args().rounds
    lacking = [
        name for name in ("slurmctld", "slurmd", "srun", "munged") if not shutil.which(name, path=SBIN)
    ]
    reason = why_no_hosts() or (
        f"needs Debian's slurmctld, slurmd, slurm-client and munge: no {lacking[0]}" if lacking else ""
    )
    if reason:
        sys.exit(f"bench: {reason}")
    with tempfile.TemporaryDirectory() as name, Hosts(3, keep=[Path(name)]) as hosts:
        folder = Path(name)
        hosts.start_cluster()
        ray = {"RAYCONTROL_HOME": f"{folder}/home", "RAY_ADDRESS": hosts.address, "RAY_AUTH_MODE": "disabled"}
        with slurm(hosts, folder) as conf, client(hosts, SRUN, conf) as srun, client(hosts, SDK, ray) as sdk:
            report(measure({"srun -N3 true": srun, 'raycontrol, exec("true")': sdk}, rounds))


@contextmanager
def client(hosts: Hosts, program: str, env: dict[str, str]) -> Iterator[Callable[[], float]]:
    """Let a process on the first host wait; give what makes it do its work once, and says how long that took."""
    path = f"{SBIN}:{os.environ['PATH']}"
    with hosts.popen(
        0, [sys.executable, "-c", program], env={**env, "PATH": path}, stdin=subprocess.PIPE
    ) as process:
        expect(process, "ready")

        def call() -> float:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return float(process.stdout.readline())

        yield call
        assert process.stdin is not None
        process.stdin.close()


@contextmanager
def slurm(hosts: Hosts, folder: Path) -> Iterator[dict[str, str]]:
    """Run Slurm on the hosts; give the environment of its clients."""
    nodes = "\n".join(
        f"NodeName={hosts.name(i)} NodeHostname={hosts.name(i)} NodeAddr={hosts.ip(i)} CPUs=1 State=UNKNOWN"
        for i in range(3)
    )
    (folder / "state").mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(SLURM_CONF.format(head=hosts.name(0), ip=hosts.ip(0), folder=folder, nodes=nodes))
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    env = {"SLURM_CONF": str(conf), "PATH": f"{SBIN}:/bin"}
    munged = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    daemons = [(0, ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munged])]
    daemons += [(0, ["slurmctld", "-D", "-f", str(conf)])]
    daemons += [(i, ["slurmd", "-D", "-N", hosts.name(i), "-f", str(conf)]) for i in range(3)]
    running: list[HostProcess] = []
    try:
        for i, argv in daemons:
            running.append(
                hosts.popen(i, argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
        ready = ["srun", "--immediate=1", "-N3", "true"]
        wait_until(lambda: hosts.run(0, ready, env=env).returncode == 0, UP_S, "Slurm runs a job")
        yield env
    finally:
        for daemon in reversed(running):
            daemon.end()


if __name__ == "__main__":
    main()
