"""Which jobs start, which wait and why, which have to make room."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycontrol.placement import Assignment, Node, NoRoom, place, reserve
from raycontrol.promises import Outlook, Promises, Stay, stay_of
from raycontrol.queue import (
    Capacity,
    KeepWaiting,
    PlaceNow,
    Policy,
    Preempt,
    Rules,
    Running,
    Wait,
    Waiting,
    decide,
)
from raycontrol.queuejobs import held_by
from raycontrol.spec import JobSpec
from tests.simulation import Load, Simulation, check_nodes, check_pass, cluster, left_by, week

FIFO, TRAVERSE, BACKFILL = (Rules(policy) for policy in Policy)
APART = "each on a node of its own"


def spec(nodes: int = 1, gpu: float = 8, cpu: float = 1, run_s: float | None = None, **more: Any) -> JobSpec:
    timeouts = {"run_s": run_s} if run_s is not None else {}
    return JobSpec(
        command="train", nodes=nodes, resources={"gpu": gpu, "cpu": cpu}, timeouts=timeouts, **more
    )


def job(job_id: str, at: float = 0.0, user: str = "ann", held: str | None = None, **more: Any) -> Waiting:
    """A waiting job, of one instance with 8 GPUs unless more is said."""
    return Waiting(job_id, spec(**more), at, user, held)


def hosts(*free: float, gpus: float = 8) -> list[Node]:
    """Nodes 0, 1, … of 8 GPUs, with so many of them free, and nearly all CPUs."""
    return [
        Node(f"id-{n}", str(n), f"10.0.0.{n}", {"CPU": 64, "GPU": gpus}, {"CPU": 56, "GPU": amount})
        for n, amount in enumerate(free)
    ]


def on(*names: int) -> tuple[Assignment, ...]:
    """The nodes of an instance each."""
    return tuple(
        Assignment("master-0" if k == 0 else f"worker-{k - 1}", f"id-{n}", str(n), f"10.0.0.{n}")
        for k, n in enumerate(names)
    )


def runs(
    job_id: str,
    *names: int,
    since: float = 0.0,
    ends_by: float | None = None,
    stopping: bool = False,
    user: str = "bob",
    **more: Any,
) -> Running:
    """A job that has these nodes, with 8 GPUs on each unless more is said."""
    return Running(job_id, spec(nodes=len(names), **more), user, on(*names), since, ends_by, stopping)


def brief(decisions: Sequence[object]) -> list[str]:
    """One line for each decision, without reasons."""
    lines = []
    for one in decisions:
        match one:
            case PlaceNow(job_id, rooms):
                lines.append(f"{job_id} on {' '.join(room.node_name for room in rooms)}")
            case KeepWaiting(job_id, kind, _, ahead):
                lines.append(f"{job_id} {kind}" + (f", {ahead} ahead" if ahead else ""))
            case Preempt(job_id, for_job):
                lines.append(f"stop {job_id} for {for_job}")
    return lines


def why(decisions: Sequence[object], job_id: str) -> str:
    (found,) = [one.why for one in decisions if isinstance(one, KeepWaiting) and one.job_id == job_id]
    return found


# The order of the queue.


def test_jobs_that_fit_are_placed_in_the_order_of_submission() -> None:
    line = [job("late", 3.0), job("first", 1.0), job("second", 2.0)]
    assert decide(line, hosts(8, 8, 8)) == [
        PlaceNow("first", on(0)),
        PlaceNow("second", on(1)),
        PlaceNow("late", on(2)),
    ]


def test_a_higher_priority_comes_first_whenever_it_was_submitted() -> None:
    line = [job("low", 1.0, priority=9), job("middle", 2.0), job("high", 3.0, priority=0)]
    assert brief(decide(line, hosts(8, 8, 0))) == ["high on 0", "middle on 1", "low NO_ROOM"]


def test_jobs_of_the_same_moment_go_by_their_id() -> None:
    assert brief(decide([job("b"), job("a")], hosts(8))) == ["a on 0", "b NO_ROOM"]


def test_an_empty_queue_decides_nothing() -> None:
    assert decide([], hosts(8)) == []


def test_who_is_placed_takes_from_who_comes_after() -> None:
    line = [job("a", 1.0, nodes=2, gpu=3, placement="pack"), job("b", 2.0, gpu=4)]
    assert brief(decide(line, hosts(8))) == ["a on 0 0", "b NO_ROOM"]


def test_shares_of_a_gpu_are_placed_until_no_gpu_has_so_much_left() -> None:
    line = [job(name, gpu=0.6) for name in "abc"]
    assert brief(decide(line, hosts(2, gpus=2))) == ["a on 0", "b on 0", "c NO_ROOM"]
    assert brief(decide([*line, job("d", gpu=0.4)], hosts(2, gpus=2))) == [
        "a on 0",
        "b on 0",
        "c NO_ROOM",
        "d on 0",
    ]


# The policies.


@pytest.mark.parametrize(
    ("rules", "small", "lower"),
    [
        (FIFO, "small BEHIND, 1 ahead", "lower BEHIND, 2 ahead"),
        (TRAVERSE, "small on 0", "lower BEHIND, 1 ahead"),
        (BACKFILL, "small BEHIND, 1 ahead", "lower BEHIND, 2 ahead"),
    ],
)
def test_behind_a_job_that_does_not_fit_yet(rules: Rules, small: str, lower: str) -> None:
    """fifo: nothing overtakes; traverse: smaller ones of its own priority pass; backfill: not without a limit."""
    line = [job("big", 1.0, nodes=2), job("small", 2.0), job("lower", 0.0, priority=6)]
    running = [runs("old", 1)]
    assert brief(decide(line, hosts(8, 0), running, rules)) == ["big NO_ROOM", small, lower]


def test_backfill_starts_what_is_over_before_the_first_can_start() -> None:
    line = [job("big", 1.0, nodes=2), job("short", 2.0, run_s=100), job("long", 3.0, run_s=101)]
    running = [runs("old", 1, ends_by=100.0)]
    assert brief(decide(line, hosts(8, 0), running, BACKFILL)) == [
        "big NO_ROOM",
        "short on 0",
        "long NO_ROOM, 1 ahead",
    ]
    assert brief(decide([line[0], line[2]], hosts(8, 0), running, BACKFILL)) == [
        "big NO_ROOM",
        "long BEHIND, 1 ahead",
    ]


def test_backfill_starts_what_is_on_nodes_that_nobody_ahead_needs() -> None:
    """big gets node 2, as soon as old has ended, and one of the others: the longest job may have the third."""
    line = [
        job("big", 1.0, nodes=2),
        job("long", 2.0, gpu=4, run_s=9e9),
        job("longer", 3.0, gpu=5, run_s=9e9),
    ]
    running = [runs("old", 2, ends_by=100.0)]
    nodes = hosts(8, 4, 0)
    assert brief(decide(line, nodes, running, BACKFILL)) == [
        "big NO_ROOM",
        "long on 1",
        "longer BEHIND, 1 ahead",
    ]


def test_backfill_keeps_the_promise_to_the_second_as_well() -> None:
    """first gets node 1 at 100, second node 0 and node 1 when first is over: at 300."""
    line = [
        job("first", 1.0, nodes=2, run_s=200),
        job("second", 2.0, nodes=3, run_s=50),
        job("short", 3.0, gpu=8, run_s=300),
        job("long", 4.0, gpu=8, run_s=301),
    ]
    running = [runs("old", 1, ends_by=100.0), runs("other", 2, ends_by=100.0)]
    assert brief(decide(line, hosts(8, 0, 0, 0, 8), [*running, runs("third", 3, ends_by=150.0)], BACKFILL))[
        0
    ] == ("first on 0 4")
    decisions = decide(line, hosts(8, 0, 0), running, BACKFILL)
    assert brief(decisions) == [
        "first NO_ROOM",
        "second NO_ROOM, 1 ahead",
        "short BEHIND, 2 ahead",
        "long BEHIND, 3 ahead",
    ]


def test_behind_a_job_without_a_limit_that_runs_nodes_are_kept_as_if_it_had_ended() -> None:
    """old may end at any moment: what big needs is node 1 and either of the others."""
    line = [job("big", 1.0, nodes=2), job("short", 2.0, run_s=1), job("small", 3.0, gpu=4, run_s=1)]
    running = [runs("old", 1), runs("half", 2, gpu=4)]
    assert brief(decide(line, hosts(8, 0, 4), running, BACKFILL)) == [
        "big NO_ROOM",
        "short BEHIND, 1 ahead",
        "small on 2",
    ]


def test_of_the_nodes_that_are_kept_those_that_are_free_already_are_the_first() -> None:
    line = [job("big", 1.0, nodes=2), job("short", 2.0, run_s=1)]
    running = [runs("one", 0), runs("two", 1)]
    nodes = [*hosts(0, 0), cluster(3)[2]]
    assert brief(decide(line, nodes, running, BACKFILL)) == ["big NO_ROOM", "short BEHIND, 1 ahead"]


def test_what_a_stopping_job_holds_counts_once() -> None:
    """big gets node 0 when gone has stopped, and at 100 node 1."""
    line = [
        job("big", 1.0, nodes=2, placement="pack"),
        job("long", 2.0, gpu=2, run_s=101),
        job("short", 3.0, gpu=2, run_s=100),
    ]
    running = [runs("gone", 0, ends_by=50.0, stopping=True), runs("old", 1, gpu=6, ends_by=100.0)]
    assert brief(decide(line, hosts(0, 2), running, BACKFILL)) == [
        "big NO_ROOM",
        "long BEHIND, 1 ahead",
        "short on 1",
    ]


def test_a_job_with_a_limit_that_does_not_run_yet_is_over_by_its_limit_from_now() -> None:
    """new is being prepared: big gets its node, not that of old, which is not over before 1000."""
    running = [runs("new", 1, run_s=100), runs("old", 2, ends_by=1000.0)]
    for run_s, filled_in in ((100, "small on 0"), (101, "small BEHIND, 1 ahead")):
        line = [job("big", 1.0, nodes=2), job("small", 2.0, run_s=run_s)]
        assert brief(decide(line, hosts(8, 0, 0), running, BACKFILL, now=60.0)) == ["big NO_ROOM", filled_in]


def test_a_sure_start_is_enough_even_if_a_job_without_a_limit_could_end_before() -> None:
    line = [job("big", 1.0, nodes=2), job("short", 2.0, run_s=100)]
    running = [runs("old", 1), runs("limited", 2, ends_by=100.0)]
    assert brief(decide(line, hosts(8, 0, 0), running, BACKFILL)) == ["big NO_ROOM", "short on 0"]


def test_a_job_past_its_limit_may_end_at_any_moment() -> None:
    line = [job("big", 1.0, nodes=2), job("short", 2.0, run_s=1)]
    running = [runs("old", 1, ends_by=50.0)]
    assert brief(decide(line, hosts(8, 0), running, BACKFILL, now=60.0)) == [
        "big NO_ROOM",
        "short BEHIND, 1 ahead",
    ]


def test_jobs_that_are_placed_in_this_very_pass_count_with_their_limits() -> None:
    line = [
        job("now", 1.0, run_s=100),
        job("big", 2.0, nodes=2),
        job("short", 3.0, run_s=100),
        job("long", 4.0, run_s=101),
    ]
    assert brief(decide(line, hosts(8, 8))) == [
        "now on 0",
        "big NO_ROOM",
        "short on 1",
        "long NO_ROOM, 1 ahead",
    ]
    assert brief(decide(line, hosts(8, 8), (), BACKFILL)) == [
        "now on 0",
        "big NO_ROOM",
        "short on 1",
        "long NO_ROOM, 1 ahead",
    ]
    assert brief(decide([*line[:2], line[3]], hosts(8, 8), (), BACKFILL))[-1] == "long BEHIND, 1 ahead"


def test_what_programs_outside_raycontrol_hold_may_become_free_at_any_moment() -> None:
    """None of our jobs runs: node 0 is kept for big, and node 1, as if it were free."""
    line = [job("big", 1.0, nodes=2), job("short", 2.0, run_s=1), job("half", 3.0, gpu=4, run_s=9e9)]
    decisions = decide(line, hosts(8, 0, 4), (), BACKFILL)
    assert brief(decisions) == ["big NO_ROOM", "short BEHIND, 1 ahead", "half on 2"]
    assert why(decisions, "big").endswith("GPUs are held by programs outside raycontrol (12)")


def test_what_a_job_has_had_until_just_now_is_not_said_to_be_held_by_programs_outside() -> None:
    """Ray's figures tell a moment later that nodes are free again."""
    line = [job("big", 1.0, nodes=2)]
    decisions = decide(line, hosts(8, 0), left=[runs("old", 1)])
    assert why(decisions, "big").endswith("GPUs are held by jobs that have just left (8)")
    decisions = decide(line, hosts(4, 0), left=[runs("old", 1)])
    assert why(decisions, "big").endswith(
        "GPUs are held by programs outside raycontrol (4), jobs that have just left (8)"
    )


