"""Which node each instance goes to."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycontrol.placement import Assignment, Node, NoRoom, demand, place, reserve
from raycontrol.spec import Group, GroupResources, JobSpec, Member, Placement, Resources, members

STRICT, PACK = Placement.STRICT, Placement.PACK


def gang(nodes: int | None = None, **spec: Any) -> tuple[Member, ...]:
    return members(JobSpec(command="torchrun train.py", nodes=nodes, **spec))


def host(name: str, cpu: float = 4, gpu: float = 0, memory: float = 0, **free: float) -> Node:
    total = {"CPU": cpu, "GPU": gpu, "memory": memory}
    return Node(f"id-{name}", name, f"10.0.0.{name}", total, {**total, **free})


def rooms(found: tuple[Assignment, ...] | NoRoom) -> list[str]:
    assert isinstance(found, tuple), found
    return [room.node_name for room in found]


def refusal(found: tuple[Assignment, ...] | NoRoom) -> NoRoom:
    assert isinstance(found, NoRoom), found
    return found


# Literal cases.


def test_an_instance_takes_its_resources_by_rays_names() -> None:
    assert demand(Resources(cpu=2, gpu=0.5, memory=2**30)) == {"CPU": 2.0, "GPU": 0.5, "memory": 2.0**30}
    assert demand(Resources()) == {"CPU": 1.0}


def test_an_assignment_names_instance_and_node() -> None:
    assert place(gang(2), STRICT, [host("1"), host("2")]) == (
        Assignment("master-0", "id-1", "1", "10.0.0.1"),
        Assignment("worker-0", "id-2", "2", "10.0.0.2"),
    )


def test_strict_gives_every_instance_a_node_of_its_own_in_the_order_of_names() -> None:
    hosts = [host(name) for name in ("4", "2", "3", "1")]
    assert rooms(place(gang(4), STRICT, hosts)) == ["1", "2", "3", "4"]


def test_strict_takes_nodes_that_are_in_use_before_empty_ones() -> None:
    hosts = [host("1"), host("2", CPU=1), host("3", CPU=2), host("4", CPU=0)]
    assert rooms(place(gang(2), STRICT, hosts)) == ["2", "3"]


def test_memory_orders_nodes_only_for_a_job_that_asks_for_it() -> None:
    """Ray measures memory: two machines of a kind never have the same number of bytes."""
    hosts = [host("1", memory=2**30 + 4096), host("2", memory=2**30 + 8192), host("3", memory=2**30)]
    assert rooms(place(gang(3), STRICT, hosts)) == ["1", "2", "3"]
    assert rooms(place(gang(1), PACK, hosts)) == ["1"]
    thirsty = gang(1, resources=Resources(memory=2**20))
    assert rooms(place(thirsty, STRICT, hosts)) == rooms(place(thirsty, PACK, hosts)) == ["3"]


def test_strict_moves_an_instance_aside_for_one_that_fits_nowhere_else() -> None:
    """master-0 would take host 1, the only one with a GPU for the worker."""
    groups = {"master": Group(), "worker": Group(resources=GroupResources(gpu=1))}
    hosts = [host("1", gpu=1, CPU=1), host("2", gpu=0)]
    assert rooms(place(gang(groups=groups), STRICT, hosts)) == ["2", "1"]


def test_a_chain_of_instances_moves_aside() -> None:
    def needs(cpu: float) -> Group:
        return Group(role="worker", resources=GroupResources(cpu=cpu))

    groups = {"a": needs(1), "b": needs(2), "c": needs(3)}
    hosts = [host("3", cpu=3), host("2", cpu=2), host("1", cpu=1)]
    for order in itertools.permutations(hosts):
        assert rooms(place(gang(groups=groups), STRICT, order)) == ["1", "2", "3"]
    tight = [host("3", cpu=3, GPU=1), host("2", cpu=2, GPU=0), host("1", cpu=1, GPU=2)]
    assert rooms(place(gang(groups=groups), STRICT, tight)) == ["1", "2", "3"]


def test_a_gang_of_more_than_a_thousand_fits() -> None:
    hosts = [host(f"{number:04}") for number in range(1100)]
    assert rooms(place(gang(1100), STRICT, hosts)) == [node.name for node in hosts]


def test_a_node_that_nobody_uses_comes_last_however_small_it_is() -> None:
    whole, used = host("1", gpu=4), host("2", gpu=8, GPU=5)
    assert rooms(place(gang(1, resources=Resources(gpu=0.5)), STRICT, [whole, used])) == ["2"]
    small, large = host("1", cpu=8), host("2", cpu=64, CPU=20)
    assert rooms(place(gang(1), STRICT, [small, large])) == ["2"]
    assert rooms(place(gang(2), PACK, [small, large])) == ["2", "2"]


def test_a_share_is_of_one_gpu_not_of_what_several_have_left() -> None:
    three = gang(3, resources=Resources(cpu=0.1, gpu=0.6))
    assert refusal(place(three, PACK, [host("1", gpu=2)])).never
    assert rooms(place(three, PACK, [host("1", gpu=2), host("2", gpu=8)])) == ["1", "1", "2"]
    (one,) = gang(1, resources=Resources(cpu=0.1, gpu=0.7))
    assert not refusal(place((one,), STRICT, [host("1", gpu=1, GPU=0.5)])).never


def test_pack_fills_the_fullest_node_first() -> None:
    hosts = [host("1", cpu=4), host("2", cpu=4, CPU=2)]
    assert rooms(place(gang(4), PACK, hosts)) == ["2", "1", "1", "2"]
    assert rooms(place(gang(2), PACK, hosts)) == ["2", "2"]


def test_pack_places_the_most_demanding_first() -> None:
    groups = {
        "small": Group(role="worker", count=2),
        "big": Group(role="worker", resources=GroupResources(cpu=4)),
    }
    assert rooms(place(gang(groups=groups), PACK, [host("1", cpu=4), host("2", cpu=2)])) == ["2", "2", "1"]


def test_fractions_of_gpus_add_up_to_whole_ones() -> None:
    hosts = [host("1", gpu=1), host("2", gpu=1)]
    ten = gang(10, resources=Resources(cpu=0.1, gpu=0.1), slots=1)
    assert rooms(place(ten, PACK, hosts)) == ["1"] * 10
    assert rooms(place(gang(4, resources=Resources(gpu=0.5)), PACK, hosts)) == ["1", "1", "2", "2"]
    assert isinstance(place(gang(5, resources=Resources(gpu=0.5)), PACK, hosts), NoRoom)


def test_reserve_takes_from_what_is_free() -> None:
    hosts = [host("1", gpu=2), host("2", gpu=2)]
    two = gang(2, resources=Resources(cpu=1, gpu=1))
    found = place(two, STRICT, hosts)
    assert isinstance(found, tuple)
    left = reserve(hosts, two, found)
    assert [node.free for node in left] == [{"CPU": 3.0, "GPU": 1.0, "memory": 0}] * 2
    assert [node.total for node in left] == [node.total for node in hosts]
    assert hosts[0].free["CPU"] == 4  # the snapshot stays as it was


def test_reserve_passes_over_nodes_that_have_left() -> None:
    two = gang(2)
    found = place(two, STRICT, [host("1"), host("2")])
    assert isinstance(found, tuple)
    assert [node.free["CPU"] for node in reserve([host("2")], two, found)] == [3.0]


# Words for a person.


@pytest.mark.parametrize(
    ("instances", "placement", "hosts", "never", "why"),
    [
        (gang(1), STRICT, [], True, "the cluster has no living node"),
        (
            gang(3),
            STRICT,
            [host("1"), host("2"), host("3", CPU=0)],
            False,
            "needs 3 instances with cpu 1 free, each on a node of its own; 2 of 3 nodes can take one",
        ),
        (
            gang(1, resources=Resources(cpu=2, gpu=0.5, memory=3 * 2**29)),
            STRICT,
            [host("1", gpu=1, memory=2**40, GPU=0)],
            False,
            "needs 1 instance with cpu 2, gpu 0.5, memory 1.5 GiB free on one node; 0 of 1 node can take one",
        ),
        (
            gang(2),
            STRICT,
            [host("1")],
            True,
            "infeasible now: needs 2 instances with cpu 1, each on a node of its own; "
            "1 of 1 node can take one; `placement: pack` (or `--set placement=pack`) lets instances share a node",
        ),
        (
            gang(2, resources=Resources(gpu=8)),
            STRICT,
            [host("1", gpu=8), host("2", gpu=4)],
            True,
            "infeasible now: needs 2 instances with cpu 1, gpu 8, each on a node of its own; "
            "1 of 2 nodes can take one",
        ),
        (
            gang(5),
            PACK,
            [host("1"), host("2", CPU=0)],
            False,
            "needs 5 instances with cpu 1 free; the 2 nodes together cannot take all of them",
        ),
        (
            gang(9),
            PACK,
            [host("1"), host("2")],
            True,
            "infeasible now: needs 9 instances with cpu 1; the 2 nodes together cannot take all of them",
        ),
    ],
)
def test_a_refusal_says_what_is_missing(
    instances: Sequence[Member], placement: Placement, hosts: Sequence[Node], never: bool, why: str
) -> None:
    assert place(instances, placement, hosts) == NoRoom(why, never)


def test_a_refusal_speaks_of_the_most_demanding_instance() -> None:
    groups = {"master": Group(), "worker": Group(count=2, resources=GroupResources(gpu=2))}
    found = refusal(place(gang(groups=groups), STRICT, [host(str(number), gpu=1) for number in range(4)]))
    assert "with cpu 1, gpu 2," in found.why
    assert "0 of 4 nodes" in found.why


# For every gang and cluster.

amounts = st.sampled_from([1.0, 2.0, 3.0, 4.0])
gpus = st.sampled_from([0.0, 0.5, 1.0, 2.0])
needs = st.builds(lambda cpu, gpu: GroupResources(cpu=cpu, gpu=gpu), amounts, gpus)
small_groups = st.lists(
    st.builds(
        lambda count, resources: Group(role="worker", count=count, resources=resources),
        st.integers(1, 2),
        needs,
    ),
    min_size=1,
    max_size=3,
)
gangs = small_groups.map(
    lambda groups: gang(groups={f"g{number}": group for number, group in enumerate(groups)})
)


@st.composite
def clusters(draw: st.DrawFn) -> list[Node]:
    hosts = []
    for number in range(draw(st.integers(0, 5))):
        cpu, gpu = draw(amounts), draw(gpus)
        used = draw(st.sampled_from([0.0, 0.5, 1.0]))
        hosts.append(host(str(number), cpu=cpu, gpu=gpu, CPU=cpu - used, GPU=max(0.0, gpu - used)))
    return hosts


def possible(instances: Sequence[Member], hosts: Sequence[Node], field: str) -> bool:
    """Whether some choice of different nodes fits, found by trying all of them."""

    def fits(member: Member, node: Node) -> bool:
        room = getattr(node, field)
        return all(room.get(name, 0.0) >= amount for name, amount in demand(member.resources).items())

    return any(
        all(fits(member, node) for member, node in zip(instances, chosen, strict=True))
        for chosen in itertools.permutations(hosts, len(instances))
    )


@settings(max_examples=70, deadline=None, derandomize=True)
@given(gangs, clusters(), st.sampled_from([STRICT, PACK]))
def test_nothing_is_oversubscribed_and_everybody_has_a_node(
    instances: tuple[Member, ...], hosts: list[Node], placement: Placement
) -> None:
    found = place(instances, placement, hosts)
    if isinstance(found, NoRoom):
        return
    assert [room.instance for room in found] == [member.name for member in instances]
    for node in reserve(hosts, instances, found):
        assert all(amount >= 0 for amount in node.free.values()), node
    if placement is STRICT:
        assert max(Counter(room.node_id for room in found).values()) == 1
    for name in {member.group for member in instances}:
        names = [
            room.node_name for room, member in zip(found, instances, strict=True) if member.group == name
        ]
        assert names == sorted(names)


@settings(max_examples=70, deadline=None, derandomize=True)
@given(gangs, clusters())
def test_strict_finds_room_whenever_there_is_some(instances: tuple[Member, ...], hosts: list[Node]) -> None:
    found = place(instances, STRICT, hosts)
    assert isinstance(found, tuple) == possible(instances, hosts, "free")
    if isinstance(found, NoRoom):
        assert found.never == (not possible(instances, hosts, "total"))
        assert found.why


@settings(max_examples=30, deadline=None, derandomize=True)
@given(gangs, clusters(), st.sampled_from([STRICT, PACK]), st.randoms(use_true_random=False))
def test_the_order_in_which_nodes_are_listed_does_not_matter(
    instances: tuple[Member, ...], hosts: list[Node], placement: Placement, random: Any
) -> None:
    shuffled = list(hosts)
    random.shuffle(shuffled)
    assert place(instances, placement, shuffled) == place(instances, placement, hosts)
