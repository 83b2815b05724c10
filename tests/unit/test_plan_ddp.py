"""The plans of ddp jobs as literals, and what torchrun's reports say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raycontrol.backends import explain, leases, local_environment, make_plan, plan_of
from raycontrol.plan import (
    Alive,
    Brief,
    Cause,
    Facts,
    Orders,
    Plan,
    PlannedRun,
    RdmaDecision,
    RdmaUse,
    Stage,
    TcpReachable,
    orders,
    render,
    shell_argv,
    to_json,
)
from raycontrol.spec import Group, GroupResources, JobSpec, Mode, Resources, members

HERE = Path(__file__).parent
CONFIGS = sorted((HERE.parents[1] / "configs" / "ddp").glob("*.yaml"))
BRIEF = Brief("digits-1", "digits", attempt=0, attempt_id="digits-1.0")


def facts(instance: str, ip: str, *gpus: str, interface: str | None = "eth0", **ports: str) -> Facts:
    return Facts(
        instance=instance,
        ip=ip,
        node_name=f"host-{ip[-1]}",
        ports={"probe": "40001", **ports},
        gpus=gpus,
        interface=interface,
        code_dir="/scratch/digits-1/code",
        output_dir=f"/scratch/digits-1/outputs/{instance}",
    )


MASTER = facts("master-0", "10.0.0.1", master="40002")
WORKER = facts("worker-0", "10.0.0.2")


def environment(spec: JobSpec, *gang: Facts) -> Any:
    """The environments of the plan with these facts (of two instances, unless given)."""
    return make_plan(spec, BRIEF, gang or (MASTER, WORKER)).environment


# Whole plans.


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_the_plan_of_every_config(config: Path) -> None:
    expected = json.loads((HERE / "plans" / f"ddp-{config.stem}.json").read_text())
    assert json.loads(json.dumps(to_json(plan_of(JobSpec.from_yaml(config))))) == expected


def test_a_plan_with_real_facts_and_uneven_groups() -> None:
    spec = JobSpec(
        name="digits",
        command="torchrun train.py",
        cwd="src",
        pipefail=False,
        groups={
            "master": Group(resources=GroupResources(gpu=2)),
            "small": Group(
                command=("python", "train.py"), resources=GroupResources(gpu=0.5), env={"LR": "0.1"}
            ),
        },
    )
    gang = (
        facts("master-0", "10.0.0.1", "4", "5", master="40002"),
        facts("small-0", "10.0.0.2", "0", interface=None),
    )
    shared = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "GPU_NUM": "3",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "40002",
        "NODE_LIST": "10.0.0.1:2,10.0.0.2:1",
        "NODE_NUM": "2",
        "PET_MASTER_ADDR": "10.0.0.1",
        "PET_MASTER_PORT": "40002",
        "PET_NNODES": "2",
        "PYTHONUNBUFFERED": "1",
        "RAYCONTROL_ATTEMPT": "0",
        "RAYCONTROL_ATTEMPT_ID": "digits-1.0",
        "RAYCONTROL_CODE_DIR": "/scratch/digits-1/code",
        "RAYCONTROL_JOB_ID": "digits-1",
        "RAYCONTROL_JOB_NAME": "digits",
        "RAYCONTROL_MODE": "ddp",
        "RAYCONTROL_NODE_NAMES": "host-1,host-2",
        "RAYCONTROL_NP": "3",
        "WORLD_SIZE": "2",
    }
    assert make_plan(spec, BRIEF, gang) == Plan(
        mode="ddp",
        environment={
            "master-0": {
                **shared,
                "CUDA_VISIBLE_DEVICES": "4,5",
                "GLOO_SOCKET_IFNAME": "eth0",
                "TP_SOCKET_IFNAME": "eth0",
                "GPU_NUM_PER_NODE": "2",
                "INDEX": "0",
                "NCCL_SOCKET_IFNAME": "=eth0",
                "PET_NODE_RANK": "0",
                "PET_NPROC_PER_NODE": "2",
                "RANK": "0",
                "RAYCONTROL_GROUP": "master",
                "RAYCONTROL_INSTANCE": "master-0",
                "RAYCONTROL_OUTPUT_DIR": "/scratch/digits-1/outputs/master-0",
                "RAYCONTROL_ROLE": "master",
                "RAYCONTROL_SLOTS": "2",
            },
            "small-0": {
                **shared,
                "CUDA_VISIBLE_DEVICES": "0",
                "GPU_NUM_PER_NODE": "1",
                "INDEX": "1",
                "LR": "0.1",
                "PET_NODE_RANK": "1",
                "PET_NPROC_PER_NODE": "1",
                "RANK": "1",
                "RAYCONTROL_GROUP": "small",
                "RAYCONTROL_INSTANCE": "small-0",
                "RAYCONTROL_OUTPUT_DIR": "/scratch/digits-1/outputs/small-0",
                "RAYCONTROL_ROLE": "worker",
                "RAYCONTROL_SLOTS": "1",
                "TF_FORCE_GPU_ALLOW_GROWTH": "true",
                "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5",
            },
        },
        files={},
        stages=(
            Stage(
                name="prove the network",
                says="every instance reaches the master",
                limit_s=30.0,
                until=(TcpReachable("small-0", "master-0", "10.0.0.1", "40001"),),
            ),
            Stage(
                name="start",
                says="start command running on 2 instances",
                limit_s=60.0,
                runs={
                    "master-0": (PlannedRun("start", "torchrun train.py", pipefail=False, cwd="src"),),
                    "small-0": (PlannedRun("start", ("python", "train.py"), pipefail=False, cwd="src"),),
                },
                until=(Alive("master-0", "start"), Alive("small-0", "start")),
            ),
        ),
        deciders=frozenset({"master-0", "small-0"}),
        origins={
            "master-0": {
                "GLOO_SOCKET_IFNAME": "the interface of the node's IP",
                "NCCL_SOCKET_IFNAME": "the interface of the node's IP",
                "TP_SOCKET_IFNAME": "the interface of the node's IP",
            },
            "small-0": {
                "TF_FORCE_GPU_ALLOW_GROWTH": "a share of 0.5 GPU",
                "XLA_PYTHON_CLIENT_MEM_FRACTION": "a share of 0.5 GPU",
            },
        },
        rdma=RdmaDecision(
            RdmaUse.MISSED, missing=("master-0, small-0 ask for fewer GPUs than `rdma.min_gpus` (8)",)
        ),
    )


def test_one_instance_has_one_stage() -> None:
    plan = make_plan(JobSpec(command="python train.py"), BRIEF, (MASTER,))
    assert [(stage.name, stage.says) for stage in plan.stages] == [
        ("start", "start command running on 1 instance")
    ]


def test_orders_are_one_instances_part_of_a_stage() -> None:
    plan = make_plan(JobSpec(command="python train.py", nodes=2), BRIEF, (MASTER, WORKER))
    assert orders(plan, 0, "master-0").until == ()
    assert orders(plan, 0, "worker-0") == Orders(
        stage=0,
        says="every instance reaches the master",
        limit_s=30.0,
        environment=plan.environment["worker-0"],
        files={},
        runs=(),
        until=(TcpReachable("worker-0", "master-0", "10.0.0.1", "40001"),),
    )
    start = orders(plan, 1, "worker-0")
    assert start.runs == (PlannedRun("start", "python train.py"),)
    assert start.until == (Alive("worker-0", "start"),)


# Addresses.


def test_ipv6_addresses_are_bracketed_where_a_port_follows_and_nowhere_else() -> None:
    gang = (facts("master-0", "fd00::1", "0", master="40002"), facts("worker-0", "fd00::2", "0"))
    spec = JobSpec(command="torchrun train.py", nodes=2, resources=Resources(gpu=1))
    worker = environment(spec, *gang)["worker-0"]
    assert worker["NODE_LIST"] == "[fd00::1]:1,[fd00::2]:1"
    assert (worker["MASTER_ADDR"], worker["PET_MASTER_ADDR"]) == ("fd00::1", "fd00::1")
    proof = make_plan(spec, BRIEF, gang).stages[0].until
    assert proof == (TcpReachable("worker-0", "master-0", "fd00::1", "40001"),)


def test_two_instances_of_one_node_are_two_entries() -> None:
    gang = (MASTER, facts("worker-0", "10.0.0.1"))
    assert (
        environment(JobSpec(command="true", nodes=2), *gang)["worker-0"]["NODE_LIST"]
        == "10.0.0.1:0,10.0.0.1:0"
    )


def test_the_master_leases_the_rendezvous_port() -> None:
    gang = members(JobSpec(command="true", nodes=3))
    assert [leases(Mode.DDP, member) for member in gang] == [("master",), (), ()]


# GPUs and slots.


@pytest.mark.parametrize(
    ("spec", "gpus", "visible", "slots"),
    [
        ({}, (), "", "1"),
        ({"slots": 3}, (), "", "3"),
        ({"resources": Resources(gpu=0.5)}, ("2",), "2", "1"),
        ({"resources": Resources(gpu=1)}, ("2",), "2", "1"),
        ({"resources": Resources(gpu=4)}, ("0", "1", "2", "3"), "0,1,2,3", "4"),
        ({"resources": Resources(gpu=4), "slots": 2}, ("0", "1", "2", "3"), "0,1,2,3", "2"),
        ({"resources": Resources(gpu=1), "slots": 3, "share_gpus": True}, ("0",), "0", "3"),
        ({"resources": Resources(gpu=1)}, ("GPU-5d3c",), "GPU-5d3c", "1"),
    ],
)
def test_gpus_and_slots(spec: dict[str, Any], gpus: tuple[str, ...], visible: str, slots: str) -> None:
    found = environment(JobSpec(command="true", **spec), facts("master-0", "10.0.0.1", *gpus, master="1"))[
        "master-0"
    ]
    assert (found["CUDA_VISIBLE_DEVICES"], found["GPU_NUM_PER_NODE"]) == (visible, str(len(gpus)))
    assert (found["GPU_NUM"], found["NODE_LIST"]) == (str(len(gpus)), f"10.0.0.1:{len(gpus)}")
    assert (found["RAYCONTROL_SLOTS"], found["PET_NPROC_PER_NODE"], found["RAYCONTROL_NP"]) == (slots,) * 3


@pytest.mark.parametrize(
    ("command", "warned"),
    [
        ("torchrun --nproc_per_node $GPU_NUM_PER_NODE train.py", True),
        ("torchrun --nproc_per_node=${GPU_NUM_PER_NODE} train.py", True),
        ("./launch -np $GPU_NUM train.py", True),
        (("bash", "-c", "torchrun --nproc_per_node $GPU_NUM_PER_NODE train.py"), True),
        ("torchrun train.py", False),
        ("echo $GPU_NUMBER", False),
        ("torchrun --nproc_per_node $RAYCONTROL_SLOTS train.py", False),
    ],
)
def test_a_command_that_counts_gpus_where_there_are_none_is_warned_of(command: Any, warned: bool) -> None:
    text = (
        "master-0 has no GPU, so GPU_NUM and GPU_NUM_PER_NODE are 0 in its command; use $RAYCONTROL_SLOTS (processes of "
        "this instance) or $RAYCONTROL_NP (of all), and `slots` to set them"
    )
    assert plan_of(JobSpec(command=command, nodes=2)).warnings == ((text,) if warned else ())
    assert plan_of(JobSpec(command=command, nodes=2, resources=Resources(gpu=1))).warnings == ()


def test_the_warning_names_the_instance_that_has_none() -> None:
    groups = {"master": Group(resources=GroupResources(gpu=1)), "worker": Group(count=2)}
    warnings = plan_of(JobSpec(command="echo $GPU_NUM", groups=groups)).warnings
    assert [warning.partition(" ")[0] for warning in warnings] == ["worker-0"]


# Where variables come from: the contract's others < the job's < the group's < the reserved.


def test_later_sources_of_variables_win() -> None:
    spec = JobSpec(
        command="true",
        env={"PYTHONUNBUFFERED": "0", "NCCL_SOCKET_IFNAME": "ib0", "A": "job", "B": "job"},
        groups={"master": Group(env={"B": "group", "NCCL_SOCKET_IFNAME": "ib1"}), "worker": Group()},
    )
    found = environment(spec)
    names = ("PYTHONUNBUFFERED", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "A", "B", "INDEX")
    assert [found["master-0"][name] for name in names] == ["0", "ib1", "eth0", "job", "group", "0"]
    assert [found["worker-0"][name] for name in names] == ["0", "ib0", "eth0", "job", "job", "1"]


def test_null_unsets_and_a_group_can_set_again_what_the_job_unsets() -> None:
    spec = JobSpec(
        command="true",
        env={"PYTHONUNBUFFERED": None, "HOME": None},
        groups={"master": Group(env={"HOME": "/root"}), "worker": Group()},
    )
    found = environment(spec)
    assert (found["master-0"]["PYTHONUNBUFFERED"], found["master-0"]["HOME"]) == (None, "/root")
    assert (found["worker-0"]["PYTHONUNBUFFERED"], found["worker-0"]["HOME"]) == (None, None)


def test_a_port_that_the_user_sets_holds_for_torchrun_too() -> None:
    found = environment(JobSpec(command="true", nodes=2, env={"MASTER_PORT": "29500"}))
    assert [(env["MASTER_PORT"], env["PET_MASTER_PORT"]) for env in found.values()] == [
        ("29500", "29500")
    ] * 2
    unset = environment(JobSpec(command="true", nodes=2, env={"MASTER_PORT": None}))["master-0"]
    assert (unset["MASTER_PORT"], unset["PET_MASTER_PORT"]) == (None, "40002")


def test_torchruns_own_defaults_can_be_replaced() -> None:
    found = environment(JobSpec(command="true", nodes=2, env={"PET_NPROC_PER_NODE": "8"}))["worker-0"]
    assert (found["PET_NPROC_PER_NODE"], found["RAYCONTROL_SLOTS"]) == ("8", "1")


def test_interfaces_are_each_instances_own() -> None:
    gang = (MASTER, facts("worker-0", "10.0.0.2", interface="bond0"))
    found = environment(JobSpec(command="true", nodes=2), *gang)
    assert [env["NCCL_SOCKET_IFNAME"] for env in found.values()] == ["=eth0", "=bond0"]
    assert [env["GLOO_SOCKET_IFNAME"] for env in found.values()] == ["eth0", "bond0"]


def test_values_are_passed_as_they_are() -> None:
    odd = {"EMPTY": "", "QUOTES": "\"a'; echo foo", "LINES": "a\nb", "DOLLAR": "$HOME", "WIDE": "ü→"}
    found = environment(JobSpec(command="true", env=odd), MASTER)["master-0"]
    assert {name: found[name] for name in odd} == odd


# For a person, and for a shell.


def test_a_plan_reads_as_text() -> None:
    spec = JobSpec(
        name="digits", command=("torchrun", "a b.py"), nodes=2, env={"LC_ALL": None, "EPOCHS": "2"}
    )
    plan = make_plan(spec, BRIEF, (MASTER, WORKER))
    lines = render(plan).splitlines()
    assert lines[:3] == [
        "mode ddp, 2 instances; success when these exit 0: master-0, worker-0",
        "",
        "master-0 (group master, role master):",
    ]
    assert {"  MASTER_PORT=40002", "  unset LC_ALL", "  EPOCHS=2", "  RANK=0"} <= set(lines)
    assert lines[
        lines.index("stage 1: prove the network (at most 30 s), then: every instance reaches the master") :
    ] == [
        "stage 1: prove the network (at most 30 s), then: every instance reaches the master",
        "  until worker-0 can connect to master-0 at 10.0.0.1:40001",
        "",
        "stage 2: start (at most 60 s), then: start command running on 2 instances",
        "  until start of master-0 is alive",
        "  until start of worker-0 is alive",
        "  master-0 runs start: torchrun 'a b.py'",
        "  worker-0 runs start: torchrun 'a b.py'",
    ]


def test_warnings_are_part_of_the_text() -> None:
    text = render(plan_of(JobSpec(command="echo $GPU_NUM")))
    assert text.splitlines()[1].startswith("warning: master-0 has no GPU")


def test_a_plan_is_plain_json() -> None:
    plan = plan_of(JobSpec(command=("torchrun", "train.py"), nodes=2))
    document = to_json(plan)
    assert json.loads(json.dumps(document))["deciders"] == ["master-0", "worker-0"]
    assert [item["kind"] for stage in document["stages"] for item in stage["until"]] == [
        "TcpReachable",
        "Alive",
        "Alive",
    ]


def test_the_local_environment_is_that_of_a_single_process() -> None:
    found = local_environment(Mode.DDP)
    wanted = (
        "MASTER_ADDR",
        "MASTER_PORT",
        "WORLD_SIZE",
        "RANK",
        "NODE_LIST",
        "PET_NNODES",
        "PET_NPROC_PER_NODE",
    )
    assert [found[name] for name in wanted] == ["127.0.0.1", "29500", "1", "0", "127.0.0.1:0", "1", "1"]


# torchrun's reports, each from a real run.


@pytest.mark.parametrize(
    ("report", "cause"),
    [
        ("torchrun-exit-3.txt", Cause(rank=1, exit_code=3)),
        ("torchrun-sigkill.txt", Cause(rank=0, exit_code=-9)),
        ("torchrun-recorded-error.txt", Cause(rank=1, exit_code=1)),
        ("torchrun-stopped.txt", None),
    ],
)
def test_torchruns_report_names_the_rank_and_its_code(report: str, cause: Cause | None) -> None:
    lines = (HERE / "reports" / report).read_text().splitlines()
    assert explain(Mode.DDP, lines) == cause
    assert explain(Mode.DDP, ["step 1", *lines, "wrapper: the training has failed"]) == cause


def test_the_last_of_several_reports_counts() -> None:
    first = (HERE / "reports" / "torchrun-sigkill.txt").read_text().splitlines()
    second = (HERE / "reports" / "torchrun-exit-3.txt").read_text().splitlines()
    assert explain(Mode.DDP, [*first, *second]) == Cause(rank=1, exit_code=3)


def test_half_a_report_gives_what_it_has() -> None:
    assert explain(
        Mode.DDP, ["Root Cause (first observed failure):", "  rank      : 5 (local_rank: 1)"]
    ) == Cause(5)
    assert explain(Mode.DDP, ["Root Cause (first observed failure):"]) == Cause()


@pytest.mark.parametrize("lines", [[], ["Traceback (most recent call last):", "ValueError: loss is nan"]])
def test_other_last_lines_explain_nothing(lines: list[str]) -> None:
    assert explain(Mode.DDP, lines) is None


def test_a_line_is_bashs_and_a_list_runs_as_it_is() -> None:
    assert shell_argv("a | b", pipefail=True) == ("bash", "-o", "pipefail", "-c", "a | b")
    assert shell_argv("a | b", pipefail=False) == ("bash", "-c", "a | b")
    assert shell_argv(("echo", "$HOME"), pipefail=True) == ("echo", "$HOME")


@pytest.mark.parametrize(
    ("command", "warning"),
    [
        ("mpirun python train.py", "the command calls `mpirun`, but the mode is ddp"),
        ("cd src && /opt/mpi/bin/mpiexec ./x", "the command calls `mpiexec`, but the mode is ddp"),
        (("horovodrun", "-np", "2", "x"), "use mode horovod (`--mode horovod`)"),
        (("torchrun", "--nnodes", "$NODE_NUM"), "$NODE_NUM is not expanded in master-0's command"),
        (("./x", "${RAYCONTROL_NP}"), "${RAYCONTROL_NP} is not expanded"),
        ("python mpirun.py", None),
        (("bash", "-c", "echo $NODE_NUM"), None),
        (("./x", "costs $5"), None),
    ],
)
def test_what_a_command_will_not_have_is_warned_of(command: Any, warning: str | None) -> None:
    warnings = plan_of(JobSpec(command=command, nodes=2)).warnings
    assert (len(warnings), warning is None or warning in warnings[0]) == (0 if warning is None else 1, True)
