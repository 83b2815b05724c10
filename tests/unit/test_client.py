"""A client's view of a job, whoever answers it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from raycontrol.archive import Archive
from raycontrol.client import Client, JobHandle, send
from raycontrol.errors import PackageError, UsageError, WaitTimeout
from raycontrol.hardware import InstanceUsage
from raycontrol.packages import pack
from raycontrol.readers import ClusterDoor
from raycontrol.settings import Settings
from raycontrol.spec import JobSpec
from raycontrol.status import Event, JobInfo, JobState, Reason
from tests.fake_client import job_info

JOB = "digits-ab12cd"


class FakeReader:
    """One job. ``page`` is the most events an answer holds; it never waits, as a controller for another's job."""

    def __init__(self, page: int = 1000) -> None:
        self.job = job_info(JOB, state=JobState.RUNNING)
        self.page = page
        self.told: list[Event] = []
        self.polls = 0
        self.log = b""

    def becomes(self, state: JobState, **changes: Any) -> None:
        self.job = self.job.model_copy(update={"state": state, **changes})
        self.tell(state)

    def tell(self, state: JobState = JobState.RUNNING) -> None:
        number = len(self.told) + 1
        self.told.append(
            Event(
                at=float(number),
                kind="Noted",
                state=state,
                reason=Reason.STARTED,
                attempt=0,
                message=f"event {number}",
                seq=number,
                job_id=JOB,
            )
        )

    def find(self, prefix: str) -> list[str]:
        return [JOB]

    def info(self, job_id: str) -> JobInfo:
        return self.job

    def jobs(self, states: Sequence[JobState] | None, user: str | None, limit: int | None) -> list[JobInfo]:
        return [self.job]

    def events(self, job_id: str, after: int, timeout_s: float) -> list[Event]:
        self.polls += 1
        return self.told[after : after + self.page]

    def tail_offset(self, job_id: str, attempt: int, instance: str, lines: int) -> int:
        return 0

    def log_sizes(self, job_id: str, attempt: int) -> dict[str, int]:
        return {"worker-0": len(self.log)}

    def log_news(
        self,
        job_id: str,
        attempt: int,
        offsets: dict[str, int],
        timeout_s: float,
        max_bytes: int,
        instances: Collection[str] | None,
    ) -> dict[str, bytes]:
        news = self.log[offsets.get("worker-0", 0) :]
        return {"worker-0": news} if news else {}

    def usage(self, job_id: str, attempt: int, last: int) -> dict[str, tuple[InstanceUsage, ...]]:
        return {}

    def stop(self, job_id: str, why: str, force: bool) -> JobInfo:
        return self.job

    def sizes_of_jobs(self) -> dict[str, int]:
        return {}

    def prune(self, job_ids: Sequence[str]) -> None:
        pass


class EndingReader(FakeReader):
    """The job ends between an empty answer and the look at the job that follows."""

    def info(self, job_id: str) -> JobInfo:
        if not self.job.state.terminal:
            self.becomes(JobState.STOPPING)
            self.becomes(JobState.SUCCEEDED)
        return self.job


def handle(reader: FakeReader, home: Path) -> JobHandle:
    client = Client(settings=Settings(home=str(home)))
    client._reader = reader
    return client.job(JOB)


def test_the_last_events_of_a_job_are_watched_however_it_ends(tmp_path: Path) -> None:
    reader = EndingReader()
    assert [event.state for event in handle(reader, tmp_path).watch()] == ["STOPPING", "SUCCEEDED"]


def test_all_events_of_a_long_story_are_read(tmp_path: Path) -> None:
    reader = FakeReader(page=3)
    for _ in range(10):
        reader.tell()
    job = handle(reader, tmp_path)
    assert [event.seq for event in job.events()] == list(range(1, 11))
    assert [event.seq for event in job.events(after=8)] == [9, 10]
    assert job.events(after=10) == []


class TriedReader(FakeReader):
    """A job whose attempts have written these; the next begins when all of one was read, and the job ends after the last."""

    def __init__(self, *logs: bytes) -> None:
        super().__init__()
        self.logs = logs

    def log_news(
        self,
        job_id: str,
        attempt: int,
        offsets: dict[str, int],
        timeout_s: float,
        max_bytes: int,
        instances: Collection[str] | None,
    ) -> dict[str, bytes]:
        news = self.logs[attempt][offsets.get("worker-0", 0) :][:5]
        if not news and attempt == self.job.attempt:
            last = attempt + 1 == len(self.logs)
            self.becomes(JobState.SUCCEEDED) if last else self.becomes(JobState.QUEUED, attempt=attempt + 1)
        return {"worker-0": news} if news else {}