def test_the_same_head_twice_does_not_forbid_all_filling_in() -> None:
    """Two jobs want the whole cluster, one after the other, and nobody knows how long they take."""
    line = [job("one", 1.0, nodes=2), job("two", 2.0, nodes=2), job("short", 3.0, run_s=100)]
    running = [runs("old", 1, ends_by=100.0)]
    assert brief(decide(line, hosts(8, 0), running, BACKFILL))[-1] == "short on 0"


# Who stands aside.


def test_a_job_that_the_cluster_as_it_is_could_never_run_says_so_and_blocks_nobody() -> None:
    line = [job("huge", 1.0, nodes=4), job("small", 2.0)]
    huge, small = decide(line, hosts(8, 8), (), FIFO)
    assert huge == KeepWaiting(
        "huge",
        Wait.INFEASIBLE,
        f"infeasible now: needs 4 instances with cpu 1, gpu 8, {APART}; 2 of 2 nodes can take one",
    )
    assert small == PlaceNow("small", on(0))


def test_it_is_back_at_its_old_place_when_nodes_join() -> None:
    capacity = Capacity()
    line = [job("huge", 1.0, nodes=3), job("small", 2.0)]
    assert brief(decide(line, hosts(8, 8), (), FIFO, capacity=capacity)) == ["huge INFEASIBLE", "small on 0"]
    assert brief(decide(line, hosts(8, 8, 0), (), FIFO, capacity=capacity)) == [
        "huge NO_ROOM",
        "small BEHIND, 1 ahead",
    ]
    assert brief(decide(line, hosts(8, 8, 8), (), FIFO, capacity=capacity)) == [
        "huge on 0 1 2",
        "small NO_ROOM",
    ]


