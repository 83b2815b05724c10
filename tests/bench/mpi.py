"""How long an mpirun of 3 x 2 ranks takes to start, through raycontrol's job-private ssh and through plain sshd.

``python -m tests.bench.mpi [--rounds N]``, as root, with Debian's openssh-server: three hosts, Ray and an sshd on each.
One job is held open; its start command calls mpirun whenever it is told to, between calls over sshd from a login on
the same host, so that both meet the same machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.bench.alone import alone
from tests.bench.tables import Table, measure
from tests.hosts.network import BIN, HostProcess, Hosts
from tests.support import wait_until

HELLO = "from mpi4py import MPI; assert MPI.COMM_WORLD.allreduce(1) == 6"
# One call for every file `go-N`: each instance waits for it, as instances of one job do; the launcher says `done-N`.
JOB = """
for n in $(seq 0 {calls}); do
  until [ -e {folder}/go-$n ]; do [ -e {folder}/stop ] && exit 0; sleep 0.01; done
  {mpirun} || exit 1
  [ $INDEX != 0 ] || touch {folder}/done-$n
done
"""
SSHD = """Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/login_key.pub
StrictModes no
PidFile none
UsePAM no
AcceptEnv *
"""
SSH = """#!/bin/sh
exec ssh -i {folder}/login_key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"
"""


def tables(rounds: int) -> Sequence[Table]:
    if not shutil.which("sshd", path=SBIN):
        raise SystemExit("bench: needs Debian's openssh-server")
    with tempfile.TemporaryDirectory() as name, Hosts(3, keep=[Path(name)]) as hosts:
        folder = Path(name)
        hosts.start_cluster()
        daemons = serve(hosts, folder)
        env = {"RAYCONTROL_HOME": f"{folder}/home", "RAY_ADDRESS": hosts.address, "RAY_AUTH_MODE": "disabled"}
        line = JOB.format(calls=rounds, folder=folder, mpirun=f"mpirun -np 6 {sys.executable} -c '{HELLO}'")
        spec = ("--mode", "mpi", "--nodes", "3", "--slots", "2", "--", line)
        job = hosts.popen(0, [BIN / "raycontrol", "run", *spec], env=env)
        try:
            ways = {"over sshd": over_sshd(hosts, folder), "raycontrol": in_job(folder, job)}
            found = measure(ways, rounds)
        finally:
            (folder / "stop").touch()
            told, _ = job.communicate(timeout=60)
            for daemon in daemons:
                daemon.end()
        assert job.returncode == 0, told
    return [Table("mpirun of 3 x 2 ranks, which say hello", found)]


SBIN = "/usr/sbin:/usr/local/sbin:/usr/bin"


def serve(hosts: Hosts, folder: Path) -> list[HostProcess]:
    """An sshd on every host that lets one key in."""
    for key in ("host_key", "login_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (folder / "sshd_config").write_text(SSHD.format(folder=folder))
    (folder / "agent").write_text(SSH.format(folder=folder))
    (folder / "agent").chmod(0o700)
    (folder / "hostfile").write_text("".join(f"{hosts.ip(i)} slots=2\n" for i in range(3)))
    sshd = shutil.which("sshd", path=SBIN)
    command = f"mkdir -p /run/sshd && exec {sshd} -D -e -f {folder}/sshd_config"
    daemons = [hosts.popen(i, ["bash", "-c", command], stderr=subprocess.DEVNULL) for i in range(3)]
    for i in range(3):
        reach = [folder / "agent", hosts.ip(i), "true"]
        wait_until(lambda reach=reach: hosts.run(0, reach).returncode == 0, 30, f"sshd answers on host {i}")
    return daemons


def over_sshd(hosts: Hosts, folder: Path) -> Callable[[], object]:
    env = {
        "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_plm_ssh_agent": str(folder / "agent"),
        "PRTE_MCA_prte_default_hostfile": str(folder / "hostfile"),
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "PRTE_MCA_prte_if_include": "eth0",
        "PMIX_MCA_ptl_tcp_if_include": "eth0",
        "OMPI_MCA_btl_tcp_if_include": "eth0",
    }
    command = ["mpirun", "-np", "6", sys.executable, "-c", HELLO]
    return lambda: hosts.run(0, ["env", *command], env=env, check=True, timeout_s=120)


def in_job(folder: Path, job: HostProcess) -> Callable[[], object]:
    calls = iter(range(1_000_000))

    def call() -> None:
        number = next(calls)
        (folder / f"go-{number}").touch()
        done = folder / f"done-{number}"
        deadline = time.monotonic() + 120
        while not done.exists():
            assert job.poll() is None and time.monotonic() < deadline, "the job does not answer"
            time.sleep(0.005)

    return call


if __name__ == "__main__":
    alone(__doc__, tables, rounds=10)
