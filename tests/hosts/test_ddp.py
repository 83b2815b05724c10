"""The launch lines that users have, unmodified, over three hosts; what they train is what one process would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.conftest import Cluster
from tests.hosts.jobs import PROGRAMS, Ran, accuracy, succeeded
from tests.hosts.network import REPOSITORY

CONFIGS = REPOSITORY / "configs/ddp"
STEPS = PROGRAMS / "steps.py"
LAUNCH = (
    "python -m torch.distributed.launch --nproc_per_node $GPU_NUM_PER_NODE --nnodes $WORLD_SIZE"
    " --node_rank $RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT steps.py"
)
C10D = (
    "python3 -m torch.distributed.run --nnodes=3 --nproc_per_node=2 --rdzv_id=100 --rdzv_backend=c10d"
    " --rdzv_endpoint={endpoint}:29400 '{script}'"
)
SPREAD = {1: [0, 1, 2], 2: [0, 0, 1, 1, 2, 2]}
long = pytest.mark.long


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses and weights of one process that trains on whole batches."""
    file = tmp_path_factory.mktemp("alone") / "result.json"
    subprocess.run([sys.executable, STEPS, "--alone", file], check=True, timeout=120)
    result: dict[str, Any] = json.loads(file.read_text())
    return result


@pytest.mark.parametrize(
    ("line", "gpus", "processes"),
    [
        pytest.param(LAUNCH, 1, 1, id="launch on one GPU"),
        pytest.param(LAUNCH, 2, 2, id="launch on two GPUs", marks=long),
        pytest.param("torchrun steps.py", 1, 1, id="torchrun on one GPU", marks=long),
        pytest.param("torchrun steps.py", 2, 2, id="torchrun on two GPUs"),
        pytest.param("python steps.py", 1, 1, id="no launcher, one GPU", marks=long),
        pytest.param("python steps.py", 2, 1, id="no launcher, two GPUs", marks=long),
    ],
)
def test_a_launch_line_trains_what_one_process_does(
    cluster: Cluster, alone: dict[str, Any], line: str, gpus: int, processes: int
) -> None:
    ran = succeeded(cluster, 0, "--nodes", "3", "--gpu", str(gpus), "--working-dir", PROGRAMS, "--", line)
    assert trained(ran) == SPREAD[processes]
    assert_equal_to(alone, ran)


@pytest.mark.parametrize(
    ("named_by", "host"),
    [("name", 1), ("ip", 2)],
)
@long
def test_a_rendezvous_on_any_host_of_the_job(
    cluster: Cluster, alone: dict[str, Any], named_by: str, host: int
) -> None:
    endpoint = getattr(cluster.hosts, named_by)(host)
    script = in_a_shared_folder(cluster, STEPS)
    line = C10D.format(endpoint=endpoint, script=script)
    if (
        named_by == "ip"
    ):  # the hosts' own names are at 127.0.1.1, by which torchrun does not recognise its own address
        here = f'$([ "$(hostname)" = {cluster.hosts.name(host)} ] && echo 1 || echo 0)'
        line = line.replace("--rdzv_endpoint", f"--rdzv_conf=is_host={here} --rdzv_endpoint")
    ran = succeeded(cluster, 1, "--nodes", "3", "--gpu", "2", "--", line)
    assert trained(ran) in ORDERS_BY_HOST
    assert_equal_to(alone, ran)


@pytest.mark.parametrize(
    ("config", "processes"),
    [("launch", 6), ("c10d", 6), ("plain", 2)],
)
@long
def test_the_example_configs_learn_to_read_digits(cluster: Cluster, config: str, processes: int) -> None:
    """``job.yaml``, the fourth, is run in test_submission.py."""
    ran = succeeded(cluster, 0, CONFIGS / f"{config}.yaml")
    assert f"with {processes} processes" in ran.told
    assert accuracy(ran.told) >= 0.95
    assert len(list(Path(ran.info["outputs"]).glob("*/model.pt"))) == 1


def test_without_gpus_a_command_that_counts_them_is_warned_about(cluster: Cluster) -> None:
    line = "echo $GPU_NUM_PER_NODE of $GPU_NUM GPUs, $RAYCONTROL_SLOTS of $RAYCONTROL_NP processes"
    ran = succeeded(cluster, 0, "--nodes", "3", "--", line)
    for instance in ("master-0", "worker-0", "worker-1"):
        assert ran.lines(instance) == ["0 of 0 GPUs, 1 of 3 processes"]
    (warning,) = [text for text in ran.told.splitlines() if text.startswith("warning: ")]
    assert "GPU_NUM_PER_NODE are 0" in warning
    assert "RAYCONTROL_SLOTS" in warning and "RAYCONTROL_NP" in warning


# With c10d torchrun gives out the ranks in the order in which hosts arrive, host by host.
ORDERS_BY_HOST = [
    [first, first, second, second, third, third]
    for first, second, third in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))
]


def trained(ran: Ran) -> list[int]:
    """The INDEX of each rank's instance, in the order of ranks, once it is sure that all were in one world."""
    ranks = sorted(ran.outputs("rank-*.json"), key=lambda document: int(document["rank"]))
    size = len(ranks)
    assert [(one["rank"], one["size"]) for one in ranks] == [(rank, size) for rank in range(size)]
    assert {one["sum"] for one in ranks} == {size * (size + 1) // 2}
    return [one["index"] for one in ranks]


def assert_equal_to(alone: dict[str, Any], ran: Ran) -> None:
    for rank in ran.outputs("rank-*.json"):
        assert rank["losses"] == pytest.approx(alone["losses"], rel=0, abs=1e-5)
        assert rank["weights"] == pytest.approx(alone["weights"], rel=0, abs=1e-5)


def in_a_shared_folder(cluster: Cluster, script: Path) -> Path:
    """A copy of the script on the hosts' shared storage, in a folder with a space in its name."""
    folder = cluster.hosts.shared / "shared code"
    folder.mkdir(exist_ok=True)
    copy = folder / script.name
    copy.write_text(script.read_text())
    return copy


@long
def test_a_training_that_fails_goes_on_from_its_checkpoint(cluster: Cluster) -> None:
    """The config itself, but that its first attempt ends with 1 after two epochs."""
    line = (
        "torchrun train.py --epochs $((2 + 2 * RAYCONTROL_ATTEMPT)) --checkpoint $RAYCONTROL_OUTPUT_DIR/checkpoint.pt"
        " && [ $RAYCONTROL_ATTEMPT = 1 ]"
    )
    ran = succeeded(cluster, 0, CONFIGS / "resume.yaml", "--set", f"command={line}")
    assert [attempt["outcome"] for attempt in ran.info["attempts"]] == ["FAILED", "SUCCEEDED"]
    told = [line for line in ran.lines("master-0") if line.startswith(("epoch", "going on"))]
    assert [line.partition("  ")[0] for line in told] == [
        "epoch 1/2",
        "epoch 2/2",
        "going on after epoch 2",
        "epoch 3/4",
        "epoch 4/4",
    ]