@pytest.mark.parametrize("policy", Policy)
def test_without_nodes_everybody_waits_for_one(policy: Policy) -> None:
    assert decide([job("a", 1.0), job("b", 2.0, run_s=5)], [], (), Rules(policy)) == [
        KeepWaiting("a", Wait.INFEASIBLE, "the cluster has no living node"),
        KeepWaiting("b", Wait.INFEASIBLE, "the cluster has no living node"),
    ]


def test_a_job_avoids_nodes_where_the_cluster_can_do_without_them() -> None:
    wary = replace(job("wary", nodes=2), avoided=frozenset({"id-0"}))
    assert decide([wary], hosts(8, 8, 8)) == [PlaceNow("wary", on(1, 2))]
    (waits,) = decide([wary], hosts(8, 8, 0))
    assert isinstance(waits, KeepWaiting) and waits.kind is Wait.NO_ROOM
    assert decide([wary], hosts(8, 8)) == [PlaceNow("wary", on(0, 1))]


def test_a_job_that_avoids_nodes_says_nothing_about_others_of_its_shape() -> None:
    wary = replace(job("a-wary", nodes=2), avoided=frozenset({"id-0"}))
    waits, placed = decide([wary, job("b", nodes=2, at=1)], hosts(8, 8, 0, 0))
    assert isinstance(waits, KeepWaiting)
    assert placed == PlaceNow("b", on(0, 1))


