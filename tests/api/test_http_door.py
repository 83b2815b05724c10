"""The client's door on the application itself: what one writes the other reads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from raycontrol.access import Role
from raycontrol.client import Client
from raycontrol.errors import (
    Forbidden,
    JobNotFound,
    PackageError,
    SpecError,
    StoreError,
    Unauthorized,
    UsageError,
)
from raycontrol.hardware import NodeInfo
from raycontrol.job import Submission
from raycontrol.remote import HttpDoor
from raycontrol.settings import Settings
from raycontrol.spec import JobSpec
from raycontrol.status import JobState
from tests.api.fakes import DIGEST, Api, adas_job, lost, write_log
from tests.fake_client import job_info
from tests.support import wait_until

URL = "http://127.0.0.1:8642"
JOB = "digits-ab12cd"


class InProcess(httpx.BaseTransport):
    """Takes requests to the application; while ``away`` is set nobody is there, and every ``loses``-th answer gets lost."""

    def __init__(self, api: Api, loses: int = 0) -> None:
        self._api = api
        self._loses = loses
        self.away = threading.Event()
        self.taken = 0
        self.refused = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.away.is_set():
            self.refused += 1
            raise httpx.ConnectError("refused")
        answer = self._api.run(self._send(request))
        self.taken += 1
        if self._loses and self.taken % self._loses == 0:
            raise httpx.ReadError("reset")
        return answer

    async def _send(self, request: httpx.Request) -> httpx.Response:
        answer = await httpx.ASGITransport(self._api.app).handle_async_request(request)
        return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())


def door_of(api: Api, by: str = "admin", transport: InProcess | None = None) -> HttpDoor:
    return HttpDoor(URL, api.tokens.get(by, by), transport=transport or InProcess(api))


def client_of(api: Api, by: str = "admin", transport: InProcess | None = None) -> Client:
    client = Client(url=URL, settings=Settings(home=str(api.home / "laptop")))
    client._remote = door_of(api, by, transport)
    return client


def submission(job_id: str = "a-1", package: str | None = None, **spec: Any) -> Submission:
    return Submission(job_id, JobSpec(command="true", **spec), user="me", package=package, version="0")


def test_a_job_goes_over_with_its_folder_and_its_secrets(api: Api, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").write_text("print()")
    spec = JobSpec(
        command="python train.py", working_dir=str(tmp_path / "code"), secret_env={"KEY": "s3cret"}
    )  # type: ignore[dict-item]
    with client_of(api, "user") as client:
        job = client.submit(spec, job_id="code-1")
        assert (job.info().user, job.info().state) == ("ada", "QUEUED")
    taken = api.door.submissions["code-1"]
    assert taken.spec.secrets() == {"KEY": "s3cret"}
    assert taken.package in api.door.whole


def test_a_submission_whose_answer_got_lost_is_made_once(api: Api) -> None:
    transport = InProcess(api, loses=2)
    door = door_of(api, transport=transport)
    door.find("")
    assert door.submit(submission()).id == "a-1"
    assert (transport.taken, len(api.door.submissions)) == (3, 1)


def test_the_same_id_returns_the_job_whatever_else_is_asked_for(api: Api) -> None:
    door = door_of(api, "user")
    door.submit(submission(secret_env={"KEY": "one"}))
    again = door.submit(submission(nodes=2, secret_env={"KEY": "two"}))
    assert (again.id, len(api.door.submissions)) == ("a-1", 1)
    with pytest.raises(UsageError, match="job id 'a-1' is taken; choose another"):
        door_of(api, "other").submit(submission())


def test_doubts_come_back_as_text(api: Api) -> None:
    spec = JobSpec.from_dict({"command": "true", "resources": {"cpu": 64}, "secret_env": {"KEY": "s3cret"}})
    assert door_of(api).doubts(spec) == "no node has 64 CPUs"
    assert door_of(api).doubts(JobSpec(command="true")) is None


def test_jobs_are_found_by_every_filter_and_over_pages(api: Api) -> None:
    for number in range(7):
        labels = {"team": "a=b"} if number % 2 else {}
        api.door.put(job_info(f"job-{number}", submitted_at=float(number), labels=labels, user="ada"))
    door = door_of(api)
    assert [job.id for job in door.jobs(None, None, 3)] == ["job-6", "job-5", "job-4"]
    assert [job.id for job in door.jobs(None, "ada", 9, labels={"team": "a=b"})] == [
        "job-5",
        "job-3",
        "job-1",
    ]
    assert [job.id for job in door.jobs([JobState.QUEUED], None, None, text="B-6")] == ["job-6"]
    assert [job.id for job in door.jobs([JobState.FAILED], None, None)] == []
    assert [job.id for job in door.jobs(None, None, 2, before=(3.0, "job-3"))] == ["job-2", "job-1"]
    assert client_of(api).job("job-3").id == "job-3"
    with pytest.raises(JobNotFound):
        client_of(api).job("job")


def test_logs_are_followed_over_a_server_that_is_away_for_a_while(api: Api) -> None:
    api.door.put(adas_job())
    transport = InProcess(api, loses=5)
    lines: list[str] = []
    job = client_of(api, "user", transport).job(JOB)
    follower = threading.Thread(target=lambda: lines.extend(job.logs(follow=True)))
    write_log(api.home, b"one\ntw")
    follower.start()
    wait_until(lambda: transport.taken > 4, what="the follower has read")
    transport.away.set()
    write_log(api.home, b"o\nthree\xff\n")
    write_log(api.home, b"zero\n", "master-0")
    wait_until(lambda: transport.refused > 1, what="the follower has tried again")
    transport.away.clear()
    api.door.becomes(JOB, JobState.SUCCEEDED)
    follower.join(30)
    assert sorted(lines) == ["master-0 | zero", "worker-0 | one", "worker-0 | three\ufffd", "worker-0 | two"]


def test_a_tail_begins_with_the_last_lines(api: Api) -> None:
    api.door.put(adas_job(JobState.SUCCEEDED))
    write_log(api.home, b"one\ntwo\nthree\n")
    job = client_of(api, "viewer").job(JOB)
    assert list(job.logs(tail=2, prefix=False)) == ["two", "three"]
    assert list(job.logs(tail=10**9, instance="worker-0", prefix=False)) == ["one", "two", "three"]
    assert door_of(api).log_sizes(JOB, 0) == {"worker-0": 14}
    assert door_of(api).usage(JOB, 0, 1) == {}


def test_a_wait_ends_with_the_job(api: Api) -> None:
    api.door.put(adas_job())
    transport = InProcess(api)
    ended: list[str] = []
    job = client_of(api, "user", transport).job(JOB)
    waiter = threading.Thread(target=lambda: ended.append(job.wait(30).state))
    waiter.start()
    wait_until(lambda: transport.taken > 2, what="somebody waits")
    api.door.becomes(JOB, JobState.FAILED, exit_code=3)
    waiter.join(30)
    assert ended == ["FAILED"]
    assert [event.state for event in job.watch()] == ["RUNNING", "FAILED"]


def test_a_stop_says_why(api: Api) -> None:
    api.door.put(adas_job())
    assert client_of(api, "user").job(JOB).stop(force=True, why="enough").id == JOB
    assert api.door.calls == [("stop", JOB, "enough", True)]


def test_ended_jobs_are_removed(api: Api) -> None:
    api.door.put(adas_job(JobState.SUCCEEDED, ended_at=2.0))
    api.door.put(job_info("running-1", state=JobState.RUNNING))
    api.door.put(job_info("kept-1", state=JobState.STOPPING, kept_until=9e9))
    with client_of(api) as client:
        assert [job.id for job in client.prune(older_than_days=1)] == [JOB]
    assert api.door.calls == [("prune", JOB)]
    door_of(api).prune([JOB])  # as one whose answer got lost is asked for again
    for job_id in ("running-1", "kept-1"):
        with pytest.raises(UsageError, match="stop it before it is removed"):
            door_of(api).prune([job_id])


def test_nodes_are_shown_and_strange_names_refused(api: Api) -> None:
    api.door.known_nodes = [NodeInfo(id="f0", name="host-a", ip="10.0.0.1")]
    assert door_of(api).nodes(["host-a"], True) == api.door.known_nodes
    with pytest.raises(UsageError, match="no node 'host-b'"):
        door_of(api).nodes(["host-b"], False)


def test_tokens_are_made_listed_and_revoked(api: Api) -> None:
    with client_of(api) as client:
        info, text = client.create_token("ci", Role.VIEWER, user="vera", ttl_s=60)
        assert (info.name, info.role, info.user) == ("ci", "viewer", "vera")
        assert door_of(api, text).find("") == []
        assert client.tokens()[-1] == info
        assert client.revoke_token("ci").revoked_at is not None
        with pytest.raises(UsageError, match="there is no token 'cd'"):
            client.revoke_token("cd")


def test_refusals_have_the_classes_that_they_have_over_ray(api: Api) -> None:
    api.door.put(adas_job())
    with pytest.raises(JobNotFound):
        door_of(api, "other").info(JOB)
    with pytest.raises(JobNotFound):
        door_of(api).events("nothing-1", 0, 0)
    with pytest.raises(
        Forbidden, match=r"^this needs the role user, operator or admin; that of this token is viewer$"
    ):
        door_of(api, "viewer").submit(submission())
    with pytest.raises(Unauthorized):
        door_of(api, "rct_wrong_token").find("")
    with pytest.raises(SpecError) as caught:
        door_of(api).submit(submission(working_dir="/code"))
    assert [fault.field for fault in caught.value.faults] == ["working_dir"]
    with pytest.raises(UsageError, match="package: is not in the archive"):
        door_of(api).submit(submission(package=DIGEST))
    with pytest.raises(PackageError, match="send it again"):
        door_of(api).put_package(DIGEST, 0, b"damaged", True)
    with pytest.raises(PackageError, match="at most 20 MiB"):
        door_of(api).put_package(DIGEST, 20 << 20, b"more", False)


class NoTime:
    """A clock by which every pause would take too long."""

    def __init__(self) -> None:
        self._now = 0.0

    def time(self) -> float:
        self._now += 59.9
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


@pytest.mark.parametrize(
    ("error", "words"),
    [(lost(), "the cluster's controller does not answer now"), (StoreError("disk full"), "disk full")],
)
def test_a_cluster_that_does_not_answer_is_told_without_what_went_wrong_inside(
    api: Api, error: Exception, words: str
) -> None:
    clock = NoTime()
    transport = InProcess(api)
    door = HttpDoor(URL, api.tokens["admin"], transport=transport, clock=clock.time, sleep=clock.sleep)
    door.find("")
    api.door.error = error
    with pytest.raises(type(error), match=words):
        door.find("")


def test_the_sizes_of_jobs_are_shown_to_who_sees_the_jobs(api: Api) -> None:
    api.door.put(adas_job())
    write_log(api.home, b"one\n")
    for name, ids in (("operator", {JOB}), ("viewer", {JOB}), ("user", {JOB}), ("other", set[str]())):
        assert set(door_of(api, name).sizes_of_jobs()) == ids


def test_a_user_removes_his_own_ended_jobs(api: Api) -> None:
    api.door.put(adas_job(JobState.SUCCEEDED, ended_at=2.0))
    api.door.put(job_info("bobs-1", user="bob", state=JobState.SUCCEEDED, ended_at=2.0))
    with client_of(api, "user") as client:
        assert [job.id for job in client.prune(older_than_days=1)] == [JOB]
    assert api.door.calls == [("prune", JOB)]


def test_outputs_come_over_as_they_are(api: Api, tmp_path: Path) -> None:
    api.door.put(adas_job(JobState.SUCCEEDED))
    outputs = api.home / "jobs" / JOB / "outputs" / "worker-0"
    outputs.mkdir(parents=True)
    (outputs / "né 'w'\n").write_bytes(b"0123" * 100_000)
    (outputs / "empty").touch()
    fetched = client_of(api).job(JOB).get_outputs(tmp_path / "here")
    assert (fetched.files, fetched.size) == (2, 400_000)
    assert (tmp_path / "here" / "worker-0" / "né 'w'\n").read_bytes() == b"0123" * 100_000
    with pytest.raises(JobNotFound):
        list(door_of(api).outputs("nobody-1"))
