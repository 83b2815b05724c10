"""The gate of collective MPI launchers: who is missing, and what came of a call."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycontrol.gate import Abandoned, Finished, Gate

INSTANCES = ("launcher-0", "worker-0", "worker-1")


def gate() -> Gate:
    return Gate("launcher-0", INSTANCES)


def test_a_call_waits_for_every_instance_in_their_order():
    calls = gate()
    assert calls.missing(0) == ("launcher-0", "worker-0", "worker-1")
    calls.arrive("worker-0", 0)
    assert calls.missing(0) == ("launcher-0", "worker-1")
    calls.arrive("launcher-0", 0)
    calls.arrive("worker-1", 0)
    assert calls.missing(0) == ()
    assert calls.outcome(0) is None


def test_the_kth_call_of_one_meets_the_kth_of_the_others():
    calls = gate()
    for instance in INSTANCES:
        calls.arrive(instance, 0)
    calls.finish(0, 0)
    calls.arrive("worker-1", 1)
    assert calls.missing(1) == ("launcher-0", "worker-0")
    assert calls.outcome(0) == Finished(0)
    assert calls.outcome(1) is None


def test_a_worker_that_ended_counts_as_arrived_at_everything():
    calls = gate()
    calls.end("worker-1")
    assert calls.missing(0) == ("launcher-0", "worker-0")
    assert calls.missing(7) == ("launcher-0", "worker-0")
    assert calls.outcome(0) is None


def test_everybody_gets_the_status_of_the_launchers_program():
    calls = gate()
    calls.finish(0, -9)
    assert calls.outcome(0) == Finished(-9)


def test_a_launcher_that_ended_without_the_call_leaves_the_others_with_advice():
    calls = gate()
    calls.arrive("worker-0", 1)
    calls.end("launcher-0")
    assert calls.outcome(1) == Abandoned(
        "the launcher instance launcher-0 ended without calling mpirun for the 2nd time while worker-0 did. Let every "
        "instance call it equally often, or set `run_on: launcher` so that the command runs once, on the launcher."
    )


def test_advice_names_a_few_of_many_callers_and_nobody_when_nobody_called():
    workers = tuple(f"worker-{i}" for i in range(5))
    calls = Gate("launcher-0", ("launcher-0", *workers))
    for worker in workers:
        calls.arrive(worker, 11)
    calls.end("launcher-0")
    outcome = calls.outcome(11)
    assert isinstance(outcome, Abandoned)
    assert "for the 12th time while worker-0, worker-1 and 3 more did." in outcome.advice
    outcome = calls.outcome(20)
    assert isinstance(outcome, Abandoned)
    assert "ended without calling mpirun for the 21st time. Let every" in outcome.advice


def test_a_launcher_whose_start_command_ended_before_its_world_did_is_not_waited_for():
    calls = gate()
    calls.arrive("launcher-0", 0)
    calls.end("launcher-0")
    outcome = calls.outcome(0)
    assert isinstance(outcome, Abandoned)
    assert "ended before the mpirun of its 1st call did" in outcome.advice
    calls.finish(0, 0)
    assert calls.outcome(0) == outcome


def test_repeated_and_late_news_change_nothing():
    calls = gate()
    for _ in range(2):
        calls.arrive("launcher-0", 0)
        calls.arrive("worker-0", 0)
    assert calls.missing(0) == ("worker-1",)
    calls.finish(0, 3)
    calls.finish(0, 0)
    calls.end("launcher-0")
    calls.end("launcher-0")
    assert calls.outcome(0) == Finished(3)
    calls.arrive("launcher-0", 1)
    assert isinstance(calls.outcome(1), Abandoned)


def test_the_launcher_is_one_of_the_instances():
    with pytest.raises(ValueError, match="launcher-0 is not among the instances worker-0"):
        Gate("launcher-0", ("worker-0",))


NEWS = st.one_of(
    st.tuples(st.just("arrive"), st.sampled_from(INSTANCES), st.integers(0, 2)),
    st.tuples(st.just("end"), st.sampled_from(INSTANCES)),
    st.tuples(st.just("finish"), st.integers(0, 2), st.integers(-15, 255)),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(NEWS, max_size=20))
def test_what_is_settled_stays_settled(news: list[tuple[str, ...]]):
    """Nobody goes missing again, an outcome never changes its kind or status, and when all ended nothing is open."""
    calls = gate()
    for name, *arguments in news:
        before = [(set(calls.missing(call)), calls.outcome(call)) for call in range(3)]
        getattr(calls, name)(*arguments)
        for call, (missing, outcome) in enumerate(before):
            assert set(calls.missing(call)) <= missing
            now = calls.outcome(call)
            assert outcome is None or type(now) is type(outcome)
            assert not isinstance(outcome, Finished) or now == outcome
    for instance in INSTANCES:
        calls.end(instance)
    assert all(calls.missing(call) == () and calls.outcome(call) is not None for call in range(3))