def test_what_a_job_avoids_is_not_promised_to_it() -> None:
    """Else others are filled in for ever on the nodes that it could start on."""
    wary = replace(job("wary", 1.0), avoided=frozenset({"id-0"}))
    filler = job("filler", 2.0, gpu=4, run_s=86_400)
    old = runs("old", 1, gpu=4, ends_by=10.0)
    assert brief(decide([wary, filler], hosts(8, 4), [old], BACKFILL)) == ["wary NO_ROOM", "filler on 0"]


def test_why_a_job_waits_does_not_count_nodes_that_it_avoids() -> None:
    wary = replace(job("wary"), avoided=frozenset({"id-0"}))
    assert why(decide([wary], hosts(8, 0), [runs("old", 1)]), "wary") == (
        "needs 1 instance with cpu 1, gpu 8 free on one node; 0 of 1 node can take one; "
        "avoids 0, where an attempt was lost; GPUs are held by old (8)"
    )


def test_a_job_that_is_held_stands_aside() -> None:
    line = [job("kept", 1.0, held="held by ann"), job("next", 2.0)]
    assert decide(line, hosts(8), (), FIFO) == [
        KeepWaiting("kept", Wait.HELD, "held by ann"),
        PlaceNow("next", on(0)),
    ]


# Limits.


def test_a_job_that_its_users_limit_holds_back_blocks_nobody() -> None:
    line = [job("second", 1.0, user="ann"), job("third", 2.0, user="eve")]
    decisions = decide(line, hosts(0, 8), [runs("first", 0, user="ann")], Rules(Policy.FIFO, user_jobs=1))
    assert decisions == [
        KeepWaiting("second", Wait.USER_LIMIT, "ann has 1 job with nodes, and may have 1"),
        PlaceNow("third", on(1)),
    ]


def test_a_users_limit_on_gpus_lets_jobs_without_gpus_and_smaller_ones_through() -> None:
    rules = Rules(user_gpus=10)
    line = [job("big", 1.0), job("small", 2.0, gpu=2), job("none", 3.0, gpu=0)]
    decisions = decide(line, hosts(0, 8), [runs("first", 0, user="ann")], rules)
    assert brief(decisions) == ["big USER_LIMIT", "small on 1", "none on 0"]
    assert why(decisions, "big") == "needs 8 GPUs; ann has 8 and may have 10"


def test_shares_of_gpus_add_up_to_a_limit() -> None:
    line = [job(f"job-{number}", number, gpu=0.1) for number in range(11)]
    assert brief(decide(line, hosts(8), (), Rules(user_gpus=1)))[9:] == ["job-9 on 0", "job-10 USER_LIMIT"]


def test_a_limit_of_all_jobs_blocks_until_one_ends() -> None:
    rules = Rules(Policy.FIFO, all_gpus=12)
    line = [job("big", 1.0), job("small", 2.0, gpu=2)]
    decisions = decide(line, hosts(0, 8), [runs("first", 0)], rules)
    assert brief(decisions) == ["big LIMIT", "small BEHIND, 1 ahead"]
    assert why(decisions, "big") == "needs 8 GPUs; all jobs have 8 and may have 12"
    decisions = decide(line, hosts(0, 8), [runs("first", 0)], Rules(Policy.FIFO, all_jobs=1))
    assert why(decisions, "big") == "1 job of all users have nodes, and 1 may"


def test_a_limit_that_no_end_of_a_job_could_satisfy_blocks_nobody() -> None:
    for rules, reason in (
        (Rules(Policy.FIFO, all_gpus=12), "infeasible now: needs 16 GPUs; all jobs together may have 12"),
        (Rules(Policy.FIFO, user_gpus=12), "infeasible now: needs 16 GPUs; ann may have 12"),
    ):
        decisions = decide([job("big", 1.0, nodes=2), job("small", 2.0)], hosts(8, 8), (), rules)
        assert brief(decisions) == ["big INFEASIBLE", "small on 0"]
        assert why(decisions, "big") == reason


def test_backfill_keeps_what_the_limits_allow_for_who_is_promised_it() -> None:
    """At 100 big may have the 8 GPUs that old has: nobody may have them for longer."""
    rules = Rules(Policy.BACKFILL, all_gpus=12)
    line = [job("big", 1.0), job("short", 2.0, gpu=4, run_s=100), job("long", 3.0, gpu=4, run_s=101)]
    running = [runs("old", 0, ends_by=100.0)]
    assert brief(decide(line, hosts(0, 8, 8), running, rules)) == [
        "big LIMIT",
        "short on 1",
        "long LIMIT, 1 ahead",
    ]
    four = job("four", 4.0, gpu=4, run_s=9e9)
    assert brief(decide([line[0], four], hosts(0, 8, 8), running, rules)) == ["big LIMIT", "four on 2"]
    five = job("five", 4.0, gpu=4.0, run_s=9e9)
    tight = Rules(Policy.BACKFILL, all_gpus=11)
    assert brief(decide([line[0], five], hosts(0, 8, 8), running, tight)) == [
        "big LIMIT",
        "five LIMIT, 1 ahead",
    ]