def test_a_job_s_log_is_followed_from_one_attempt_into_the_next(tmp_path: Path) -> None:
    job = handle(TriedReader(b"one\nhalf a line", b"", b"three\nfour\n"), tmp_path)
    assert list(job.logs(follow=True, prefix=False)) == ["one", "half a line", "three", "four"]
    assert list(job.logs(prefix=False)) == ["three", "four"]


def test_one_attempt_s_log_is_shown_alone(tmp_path: Path) -> None:
    job = handle(TriedReader(b"one\n", b"two\n", b"three\n"), tmp_path)
    assert list(job.logs(follow=True, attempt=0, prefix=False)) == ["one"]
    assert list(job.logs(attempt=0, prefix=False)) == ["one"]
    with pytest.raises(UsageError, match="has had no attempt 7; the current one is 1"):
        list(job.logs(attempt=7))


def test_nobody_waits_for_an_abandoned_job(tmp_path: Path) -> None:
    reader = FakeReader()
    reader.tell()
    reader.job = reader.job.model_copy(update={"abandoned": True})
    reader.log = b"the last line\n"
    job = handle(reader, tmp_path)
    assert job.wait().abandoned
    assert [event.seq for event in job.watch()] == [1]
    assert list(job.logs(follow=True, prefix=False)) == ["the last line"]


def test_who_is_answered_at_once_with_nothing_asks_again_after_a_while(tmp_path: Path) -> None:
    reader = FakeReader()
    job = handle(reader, tmp_path)
    begin = time.monotonic()
    with pytest.raises(WaitTimeout):
        job.wait(timeout_s=0.7)
    assert 0.7 <= time.monotonic() - begin < 5
    assert reader.polls <= 3


# Within a program that runs an event loop


class Remote:
    """A method of an actor in this process: a call returns what the method's coroutine is."""

    def __init__(self, method: Any) -> None:
        self.remote = method


class FakeSession:
    """A session whose archive is in this process."""

    def __init__(self, archive: Archive) -> None:
        self.has_package = Remote(archive.has_package)
        self.put_package = Remote(archive.put_package)

    def archive(self) -> FakeSession:
        return self

    def get(self, call: Any) -> Any:
        from raycontrol.readers import completed

        return completed(call)


def test_a_working_directory_is_uploaded_from_within_an_event_loop(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").write_text("print()")
    archive = Archive(tmp_path / "home", min_free_bytes=0)
    door = ClusterDoor(FakeSession(archive), controller=None)

    async def program() -> None:
        with pack(tmp_path / "code") as package:
            send(door, package, print)
            stored = tmp_path / f"home/packages/{package.digest}.tar"
            assert hashlib.sha256(stored.read_bytes()).hexdigest() == package.digest

    asyncio.run(program())
    archive.close()


def test_no_ray_is_started_for_a_working_directory_that_is_not_there(tmp_path: Path) -> None:
    told: list[str] = []
    spec = JobSpec(command="true", working_dir=str(tmp_path / "nowhere"))
    client = Client(embedded=True, settings=Settings(home=str(tmp_path)))
    with client, pytest.raises(PackageError, match="nowhere"):
        client.submit(spec, progress=told.append)
    assert told == []


def test_a_mount_of_the_code_that_is_not_in_it_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    client = Client(settings=Settings(home=str(tmp_path / "home"), address="127.0.0.1:1"))
    for spec, why in (
        (
            JobSpec(command="true", working_dir=str(tmp_path), mounts={"/opt/code": "./nope"}),
            "there is no ./nope in",
        ),
        (JobSpec(command="true", mounts={"/opt/code": "./src"}), "and there is no working_dir"),
    ):
        with pytest.raises(UsageError, match=f"mounts: /opt/code: .*{why}"):
            client.submit(spec)


def test_an_empty_id_is_no_beginning_of_all_ids(tmp_path: Path) -> None:
    client = Client(settings=Settings(home=str(tmp_path)))
    for job_id in ("", "~7"):
        with pytest.raises(UsageError, match="job id: must not be empty"):
            client.job(job_id)
