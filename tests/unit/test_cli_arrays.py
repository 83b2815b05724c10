"""Arrays and dependencies on the command line."""

from __future__ import annotations

import json

import pytest

from raycontrol.cli.specs import Fields, read_spec
from raycontrol.errors import SpecError, UsageError
from raycontrol.spec import After, Array
from raycontrol.status import ArrayInfo, JobState
from tests.fake_client import FakeClient, FakeJob, job_info
from tests.unit.test_cli import Shell, finished


def sweep() -> FakeJob:
    """An array of four: one succeeded, one failed, one runs, one has not begun."""
    progress = ArrayInfo(indices="0-3", parallel=2, members=4, begun=3, living=1, succeeded=1, failed=1)
    job = FakeJob(job_info("sweep-1", state=JobState.RUNNING, array=progress))
    job.jobs_of_members = {
        0: finished("sweep-1~0", exit_code=0),
        1: finished("sweep-1~1", JobState.FAILED, exit_code=3),
        2: FakeJob(job_info("sweep-1~2", state=JobState.RUNNING)),
    }
    return job


def test_get_shows_the_members_of_an_array_those_that_failed_first() -> None:
    shell = Shell(FakeClient(sweep()))
    assert shell("get", "sweep-1") == 0
    assert (
        "array        0-3; 2 of 4 members ended: 1 succeeded, 1 failed; 1 live, 1 not begun\n" in shell.stdout
    )
    table = shell.stdout[shell.stdout.index("MEMBERS") :].splitlines()
    assert [line.split() for line in table[1:4]] == [
        ["1", "FAILED", "code", "3"],
        ["2", "RUNNING"],
        ["0", "SUCCEEDED", "code", "0"],
    ]
    document = shell.json("get", "sweep-1")
    assert [(one["index"], one["state"]) for one in document["members"]] == [
        (0, "SUCCEEDED"),
        (1, "FAILED"),
        (2, "RUNNING"),
    ]


def test_list_has_one_line_for_an_array() -> None:
    shell = Shell(FakeClient(sweep()))
    assert shell("list") == 0
    (line,) = shell.stdout.splitlines()[1:]
    assert line.endswith("0-3; 2 of 4 members ended: 1 succeeded, 1 failed; 1 live, 1 not begun")


def test_logs_of_one_member() -> None:
    job = sweep()
    job.jobs_of_members[1].prints("master-0", "no labels found")
    shell = Shell(FakeClient(job))
    assert shell("logs", "sweep-1", "--member", "1") == 0
    assert shell.stdout == "master-0 | no labels found\n"


def test_an_array_and_dependencies_are_options() -> None:
    given = Fields(array="0-99%8", after=["ok:first-1", "second-1", "any:third-1", "failed:fourth-1"])
    spec = read_spec(None, ["true"], given, [], [])
    assert spec.array == Array(indices="0-99", parallel=8)
    assert spec.after == After(ok=("first-1", "second-1"), any=("third-1",), failed=("fourth-1",))
    fast = read_spec(None, ["true"], Fields(array="0-99%8"), ["array.fail_fast=true"], [])
    assert fast.array == Array(indices="0-99", parallel=8, fail_fast=True)
    with pytest.raises(SpecError, match="array"):
        read_spec(None, ["true"], Fields(array="0-99%many"), [], [])


def test_options_replace_what_a_file_says(tmp_path: pytest.TempPathFactory) -> None:
    path = f"{tmp_path}/job.json"
    with open(path, "w") as file:
        json.dump({"command": "true", "array": "0-3", "after": {"ok": ["first-1"]}}, file)
    spec = read_spec(path, [], Fields(array="5", after=["any:second-1"]), [], [])
    assert (spec.array, spec.after) == (Array(indices="5"), After(any=("second-1",)))


def test_a_condition_that_does_not_exist_is_a_usage_error() -> None:
    with pytest.raises(
        UsageError, match="--after: must be ok:ID, any:ID, failed:ID or ID alone, got never:a-1"
    ):
        read_spec(None, ["true"], Fields(after=["never:a-1"]), [], [])
