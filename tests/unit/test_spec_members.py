"""The instances that a spec stands for, in INDEX order, mode by mode."""

from __future__ import annotations

from typing import Any

import pytest

from raycontrol.errors import SpecError
from raycontrol.spec import JobSpec, Member, Resources, members


def spec_of(mode: str, **fields: Any) -> JobSpec:
    return JobSpec.from_dict({"mode": mode, "command": "go", **fields})


def roles(mode: str, **fields: Any) -> list[tuple[str, str]]:
    return [(member.name, member.role) for member in members(spec_of(mode, **fields))]


def test_a_member_carries_all_that_is_the_instances_own() -> None:
    spec = spec_of(
        "ddp",
        resources={"cpu": 4, "memory": "8GiB"},
        env={"A": "1", "B": "2"},
        groups={
            "worker": {"count": 1, "command": ["python", "x.py"], "env": {"B": None, "C": "3"}, "slots": 3},
            "master": {"resources": {"gpu": 2}},
        },
    )
    assert members(spec) == (
        Member(
            name="master-0",
            group="master",
            role="master",
            index=0,
            local_index=0,
            resources=Resources(cpu=4, gpu=2, memory=8_589_934_592),
            slots=2,
            command="go",
            env={"A": "1", "B": "2"},
        ),
        Member(
            name="worker-0",
            group="worker",
            role="worker",
            index=1,
            local_index=0,
            resources=Resources(cpu=4, gpu=0, memory=8_589_934_592),
            slots=3,
            command=("python", "x.py"),
            env={"A": "1", "B": None, "C": "3"},
        ),
    )


@pytest.mark.parametrize(
    ("mode", "single"), [("ddp", "master"), ("mpi", "launcher"), ("horovod", "launcher"), ("ray", "head")]
)
def test_nodes_is_short_for_the_single_role_and_workers(mode: str, single: str) -> None:
    assert roles(mode) == [(f"{single}-0", single)]
    assert roles(mode, nodes=1) == [(f"{single}-0", single)]
    assert roles(mode, nodes=3) == [(f"{single}-0", single), ("worker-0", "worker"), ("worker-1", "worker")]


@pytest.mark.parametrize(
    ("mode", "single"), [("ddp", "master"), ("mpi", "launcher"), ("horovod", "launcher"), ("ray", "head")]
)
def test_of_workers_only_the_first_takes_the_single_role(mode: str, single: str) -> None:
    assert roles(mode, groups={"b": {"count": 2}, "a": {}}) == [
        ("b-0", single),
        ("b-1", "worker"),
        ("a-0", "worker"),
    ]


def test_the_single_roles_group_comes_first_and_the_others_as_written() -> None:
    groups = {"z": {"count": 2}, "a": {}, "lead": {"role": "master"}, "worker": {}}
    assert roles("ddp", groups=groups) == [
        ("lead-0", "master"),
        ("z-0", "worker"),
        ("z-1", "worker"),
        ("a-0", "worker"),
        ("worker-0", "worker"),
    ]


def test_a_groups_name_is_its_role_where_the_mode_has_that_role() -> None:
    assert roles("ddp", groups={"chief": {}, "master": {}}) == [("master-0", "master"), ("chief-0", "worker")]
    assert roles("ray", groups={"master": {}, "head": {}}) == [("head-0", "head"), ("master-0", "worker")]


def test_ps_begins_with_the_chief() -> None:
    groups = {"ps": {"count": 2}, "evaluator": {}, "worker": {"count": 2}, "chief": {}}
    assert roles("ps", groups=groups) == [
        ("chief-0", "chief"),
        ("ps-0", "ps"),
        ("ps-1", "ps"),
        ("evaluator-0", "evaluator"),
        ("worker-0", "worker"),
        ("worker-1", "worker"),
    ]


def test_ps_without_a_chief_begins_with_the_first_workers() -> None:
    assert roles("ps", groups={"ps": {}, "big": {"count": 2}, "small": {"role": "worker"}}) == [
        ("big-0", "worker"),
        ("big-1", "worker"),
        ("ps-0", "ps"),
        ("small-0", "worker"),
    ]


def test_ps_may_have_no_parameter_server_if_that_is_written() -> None:
    assert roles("ps", groups={"ps": {"count": 0}, "worker": {}}) == [("worker-0", "worker")]
    with pytest.raises(SpecError, match=r"must have a group ps in mode ps"):
        roles("ps", groups={"worker": {}})
    with pytest.raises(SpecError, match=r"^groups\.ps\.count: must be at least 0, got -1$"):
        roles("ps", groups={"ps": {"count": -1}, "worker": {}})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "groups: must be given in mode ps, such as `groups: {ps: {count: 1}, worker: {count: 1}}`"),
        (
            {"nodes": 5},
            "nodes: is not enough in mode ps; write `groups: {ps: {count: 1}, worker: {count: 4}}` instead, got 5",
        ),
        ({"groups": {"ps": {}}}, "groups: must have a group of workers in mode ps"),
        (
            {"groups": {"ps": {}, "worker": {}, "chief": {"count": 2}}},
            "groups.chief.count: must be 1, a job has one chief, got 2",
        ),
        (
            {"groups": {"ps": {}, "worker": {}, "evaluator": {"count": 2}}},
            "groups.evaluator.count: must be 1, a job has one evaluator, got 2",
        ),
    ],
)
def test_rules_of_ps(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_of("ps", **fields)
    assert str(caught.value) == expected


def test_five_groups_of_workers_are_allowed_beside_the_single_role() -> None:
    groups = {name: {} for name in ("head", "a", "b", "c", "d", "e")}
    assert len(roles("ray", groups=groups)) == 6


@pytest.mark.parametrize(
    ("fields", "slots"),
    [
        ({}, 1),
        ({"resources": {"gpu": 8}}, 8),
        ({"resources": {"gpu": 0.5}}, 1),
        ({"slots": 3}, 3),
        ({"resources": {"gpu": 8}, "slots": 2}, 2),
        ({"slots": 3, "groups": {"master": {"slots": 2}}}, 2),
        ({"resources": {"gpu": 8}, "groups": {"master": {"resources": {"gpu": 4}}}}, 4),
    ],
)
def test_slots_are_the_gpus_or_one_or_what_is_written(fields: dict[str, Any], slots: int) -> None:
    assert members(spec_of("ddp", **fields))[0].slots == slots


def test_what_a_groups_resources_leave_out_is_the_jobs() -> None:
    spec = JobSpec(
        command="x",
        resources=Resources(cpu=4, gpu=1),
        groups={"worker": {"resources": Resources(gpu=2)}},  # type: ignore[dict-item]
    )
    assert members(spec)[0].resources == Resources(cpu=4, gpu=2)
