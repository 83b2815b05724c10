"""Jobs that must not meet, instances that share a host, and MPI as another user, from another maker, over a cut cable."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import jobs
from tests.hosts.conftest import Cluster
from tests.hosts.jobs import PROGRAMS, succeeded
from tests.hosts.network import Hosts
from tests.hosts.test_mpi import world
from tests.support import wait_until

THREE = ("--mode", "mpi", "--nodes", "3", "--working-dir", str(PROGRAMS))
LAUNCHER = ("--set", "run_on=launcher")
USER = "nobody"
UP_S = 120
long = pytest.mark.long

# The first job shows where its endpoints are and waits; the second tries to get in with its own key, and with none.
OPEN = "cp $(dirname $(command -v ssh))/../ssh/hosts.json {folder}/hosts; until [ -e {folder}/go ]; do sleep 0.1; done"
BREAK_IN = """
python - <<'EOF' > target
import json
print(*(json.load(open("{folder}/hosts"))["worker-0"][name] for name in ("ip", "port")))
EOF
read ip port < target
real=$(PATH=${{PATH#*:}} command -v ssh)
for key in "-i $(dirname $(command -v ssh))/../ssh/login_key" "-o IdentityAgent=none"; do
  $real -F none -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o BatchMode=yes $key -p $port $ip true
  echo code $?
done
touch {folder}/go
"""


def test_a_job_cannot_log_in_to_another(cluster: Cluster) -> None:
    folder = cluster.hosts.shared / "doors"
    folder.mkdir()
    first = jobs.start(cluster, 0, *THREE, *LAUNCHER, "--", OPEN.format(folder=folder))
    wait_until((folder / "hosts").exists, UP_S, "the first job is up")
    second = succeeded(cluster, 1, *THREE, *LAUNCHER, "--", BREAK_IN.format(folder=folder))
    assert jobs.ended(first).status == 0
    said = second.lines("launcher-0")
    assert [line for line in said if line.startswith("code")] == ["code 255", "code 255"]
    assert len([line for line in said if "Permission denied (publickey)" in line]) == 2


def test_instances_that_share_a_host_are_one_host_to_mpi(cluster: Cluster) -> None:
    options = ("--placement", "pack", "--gpu", "1", "--cpu", "0.5")
    ran = succeeded(cluster, 0, *THREE, *options, "--", "mpirun python mpi_report.py")
    assert len({instance["node"] for instance in ran.info["instances"]}) == 1
    ranks = world(ran)
    assert [rank["index"] for rank in ranks] == [0, 0, 0]
    for rank in ranks:
        assert len(rank["env"]["CUDA_VISIBLE_DEVICES"].split(",")) == 3
        assert rank["env"]["NODE_IP_SLOT_LIST"] == f"{ran.info['instances'][0]['ip']}:3"


@pytest.fixture(scope="module")
def unprivileged(needs_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three hosts on which Ray runs as a user without any rights."""
    with Hosts(3, keep=[tmp_path_factory.getbasetemp()]) as hosts:
        hosts.start_cluster(user=USER)
        cluster = Cluster(hosts, hosts.shared / f"home-{USER}" / "raycontrol")
        yield cluster
        cluster.close()


@long
@pytest.mark.parametrize(
    ("mode", "line"),
    [
        ("mpi", "mpirun python -c 'from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1))'"),
        pytest.param(
            *("mpi", "[ $INDEX != 0 ] || { echo 3 > f; scp -q f worker-1:f && ssh worker-1 cat f; }"),
            marks=long,
        ),
        pytest.param("horovod", "horovodrun -np 3 -H $NODE_IP_SLOT_LIST python horovod_steps.py", marks=long),
    ],
)
def test_as_a_user_without_any_rights(unprivileged: Cluster, mode: str, line: str) -> None:
    code = unprivileged.hosts.shared / "code"
    if not code.exists():
        code.mkdir()
        for program in PROGRAMS.glob("*.py"):
            (code / program.name).write_text(program.read_text())
    command = ("run", "--mode", mode, "--nodes", "3", "--working-dir", code, "--", line)
    ran = unprivileged.raycontrol(1, *command, user=USER, timeout_s=200)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "3" in ran.stdout


@long
def test_mpich_from_an_environment_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    venv = tmp_path / "mpich"
    constraints = Path(__file__).parents[2] / "constraints.txt"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    install = [venv / "bin/python", "-m", "pip", "install", "-q", "-c", constraints, "mpich", "mpi4py"]
    subprocess.run(install, check=True, timeout=300)
    hello = (
        "from mpi4py import MPI; sizes = MPI.COMM_WORLD.gather(MPI.COMM_WORLD.allreduce(1));"
        " sizes and print(MPI.Get_library_version()[:5], sizes)"
    )
    fields = {
        **{"mode": "mpi", "nodes": 3, "slots": 2, "command": f'mpiexec python -c "{hello}"'},
        # All hosts have one kernel here, which makes UCX believe that they share memory.
        "env": {"PATH": f"{venv}/bin:/usr/bin:/bin", "UCX_TLS": "tcp,self", "MPIR_CVAR_CH4_NETMOD": "ofi"},
    }
    spec = cluster.hosts.shared / "mpich.json"
    spec.write_text(json.dumps(fields))
    assert succeeded(cluster, 0, spec).lines("launcher-0") == ["MPICH [6, 6, 6, 6, 6, 6]"]


@long
def test_a_host_that_is_cut_off_fails_the_job_and_keeps_nothing_of_the_world(
    needs_hosts: None, tmp_path: Path
) -> None:
    with Hosts(3, keep=[tmp_path]) as hosts:
        hosts.start_cluster()
        cluster = Cluster(hosts, tmp_path / "home")
        once = ("--set", "retry.infra_max=0")
        process = jobs.start(cluster, 0, *THREE, *LAUNCHER, *once, "--", "mpirun python mpi_dies.py stay 0")
        wait_until(lambda: all(ranks(cluster, i) for i in range(3)), UP_S, "every host has a rank")
        hosts.cut(2)
        ran = jobs.ended(process)
        assert (ran.info["state"], ran.info["reason"]) == ("FAILED", "INSTANCE_LOST")
        assert ran.info["verdict"]["summary"].startswith(f"worker-1 on {hosts.name(2)} was lost")
        wait_until(lambda: not any(parts(cluster, i) for i in range(3)), 60, "nothing of the world is left")
        cluster.close()


def ranks(cluster: Cluster, i: int) -> list[str]:
    return cluster.hosts.run(i, ["pgrep", "-f", "^python mpi_dies.py"]).stdout.split()


def parts(cluster: Cluster, i: int) -> list[str]:
    command = ["pgrep", "-f", "^python mpi_dies.py|^[^ ]*prted|^[^ ]*prterun|^[^ ]*ssh "]
    return cluster.hosts.run(i, command).stdout.split()