def test_what_fits_now_may_be_too_much_for_the_limits_when_a_promised_job_starts() -> None:
    """At 100 big will have 8 GPUs."""
    line = [job("big", 1.0), job("long", 2.0, gpu=4, run_s=101), job("short", 3.0, gpu=4, run_s=100)]
    running = [runs("old", 0, gpu=4, ends_by=100.0)]
    nodes = hosts(4, 4)
    assert brief(decide(line, nodes, running, Rules(Policy.BACKFILL, all_gpus=12)))[1] == "long on 1"
    tight = Rules(Policy.BACKFILL, all_gpus=11)
    assert brief(decide(line, nodes, running, tight)) == ["big LIMIT", "long BEHIND, 1 ahead", "short on 0"]
    hers = Rules(Policy.BACKFILL, user_jobs=1)
    assert brief(decide(line[:2], nodes, running, hers)) == ["big NO_ROOM", "long BEHIND, 1 ahead"]
    other = job("long", 2.0, user="eve", gpu=4, run_s=101)
    assert brief(decide([line[0], other], nodes, running, hers)) == ["big NO_ROOM", "long on 1"]


# Making room.


def test_a_preemptible_job_makes_room_for_one_of_higher_priority() -> None:
    running = [runs("low", 0, priority=6, preemptible=True)]
    assert decide([job("high")], hosts(0), running) == [
        Preempt("low", "high"),
        KeepWaiting("high", Wait.MAKING_ROOM, "waits until low has stopped"),
    ]


@pytest.mark.parametrize(
    "low",
    [
        runs("low", 0, priority=5, preemptible=True),
        runs("low", 0, priority=4, preemptible=True),
        runs("low", 0, priority=6),
    ],
)
def test_not_for_one_of_its_own_or_a_lower_priority_and_not_unless_it_is_marked(low: Running) -> None:
    assert brief(decide([job("high")], hosts(0), [low])) == ["high NO_ROOM"]


def test_not_if_it_would_not_help_and_not_if_there_is_room() -> None:
    low = runs("low", 0, priority=6, preemptible=True)
    assert brief(decide([job("high", nodes=2)], hosts(0, 0), [low, runs("other", 1)])) == ["high NO_ROOM"]
    assert brief(decide([job("high")], hosts(0, 8), [low])) == ["high on 1"]


def test_the_fewest_have_to_go_and_of_these_the_youngest() -> None:
    def low(name: str, *nodes: int, since: float, **more: Any) -> Running:
        return runs(name, *nodes, since=since, priority=6, preemptible=True, **more)

    running = [
        low("young-a", 0, since=9.0, gpu=4),
        low("young-b", 0, since=8.0, gpu=4),
        low("old", 1, since=1.0),
        low("older", 2, since=0.0),
    ]
    nodes = hosts(0, 0, 0)
    assert brief(decide([job("high")], nodes, running))[:-1] == ["stop old for high"]
    assert brief(decide([job("half", gpu=4)], nodes, running))[:-1] == ["stop young-a for half"]
    assert brief(decide([job("two", nodes=2)], nodes, running))[:-1] == [
        "stop old for two",
        "stop older for two",
    ]
    wide = [low("narrow-a", 0, since=9.0), low("narrow-b", 1, since=8.0), low("wide", 2, 3, since=1.0)]
    assert brief(decide([job("two", nodes=2)], hosts(0, 0, 0, 0), wide))[:-1] == ["stop wide for two"]


