"""Horovod start commands over three hosts: horovodrun as it is written down, and horovod under mpirun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import jobs
from tests.hosts.conftest import Cluster
from tests.hosts.jobs import PROGRAMS, Ran, accuracy, run, succeeded
from tests.hosts.network import REPOSITORY
from tests.hosts.test_mpi import ODD
from tests.support import wait_until

TI_ONE = (
    "horovodrun -np $GPU_NUM -H $NODE_IP_SLOT_LIST --network-interface eth0"
    " python3 horovod_steps.py --data-dir /opt/ml/input/data"
)
THREE = ("--mode", "horovod", "--nodes", "3", "--working-dir", str(PROGRAMS))
INSTANCES = ("launcher-0", "worker-0", "worker-1")
STEPS = PROGRAMS / "horovod_steps.py"
long = pytest.mark.long


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The weights that one process learns from whole batches."""
    file = tmp_path_factory.mktemp("alone") / "result.json"
    subprocess.run([sys.executable, STEPS, "--alone", file], check=True, timeout=120)
    weights: list[float] = json.loads(file.read_text())["weights"]
    return weights


@pytest.mark.parametrize("gpus", [pytest.param(1, marks=long), 2])
def test_the_documented_horovodrun_line(cluster: Cluster, alone: list[float], gpus: int) -> None:
    spec = cluster.hosts.shared / f"horovod-{gpus}.json"
    fields = {
        "mode": "horovod",
        "nodes": 3,
        "working_dir": str(PROGRAMS),
        "command": f"export RUN_TOKEN='made here'; {TI_ONE}",
    }
    env = {**ODD, "WANDB_API_KEY": "for the ranks only"}
    spec.write_text(json.dumps({**fields, "resources": {"gpu": gpus}, "env": env}))
    ranks = world(succeeded(cluster, 0, spec))
    assert [rank["index"] for rank in ranks] == [index for index in range(3) for _ in range(gpus)]
    assert not any(rank["mpi"] for rank in ranks)
    for rank in ranks:
        assert rank["env"]["RAYCONTROL_INSTANCE"] == INSTANCES[rank["index"]]
        assert rank["env"]["RAYCONTROL_OUTPUT_DIR"].endswith(INSTANCES[rank["index"]])
        assert {name: rank["env"].get(name) for name in env} == env
        assert rank["env"]["RUN_TOKEN"] == "made here"
        assert rank["weights"] == pytest.approx(alone, rel=0, abs=1e-5)


@pytest.mark.parametrize(
    ("line", "mpi"),
    [
        pytest.param(
            "horovodrun -np $RAYCONTROL_NP -H $NODE_IP_SLOT_LIST python horovod_steps.py", False, marks=long
        ),
        pytest.param(
            "horovodrun --mpi -np $RAYCONTROL_NP -H $NODE_IP_SLOT_LIST python horovod_steps.py",
            True,
            marks=long,
        ),
    ],
)
def test_the_controller_of_a_plain_line_and_of_mpi(
    cluster: Cluster, alone: list[float], line: str, mpi: bool
) -> None:
    ranks = world(succeeded(cluster, 1, *THREE, "--", line))
    assert [(rank["index"], rank["mpi"]) for rank in ranks] == [(0, mpi), (1, mpi), (2, mpi)]
    for rank in ranks:
        assert rank["env"]["RAYCONTROL_INSTANCE"] == INSTANCES[rank["index"]]
        assert rank["weights"] == pytest.approx(alone, rel=0, abs=1e-5)


def test_horovod_under_mpirun(cluster: Cluster, alone: list[float]) -> None:
    ran = succeeded(cluster, 1, *THREE, "--mode", "mpi", "--", "mpirun python horovod_steps.py")
    ranks = world(ran)
    assert [(rank["index"], rank["mpi"]) for rank in ranks] == [(0, True), (1, True), (2, True)]
    assert all(rank["weights"] == pytest.approx(alone, rel=0, abs=1e-5) for rank in ranks)


def test_a_rank_that_dies_has_horovodruns_code_and_is_named(cluster: Cluster) -> None:
    line = "horovodrun -np 3 -H $NODE_IP_SLOT_LIST python horovod_dies.py 2"
    ran = run(cluster, 0, *THREE, "--", line)
    verdict = ran.info["verdict"]
    assert (ran.status, verdict["instance"]) == (1, "launcher-0")
    assert (verdict["rank"], verdict["rank_exit_code"]) == (2, 3), ran.told[-4000:]


def test_ranks_end_with_a_horovodrun_that_is_killed_and_secrets_are_on_no_command_line(
    cluster: Cluster,
) -> None:
    line = "export RUN_TOKEN=$(echo edam-ereh | rev); horovodrun -np 3 -H $NODE_IP_SLOT_LIST python horovod_dies.py none"
    spec = cluster.hosts.shared / "secret.json"
    fields = {"mode": "horovod", "nodes": 3, "working_dir": str(PROGRAMS), "command": line}
    spec.write_text(json.dumps({**fields, "env": {"WANDB_API_KEY": "for-the-ranks-only"}}))
    process = jobs.start(cluster, 0, spec)
    wait_until(lambda: all(ranks_on(cluster, i) for i in range(3)), 120, "every host has a rank")
    for i in range(3):
        arguments = cluster.hosts.run(i, ["ps", "-eo", "args"]).stdout
        assert "for-the-ranks-only" not in arguments and "here-made" not in arguments
    horovodrun = cluster.hosts.run(0, ["pgrep", "-o", "-f", "^[^ ]*python[^ ]* .*horovodrun"]).stdout.strip()
    cluster.hosts.run(0, ["kill", "-9", horovodrun], check=True)
    ran = jobs.ended(process)
    assert (ran.status, ran.info["reason"]) == (137, "INSTANCE_FAILED")
    wait_until(lambda: not any(ranks_on(cluster, i) for i in range(3)), 30, "no rank is left")


@long
def test_the_example_learns_to_read_digits(cluster: Cluster) -> None:
    ran = succeeded(cluster, 2, REPOSITORY / "configs/horovod/job.yaml")
    assert accuracy(ran.told) >= 0.95
    assert len(list(Path(ran.info["outputs"]).glob("*/model.pt"))) == 1


def world(ran: Ran) -> list[dict[str, Any]]:
    """What every rank saw, in the order of ranks, once it is sure that all were in one world."""
    ranks = sorted(ran.outputs("rank-*.json"), key=lambda document: int(document["rank"]))
    size = len(ranks)
    assert size > 0, ran.told[-6000:]
    assert [(one["rank"], one["size"]) for one in ranks] == [(rank, size) for rank in range(size)]
    assert {one["sum"] for one in ranks} == {size * (size + 1) // 2}
    return ranks


def ranks_on(cluster: Cluster, i: int) -> list[str]:
    return cluster.hosts.run(i, ["pgrep", "-f", "^python horovod_dies.py"]).stdout.split()
