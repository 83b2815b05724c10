"""In which order jobs start."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from raycontrol.placement import Assignment, Node, NoRoom, place, reserve
from raycontrol.queue import KeepWaiting, PlaceNow, Waiting, decide
from raycontrol.spec import JobSpec, Placement, members


def waiting(job_id: str, submitted_at: float, nodes: int = 1, **spec: Any) -> Waiting:
    return Waiting(job_id, JobSpec(command="torchrun train.py", nodes=nodes, **spec), submitted_at)


def hosts(*free: float, cpu: float = 1) -> list[Node]:
    """Nodes named 0, 1, … of ``cpu`` CPUs, with so many of them free."""
    return [
        Node(f"id-{number}", str(number), f"10.0.0.{number}", {"CPU": cpu}, {"CPU": amount})
        for number, amount in enumerate(free)
    ]


def test_jobs_that_fit_are_placed_in_the_order_of_submission() -> None:
    jobs = [waiting("late", 3.0), waiting("first", 1.0), waiting("second", 2.0)]
    assert decide(jobs, hosts(1, 1, 1)) == [
        PlaceNow("first", (Assignment("master-0", "id-0", "0", "10.0.0.0"),)),
        PlaceNow("second", (Assignment("master-0", "id-1", "1", "10.0.0.1"),)),
        PlaceNow("late", (Assignment("master-0", "id-2", "2", "10.0.0.2"),)),
    ]


def test_jobs_of_the_same_moment_go_by_their_id() -> None:
    decisions = decide([waiting("b", 1.0), waiting("a", 1.0)], hosts(1))
    assert [(type(one).__name__, one.job_id) for one in decisions] == [
        ("PlaceNow", "a"),
        ("KeepWaiting", "b"),
    ]


def test_a_job_that_does_not_fit_yet_holds_up_those_behind_it() -> None:
    jobs = [waiting("big", 1.0, nodes=2), waiting("small", 2.0), waiting("tiny", 3.0)]
    assert decide(jobs, hosts(1, 0)) == [
        KeepWaiting(
            "big", "needs 2 instances with cpu 1 free, each on a node of its own; 1 of 2 nodes can take one"
        ),
        KeepWaiting("small", "1 ahead in the queue; the first, big, does not fit yet"),
        KeepWaiting("tiny", "2 ahead in the queue; the first, big, does not fit yet"),
    ]


def test_a_job_that_can_never_run_stands_aside() -> None:
    jobs = [waiting("huge", 1.0, nodes=3), waiting("small", 2.0)]
    huge, small = decide(jobs, hosts(1, 1))
    assert isinstance(huge, KeepWaiting) and huge.why.startswith(
        "the cluster as it is can never run it: needs 3"
    )
    assert small == PlaceNow("small", (Assignment("master-0", "id-0", "0", "10.0.0.0"),))


def test_a_job_that_stood_aside_is_first_again_when_nodes_join() -> None:
    jobs = [waiting("huge", 1.0, nodes=3), waiting("small", 2.0)]
    huge, small = decide(jobs, hosts(1, 1, 1))
    assert isinstance(huge, PlaceNow) and [room.node_name for room in huge.assignments] == ["0", "1", "2"]
    assert isinstance(small, KeepWaiting)


def test_who_is_placed_takes_from_who_comes_after() -> None:
    jobs = [waiting("a", 1.0, nodes=2, placement="pack"), waiting("b", 2.0, resources={"cpu": 3})]
    a, b = decide(jobs, hosts(4, cpu=4))
    assert isinstance(a, PlaceNow)
    assert b == KeepWaiting(
        "b", "needs 1 instance with cpu 3 free, each on a node of its own; 0 of 1 node can take one"
    )


def test_without_nodes_everybody_waits_for_one() -> None:
    decisions = decide([waiting("a", 1.0), waiting("b", 2.0)], [])
    assert decisions == [
        KeepWaiting("a", "the cluster has no living node"),
        KeepWaiting("b", "the cluster has no living node"),
    ]


def test_an_empty_queue_decides_nothing() -> None:
    assert decide([], hosts(1)) == []


jobs_in_line = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from([1.0, 2.0]), st.sampled_from(list(Placement))), max_size=6
).map(
    lambda kinds: [
        waiting(f"job-{number}", float(number), nodes=count, resources={"cpu": cpu}, placement=placement)
        for number, (count, cpu, placement) in enumerate(kinds)
    ]
)
free_cpus = st.lists(st.sampled_from([0.0, 1.0, 2.0]), max_size=4)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(jobs_in_line, free_cpus)
def test_first_in_first_out_and_never_more_than_is_free(jobs: list[Waiting], free: list[float]) -> None:
    nodes = hosts(*free, cpu=2)
    decisions = decide(jobs, nodes)
    assert [one.job_id for one in decisions] == [job.job_id for job in jobs]
    left: Any = nodes
    held_up = False
    for job, decision in zip(jobs, decisions, strict=True):
        found = place(members(job.spec), job.spec.placement, left)
        if isinstance(decision, PlaceNow):
            assert not held_up
            assert decision.assignments == found
            left = reserve(left, members(job.spec), decision.assignments)
            assert all(node.free["CPU"] >= 0 for node in left)
        else:
            assert decision.why
            assert held_up or isinstance(found, NoRoom)
            held_up = held_up or not (isinstance(found, NoRoom) and found.never)
