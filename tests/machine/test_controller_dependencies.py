"""Jobs that wait for others, with the real controller on a real store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raycontrol.errors import UsageError
from raycontrol.status import JobInfo, JobState, Reason
from tests.machine.fake_cluster import FakeCluster, Site, in_loop
from tests.unit.fake_gangs import Program, nodes


def site(home: Path, **program: Any) -> Site:
    return Site(
        home, FakeCluster(nodes("host-a", cpu=1), {"master-0": Program(**{"seconds": None, **program})})
    )


async def submit(here: Site, job_id: str, **spec: Any) -> JobInfo:
    return await here.submit(job_id, nodes=1, command="python train.py", **spec)


@in_loop
async def test_a_job_waits_until_the_other_has_succeeded_also_under_another_controller(
    tmp_path: Path,
) -> None:
    here = site(tmp_path, seconds=0.1)
    here.cluster.hidden.add("id-of-host-a")
    await submit(here, "first-1")
    await submit(here, "second-1", after={"ok": ["first-1"]})
    await submit(here, "third-1", after={"ok": ["second-1"]})
    told = await here.shows("second-1", lambda info: info.pending is not None)
    assert (told.state, told.reason) == (JobState.QUEUED, Reason.WAITING)
    assert told.pending == "waits for first-1 (QUEUED) to succeed"
    assert [one.id for one in await here.controller.queue()] == ["first-1", "second-1", "third-1"]
    await here.restart()
    here.cluster.hidden.clear()
    assert [(await here.ends(job_id)).state for job_id in ("first-1", "second-1", "third-1")] == [
        JobState.SUCCEEDED
    ] * 3
    first, second = await here.controller.info("first-1"), await here.controller.info("second-1")
    assert first.ended_at is not None
    assert second.started_at is not None
    assert second.started_at >= first.ended_at
    await here.kill()


@in_loop
async def test_who_begins_to_wait_for_a_job_that_is_kept_learns_at_once_that_it_has_failed(
    tmp_path: Path,
) -> None:
    here = Site(
        tmp_path, FakeCluster(nodes("host-a", "host-b", cpu=1), {"master-0": Program(seconds=0.1, code=3)})
    )
    await submit(here, "first-1", timeouts={"keep_failed_s": 3600})
    await here.shows("first-1", lambda info: info.kept_until is not None)
    await submit(here, "second-1", after={"failed": ["first-1"]})
    assert (await here.ends("second-1")).reason is Reason.INSTANCE_FAILED
    await submit(here, "third-1", after={"ok": ["first-1"]})
    assert (await here.ends("third-1")).reason is Reason.DEPENDENCY_FAILED
    await here.controller.stop("first-1", "seen enough", True)
    await here.ends("first-1")
    await here.kill()


@in_loop
async def test_a_chain_falls_when_its_first_job_fails(tmp_path: Path) -> None:
    here = site(tmp_path, seconds=0.1, code=3)
    await submit(here, "first-1")
    await submit(here, "second-1", after={"ok": ["first-1"]})
    await submit(here, "third-1", after={"any": ["second-1"], "failed": ["first-1"]})
    await submit(here, "fourth-1", after={"ok": ["second-1"]})
    second, third, fourth = [await here.ends(f"{name}-1") for name in ("second", "third", "fourth")]
    assert (second.state, second.reason) == (JobState.FAILED, Reason.DEPENDENCY_FAILED)
    assert second.verdict is not None
    assert second.verdict.summary == "waited for first-1 to succeed, but it is FAILED"
    assert (third.state, third.exit_code) == (JobState.FAILED, 3)  # it has run
    assert (fourth.state, fourth.reason) == (JobState.FAILED, Reason.DEPENDENCY_FAILED)
    await here.kill()


@in_loop
async def test_that_the_other_job_was_removed_does_not_matter_once_its_end_was_seen(tmp_path: Path) -> None:
    here = site(tmp_path, seconds=0.1)
    await submit(here, "first-1")
    await here.ends("first-1")
    await submit(here, "blocker-1", priority=0)
    await submit(here, "second-1", after={"ok": ["first-1"]})
    await here.controller.prune(["first-1"])
    await here.restart()
    assert (await here.ends("second-1")).state is JobState.SUCCEEDED
    await here.kill()


@in_loop
async def test_a_job_cannot_wait_for_one_that_is_not_there(tmp_path: Path) -> None:
    here = site(tmp_path)
    with pytest.raises(UsageError, match=r"after\.failed: there is no job 'never-1' on this cluster"):
        await submit(here, "second-1", after={"failed": ["never-1"]})
    assert await here.controller.jobs(None, None, None) == []
    await here.kill()
