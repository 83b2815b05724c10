"""MPI start commands as users have them, over three hosts, with nothing but pip-installed software and no sshd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checker import Job, violations
from tests.hosts import jobs
from tests.hosts.conftest import Cluster
from tests.hosts.jobs import PROGRAMS, Ran, accuracy, run, succeeded
from tests.hosts.network import ENVIRONMENT, RAY_ENVIRONMENT, REPOSITORY

TI_ONE = (
    "mpirun --allow-run-as-root -np $GPU_NUM -H $NODE_IP_SLOT_LIST"
    " python3 mpi_report.py --data-dir /opt/ml/input/data"
)
THREE = ("--mode", "mpi", "--nodes", "3", "--working-dir", str(PROGRAMS))
INSTANCES = ("launcher-0", "worker-0", "worker-1")
ODD = {
    "SPACES": " a  b ",
    "LINES": "one\ntwo\n",
    "QUOTES": "'\"`$(x) \\",
    "UNICODE": "Grüße 训练",
    "EMPTY": "",
}
long = pytest.mark.long


@pytest.mark.parametrize("gpus", [pytest.param(1, marks=long), 2])
def test_the_documented_mpirun_line(cluster: Cluster, gpus: int) -> None:
    ran = succeeded(cluster, 0, *THREE, "--gpu", str(gpus), "--", TI_ONE)
    ranks = world(ran)
    assert [rank["index"] for rank in ranks] == [index for index in range(3) for _ in range(gpus)]
    assert {rank["data_dir"] for rank in ranks} == {"/opt/ml/input/data"}
    for rank in ranks:
        assert rank["env"]["RAYCONTROL_INSTANCE"] == INSTANCES[rank["index"]]
        assert rank["cwd"] == rank["env"]["RAYCONTROL_CODE_DIR"]
        assert len(rank["env"]["CUDA_VISIBLE_DEVICES"].split(",")) == gpus
    assert len([line for line in ran.lines("launcher-0") if " of " in line]) == 3 * gpus


def test_without_flags_all_slots_are_used_and_two_jobs_do_not_share_a_core(cluster: Cluster) -> None:
    options = (*THREE, "--slots", "2", "--", "mpirun python mpi_report.py")
    first, second = jobs.start(cluster, 0, *options), jobs.start(cluster, 1, *options)
    for ran in (jobs.ended(first), jobs.ended(second)):
        assert ran.status == 0, ran.told[-6000:]
        ranks = world(ran)
        assert [rank["index"] for rank in ranks] == [0, 0, 1, 1, 2, 2]
        assert all(len(rank["cores"]) > 1 for rank in ranks)


def test_the_command_as_the_ranks_of_one_world_with_its_environment_unchanged(cluster: Cluster) -> None:
    spec = cluster.hosts.shared / "ranks.json"
    fields = {"mode": "mpi", "nodes": 3, "slots": 2, "run_on": "ranks", "working_dir": str(PROGRAMS)}
    spec.write_text(json.dumps({**fields, "env": ODD, "command": "python mpi_report.py"}))
    ranks = world(succeeded(cluster, 1, spec))
    assert [rank["index"] for rank in ranks] == [0, 0, 1, 1, 2, 2]
    for rank in ranks:
        assert {name: rank["env"].get(name) for name in ODD} == ODD
        assert (rank["env"]["INDEX"], rank["env"]["RAYCONTROL_INSTANCE"]) == (
            str(rank["index"]),
            INSTANCES[rank["index"]],
        )


START = """
touch /tmp/staged.$RAYCONTROL_JOB_ID
bash inner.sh
mpirun -np 3 --map-by node python mpi_report.py --name second
"""
INNER = """
[ $INDEX = 2 ] && [ -n "$LEAVES" ] && exit 0
python -c "import subprocess, sys; sys.exit(subprocess.run(['mpirun', 'python', 'mpi_report.py']).returncode)"
"""


def test_a_script_that_stages_on_every_host_and_calls_mpirun_deep_inside_and_twice(cluster: Cluster) -> None:
    code = script_folder(cluster, "staging", {"start.sh": START, "inner.sh": INNER})
    ran = succeeded(cluster, 0, *THREE, "--working-dir", code, "--", "bash start.sh")
    assert [rank["index"] for rank in world(ran)] == [0, 1, 2]
    assert [rank["index"] for rank in world(ran, "second")] == [0, 1, 2]
    for host in cluster.hosts.hosts[:3]:
        staged = host.tmp / f"staged.{ran.info['id']}"
        assert staged.exists()
        staged.unlink()


def test_an_instance_that_ends_before_the_call_is_not_waited_for(cluster: Cluster) -> None:
    line = "[ $INDEX = 2 ] && exit 0; mpirun -np 2 -H $(echo $NODE_IP_SLOT_LIST | cut -d, -f1,2) python mpi_report.py"
    assert [rank["index"] for rank in world(succeeded(cluster, 0, *THREE, "--", line))] == [0, 1]


def test_a_launcher_that_is_reached_around_the_stand_ins_is_refused_with_advice(cluster: Cluster) -> None:
    line = "$(dirname $(command -v python))/mpirun python mpi_report.py; code=$?; sleep 5; exit $code"
    ran = run(cluster, 0, *THREE, "--", line)
    assert (ran.info["state"], ran.info["reason"]) == ("FAILED", "INSTANCE_FAILED")
    assert ran.info["verdict"]["instance"] in ("worker-0", "worker-1")
    assert "run_on: launcher" in ran.info["verdict"]["hint"]


def test_a_large_allreduce_over_unequal_slots(cluster: Cluster) -> None:
    spec = cluster.hosts.shared / "unequal.json"
    groups = {"launcher": {}, "two": {"slots": 2}, "one": {}}
    command = "mpirun python mpi_report.py --megabytes 64"
    fields = {"mode": "mpi", "groups": groups, "working_dir": str(PROGRAMS), "command": command}
    spec.write_text(json.dumps(fields))
    ranks = world(succeeded(cluster, 0, spec))
    assert [rank["index"] for rank in ranks] == [0, 1, 1, 2]
    assert all(rank["allreduce"] is True for rank in ranks)


def test_twelve_ranks_and_standard_input(cluster: Cluster) -> None:
    line = "printf 'hello there' | mpirun python mpi_report.py --stdin 11"
    ranks = world(succeeded(cluster, 0, *THREE, "--slots", "4", "--", line))
    assert [rank["index"] for rank in ranks] == [0] * 4 + [1] * 4 + [2] * 4
    assert ranks[0]["stdin"] == "hello there"


TRANSFERS = """
set -ex
head -c 200000000 /dev/urandom > big; mine=$(sha256sum < big)
[ "$(ssh worker-0 'cat > copy; sha256sum < copy' < big)" = "$mine" ]
[ "$(ssh worker-0 'cat copy' | sha256sum)" = "$mine" ]
scp -q worker-0:copy back; cmp big back; rm back
head -c 1000000 big > small
scp -q small worker-1:"there 1"; ssh worker-1 'scp -q launcher-0:small back && cmp "there 1" back'
rsync -e ssh small worker-1:there2; rsync -e ssh worker-1:there2 back; cmp small back
ssh $(echo $NODE_LIST | cut -d, -f3 | cut -d: -f1) 'echo by address: $RAYCONTROL_INSTANCE'
ssh $(echo $RAYCONTROL_NODE_NAMES | cut -d, -f3) 'echo by node name: $RAYCONTROL_INSTANCE'
set +e
ssh worker-0 'exit 7'; echo code $?
ssh worker-0 'kill -9 $$'; echo code $?
"""


@pytest.mark.long
def test_ssh_scp_and_rsync_between_instances_of_any_job(cluster: Cluster) -> None:
    code = script_folder(cluster, "transfers", {"start.sh": f"[ $INDEX != 0 ] || {{ {TRANSFERS} }}\n"})
    options = ("--nodes", "3", "--set", "ssh=true", "--working-dir", str(code))
    ran = succeeded(
        cluster,
        0,
        *options,
        "--set",
        "groups={launcher: {role: master}, worker: {count: 2}}",
        "--set",
        "nodes=null",
        "--",
        "bash start.sh",
    )
    lines = ran.lines("launcher-0")
    assert [line for line in lines if line.startswith(("by ", "code "))] == [
        "by address: worker-1",
        "by node name: worker-1",
        "code 7",
        "code 255",
    ]


def test_the_contract_seen_from_outside(cluster: Cluster) -> None:
    probe = REPOSITORY / "tests/hosts/probe"
    groups = "groups={launcher: {slots: 1}, worker: {count: 2, slots: 2}}"
    options = ("--mode", "mpi", "--set", "nodes=null", "--set", groups, "--set", "env={GREETING: hello}")
    ran = succeeded(cluster, 1, "--name", "probe", *options, "--working-dir", probe, "--", "python3 probe.py")
    contract = Job(
        ran.outputs("probe-*.json"),
        slots=(1, 2, 2),
        gpus=(0, 0, 0),
        mode="mpi",
        name="probe",
        env={"GREETING": "hello"},
        files=("probe.py", "job.yaml"),
        node_env={**ENVIRONMENT, **RAY_ENVIRONMENT},
    )
    assert violations([contract]) == []


@long
def test_the_example_learns_to_read_digits(cluster: Cluster) -> None:
    ran = succeeded(cluster, 2, REPOSITORY / "configs/mpi/job.yaml")
    assert accuracy(ran.told) >= 0.95
    assert len(list(Path(ran.info["outputs"]).glob("*/weights.npy"))) == 1


# -- reading a world


def world(ran: Ran, name: str = "rank") -> list[dict[str, Any]]:
    """What every rank saw, in the order of ranks, once it is sure that all were in one world."""
    ranks = sorted(ran.outputs(f"{name}-*.json"), key=lambda document: int(document["rank"]))
    size = len(ranks)
    assert size > 0, ran.told[-6000:]
    assert [(one["rank"], one["size"]) for one in ranks] == [(rank, size) for rank in range(size)]
    assert {one["sum"] for one in ranks} == {size * (size + 1) // 2}
    return ranks


def script_folder(cluster: Cluster, name: str, scripts: dict[str, str]) -> Path:
    """A working directory with these scripts and the report program."""
    folder = cluster.hosts.shared / name
    folder.mkdir()
    (folder / "mpi_report.py").write_text((PROGRAMS / "mpi_report.py").read_text())
    for path, text in scripts.items():
        (folder / path).write_text(text)
    return folder
