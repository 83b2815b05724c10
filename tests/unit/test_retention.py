"""Which finished jobs are removed."""

from __future__ import annotations

from raycontrol.retention import DAY_S, expired
from raycontrol.status import JobInfo, JobState, Reason

NOW = 1_000 * DAY_S
GIB = 2**30


def job(job_id: str, ended_days_ago: float | None) -> JobInfo:
    ended = None if ended_days_ago is None else NOW - ended_days_ago * DAY_S
    return JobInfo(
        id=job_id,
        name="digits",
        user="ada",
        mode="ddp",
        state=JobState.RUNNING if ended is None else JobState.SUCCEEDED,
        reason=Reason.PLACED if ended is None else Reason.COMPLETED,
        attempt=0,
        priority=5,
        submitted_at=0.0,
        ended_at=ended,
    )


def test_jobs_that_ended_too_long_ago_go() -> None:
    jobs = [job("new", 1), job("old", 30.5), job("older", 90), job("just", 30)]
    assert expired(jobs, {}, NOW, keep_days=30, keep_gib=50) == ["older", "old"]


def test_jobs_that_have_not_ended_stay_however_old_and_large() -> None:
    jobs = [job("running", None), job("ended", 2)]
    assert expired(jobs, {"running": 100 * GIB, "ended": GIB}, NOW, keep_days=30, keep_gib=50) == []


def test_the_oldest_go_until_the_rest_is_within_the_limit() -> None:
    jobs = [job("c", 1), job("a", 3), job("b", 2), job("d", 0.5)]
    sizes = {"a": 4 * GIB, "b": 3 * GIB, "c": 2 * GIB, "d": 1 * GIB}
    assert expired(jobs, sizes, NOW, keep_days=30, keep_gib=10) == []
    assert expired(jobs, sizes, NOW, keep_days=30, keep_gib=6) == ["a"]
    assert expired(jobs, sizes, NOW, keep_days=30, keep_gib=5.9) == ["a", "b"]
    assert expired(jobs, sizes, NOW, keep_days=30, keep_gib=0) == ["a", "b", "c", "d"]


def test_what_is_too_old_counts_no_more_against_the_limit() -> None:
    jobs = [job("old", 40), job("new", 1)]
    assert expired(jobs, {"old": 9 * GIB, "new": 9 * GIB}, NOW, keep_days=30, keep_gib=10) == ["old"]


def test_jobs_that_keep_nothing_do_not_help_but_are_not_spared_by_age() -> None:
    jobs = [job("empty", 40), job("full", 1)]
    assert expired(jobs, {"full": 2 * GIB}, NOW, keep_days=30, keep_gib=1) == ["empty", "full"]


def test_no_jobs() -> None:
    assert expired([], {}, NOW, keep_days=0, keep_gib=0) == []
