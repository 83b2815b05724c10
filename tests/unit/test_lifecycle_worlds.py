"""MPI worlds that break: mpirun may exit 0 all the same, and its own code says more when it does not."""

from __future__ import annotations

from dataclasses import replace

from raycontrol.demands import BROKEN_S, deadline
from raycontrol.events import TimePassed, WorldBroken, WorldFailed
from raycontrol.lifecycle import advance
from raycontrol.status import JobState, Reason
from tests.unit import lifecycle_jobs as jobs
from tests.unit.lifecycle_jobs import ATTEMPT, after, closed, exited

BROKEN = WorldBroken(1018.0, ATTEMPT, "worker-0", "prted was ended by signal 9")


def test_a_job_whose_launcher_exits_0_after_its_world_broke_has_failed() -> None:
    job = after(
        jobs.running(), BROKEN, exited("master-0", 1019.0, code=0), exited("worker-0", 1019.0, code=0)
    )
    assert (job.state, job.after, job.reason) == (JobState.STOPPING, JobState.FAILED, Reason.WORLD_BROKEN)
    assert job.verdict is not None
    assert (job.verdict.summary, job.verdict.instance) == (
        "worker-0: prted was ended by signal 9",
        "worker-0",
    )


def test_so_has_one_that_hears_of_it_while_it_ends() -> None:
    job = after(jobs.finishing(), BROKEN, closed("master-0"), closed("worker-0"))
    assert (job.after, job.reason) == (JobState.FAILED, Reason.WORLD_BROKEN)


def test_a_script_that_goes_on_after_a_launcher_that_failed_can_succeed() -> None:
    """As `mpirun train || mpirun train --resume` does: the launcher has told it."""
    ends = (exited("master-0", 1050.0, code=0), exited("worker-0", 1050.0, code=0))
    in_world_3 = replace(BROKEN, world=3)
    failed = WorldFailed(1018.5, ATTEMPT, "master-0", 3)
    for news in ((in_world_3, failed), (failed, in_world_3)):
        job = after(jobs.running(), *news)
        assert deadline(job) == jobs.running().since + 200
        assert after(job, *ends).after is JobState.SUCCEEDED


def test_that_does_not_excuse_another_world() -> None:
    failed = WorldFailed(1018.5, ATTEMPT, "master-0", 3)
    for world in (4, None):
        job = after(jobs.running(), replace(BROKEN, at=1017.5, world=3), failed, replace(BROKEN, world=world))
        assert job.fault is not None and job.fault.world == world


def test_a_time_limit_that_runs_out_meanwhile_is_called_that() -> None:
    job = after(jobs.running(run_s=5), BROKEN, TimePassed(1022.5))
    assert job.reason is Reason.RUN_TIMEOUT


def test_what_broke_after_the_end_was_not_before_it() -> None:
    job = after(jobs.running(), BROKEN, exited("master-0", 1019.0, code=3, ended_at=1017.9))
    assert job.verdict is not None and job.verdict.summary == "master-0 on host-a exited 3"


def test_a_terminal_state_stays() -> None:
    assert advance(jobs.succeeded(), BROKEN).job == jobs.succeeded()


def test_the_launchers_own_code_wins_and_the_verdict_tells_both() -> None:
    job = after(jobs.running(), BROKEN, exited("master-0", 1019.0, code=3))
    assert job.verdict is not None
    assert (job.reason, job.verdict.exit_code) == (Reason.INSTANCE_FAILED, 3)
    assert (
        job.verdict.summary
        == "master-0 on host-a exited 3; before that on worker-0: prted was ended by signal 9"
    )


def test_a_launcher_that_does_not_end_is_stopped() -> None:
    job = after(jobs.running(), BROKEN)
    assert deadline(job) == BROKEN.at + BROKEN_S
    assert advance(job, TimePassed(BROKEN.at + BROKEN_S - 1)).job == job
    job = after(job, TimePassed(BROKEN.at + BROKEN_S))
    assert (job.state, job.after, job.reason) == (JobState.STOPPING, JobState.FAILED, Reason.WORLD_BROKEN)


def test_the_first_part_that_broke_counts() -> None:
    earlier = replace(BROKEN, at=1017.5, instance="master-0", message="the connection was lost")
    later = replace(BROKEN, at=1018.5, message="again")
    job = after(jobs.running(), BROKEN, earlier, later)
    assert job.broken is not None
    assert (job.broken.instance, job.broken.message) == ("master-0", "the connection was lost")


def test_a_stop_that_was_asked_for_is_not_blamed_on_what_it_breaks() -> None:
    assert advance(jobs.killing(), BROKEN).job == jobs.killing()


def test_an_instance_that_only_followed_the_launcher_does_not_take_the_blame() -> None:
    """Its exit may be earlier and heard of earlier: the launcher's script goes on for a moment."""
    job = after(jobs.running(), exited("worker-0", 1018.0, code=3, followed=True))
    assert job.verdict is not None and job.verdict.instance == "worker-0"  # as long as nobody else has failed
    job = after(job, exited("master-0", 1018.1, code=3))
    assert job.verdict is not None and job.verdict.instance == "master-0"
    job = after(
        jobs.running(), exited("master-0", 1018.1, code=3), exited("worker-0", 1018.0, code=3, followed=True)
    )
    assert job.verdict is not None and job.verdict.instance == "master-0"


def test_a_launcher_that_was_stopped_for_what_a_follower_told_takes_the_blame() -> None:
    """Its own end was still to be told when the others were stopped."""
    job = after(
        jobs.running(),
        exited("worker-0", 1018.0, code=137, followed=True),
        exited(
            "master-0", 1018.1, signal=15, sender="stopped by raycontrol", last_lines=("prterun was killed",)
        ),
    )
    assert job.verdict is not None
    assert (job.verdict.instance, job.verdict.exit_code, job.reason) == (
        "master-0",
        137,
        Reason.INSTANCE_FAILED,
    )
    assert job.verdict.summary == "master-0 on host-a led a world that ended with 137, as worker-0 has told"
    assert job.verdict.last_lines == ("prterun was killed",)