def test_of_very_many_sets_one_is_taken_of_which_nobody_can_be_spared() -> None:
    running = [
        runs(f"low-{number:02}", number // 8, gpu=1, since=float(number), priority=6, preemptible=True)
        for number in range(48)
    ]
    decisions = decide([job("high", nodes=5)], hosts(0, 0, 0, 0, 0, 0), running)
    victims = [one.job_id for one in decisions if isinstance(one, Preempt)]
    assert victims == [f"low-{number:02}" for number in range(47, 7, -1)]


def test_one_that_is_stopping_already_is_waited_for_not_stopped_again() -> None:
    running = [
        runs("gone", 0, priority=6, preemptible=True, stopping=True),
        runs("low", 1, priority=6, preemptible=True),
    ]
    assert decide([job("high")], hosts(0, 0), running) == [
        KeepWaiting("high", Wait.MAKING_ROOM, "waits until gone has stopped")
    ]
    assert brief(decide([job("wide", nodes=2)], hosts(0, 0), running)) == [
        "stop low for wide",
        "wide MAKING_ROOM",
    ]


def test_nobody_takes_what_is_becoming_free_for_another() -> None:
    """Under traverse small would pass: but node 1 is free for wide, which will have node 0 as well."""
    running = [runs("low", 0, priority=6, preemptible=True, stopping=True)]
    line = [job("wide", 1.0, nodes=2), job("small", 2.0)]
    decisions = decide(line, hosts(0, 8), running)
    assert brief(decisions) == ["wide MAKING_ROOM", "small NO_ROOM, 1 ahead"]
    assert why(decisions, "small").endswith("; what wide waits for is kept")
    assert brief(decide(line, hosts(0, 8, 8), running)) == ["wide on 1 2", "small MAKING_ROOM"]


def test_two_that_want_room_do_not_count_on_the_same_job_to_go() -> None:
    running = [
        runs("low-a", 0, since=1.0, priority=6, preemptible=True),
        runs("low-b", 1, since=2.0, priority=6, preemptible=True),
    ]
    for rules in (FIFO, TRAVERSE, BACKFILL):
        assert brief(decide([job("a", 1.0), job("b", 2.0), job("c", 3.0)], hosts(0, 0), running, rules))[
            :-1
        ] == [
            "stop low-b for a",
            "a MAKING_ROOM",
            "stop low-a for b",
            "b MAKING_ROOM, 1 ahead",
        ]


def test_who_may_not_pass_the_first_has_nobody_stopped_for_it() -> None:
    line = [job("big", 1.0, nodes=2), job("small", 2.0)]
    running = [runs("ours", 0), runs("low", 1, priority=6, preemptible=True)]
    assert brief(decide(line, hosts(0, 0), running, FIFO)) == ["big NO_ROOM", "small BEHIND, 1 ahead"]
    assert brief(decide(line, hosts(0, 0), running, TRAVERSE)) == [
        "big NO_ROOM",
        "stop low for small",
        "small MAKING_ROOM, 1 ahead",
    ]


def test_room_is_made_within_the_limits_of_all_too() -> None:
    running = [runs("low", 0, priority=6, preemptible=True)]
    assert brief(decide([job("high")], hosts(0, 8), running, Rules(all_jobs=1))) == [
        "stop low for high",
        "high MAKING_ROOM",
    ]
    stopping = [runs("low", 0, stopping=True)]
    decisions = decide([job("high")], hosts(0, 8), stopping, Rules(all_jobs=1))
    assert why(decisions, "high") == "waits until low has stopped"


def test_who_waits_for_a_node_that_no_limit_denies_waits_for_nobody_else_to_stop() -> None:
    running = [runs("near", 0, stopping=True), runs("far", 1, stopping=True)]
    for all_jobs, awaited in ((3, "near has stopped"), (2, "near, far have stopped")):
        decisions = decide([job("high")], hosts(0, 0), running, Rules(all_jobs=all_jobs))
        assert why(decisions, "high") == f"waits until {awaited}"


def test_who_waits_for_room_counts_towards_its_users_limit() -> None:
    """Otherwise small would start, and leave high nothing to start with when low has gone."""
    running = [runs("low", 0, priority=6, preemptible=True)]
    line = [job("high", 1.0), job("small", 2.0, gpu=1)]
    assert brief(decide(line, hosts(0, 4), running, Rules(user_jobs=1))) == [
        "stop low for high",
        "high MAKING_ROOM",
        "small USER_LIMIT",
    ]


# Reasons.


def test_a_reason_says_what_is_missing_how_many_nodes_fit_and_who_has_the_rest() -> None:
    running = [runs("big", 0, 1), runs("half", 2, gpu=4), *(runs(f"one-{n}", 3, gpu=1) for n in range(4))]
    assert decide([job("job", nodes=2)], hosts(0, 0, 4, 4, 8), running) == [
        KeepWaiting(
            "job",
            Wait.NO_ROOM,
            f"needs 2 instances with cpu 1, gpu 8 free, {APART}; 1 of 5 nodes can take one; "
            "GPUs are held by big (16), half (4), one-0 (1) and 3 more",
        )
    ]


def test_the_resource_that_is_named_is_the_scarcest() -> None:
    busy = Node("id-0", "0", "10.0.0.0", {"CPU": 64, "GPU": 8}, {"CPU": 4, "GPU": 7})
    running = [runs("greedy", 0, gpu=1, cpu=60)]
    assert why(decide([job("job", gpu=1, cpu=8)], [busy], running), "job").endswith(
        "CPUs are held by greedy (60)"
    )
    full = Node("id-0", "0", "10.0.0.0", {"CPU": 64, "memory": 2.0**34}, {"CPU": 63, "memory": 2.0**30})
    hungry = Running("hungry", JobSpec(command="x", resources={"memory": 15 * 2**30}), "bob", on(0), 0.0)
    thirsty = Waiting("job", JobSpec(command="x", resources={"memory": 2**31}), 0.0)
    assert why(decide([thirsty], [full], [hungry]), "job").endswith("memory is held by hungry (15 GiB)")


def test_reasons_of_those_who_wait_behind_another() -> None:
    line = [job("big", 1.0, nodes=2), job("long", 2.0, run_s=9e9), job("free", 3.0)]
    running = [runs("old", 1, ends_by=10.0)]
    decisions = decide(line, hosts(8, 0), running, BACKFILL)
    assert (
        why(decisions, "long") == "big is before it; who is ahead could start later if this one started now"
    )
    assert why(decisions, "free") == "big is before it; only a job with `timeouts.run_s` can be filled in"
    assert why(decide(line, hosts(8, 0), running, FIFO), "free") == "big is before it and does not fit yet"


def test_behind_many_that_do_not_fit_nothing_is_filled_in() -> None:
    line = [job(f"big-{number:02}", number, nodes=2) for number in range(17)] + [job("short", 99, run_s=1)]
    decisions = decide(line, hosts(8, 0), [runs("old", 1, ends_by=10.0)], BACKFILL)
    assert why(decisions, "short") == (
        "big-00 is before it; behind 16 jobs that do not fit yet nothing is filled in"
    )


# For every queue and cluster.

POLICIES = st.sampled_from([Rules(policy) for policy in Policy])
GPUS = st.sampled_from([0.5, 1.0, 4.0, 8.0])


@st.composite
def lines(draw: st.DrawFn) -> list[Waiting]:
    line = []
    for number in range(draw(st.integers(1, 7))):
        gpu, nodes, cpu = draw(GPUS), draw(st.integers(1, 3)), draw(st.sampled_from([1, 20]))
        run_s = draw(st.sampled_from([None, 50.0, 100.0, 400.0]))
        placement = draw(st.sampled_from(["strict", "pack"]))
        priority = draw(st.integers(3, 5))
        user = draw(st.sampled_from(["ann", "eve"]))
        held = draw(st.sampled_from([None, None, None, "held"]))
        line.append(
            job(
                f"job-{number}", float(number), user, held,
                nodes=nodes, gpu=gpu, cpu=cpu, run_s=run_s, placement=placement, priority=priority,
            )
        )  # fmt: skip
    return line


@st.composite
def situations(draw: st.DrawFn, limited: bool = False) -> tuple[list[Node], list[Running]]:
    """Nodes, and jobs that were placed on them one after the other; some GPUs nobody of ours has."""
    empty = cluster(draw(st.integers(0, 4)))
    nodes: Sequence[Node] = empty
    running = []
    for number in range(draw(st.integers(0, 6))):
        wanted = spec(
            nodes=draw(st.integers(1, 2)),
            gpu=draw(GPUS),
            priority=draw(st.integers(3, 7)),
            preemptible=draw(st.booleans()),
        )
        item = Waiting(f"old-{number}", wanted, 0.0)
        rooms = place(item.gang, wanted.placement, nodes)
        if isinstance(rooms, NoRoom):
            continue
        nodes = reserve(nodes, item.gang, rooms)
        ends_by = draw(st.sampled_from([30.0, 60.0, 200.0] if limited else [None, 30.0, 60.0, 200.0]))
        since = draw(st.sampled_from([-1.0, -2.0]))
        stopping = draw(st.sampled_from([False, False, True])) and not limited
        running.append(Running(item.job_id, wanted, "bob", rooms, since, ends_by, stopping))
    return empty, running


@settings(max_examples=150, deadline=None, derandomize=True)
@given(lines(), situations(), POLICIES)
def test_gangs_are_placed_whole_within_what_is_free_and_as_the_policy_says(
    line: list[Waiting], situation: tuple[list[Node], list[Running]], rules: Rules
) -> None:
    empty, running = situation
    decisions = decide(line, left_by(empty, running), running, rules)
    check_pass(sorted(line, key=lambda item: item.turn), decisions, rules.policy)
    by_id = {item.job_id: item for item in line}
    placed = [one for one in decisions if isinstance(one, PlaceNow)]
    for one in placed:
        item = by_id[one.job_id]
        assert [room.instance for room in one.assignments] == [member.name for member in item.gang]
        assert (
            len({room.node_id for room in one.assignments}) == len(item.gang) or item.spec.placement == "pack"
        )
    started = [Running(one.job_id, by_id[one.job_id].spec, "", one.assignments, 0.0) for one in placed]
    check_nodes(empty, [*running, *started])


LIMITED = st.builds(
    Rules,
    st.sampled_from(Policy),
    user_jobs=st.sampled_from([None, 2]),
    user_gpus=st.sampled_from([None, 8.0]),
    all_jobs=st.sampled_from([None, 4]),
    all_gpus=st.sampled_from([None, 16.0]),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(lines(), situations(), LIMITED)
def test_jobs_that_are_alike_get_the_answers_that_they_would_get_if_each_were_unlike_all_others(
    line: list[Waiting], situation: tuple[list[Node], list[Running]], rules: Rules
) -> None:
    """Who avoids a node that is not there wants the same as before, and is like nobody."""
    empty, running = situation
    many = [
        replace(item, job_id=f"{item.job_id}-{number}", submitted_at=item.submitted_at + number / 2)
        for item in line
        for number in range(6)
    ]
    unlike = [replace(item, avoided=frozenset({item.job_id})) for item in many]
    nodes = left_by(empty, running)
    assert decide(many, nodes, running, rules) == decide(unlike, nodes, running, rules)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(lines(), situations(), POLICIES)
def test_a_job_waits_only_if_it_does_not_fit_or_may_not_pass(
    line: list[Waiting], situation: tuple[list[Node], list[Running]], rules: Rules
) -> None:
    """The first that waits does not fit into what those before it have left."""
    empty, running = situation
    nodes: Sequence[Node] = left_by(empty, running)
    decisions = [one for one in decide(line, nodes, running, rules) if not isinstance(one, Preempt)]
    for item, one in zip(sorted(line, key=lambda item: item.turn), decisions, strict=True):
        found = place(item.gang, item.spec.placement, nodes)
        if isinstance(one, PlaceNow):
            assert one.assignments == found
            nodes = reserve(nodes, item.gang, one.assignments)
        elif one.kind is Wait.INFEASIBLE:
            assert isinstance(found, NoRoom) and found.never
        elif one.kind is not Wait.HELD:
            assert isinstance(found, NoRoom) and not found.never
            break


@settings(max_examples=150, deadline=None, derandomize=True)
@given(lines(), situations(), POLICIES)
def test_victims_are_as_few_as_can_be_of_lower_priority_and_marked(
    line: list[Waiting], situation: tuple[list[Node], list[Running]], rules: Rules
) -> None:
    empty, running = situation
    decisions = decide(line, left_by(empty, running), running, rules)
    named = [one for one in decisions if isinstance(one, Preempt)]
    assert len({one.job_id for one in named}) == len(named)
    if not named:
        return
    by_id = {one.job_id: one for one in running}
    (item,) = [item for item in line if item.job_id == named[0].for_job]
    victims = [by_id[one.job_id] for one in named if one.for_job == item.job_id]
    for victim in victims:
        assert victim.spec.preemptible and victim.spec.priority > item.spec.priority and not victim.stopping
    # The first that others have to make room for finds what those before it have left.
    ids = [one.job_id for one in decisions]
    before = [one for one in decisions[: ids.index(victims[0].job_id)] if isinstance(one, PlaceNow)]
    gangs = {other.job_id: other.gang for other in line}
    if any(
        isinstance(one, KeepWaiting) and one.kind is Wait.MAKING_ROOM
        for one in decisions[: ids.index(victims[0].job_id)]
    ):
        return

    def fits_without(gone: Sequence[Running]) -> bool:
        staying = [one for one in running if not one.stopping and one not in gone]
        nodes: Sequence[Node] = left_by(empty, staying)
        for one in before:
            nodes = reserve(nodes, gangs[one.job_id], one.assignments)
        return not isinstance(place(item.gang, item.spec.placement, nodes), NoRoom)

    assert fits_without(victims)
    for fewer in range(len(victims)):
        assert not any(fits_without(some) for some in itertools.combinations(victims, fewer))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(lines(), situations(limited=True))
def test_the_first_of_the_line_starts_no_later_than_the_limits_of_those_that_run_say(
    line: list[Waiting], situation: tuple[list[Node], list[Running]]
) -> None:
    """Backfill, every job taking as long as it may: what is filled in is never in the way of the first."""
    empty, running = situation
    strict = [item for item in line if item.spec.placement == "strict" and item.held is None]
    loads = [Load(item, item.spec.timeouts.run_s or 500.0) for item in strict]
    simulated = Simulation(empty, loads, BACKFILL)
    simulated.begin_with(running)
    simulated.run()
    assert simulated.late == []


@settings(max_examples=150, deadline=None, derandomize=True)
@given(lines(), situations(limited=True))
def test_what_is_filled_in_leaves_everybody_ahead_what_is_promised(
    line: list[Waiting], situation: tuple[list[Node], list[Running]]
) -> None:
    """When a promised stay begins, its nodes have room for it beside all that may still be there."""
    empty, running = situation
    line = sorted((item for item in line if item.held is None), key=lambda item: item.turn)
    nodes = left_by(empty, running)
    decisions = decide(line, nodes, [job for job in running], Rules(Policy.BACKFILL))
    answers = dict(
        zip([i.job_id for i in line], [one for one in decisions if not isinstance(one, Preempt)], strict=True)
    )
    if any(isinstance(one, KeepWaiting) and one.kind is Wait.MAKING_ROOM for one in decisions):
        return  # then those ahead have nodes of their own
    promises: Promises | None = None
    stays = [stay_of(job, 0.0) for job in running]
    made = []
    for item in line:
        answer = answers[item.job_id]
        if isinstance(answer, PlaceNow):
            stays.append(Stay(item, held_by(item.gang, answer.assignments), 0.0, item.over_by(0.0)))
            if promises is not None:
                promises.add(stays[-1])
        elif answer.kind is not Wait.INFEASIBLE:
            if promises is None:
                now_free = left_by(empty, [*running, *(as_running(stay) for stay in stays[len(running) :])])
                promises = Promises(now_free, stays, Rules(), 0.0)
            made.append(promises.make(item))
    sure = [promise for promise in made if promise.outlook is Outlook.LIMITS]
    for promise in sure:
        at = promise.start
        there = [stay for stay in stays if stay.ends_by is None or stay.ends_by > at]
        there += [p.stay for p in sure if p.start <= at and (p.stay.ends_by is None or p.stay.ends_by > at)]
        for node in empty:
            for name in ("GPU", "CPU") if node.id in promise.stay.holding else ():
                held = sum(stay.holding.get(node.id, {}).get(name, 0.0) for stay in there)
                assert held <= node.total[name] + 1e-6, (promise, node.id, held)


def as_running(stay: Stay) -> Running:
    found = Running(stay.job.job_id, stay.job.spec, "", (), 0.0)
    found.__dict__["holding"] = stay.holding
    return found


# A week of a mixed load.


@pytest.mark.parametrize("policy", Policy)
def test_a_simulated_week_keeps_what_the_policy_promises(policy: Policy) -> None:
    loads = week(jobs=500)
    simulated = Simulation(cluster(8), loads, Rules(policy, user_jobs=12, all_jobs=25))
    simulated.run()
    assert len(simulated.ended) == len(loads)
    if policy is not Policy.TRAVERSE:
        assert simulated.late == []
    assert any(simulated.preemptions.values())
