"""Which nodes a job may use by its spec, why not the others, and what of it a spec may say."""

from __future__ import annotations

from typing import Any

import pytest

from raycontrol import conditions
from raycontrol.choosing import ANY, Choice, Choices, choice_of, objection
from raycontrol.errors import SpecError
from raycontrol.hardware import Traits, traits
from raycontrol.placement import Node
from raycontrol.spec import Group, JobSpec, Mode, members
from tests.node_facts import GIB, cpu_facts, gpu, gpu_facts

H100 = Traits(frozenset({"NVIDIA H100 80GB HBM3"}), 80, rdma=True)
A10 = Traits(frozenset({"NVIDIA A10"}), 22)
NO_GPU = Traits()


def host(name: str = "a", **changes: Any) -> Node:
    return Node(f"id-{name}", name, f"10.0.0.{name}", {"CPU": 4}, {"CPU": 4}, **changes)


# Conditions.


def test_numbers_of_a_spec_are_compared_as_they_are_written() -> None:
    where = JobSpec.from_dict({"command": "true", "where": {"asset": 1234567, "slot": 1000000}}).where
    assert where == {"asset": "1234567", "slot": "1000000"}


@pytest.mark.parametrize(
    ("text", "rack", "true"),
    [
        ("r1", "r1", True),
        ("r1", "r2", False),
        ("r1", None, False),
        ("in(r1,r2)", "r2", True),
        ("in(r1, r2)", "r3", False),
        ("in(r1)", None, False),
        ("!in(r1,r2)", "r3", True),
        ("!in(r1,r2)", "r2", False),
        ("!in(r1,r2)", None, True),
        ("!r1", "r2", True),
        ("!r1", "r1", False),
    ],
)
def test_a_label_is_compared_as_text(text: str, rack: str | None, true: bool) -> None:
    labels = {} if rack is None else {"rack": rack}
    assert conditions.holds("rack", text, labels, None) is true


@pytest.mark.parametrize(
    ("name", "text", "of", "true"),
    [
        ("gpu_model", "H100", H100, True),
        ("gpu_model", "h100 80gb", H100, True),
        ("gpu_model", "NVIDIA H100 80GB HBM3", H100, True),
        ("gpu_model", "A100", H100, False),
        ("gpu_model", "A1", A10, False),
        ("gpu_model", "in(A100,A10)", A10, True),
        ("gpu_model", "!in(A100,A10)", A10, False),
        ("gpu_model", "!in(A100,A10)", H100, True),
        ("gpu_model", "H100", NO_GPU, False),
        ("gpu_model", "!H100", NO_GPU, True),
        ("gpu_model", "H100", Traits(H100.gpu_models | A10.gpu_models, 22), False),
        ("gpu_memory_gib", ">= 80", H100, True),
        ("gpu_memory_gib", ">80", H100, False),
        ("gpu_memory_gib", "80", H100, True),
        ("gpu_memory_gib", "<= 24", A10, True),
        ("gpu_memory_gib", "< 22", A10, False),
        ("gpu_memory_gib", ">= 1", NO_GPU, False),
        ("rdma", "true", H100, True),
        ("rdma", "true", A10, False),
        ("rdma", "false", A10, True),
        ("rdma", "true", None, None),
        ("gpu_model", "!H100", None, None),
    ],
)
def test_a_fact_is_asked_of_what_the_node_says_of_itself(
    name: str, text: str, of: Traits | None, true: bool | None
) -> None:
    assert conditions.holds(name, text, {name: text}, of) is true


def test_the_traits_of_a_node_come_from_its_facts() -> None:
    assert traits(cpu_facts()) == Traits()
    assert traits(gpu_facts()) == Traits(frozenset({"NVIDIA H100"}), 80, rdma=True)
    mixed = gpu_facts(gpus=(gpu(), gpu(1, model="NVIDIA A10", memory_bytes=23_028 << 20)), rdma=())
    assert traits(mixed) == Traits(frozenset({"NVIDIA H100", "NVIDIA A10"}), 22)
    kept_back = gpu_facts(gpus=(gpu(memory_bytes=81_559 << 20),))
    assert traits(kept_back).gpu_memory_gib == 80 and 80 * GIB > 81_559 << 20


