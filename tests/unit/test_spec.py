"""JobSpec: what it accepts, and that it names every fault at once in our own words."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycontrol.errors import Fault, SpecError
from raycontrol.spec import (
    Group,
    GroupResources,
    JobSpec,
    Mode,
    Placement,
    Resources,
    Timeouts,
    build,
    members,
)


def faults(**fields: Any) -> list[str]:
    """The faults of a spec that has a good command and these fields."""
    with pytest.raises(SpecError) as caught:
        JobSpec.from_dict({"command": "torchrun train.py", **fields})
    return [str(fault) for fault in caught.value.faults]


def test_a_command_is_enough() -> None:
    spec = JobSpec(command="torchrun train.py")

    assert spec == JobSpec(
        name=None,
        mode=Mode.DDP,
        command="torchrun train.py",
        nodes=None,
        resources=Resources(cpu=1, gpu=0, memory=None),
        placement=Placement.STRICT,
        priority=5,
        timeouts=Timeouts(queue_s=None, run_s=None, grace_s=40),
        pipefail=True,
    )
    assert (spec.groups, spec.env, spec.labels, spec.slots, spec.share_gpus) == ({}, {}, {}, None, False)


def test_the_constructor_raises_spec_error_and_takes_parts_as_models() -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec(command="x", nodes=0, slots=3, resources=Resources(gpu=2))
    assert caught.value.faults == (
        Fault("nodes", "must be at least 1", "0"),
        Fault("slots", "must be at most the number of GPUs (2); `share_gpus: true` allows more", "3"),
    )


def test_a_part_on_its_own_raises_spec_error_too() -> None:
    with pytest.raises(SpecError, match=r"^gpu: must be a whole number, .* or a share of one, got 1\.5$"):
        Resources(gpu=1.5)


def test_json_that_was_stored_comes_back_as_it_was() -> None:
    spec = JobSpec(
        command=("python", "train.py", ""),
        groups={"master": Group(), "big": Group(count=2, resources=GroupResources(gpu=1))},
        env={"A": "", "B": None},
        resources=Resources(cpu=4),
    )
    stored = json.dumps(spec.model_dump(mode="json"))

    assert JobSpec.model_validate(json.loads(stored)) == spec
    assert JobSpec.model_validate_json(stored) == spec
    assert members(JobSpec.model_validate_json(stored)) == members(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_stored_json_with_faults_raises_spec_error() -> None:
    with pytest.raises(SpecError, match=r'^command: must be text, write command: "3", got 3$'):
        JobSpec.model_validate_json('{"command": 3}')


def test_a_spec_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        JobSpec(command="x").nodes = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"name": "my job"}, "name: must be 1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit, got \"my job\""),
        ({"name": 7}, 'name: must be text, write name: "7", got 7'),
        ({"mode": "pdd"}, 'mode: must be one of ddp, mpi, horovod, ps, ray, got "pdd"'),
        ({"command": ""}, 'command: must not be empty, got ""'),
        ({"command": []}, "command: must name a program, got a list of 0"),
        ({"command": ["torchrun", 4]}, 'command[1]: must be text, write "4", got 4'),
        ({"command": "a\0b"}, 'command: must not contain a NUL byte, got "a\\x00b"'),
        ({"command": "\ud800"}, 'command: must be text that UTF-8 can hold, got "\\ud800"'),
        ({"command": "x" * 140_000}, f"command: must be shorter than 128 KiB (Linux's limit for an argument), got \"{'x' * 80}…\""),
        ({"nodes": 0}, "nodes: must be at least 1, got 0"),
        ({"nodes": True}, "nodes: must be a whole number, or a range such as \"2-4\", got true"),
        ({"nodes": 2.0}, "nodes: must be a whole number, or a range such as \"2-4\", got 2.0"),
        ({"nodes": "two"}, 'nodes: must be a whole number, or a range such as "2-4", got "two"'),
        ({"nodes": 10**5000}, "nodes: must be at most 4096, got a number of more than 300 digits"),
        ({"slots": 0}, "slots: must be at least 1, got 0"),
        ({"resources": 4}, "resources: must be a mapping, got 4"),
        ({"resources": {"cpu": 0}}, "resources.cpu: must be at least 0.0001, got 0"),
        ({"resources": {"cpu": 1e-9}}, "resources.cpu: must be at least 0.0001, got 1e-09"),
        ({"resources": {"cpu": 1e308}}, "resources.cpu: must be at most 100000, got 1e+308"),
        ({"resources": {"gpu": 1e9}}, "resources.gpu: must be at most 1024, got 1000000000.0"),
        ({"groups": {"worker": {"resources": {"gpu": 1025}}}}, "groups.worker.resources.gpu: must be at most 1024, got 1025"),
        ({"resources": {"memory": "513TiB"}}, 'resources.memory: must be at most 512TiB, got "513TiB"'),
        ({"resources": {"cpu": float("inf")}}, "resources.cpu: must be a finite number, got inf"),
        ({"resources": {"cpu": True}}, "resources.cpu: must be a number, got true"),
        ({"resources": {"gpu": 1.5}}, "resources.gpu: must be a whole number, or a fraction below 1 with at most two decimals such as 0.5: an instance gets whole GPUs, or a share of one, got 1.5"),
        ({"resources": {"gpu": 0.125}}, "resources.gpu: must be a whole number, or a fraction below 1 with at most two decimals such as 0.5: an instance gets whole GPUs, or a share of one, got 0.125"),
        ({"resources": {"gpu": -1}}, "resources.gpu: must be a whole number, or a fraction below 1 with at most two decimals such as 0.5: an instance gets whole GPUs, or a share of one, got -1"),
        ({"resources": {"memory": "8"}}, 'resources.memory: must be a size with its unit, such as 8GiB or 512MiB, got "8"'),
        ({"resources": {"memory": 8}}, "resources.memory: must be a size with its unit, such as 8GiB or 512MiB, got 8"),
        ({"priority": 10}, "priority: must be at most 9, got 10"),
        ({"placement": "spread"}, 'placement: must be one of strict, pack, got "spread"'),
        ({"pipefail": 1}, "pipefail: must be true or false, got 1"),
        ({"timeouts": {"run_s": 0}}, "timeouts.run_s: must be more than 0, got 0"),
        ({"working_dir": "a\0"}, 'working_dir: must not contain a NUL byte, got "a\\x00"'),
        ({"labels": {"team": 3}}, 'labels.team: must be text, write team: "3", got 3'),
        ({"labels": {"": "x"}}, "labels.: names must be 1 to 63 letters, digits, '.', '_', '-' or '/'"),
        ({"env": {"EPOCHS": 3}}, 'env.EPOCHS: must be text, write EPOCHS: "3", got 3'),
        ({"env": {"DEBUG": True}}, 'env.DEBUG: must be text, write DEBUG: "true", got true'),
        ({"env": {"LIST": [1, 2]}}, "env.LIST: must be text, got a list of 2"),
        ({"env": {"A": "x\0"}}, 'env.A: must not contain a NUL byte, got "x\\x00"'),
        ({"env": {"A=B": "x"}}, "env.A=B: names of variables must not be empty or contain '=', spaces or NUL bytes"),
        ({"env": {"RANK": "0"}}, "env.RANK: is set by raycontrol itself and must not be given"),
        ({"env": {"RAYCONTROL_SLOTS": None}}, "env.RAYCONTROL_SLOTS: is set by raycontrol itself and must not be given"),
        ({"env": ["A=1"]}, "env: must be a mapping, got a list of 1"),
        ({"groups": {}, "node": 3}, "node: unknown field, did you mean nodes?"),
        ({"gpus": 3}, "gpus: unknown field, did you mean resources.gpu?"),
        ({"cpu": 3}, "cpu: unknown field, did you mean resources.cpu?"),
        ({"resources": {"zebra": 3}}, "resources.zebra: unknown field; there are cpu, gpu, memory"),
        ({"groups": {"worker": {"cuont": 3}}}, "groups.worker.cuont: unknown field, did you mean count?"),
        ({"groups": {"worker": {"resources": {"cpus": 1}}}}, "groups.worker.resources.cpus: unknown field, did you mean cpu?"),
        ({"groups": {"gpu-": {}}}, "groups.gpu-: names of groups must be 1 to 40 lowercase letters, digits or '-', starting and ending with a letter or digit"),
        ({"groups": {"Worker": {}}}, "groups.Worker: names of groups must be 1 to 40 lowercase letters, digits or '-', starting and ending with a letter or digit"),
        ({"groups": {"worker": 5}}, "groups.worker: must be a mapping, got 5"),
        ({"groups": {"worker": {"count": 0}}}, "groups.worker.count: must be at least 1, got 0"),
        ({"groups": {"worker": {"count": -3}}}, "groups.worker.count: must be at least 1, got -3"),
        ({"groups": {"worker": {"env": {"INDEX": "1"}}}}, "groups.worker.env.INDEX: is set by raycontrol itself and must not be given"),
        ({"groups": {"master": {"count": 2}}}, "groups.master.count: must be 1, a job has one master, got 2"),
        ({"groups": {"a": {"role": "chief"}}}, 'groups.a.role: must be one of master, worker in mode ddp, got "chief"'),
        ({"groups": {"a": {"role": "master"}, "master": {}}}, "groups.master: must not be a second group with the role master"),
        ({"groups": {name: {} for name in "abcdef"}}, "groups: must have at most 5 groups of workers, got 6"),
        ({"groups": {"a": {"count": 4000}, "b": {"count": 4000}}}, "groups: must have at most 4096 instances in all, got 8000"),
        ({"nodes": 3, "groups": {"worker": {}}}, "nodes: must not be given together with groups, whose counts say how many instances there are, got 3"),
        ({"slots": 4, "resources": {"gpu": 2}}, "slots: must be at most the number of GPUs (2); `share_gpus: true` allows more, got 4"),
        ({"resources": {"gpu": 2}, "groups": {"worker": {"slots": 3}}}, "groups.worker.slots: must be at most the number of GPUs (2); `share_gpus: true` allows more, got 3"),
        ({"slots": 3, "groups": {"a": {}, "b": {"resources": {"gpu": 1}}}}, "slots: must be at most the number of GPUs of b (1); `share_gpus: true` allows more, got 3"),
    ],
)  # fmt: skip
def test_one_fault(fields: dict[str, Any], expected: str) -> None:
    assert faults(**fields) == [expected]


def test_a_missing_command_shows_one() -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.from_dict({})
    assert str(caught.value) == (
        "command: must be given: the line that starts the program, such as `command: torchrun train.py`"
    )


@pytest.mark.parametrize(
    ("data", "expected"), [([1], "a list of 1"), ("torchrun", '"torchrun"'), (None, "null")]
)
def test_a_spec_that_is_not_a_mapping(data: Any, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.from_dict(data)
    assert caught.value.faults == (
        Fault("", "a job's spec must be a mapping of fields, such as `command: torchrun train.py`", expected),
    )


def test_values_of_secret_variables_are_never_shown() -> None:
    text = "\n".join(
        faults(
            env={"HF_TOKEN": 123456, "aws_key": ["123456"], "DB_PASSWORD": "123456\0", "MY_SECRET": True},
            groups={"worker": {"env": {"API_KEY": 123456}}},
        )
        + faults(env="HF_TOKEN=123456")
    )
    assert "123456" not in text and "true" not in text
    assert "env.HF_TOKEN: must be text; put the value in quotes, got a value that is not shown" in text
    assert "env: must be a mapping, got text" in text


def test_rules_for_the_whole_are_checked_on_what_is_right() -> None:
    assert faults(
        name="",
        slots=3,
        resources={"gpu": 2, "cpu": "many"},
        nodes="two",
        groups={"worker": {"count": 0, "comand": "x"}, "master": {"count": 2, "slots": "x"}},
    ) == [
        "name: must be 1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit, got \"\"",
        'nodes: must be a whole number, or a range such as "2-4", got "two"',
        'resources.cpu: must be a number, got "many"',
        "groups.worker.comand: unknown field, did you mean command?",
        'groups.master.slots: must be a whole number, got "x"',
        "nodes: must not be given together with groups, whose counts say how many instances there are, "
        'got "two"',
        "groups.worker.count: must be at least 1, got 0",
        "groups.master.count: must be 1, a job has one master, got 2",
        "slots: must be at most the number of GPUs (2); `share_gpus: true` allows more, got 3",
    ]


def test_a_rule_is_not_judged_on_a_value_that_is_wrong() -> None:
    assert faults(slots=3, resources={"gpu": "two"}) == ['resources.gpu: must be a number, got "two"']
    assert faults(mode="x", groups={"chief": {"role": "chief"}}) == [
        'mode: must be one of ddp, mpi, horovod, ps, ray, got "x"'
    ]
    assert faults(groups=3, mode="ps") == [
        "groups: must be a mapping, got 3",
    ]


def test_mode_ps_says_which_groups_to_write() -> None:
    assert faults(mode="ps", nodes=4) == [
        "nodes: is not enough in mode ps; write `groups: {ps: {count: 1}, worker: {count: 3}}` instead, got 4",
    ]
    assert faults(mode="ps", groups={"chief": {"count": 2}, "evaluator": {}, "x": {"role": "evaluator"}}) == [
        "groups.chief.count: must be 1, a job has one chief, got 2",
        "groups.x: must not be a second group with the role evaluator",
        "groups: must have a group ps in mode ps (`ps: {count: 0}` for no parameter server)",
        "groups: must have a group of workers in mode ps",
    ]


def test_null_means_not_given_except_in_env() -> None:
    spec = JobSpec.from_dict(
        {
            "command": "x",
            "nodes": None,
            "resources": {"cpu": None},
            "timeouts": None,
            "env": {"A": None},
            "groups": {"worker": None},
        }
    )
    assert spec == JobSpec(command="x", env={"A": None}, groups={"worker": Group()})
    assert faults(command=None)[0].startswith("command: must be given")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("8GiB", 8_589_934_592),
        ("8 gib", 8_589_934_592),
        ("512Mi", 536_870_912),
        ("1.5GB", 1_500_000_000),
        (1_048_576, 1_048_576),
    ],
)
def test_memory_is_bytes(written: str | int, expected: int) -> None:
    spec = JobSpec.from_dict({"command": "x", "resources": {"memory": written}})
    assert spec.resources.memory == expected


@pytest.mark.parametrize("gpu", [0, 0.5, 0.25, 0.07, 1, 2.0, 8])
def test_gpus_are_whole_or_a_fraction_of_one(gpu: float) -> None:
    assert Resources(gpu=gpu).gpu == gpu


def test_share_gpus_allows_more_slots_than_gpus() -> None:
    assert JobSpec(command="x", slots=4, resources=Resources(gpu=2), share_gpus=True).slots == 4
    assert JobSpec(command="x", slots=4, resources=Resources(gpu=0.5)).slots == 4


def test_a_job_is_named_after_its_file_or_its_command() -> None:
    assert JobSpec(command="/opt/bin/torchrun train.py").named().name == "torchrun"
    assert JobSpec(command="A=1 B=2 python x.py").named().name == "python"
    assert JobSpec(command=("./run me.sh", "x")).named().name == "run-me.sh"
    assert JobSpec(command="(true)").named("my job!").name == "my-job"
    assert JobSpec(command="(").named("…").name == "job"
    assert JobSpec(command="x", name="mine").named("other").name == "mine"


def test_a_spec_without_a_file() -> None:
    spec = build(
        {"mode": "ddp", "nodes": 2, "command": ("torchrun", "train.py"), "working_dir": "src"},
        ["resources.gpu=1", "labels.a.b=c"],
        ["N=1"],
    )
    assert spec == JobSpec(
        name="torchrun",
        nodes=2,
        command=("torchrun", "train.py"),
        resources=Resources(gpu=1),
        env={"N": "1"},
        labels={"a.b": "c"},
        working_dir=str(Path.cwd() / "src"),
    )


def test_no_error_speaks_pydantic() -> None:
    odd: list[Any] = [
        object(),
        b"x",
        {1: 2},
        [None],
        10**400,
        float("nan"),
        "\ud800",
        -1,
        True,
        [[]],
        {"a": {}},
    ]
    for field in JobSpec.model_fields:
        for value in odd:
            try:
                JobSpec.from_dict({"command": "x", field: value})
            except SpecError as error:
                text = str(error)
                assert "pydantic" not in text and "Input should" not in text and "not possible" not in text, (
                    text
                )
                assert "<object" not in text and "<words>" not in text, text
                assert text.encode() and "\n" not in str(error.faults[0])


# -- property: what is accepted survives JSON --------------------------------------------------------------------------

_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
_resources = st.fixed_dictionaries(
    {},
    optional={
        "cpu": st.floats(0.01, 512),
        "gpu": st.sampled_from([0, 0.25, 0.5, 1, 2, 8]),
        "memory": st.integers(1 << 20, 1 << 49),
    },
)
_env = st.dictionaries(st.from_regex(r"[A-Z]{1,3}_[a-z]{1,4}", fullmatch=True), st.none() | _text, max_size=3)
_command = st.tuples(st.just("run"), _text) | _text.map(lambda text: f"run {text}")
_group = st.fixed_dictionaries(
    {}, optional={"count": st.integers(1, 4), "command": _command, "env": _env, "resources": _resources}
)
_names = st.from_regex(r"[a-z]([a-z0-9-]{0,5}[a-z0-9])?", fullmatch=True).filter(
    lambda name: name != "master"
)
_specs = st.fixed_dictionaries(
    {"command": _command},
    optional={
        "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True),
        "resources": _resources,
        "groups": st.dictionaries(_names, _group, max_size=5),
        "env": _env,
        "labels": st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), _text, max_size=2),
        "placement": st.sampled_from(["strict", "pack"]),
        "priority": st.integers(0, 9),
        "timeouts": st.fixed_dictionaries({}, optional={"run_s": st.floats(0.1, 1e6), "grace_s": st.just(0)}),
        "pipefail": st.booleans(),
    },
)


@settings(max_examples=40, deadline=None)
@given(_specs)
def test_what_is_accepted_survives_json(data: dict[str, Any]) -> None:
    spec = JobSpec.from_dict(data)
    again = JobSpec.model_validate_json(spec.model_dump_json())
    assert again == spec
    assert members(again) == members(spec)
    assert [member.index for member in members(spec)] == list(range(len(members(spec))))


@pytest.mark.parametrize("mode", ["ddp", "mpi", "horovod"])
def test_a_spec_that_was_written_out_whole_is_read_again(mode: str) -> None:
    spec = JobSpec.from_dict({"mode": mode, "command": "go", "nodes": 2})
    assert JobSpec.from_dict(spec.model_dump(mode="json")) == spec
