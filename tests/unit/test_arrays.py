"""Arrays: their indices, what a spec may say of them, and how members are shown."""

from __future__ import annotations

from typing import Any

import pytest

from raycontrol import backends
from raycontrol.arrayspec import array_of, indices_of, ranges
from raycontrol.cli.members import counts, rows
from raycontrol.errors import SpecError, UsageError
from raycontrol.job import checked_id, known_id
from raycontrol.queue import KeepWaiting, PlaceNow, Wait, Waiting, decide
from raycontrol.retention import expired
from raycontrol.spec import Array, JobSpec
from raycontrol.status import ArrayInfo, JobState, MemberInfo, Reason
from tests.fake_client import job_info
from tests.unit.fake_gangs import nodes


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("5", (5,)),
        ("0-3", (0, 1, 2, 3)),
        ("0-15:4,20", (0, 4, 8, 12, 20)),
        ("7,3,3,1-4", (1, 2, 3, 4, 7)),
        ("0-10:3, 2", (0, 2, 3, 6, 9)),
    ],
)
def test_indices_are_written_as_slurm_writes_them(text: str, indices: tuple[int, ...]) -> None:
    assert indices_of(text) == indices


@pytest.mark.parametrize(
    "text", ["", "a", "3-1", "-1", "0-9:0", "1,,2", "0-10000", "0-9999999", "1-2-3", "٣", "12345678"]
)
def test_what_means_no_indices_or_too_many_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"array\.indices: must be indices such as 0-99"):
        JobSpec(command="true", array={"indices": text})


def test_ten_thousand_members_are_possible() -> None:
    assert len(indices_of("0-9999")) == 10_000


@pytest.mark.parametrize(
    ("written", "array"),
    [
        ("0-99%8", Array(indices="0-99", parallel=8)),
        ("0-99", Array(indices="0-99")),
        (5, Array(indices="5")),
        ({"indices": 5, "fail_fast": True}, Array(indices="5", fail_fast=True)),
    ],
)
def test_an_array_has_a_short_form(written: Any, array: Array) -> None:
    spec = JobSpec(command="true", array=written)
    assert spec.array == array
    assert JobSpec.from_dict(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"array": "0-9%0"}, r"array\.parallel: must be at least 1"),
        ({"array": "0-9%many"}, r"array\.parallel"),
        ({"array": [1, 2]}, "array: must be indices such as 0-99%8, or a mapping"),
        ({"array": "0-9", "nodes": 2}, "array: must have one instance for each member"),
        ({"array": "0-9", "mode": "mpi"}, "array: is for mode ddp only, not mpi"),
        ({"array": {"parallel": 3}}, r"array\.indices"),
        (
            {"array": "0-9", "timeouts": {"keep_failed_s": 60}},
            r"timeouts\.keep_failed_s: is not for arrays",
        ),
    ],
)
def test_a_spec_says_what_is_wrong_with_its_array(values: dict[str, Any], fault: str) -> None:
    with pytest.raises(SpecError, match=fault):
        JobSpec(command="true", **values)


def test_the_plan_of_an_array_is_that_of_a_member() -> None:
    plan = backends.plan_of(JobSpec(command="true", name="sweep", array="2-10:4"))
    environment = plan.environment["master-0"]
    assert {name: value for name, value in environment.items() if "ARRAY" in name} == {
        "RAYCONTROL_ARRAY_INDEX": "<array index>",
        "RAYCONTROL_ARRAY_COUNT": "3",
        "RAYCONTROL_ARRAY_MIN": "2",
        "RAYCONTROL_ARRAY_MAX": "10",
    }


def test_a_members_id_can_be_no_other_jobs() -> None:
    assert known_id("sweep-1~17") == "sweep-1~17"
    assert array_of("sweep-1~17") == "sweep-1"
    for wrong in ("sweep-1~", "sweep-1~x", "~3", "a~3~4", "a/b~3"):
        with pytest.raises(UsageError):
            known_id(wrong)
    with pytest.raises(UsageError):
        checked_id("sweep-1~17")


def test_members_stand_in_the_queue_by_their_indices() -> None:
    spec = JobSpec(command="true", resources={"cpu": 4})
    line = [Waiting(job_id, spec, 1.0) for job_id in ("s-1~10", "s-1~9", "s-2", "s-1~2")]
    first, *others = decide(line, nodes("host-a", cpu=4))
    assert isinstance(first, PlaceNow)
    assert first.job_id == "s-1~2"
    assert [one.job_id for one in others] == ["s-1~9", "s-1~10", "s-2"]
    assert all(isinstance(one, KeepWaiting) and one.kind is Wait.NO_ROOM for one in others)


def test_what_members_keep_counts_as_their_arrays() -> None:
    arrays = [job_info("a-1", ended_at=1.0), job_info("b-1", ended_at=2.0)]
    sizes = {"a-1~0": 2**30, "a-1~1": 2**30, "b-1": 2**30}
    assert expired(arrays, sizes, now=3.0, keep_days=1, keep_gib=2) == ["a-1"]


# In words.


def member(index: int, state: JobState, **values: Any) -> MemberInfo:
    reason = Reason.COMPLETED if state is JobState.SUCCEEDED else Reason.INSTANCE_FAILED
    return MemberInfo(index=index, **{"id": f"s-1~{index}", "state": state, "reason": reason, **values})


def test_indices_are_told_in_ranges() -> None:
    assert ranges([0, 1, 2, 3, 7, 9, 10]) == "0-3,7,9-10"
    assert ranges([]) == ""


def test_members_that_fare_alike_share_a_row_and_those_that_failed_come_first() -> None:
    members = [
        *(member(index, JobState.SUCCEEDED, exit_code=0) for index in (0, 1, 2, 4)),
        member(3, JobState.FAILED, exit_code=3, summary="master-0 on host-a exited 3"),
        member(5, JobState.FAILED, exit_code=3, summary="master-0 on host-b exited 3"),
        member(6, JobState.FAILED, signal=9, summary="master-0 was ended by signal 9"),
        member(7, JobState.RUNNING),
        member(8, JobState.QUEUED, id=None),
        member(9, JobState.QUEUED, id=None),
    ]
    assert rows(members) == [
        ("3,5", "FAILED", "code 3", "3: master-0 on host-a exited 3 (and 1 more)"),
        ("6", "FAILED", "signal 9", "6: master-0 was ended by signal 9"),
        ("8-9", "QUEUED", "", "not begun"),
        ("7", "RUNNING", "", ""),
        ("0-2,4", "SUCCEEDED", "code 0", ""),
    ]


def test_how_far_an_array_is_fits_in_a_line() -> None:
    array = ArrayInfo(indices="0-11", members=12, begun=7, living=4, succeeded=2, failed=1)
    assert counts(array) == "3 of 12 members ended: 2 succeeded, 1 failed; 4 live, 5 not begun"
    assert counts(ArrayInfo(indices="0-11", members=12)) == "0 of 12 members ended; 12 not begun"
    done = ArrayInfo(indices="0-11", members=12, begun=12, succeeded=12)
    assert counts(done) == "12 of 12 members ended: 12 succeeded"