# Specs.


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"where": {"rack": ">= 3"}}, 'where.rack: only gpu_memory_gib can be compared, got ">= 3"'),
        (
            {"where": {"rack": "in()"}},
            'where.rack: must be a value, "!value", "in(a,b)" or "!in(a,b)", got "in()"',
        ),
        ({"where": {"rdma": "yes"}}, 'where.rdma: must be true or false, got "yes"'),
        (
            {"where": {"gpu_memory_gib": "80GB"}},
            'where.gpu_memory_gib: must be a number of GiB such as 80, or a comparison such as ">= 80", got "80GB"',
        ),
        ({"where": {"rack": ["a"]}}, "where.rack: must be text, got a list of 1"),
        ({"node_names": "a"}, 'node_names: must be a list, such as [host-a, host-b], got "a"'),
        (
            {"node_names": ["a", "b"], "nodes": 3},
            "node_names: must name as many nodes as there are instances (3), got 2",
        ),
        (
            {"node_names": ["a", "b"], "nodes": "2-3"},
            "node_names: must name as many nodes as there are instances (2 to 3), got 2",
        ),
        (
            {"node_names": ["a"], "groups": {"worker": Group(count=2)}},
            "node_names: must name as many nodes as there are instances (2), got 1",
        ),
        (
            {"node_names": ["a", "b"], "placement": "pack"},
            "node_names: are for `placement: strict`, one instance on each; with pack choose nodes by `node_group` or `where`",
        ),
        ({"node_names": ["a", "a"]}, "node_names: must name each node once, not a again, got a list of 2"),
        ({"node_names": ["a", "b"], "exclude": ["b"]}, "exclude: must not name nodes of node_names (b)"),
        ({"exclude": ["a,b"]}, 'exclude[0]: must be a node\'s name or IP, got "a,b"'),
        (
            {"exclusive": True, "placement": "pack"},
            "exclusive: must not be given together with `placement: pack`, whose instances share nodes",
        ),
        ({"nodes": "4-2"}, 'nodes: must begin with the least number of nodes, got "4-2"'),
        ({"nodes": "0-2"}, 'nodes: must be at least 1, got "0-2"'),
        ({"nodes": "2-5000"}, 'nodes: must be at most 4096, got "2-5000"'),
        (
            {"nodes": "2-4", "groups": {"worker": Group()}},
            'nodes: must not be given together with groups, whose counts say how many instances there are, got "2-4"',
        ),
    ],
)
def test_what_no_nodes_can_mend_is_a_fault_of_the_spec(values: dict[str, Any], fault: str) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec(command="true", **values)
    assert [str(found) for found in caught.value.faults] == [fault]


def test_a_range_stands_for_its_largest_until_a_number_is_chosen() -> None:
    spec = JobSpec(command="true", nodes=" 2 - 4 ")
    assert (spec.nodes, spec.span) == ("2-4", (2, 4))
    assert [member.name for member in members(spec)] == ["master-0", "worker-0", "worker-1", "worker-2"]
    assert [member.name for member in members(spec.smallest)] == ["master-0", "worker-0"]
    assert spec.largest == spec.sized(4) == JobSpec(command="true", nodes=4)
    assert JobSpec(command="true", nodes="3-3").nodes == 3
    assert JobSpec.from_dict(spec.model_dump(mode="json")) == spec


def test_names_of_nodes_say_how_many_there_are() -> None:
    spec = JobSpec(command="true", mode=Mode.MPI, node_names=["a", "b", "c"])
    assert [member.name for member in members(spec)] == ["launcher-0", "worker-0", "worker-1"]
    assert spec.smallest is spec


