"""MPI start commands as users have them, over three hosts, with nothing but pip-installed software and no sshd."""

from __future__ import annotations

from typing import Any

import pytest

from tests.hosts.conftest import Cluster
from tests.hosts.jobs import PROGRAMS, Ran, succeeded

TI_ONE = (
    "mpirun --allow-run-as-root -np $GPU_NUM -H $NODE_IP_SLOT_LIST"
    " python3 mpi_report.py --data-dir /opt/ml/input/data"
)
THREE = ("--mode", "mpi", "--nodes", "3", "--working-dir", str(PROGRAMS))
INSTANCES = ("launcher-0", "worker-0", "worker-1")
long = pytest.mark.long


@pytest.mark.parametrize("gpus", [1, pytest.param(2)])
def test_the_documented_mpirun_line(cluster: Cluster, gpus: int) -> None:
    ran = succeeded(cluster, 0, *THREE, "--gpu", str(gpus), "--", TI_ONE)
    ranks = world(ran)
    assert [rank["index"] for rank in ranks] == [index for index in range(3) for _ in range(gpus)]
    assert {rank["data_dir"] for rank in ranks} == {"/opt/ml/input/data"}
    for rank in ranks:
        assert rank["env"]["RAYCONTROL_INSTANCE"] == INSTANCES[rank["index"]]
        assert rank["cwd"] == rank["env"]["RAYCONTROL_CODE_DIR"]
        assert set(rank["env"]["CUDA_VISIBLE_DEVICES"].split(",")) == {str(i) for i in range(gpus)}
    assert [len(ran.outputs_of(name)) for name in INSTANCES] == [gpus] * 3


def test_mpirun_without_a_number_and_hosts_uses_all_slots(cluster: Cluster) -> None:
    ran = succeeded(cluster, 1, *THREE, "--slots", "2", "--", "mpirun python mpi_report.py")
    assert [rank["index"] for rank in world(ran)] == [0, 0, 1, 1, 2, 2]


def test_the_command_as_the_ranks_of_one_world(cluster: Cluster) -> None:
    line = "python mpi_report.py"
    ran = succeeded(cluster, 1, *THREE, "--slots", "2", "--set", "run_on=ranks", "--", line)
    assert [rank["index"] for rank in world(ran)] == [0, 0, 1, 1, 2, 2]


# -- reading a world


def world(ran: Ran, name: str = "rank") -> list[dict[str, Any]]:
    """What every rank saw, in the order of ranks, once it is sure that all were in one world."""
    ranks = sorted(ran.outputs(f"{name}-*.json"), key=lambda document: int(document["rank"]))
    size = len(ranks)
    assert size > 0, ran.told[-6000:]
    assert [(one["rank"], one["size"]) for one in ranks] == [(rank, size) for rank in range(size)]
    assert {one["sum"] for one in ranks} == {size * (size + 1) // 2}
    return ranks
