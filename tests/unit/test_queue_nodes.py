"""Which nodes waiting jobs get: of a range as many as fit, nodes of their own, only those that they may use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from raycontrol.hardware import Traits
from raycontrol.placement import Node, place
from raycontrol.queue import Capacity, KeepWaiting, Policy, Rules, Running, Waiting, decide, lacks
from raycontrol.spec import JobSpec, Placement, members
from tests.unit.test_queue import brief, on, why

BACKFILL = Rules(Policy.BACKFILL)


def hosts(*free_cpus: float, **changes: Any) -> list[Node]:
    """Nodes 0, 1, … of 4 CPUs, with so many of them free."""
    return [
        Node(f"id-{n}", str(n), f"10.0.0.{n}", {"CPU": 4}, {"CPU": free}, **changes)
        for n, free in enumerate(free_cpus)
    ]


def spec(cpu: float = 1, run_s: float | None = None, **more: Any) -> JobSpec:
    timeouts = {} if run_s is None else {"run_s": run_s}
    return JobSpec(command="train", resources={"cpu": cpu}, timeouts=timeouts, **more)


def job(job_id: str, at: float = 0.0, user: str = "ann", **more: Any) -> Waiting:
    return Waiting(job_id, spec(**more), at, user)


def runs(job_id: str, *names: int, ends_by: float | None = None, **more: Any) -> Running:
    return Running(job_id, spec(nodes=len(names), **more), "bob", on(*names), 0.0, ends_by)


# Ranges.


@pytest.mark.parametrize(
    ("free", "placed"),
    [
        ((4, 4, 4, 4, 4), "range on 0 1 2 3"),
        ((4, 0, 4, 4, 0), "range on 0 2 3"),
        ((4, 0, 0, 4, 0), "range on 0 3"),
        ((4, 0, 0, 0, 0), "range NO_ROOM"),
    ],
)
def test_of_a_range_the_largest_that_fits_now_starts(free: Sequence[float], placed: str) -> None:
    assert brief(decide([job("range", nodes="2-4", cpu=4)], hosts(*free))) == [placed]


def test_a_range_is_infeasible_only_below_its_least() -> None:
    (two,) = decide([job("range", nodes="2-9", cpu=4)], hosts(4, 0))
    assert isinstance(two, KeepWaiting)
    assert two.why.startswith("needs 2 instances with cpu 4 free, each on a node of its own; 1 of 2 nodes")
    (three,) = decide([job("range", nodes="3-9", cpu=4)], hosts(4, 0))
    assert isinstance(three, KeepWaiting) and three.why.startswith("infeasible now: needs 3 instances")


def test_a_range_takes_no_more_than_a_limit_allows() -> None:
    nodes = [replace(node, total={"CPU": 4, "GPU": 1}, free={"CPU": 4, "GPU": 1}) for node in hosts(4, 4, 4)]
    wanted = JobSpec(command="train", nodes="1-3", resources={"gpu": 1})
    found = decide([Waiting("range", wanted, 0.0, "ann")], nodes, rules=Rules(user_gpus=2))
    assert brief(found) == ["range on 0 1"]


def test_those_behind_a_range_get_what_it_leaves() -> None:
    line = [job("range", nodes="1-2", cpu=4), job("next", 1.0, nodes=1, cpu=4)]
    assert brief(decide(line, hosts(4, 4, 4))) == ["range on 0 1", "next on 2"]
    assert brief(decide(line, hosts(4, 4))) == ["range on 0 1", "next NO_ROOM"]


def test_a_range_that_is_filled_in_delays_nobody() -> None:
    """Node 2 is promised to the first job at 50; until then it is free."""
    first = job("first", nodes=3, exclude=["3"], cpu=4, run_s=100)
    nodes, running = hosts(0, 0, 4, 4), [runs("r", 0, 1, cpu=4, ends_by=50.0)]
    for run_s, placed in ((20, "range on 2 3"), (1000, "range on 3")):
        line = [first, job("range", 1.0, nodes="1-2", cpu=4, run_s=run_s)]
        assert brief(decide(line, nodes, running, BACKFILL)) == ["first NO_ROOM", placed]


# Choices.


def test_a_job_gets_only_nodes_that_it_may_use() -> None:
    racks = [replace(node, labels={"rack": f"r{node.name}"}) for node in hosts(4, 4, 4)]
    assert brief(decide([job("a", nodes=2, where={"rack": "in(r1,r2)"})], racks)) == ["a on 1 2"]
    assert brief(decide([job("a", nodes=2, exclude=["1"])], racks)) == ["a on 0 2"]
    assert brief(decide([job("a", node_names=["2", "10.0.0.0"])], racks)) == ["a on 0 2"]
    racks[0] = replace(racks[0], groups=frozenset({"train"}))
    assert brief(decide([job("a", node_group="train")], racks)) == ["a on 0"]
    racks[0] = replace(racks[0], offline="fan")
    assert brief(decide([job("a"), job("b", 1.0)], racks)) == ["a on 1", "b on 1"]


def test_a_wish_that_no_node_fulfils_is_infeasible_at_once() -> None:
    nodes = [
        *hosts(4, 4, traits=Traits()),
        Node("id-9", "9", "10.0.0.9", {"CPU": 4}, {"CPU": 4}, offline="fan"),
    ]
    line = [
        job("model", where={"gpu_model": "H100"}),
        job("named", 1.0, node_names=["0", "x"]),
        job("many", 2.0, nodes=3),
    ]
    found = decide(line, nodes)
    assert brief(found) == ["model INFEASIBLE", "named INFEASIBLE", "many INFEASIBLE"]
    assert why(found, "model") == (
        "infeasible now: needs 1 instance with cpu 1 on one node; "
        "3 of 3 nodes are excluded: 2 by where gpu_model, 1 offline"
    )
    assert "1 of 1 node can take one; not in the cluster: x; 2 of 3 nodes are excluded" in why(found, "named")
    assert why(found, "many").endswith(
        "each on a node of its own; 2 of 2 nodes can take one; "
        "`placement: pack` (or `--set placement=pack`) lets instances share a node; 1 of 3 nodes is excluded: 1 offline"
    )
    assert lacks(line[0], nodes) == why(found, "model") and lacks(job("fits"), nodes) is None


def test_a_node_that_has_told_nothing_yet_does_not_match_and_says_so() -> None:
    found = decide([job("a", where={"rdma": True})], hosts(4, 4))
    assert why(found, "a").endswith("2 of 2 nodes are excluded: 2 whose rdma is not known yet")


def test_no_room_counts_only_nodes_that_the_job_may_use_and_who_has_them() -> None:
    racks = [replace(node, labels={"rack": "r1" if node.name < "2" else "r2"}) for node in hosts(0, 4, 0)]
    running = [runs("mine", 0, cpu=4), runs("other", 2, cpu=4)]
    found = decide([job("a", nodes=2, cpu=4, where={"rack": "r1"})], racks, running)
    assert why(found, "a") == (
        "needs 2 instances with cpu 4 free, each on a node of its own; 1 of 2 nodes can take one; "
        "1 of 3 nodes is excluded: 1 by where rack; CPUs are held by mine (4)"
    )


def test_one_who_may_use_other_nodes_is_not_held_back_by_the_same_shape() -> None:
    racks = [replace(node, labels={"rack": f"r{node.name}"}) for node in hosts(0, 4)]
    line = [job("a", cpu=4, where={"rack": "r0"}), job("b", 1.0, cpu=4, where={"rack": "r1"})]
    assert brief(decide(line, racks)) == ["a NO_ROOM", "b on 1"]


def test_a_promise_is_of_nodes_that_the_job_may_use() -> None:
    """Node 0 is free at 10, node 1, the only one for the first job, at 100."""
    racks = [replace(node, labels={"rack": f"r{node.name}"}) for node in hosts(0, 0, 4)]
    running = [runs("soon", 0, cpu=4, ends_by=10.0), runs("late", 1, cpu=4, ends_by=100.0)]
    line = [
        job("first", cpu=4, where={"rack": "r1"}, run_s=50),
        job("fill", 1.0, cpu=4, run_s=5000),
    ]
    assert brief(decide(line, racks, running, BACKFILL)) == ["first NO_ROOM", "fill on 2"]


def test_only_those_are_stopped_whose_nodes_help() -> None:
    racks = [replace(node, labels={"rack": f"r{node.name}"}) for node in hosts(0, 0)]
    running = [
        replace(runs(name, n, cpu=4, preemptible=True, priority=8), since=float(9 - n))
        for n, name in enumerate(("young", "old"))
    ]
    found = decide([job("a", cpu=4, priority=1, where={"rack": "r1"})], racks, running)
    assert brief(found) == ["stop old for a", "a MAKING_ROOM"]


def test_what_is_known_of_a_cluster_is_forgotten_when_a_node_is_marked() -> None:
    capacity, line = Capacity(), [job("a", nodes=2)]
    assert brief(decide(line, hosts(4, 4), capacity=capacity)) == ["a on 0 1"]
    drained = [replace(node, offline="fan" if node.name == "1" else None) for node in hosts(4, 4)]
    assert brief(decide(line, drained, capacity=capacity)) == ["a INFEASIBLE"]
    assert brief(decide(line, hosts(4, 4), capacity=capacity)) == ["a on 0 1"]


# Nodes of its own.


def test_an_exclusive_job_is_placed_where_no_other_job_is() -> None:
    running = [runs("r", 0)]
    assert brief(decide([job("a", exclusive=True)], hosts(3, 4), running)) == ["a on 1"]
    found = decide([job("a", exclusive=True)], hosts(3), running)
    assert brief(found) == ["a NO_ROOM"]
    assert why(found, "a") == (
        "needs 1 instance with cpu 1 free on a node of no other job; 0 of 1 node can take one; "
        "other jobs are there: r"
    )


def test_nobody_is_placed_beside_an_exclusive_job() -> None:
    running = [runs("alone", 0, exclusive=True)]
    assert brief(decide([job("a"), job("b", 1.0, exclusive=True)], hosts(3, 4), running)) == [
        "a on 1",
        "b NO_ROOM",
    ]
    found = decide([job("a", nodes=2)], hosts(3, 4), running)
    assert why(found, "a") == (
        "needs 2 instances with cpu 1 free, each on a node of its own; 1 of 2 nodes can take one; "
        "CPUs are held by alone (1); alone has nodes alone"
    )


def test_two_exclusive_jobs_of_one_pass_get_different_nodes() -> None:
    line = [job("a", exclusive=True), job("b", 1.0, exclusive=True), job("c", 2.0)]
    assert brief(decide(line, hosts(4, 4, 4))) == ["a on 0", "b on 1", "c on 2"]


def test_a_job_with_a_limit_may_be_filled_in_before_an_exclusive_one_only_if_it_is_over_by_then() -> None:
    line = [job("alone", nodes=2, exclusive=True, run_s=10)]
    running, nodes = [runs("r", 0, cpu=1, ends_by=100.0)], hosts(3, 4)
    short, long = job("short", 1.0, run_s=50), job("long", 1.0, run_s=500)
    assert brief(decide([*line, short], nodes, running, BACKFILL)) == ["alone NO_ROOM", "short on 0"]
    assert brief(decide([*line, long], nodes, running, BACKFILL)) == ["alone NO_ROOM", "long BEHIND, 1 ahead"]


def test_what_others_use_of_ray_does_not_keep_an_exclusive_job_away() -> None:
    assert brief(decide([job("a", exclusive=True)], hosts(2))) == ["a on 0"]


# The order of ranks.


def test_neighbours_get_neighbouring_ranks() -> None:
    where = {"0": ("z", "r2"), "1": ("z", "r1"), "2": ("z", "r2"), "3": ("z", "r1")}
    nodes = [replace(node, topology=where[node.name]) for node in hosts(4, 4, 4, 4)]
    found = place(members(spec(nodes=4)), Placement.STRICT, nodes)
    assert isinstance(found, tuple)
    assert [room.node_name for room in found] == ["1", "3", "0", "2"]
    workers = place(members(spec(nodes=3)), Placement.STRICT, [nodes[0], *hosts(4, 4, 4)[1:]])
    assert isinstance(workers, tuple) and [room.node_name for room in workers] == ["1", "2", "0"]