def test_yaml_may_write_conditions_as_numbers_and_truths() -> None:
    spec = JobSpec.from_text("command: x\nwhere: {rack: 3, rdma: true, gpu_memory_gib: 80}\n")
    assert spec.where == {"rack": "3", "rdma": "true", "gpu_memory_gib": "80"}


# Choices.


@pytest.mark.parametrize(
    ("choice", "node", "why"),
    [
        (ANY, host(), None),
        (ANY, host(offline="fan"), "offline"),
        (Choice(names=("a",)), host(offline="fan"), "offline"),
        (Choice(names=("b", "c")), host(), "not in node_names"),
        (Choice(names=("10.0.0.a",)), host(), None),
        (Choice(excluded=("10.0.0.a",)), host(), "by exclude"),
        (Choice(group="train"), host(), "not in node_group train"),
        (Choice(group="train"), host(groups=frozenset({"train", "big"})), None),
        (Choice(where=(("rack", "r1"),)), host(labels={"rack": "r1"}), None),
        (Choice(where=(("rack", "r1"), ("row", "2"))), host(labels={"rack": "r1"}), "by where row"),
        (Choice(where=(("rdma", "true"),)), host(), "whose rdma is not known yet"),
        (Choice(where=(("rdma", "true"),)), host(traits=A10), "by where rdma"),
        (Choice(where=(("rdma", "true"),)), host(traits=H100), None),
    ],
)
def test_the_first_objection_to_a_node_is_its_reason(choice: Choice, node: Node, why: str | None) -> None:
    assert objection(choice, node) == why


def test_what_a_spec_wants_of_its_nodes_is_its_choice() -> None:
    assert choice_of(JobSpec(command="true", nodes=4)) is ANY
    spec = JobSpec(command="true", exclude=["a"], where={"rdma": True}, node_group="train")
    assert choice_of(spec) == Choice((), ("a",), (("rdma", "true"),), "train")
    assert choice_of(spec).asks_for_facts and not ANY.asks_for_facts


def test_those_that_are_left_out_are_counted_by_their_reasons() -> None:
    nodes = [
        host("a", traits=A10),
        host("b", traits=A10),
        host("c", offline="fan"),
        host("d", traits=H100),
        host("e", traits=H100),
    ]
    choices = Choices(nodes)
    wanted = Choice(where=(("gpu_model", "H100"),))
    assert [node.name for node in choices.among(nodes, wanted)] == ["d", "e"]
    assert (
        choices.told(wanted, "no room")
        == "no room; 3 of 5 nodes are excluded: 2 by where gpu_model, 1 offline"
    )
    assert choices.told(ANY, "no room") == "no room; 1 of 5 nodes is excluded: 1 offline"
    assert Choices(nodes[:2]).told(ANY, "no room") == "no room"


def test_a_label_that_no_node_has_is_told_with_those_there_are() -> None:
    choices = Choices([host("a", labels={"rack": "r1", "ray.io/node-id": "1"}), host("b")])
    assert choices.told(Choice(where=(("rakc", "r1"),)), "no room") == (
        "no room; no node has a label rakc (there are rack); 2 of 2 nodes are excluded: 2 by where rakc"
    )
    assert choices.told(Choice(where=(("rack", "r1"),)), "no room") == (
        "no room; 1 of 2 nodes is excluded: 1 by where rack"
    )
    assert choices.told(Choice(where=(("maint", "!yes"),), excluded=("a",)), "no room") == (
        "no room; 1 of 2 nodes is excluded: 1 by exclude"
    )
    assert "(there are none but Ray's own)" in Choices([host("b")]).told(
        Choice(where=(("rack", "r1"),)), "no room"
    )


def test_names_that_no_node_has_are_told() -> None:
    choices = Choices([host("a"), host("b")])
    wanted = Choice(names=("a", "x", "y"))
    assert choices.told(wanted, "no room") == (
        "no room; not in the cluster: x, y; 1 of 2 nodes is excluded: 1 not in node_names"
    )
