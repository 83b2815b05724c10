"""`valid_exit_codes`: which exit codes of the start command are a success."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raycontrol.errors import SpecError
from raycontrol.events import NodesReleased
from raycontrol.job import Job, info
from raycontrol.spec import JobSpec
from raycontrol.status import JobState, Reason
from tests.unit import lifecycle_jobs as jobs
from tests.unit.lifecycle_jobs import ATTEMPT, after, closed, exited


def spec(**values: Any) -> JobSpec:
    return JobSpec(command="grep -q digits data.txt", **values)


def running(*codes: int | str) -> Job:
    """A job of two instances whose start commands run, with these codes valid."""
    job = jobs.running()
    return replace(job, spec=job.spec.model_copy(update={"valid_exit_codes": codes}))


def ended(job: Job) -> Job:
    return after(job, closed("master-0", 1024.0), closed("worker-0", 1024.0), NodesReleased(1025.0, ATTEMPT))


@pytest.mark.parametrize(
    ("written", "valid", "others"),
    [
        ([0], [0], [1, 3, 255]),
        ([0, "3-5"], [0, 3, 4, 5], [1, 2, 6]),
        (["0-255"], [0, 137, 255], []),
        ([1], [1], [0, 2]),
    ],
)
def test_codes_are_named_one_by_one_and_by_ranges(
    written: list[int | str], valid: list[int], others: list[int]
) -> None:
    job = spec(valid_exit_codes=written)
    assert [code for code in [*valid, *others] if job.is_valid(code)] == valid
    assert not job.is_valid(None)


@pytest.mark.parametrize("written", [[], [256], [-1], ["5-3"], ["3"], ["0-256"], [True], ["a-b"], [0.5], "0"])
def test_what_is_no_exit_code_is_refused(written: Any) -> None:
    with pytest.raises(SpecError, match="valid_exit_codes"):
        spec(valid_exit_codes=written)


def test_a_code_is_a_success_or_is_tried_again_but_not_both() -> None:
    with pytest.raises(SpecError) as raised:
        spec(valid_exit_codes=[0, "3-5"], retry={"exit_codes": {"retry": [4, 75], "fail": [5, 9]}})
    assert [(fault.field, fault.rule) for fault in raised.value.faults] == [
        ("retry.exit_codes.retry", "must not name 4, which is among `valid_exit_codes`"),
        ("retry.exit_codes.fail", "must not name 5, which is among `valid_exit_codes`"),
    ]


def test_a_job_that_exits_with_a_valid_code_succeeds_and_keeps_its_code() -> None:
    job = ended(after(running(0, "3-5"), exited("master-0", code=0), exited("worker-0", 1021.0, code=4)))
    shown = info(job)
    assert (shown.state, shown.reason, shown.exit_code) == (JobState.SUCCEEDED, Reason.COMPLETED, 4)
    assert (shown.exit_status, shown.verdict) == (0, None)
    assert [(one.exit_code, one.summary) for one in shown.attempts] == [
        (4, "every start command that decides exited with a valid code (4)")
    ]


def test_another_code_fails_the_job_as_ever() -> None:
    job = ended(after(running(0, "3-5"), exited("worker-0", code=2)))
    assert (job.state, info(job).exit_code, info(job).exit_status) == (JobState.FAILED, 2, 2)


def test_zero_fails_a_job_where_it_is_not_valid() -> None:
    job = ended(after(running(1), exited("worker-0", code=0)))
    assert (job.state, info(job).exit_code, info(job).exit_status) == (JobState.FAILED, 0, 1)
    assert job.verdict is not None and job.verdict.summary.endswith("exited 0; valid_exit_codes: 1")


def test_a_valid_code_of_one_instance_does_not_hide_the_failure_of_another() -> None:
    job = after(running(0, 3), exited("master-0", code=3), exited("worker-0", 1021.0, code=9))
    verdict = ended(job).verdict
    assert verdict is not None
    assert (verdict.instance, verdict.exit_code) == ("worker-0", 9)
