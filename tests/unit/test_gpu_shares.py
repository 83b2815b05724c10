"""Fractions of a GPU: what frameworks are told, and who is warned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raycontrol.backends import explain, make_plan, plan_of
from raycontrol.hardware import Essentials
from raycontrol.plan import Brief, Cause, Facts, Plan
from raycontrol.spec import JobSpec, Mode, Resources, members

BRIEF = Brief("digits-1", "digits", attempt=0, attempt_id="digits-1.0")
NODE = Essentials(gpus=2, torch="2.13.0+cu128", gpu_memory=80 << 30)
GLOO = "NCCL refuses that; use gloo (`init_process_group('gloo')`, `horovodrun --gloo`), or whole GPUs"


def planned(spec: JobSpec, node: Essentials, *gpus: str) -> Plan:
    """The plan of a job whose instances are all on one node, each with the GPUs named (separated by commas)."""
    facts = tuple(
        Facts(
            instance=member.name,
            ip="10.0.0.1",
            node_name="host-1",
            ports={"probe": "40001", "master": "40002", "ssh": "40003"},
            gpus=tuple(ids.split(",")),
            hardware=node,
        )
        for member, ids in zip(members(spec), gpus, strict=True)
    )
    return make_plan(spec, BRIEF, facts)


def shares(node: Essentials, gpu: float = 0.4, **fields: Any) -> dict[str, str | None]:
    spec = JobSpec(command="true", resources=Resources(gpu=gpu), **fields)
    plan = planned(spec, node, "0")
    return {
        name: plan.environment["master-0"][name]
        for name, origin in plan.origins["master-0"].items()
        if origin == f"a share of {gpu:g} GPU"
    }


def test_a_fraction_tells_frameworks_how_much_memory_is_theirs() -> None:
    assert shares(NODE) == {
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4",
        "PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.4",
    }


@pytest.mark.parametrize("torch", [None, "2.9.1+cu128", "1.13.1"])
def test_a_pytorch_that_would_refuse_the_fraction_is_not_given_it(torch: str | None) -> None:
    assert "PYTORCH_ALLOC_CONF" not in shares(replace(NODE, torch=torch))


def test_allocator_settings_of_the_user_by_their_older_name_are_not_overruled() -> None:
    assert "PYTORCH_ALLOC_CONF" not in shares(
        NODE, env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    )


def test_processes_of_one_instance_share_its_share() -> None:
    found = shares(NODE, slots=2)
    assert found["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.2"
    assert found["PYTORCH_ALLOC_CONF"] == "per_process_memory_fraction:0.2"


def test_an_mps_daemon_is_told_the_limits_of_a_share() -> None:
    found = shares(replace(NODE, mps=True))
    assert found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
    assert found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=32768M"
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in shares(replace(NODE, mps=True, gpu_memory=0))


@pytest.mark.parametrize("gpu", [0, 1, 2])
def test_whole_gpus_and_none_have_no_share(gpu: int) -> None:
    assert shares(NODE, gpu) == {}


def test_the_user_has_the_last_word_on_a_share() -> None:
    spec = JobSpec(command="true", resources=Resources(gpu=0.5), env={"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"})
    plan = planned(spec, NODE, "0")
    assert plan.environment["master-0"]["XLA_PYTHON_CLIENT_MEM_FRACTION"] == ".9"
    assert plan.origins["master-0"]["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "the job's env"


# Warnings.


def packed(mode: str = "ddp", **fields: Any) -> JobSpec:
    return JobSpec(
        **{
            "command": "true",
            "mode": mode,
            "nodes": 2,
            "placement": "pack",
            "resources": Resources(gpu=0.5),
            **fields,
        }
    )


def test_ranks_that_may_share_a_gpu_are_warned_of_before_launch() -> None:
    assert plan_of(packed()).warnings == (f"ranks of master-0 and worker-0 may share a GPU: {GLOO}",)
    assert plan_of(packed(placement="strict")).warnings == ()
    assert plan_of(packed(resources=Resources(gpu=0.6))).warnings == ()  # two of them are more than one GPU


def test_ranks_that_do_share_a_gpu_are_told_with_the_plan() -> None:
    assert planned(packed(), NODE, "0", "0").notes == (f"ranks of master-0 and worker-0 share a GPU: {GLOO}",)
    assert planned(packed(), NODE, "0", "1").notes == ()


def test_more_slots_than_gpus_are_warned_of() -> None:
    spec = JobSpec(command="true", resources=Resources(gpu=2), slots=4, share_gpus=True)
    assert plan_of(spec).warnings == (f"the 4 ranks of master-0 share 2 GPUs: {GLOO}",)


def test_parameter_servers_may_share_a_gpu_in_peace() -> None:
    groups: dict[str, Any] = {"ps": {"count": 1}, "worker": {"count": 2}}
    assert plan_of(packed("ps", nodes=None, groups=groups)).warnings == ()


# The verdict's hint.


@pytest.mark.parametrize("mode", list(Mode))
def test_a_duplicate_gpu_in_the_log_becomes_advice(mode: Mode) -> None:
    lines = [
        "host-1:91:105 [0] init.cc:1358 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 65000",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp, invalid usage",
    ]
    assert explain(mode, lines) == Cause(advice=f"two ranks of the job were on one GPU: {GLOO}")
    assert explain(mode, ["nothing of the kind"]) is None


def test_a_name_that_means_loopback_becomes_advice() -> None:
    lines = [
        "[2]<stderr>:  what():  [/src/third_party/gloo/gloo/transport/tcp/pair.cc:799] connect [127.0.1.1]:17844: Connection refused",
        "Process name: 2",
        "Exit code: 255",
    ]
    cause = explain(Mode.HOROVOD, lines)
    assert cause is not None and (cause.rank, cause.exit_code) == (2, 255)
    assert (cause.advice or "").startswith("Gloo asked a host for the address of its own name")
