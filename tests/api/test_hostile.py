"""What is sent by those who mean no good, or know no better."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from raycontrol.api.hosts import Hosts
from raycontrol.httpcalls import is_loopback
from raycontrol.logs import JobFolder
from raycontrol.status import JobState
from tests.api.fakes import DIGEST, Api, adas_job, until, write_log

TREASURE = "treasure-5d1f"
YAML = {"Content-Type": "application/yaml"}

NAMES = [
    "..",
    "../../secret",
    "%2e%2e",
    "%2e%2e%2f%2e%2e%2fsecret",
    "%252e%252e%252fsecret",
    "..%2f..%2fsecret",
    "..%5c..%5csecret",
    "%00",
    "worker-0%00",
    "worker-0.log",
    ".hidden",
    "%2Fetc%2Fpasswd",
    "worker-0%0a",
    "a" * 300,
    "%ff%fe",
]


@pytest.mark.parametrize("name", NAMES)
def test_no_name_of_an_instance_leads_out_of_the_job(api: Api, name: str) -> None:
    api.door.put(adas_job(JobState.SUCCEEDED))
    write_log(api.home, b"fine\n")
    (api.home / "secret.log").write_text(TREASURE)
    (api.home / "jobs/secret.log").write_text(TREASURE)
    for path in (f"logs/{name}", f"logs/{name}?follow=1", f"logs/{name}/tail_offset", f"logs/{name}?tail=3"):
        answer = api.exact(f"/api/v1/jobs/digits-ab12cd/{path}")
        assert TREASURE not in answer.text, path
        assert answer.status in (400, 404) or answer.text == '{"offset":0}', path


@pytest.mark.parametrize("name", NAMES)
def test_no_id_leads_out_of_the_folder_of_jobs(api: Api, name: str) -> None:
    (api.home / "logs/0").mkdir(parents=True)
    (api.home / "logs/0/worker-0.log").write_text(TREASURE)
    for path in ("", "/logs", "/logs/worker-0", "/logs.tar", "/outputs.tar", "/plan", "/usage", "/events"):
        answer = api.exact(f"/api/v1/jobs/{name}{path}")
        assert TREASURE not in answer.text, path
        assert answer.status == 404, path


def test_links_out_of_a_job_s_folder_are_not_followed(api: Api) -> None:
    api.door.put(adas_job(JobState.SUCCEEDED, attempt=1))
    secret = api.home / "secret"
    secret.mkdir()
    (secret / "worker-0.log").write_text(TREASURE)
    folder = JobFolder(api.home, "digits-ab12cd")
    outputs = folder.outputs("worker-0")
    outputs.mkdir(parents=True)
    (outputs / "model.pt").write_bytes(b"weights")
    (outputs / "file").symlink_to(secret / "worker-0.log")
    (outputs / "folder").symlink_to(secret)
    folder.logs(0).mkdir(parents=True)
    folder.log("worker-0", 0).symlink_to(secret / "worker-0.log")
    folder.logs(1).symlink_to(secret)
    for path in (
        "logs",
        "logs/worker-0",
        "logs/worker-0?follow=1",
        "logs/worker-0?tail=1",
        "logs/worker-0?attempt=0",
        "logs/worker-0?attempt=0&follow=1",
        "logs/worker-0?attempt=0&tail=1",
        "logs?attempt=0",
        "logs/stream",
        "logs.tar",
        "outputs.tar",
    ):
        assert TREASURE not in api.get(f"/api/v1/jobs/digits-ab12cd/{path}").text, path
    for attempt in (0, 1):
        body = {"attempt": attempt}
        assert api.post("/api/v1/jobs/digits-ab12cd/logs/read", json=body).json() == {}
        assert api.get(f"/api/v1/jobs/digits-ab12cd/logs?attempt={attempt}").json() == {}
    assert b"weights" in api.get("/api/v1/jobs/digits-ab12cd/outputs.tar").content


SAMPLE = (
    '{"at": 1, "cpu_percent": 1, "memory_bytes": 1, "read_bytes": 0, "written_bytes": 0, "processes": 1}\n'
)


def test_usage_behind_links_is_not_shown(api: Api) -> None:
    """Nor that of another job, which a job could lay a link to."""
    api.door.put(adas_job(attempt=1))
    theirs = JobFolder(api.home, "bobs-1").usages(0)
    theirs.mkdir(parents=True)
    (theirs / "worker-0.jsonl").write_text(SAMPLE)
    folder = JobFolder(api.home, "digits-ab12cd")
    folder.usages(1).mkdir(parents=True)
    folder.usages(0).symlink_to(theirs)
    folder.usage("worker-0", 1).symlink_to(theirs / "worker-0.jsonl")
    folder.usage("master-0", 1).write_text(SAMPLE)
    for attempt, names in ((0, []), (1, ["master-0"])):
        found = api.get(f"/api/v1/jobs/digits-ab12cd/usage?attempt={attempt}")
        assert list(found.json()) == names
    assert "gpu=" not in api.get("/metrics").text


def test_usage_of_many_instances_has_fewer_samples_of_each(api: Api) -> None:
    api.door.put(adas_job(JobState.SUCCEEDED))
    folder = JobFolder(api.home, "digits-ab12cd")
    folder.usages(0).mkdir(parents=True)
    for number in range(50):
        folder.usage(f"worker-{number}", 0).write_text(SAMPLE * 210)
    found = api.get("/api/v1/jobs/digits-ab12cd/usage?last=1000").json()
    assert {len(samples) for samples in found.values()} == {200}


def test_a_job_s_folder_that_is_a_link_is_none(api: Api) -> None:
    api.door.put(adas_job(JobState.SUCCEEDED))
    other = api.home / "other/outputs/worker-0"
    other.mkdir(parents=True)
    (other / "file").write_text(TREASURE)
    (api.home / "jobs").mkdir()
    (api.home / "jobs/digits-ab12cd").symlink_to(api.home / "other")
    assert TREASURE not in api.get("/api/v1/jobs/digits-ab12cd/outputs.tar").text


def test_names_that_are_not_this_server_s_are_refused(api: Api) -> None:
    for host, status in (
        ("127.0.0.1:8642", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:8642", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost@evil.example", 421),
        ("evil.example:8642", 421),
        ("localhost:99999999", 421),
        ("", 421),
    ):
        assert api.get("/healthz", headers={"Host": host}).status_code == status, host


def test_two_names_at_once_are_refused(api: Api) -> None:
    async def ask() -> int:
        statuses = []

        async def send(message: Any) -> None:
            statuses.append(message.get("status"))

        headers = [(b"host", b"localhost"), (b"host", b"evil.example")]
        scope = {"type": "http", "method": "GET", "path": "/healthz", "headers": headers, "query_string": b""}
        await api.app({**scope, "client": None}, None, send)  # type: ignore[arg-type]
        return int(statuses[0])

    assert api.run(ask()) == 400


def test_a_server_on_all_addresses_answers_to_addresses_and_its_own_name() -> None:
    for bound in ("0.0.0.0", "::", "[::]"):
        hosts = Hosts.of(bound, ["head.example"], "Head")
        known = ["10.1.2.3:8642", "[fe80::1]:8642", "head:8642", "head.example", "localhost"]
        assert [hosts.know(name) for name in known] == [True] * 5, bound
        assert [hosts.know(name) for name in ("evil.example", "0.0.0.0.evil.example", "10.1.2.3/x")] == [
            False
        ] * 3


def test_only_loopback_is_this_machine() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")] == [
        True
    ] * 5
    assert [is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "::", "head", "")] == [False] * 5


def test_pages_of_other_origins_are_refused(api: Api) -> None:
    for origin, status in (
        ("http://127.0.0.1:8642", 200),
        ("https://127.0.0.1:8642", 200),
        ("http://127.0.0.1", 403),
        ("http://127.0.0.1:9999", 403),
        ("http://evil.example", 403),
        ("null", 403),
        ("", 403),
        ("file://", 403),
        ("http://[", 403),
    ):
        answer = api.get("/api/v1/jobs", headers={"Origin": origin})
        assert answer.status_code == status, origin
        assert not [name for name in answer.headers if name.startswith("access-control")]
    preflight = api.request("OPTIONS", "/api/v1/jobs", headers={"Origin": "http://evil.example"})
    assert preflight.status_code == 403


def test_every_answer_carries_what_browsers_heed(api: Api) -> None:
    for answer in (api.get("/healthz"), api.get("/none"), api.get("/api/v1/jobs", by=None), api.get("/docs")):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-request-id"]
    assert api.get("/none").headers["content-type"] == "application/problem+json"


def test_a_method_that_a_path_does_not_have_is_told_which_it_has(api: Api) -> None:
    for path, methods in (
        ("/api/v1/jobs", "GET, HEAD, POST"),
        ("/api/v1/jobs/digits-ab12cd", "DELETE, GET, HEAD"),
        (f"/api/v1/packages/{DIGEST}", "HEAD, PUT"),
    ):
        refused = api.request("PATCH", path)
        assert (refused.status_code, refused.headers["allow"]) == (405, methods)


@pytest.mark.parametrize(
    "path",
    [
        "jobs",
        "jobs/digits-ab12cd",
        "jobs/digits-ab12cd/logs/worker-0",
        "jobs/digits-ab12cd/logs/worker-0?follow=1",
        "jobs/digits-ab12cd/events/stream",
        "jobs/digits-ab12cd/outputs.tar",
        "jobs/none-1",
    ],
)
def test_head_has_the_head_of_get_alone(api: Api, path: str) -> None:
    api.door.put(adas_job(JobState.SUCCEEDED))
    write_log(api.home, b"one\ntwo\n")
    got = api.get(f"/api/v1/{path}", headers={"X-Request-ID": "same"})
    head = api.request("HEAD", f"/api/v1/{path}", headers={"X-Request-ID": "same"})
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers == got.headers


def test_a_target_that_is_a_whole_url_is_one_of_its_path_at_its_host(api: Api) -> None:
    api.door.put(adas_job(JobState.SUCCEEDED))
    for target, status in (
        ("http://127.0.0.1:8642/api/v1/jobs/digits-ab12cd/events?after=0", 200),
        ("HTTP://localhost/api/v1/jobs", 200),
        ("http://127.0.0.1", 404),
        ("http://evil.example/api/v1/jobs", 421),
        ("http:///api/v1/jobs", 421),
        ("ftp://localhost/api/v1/jobs", 404),
    ):
        assert api.exact(target).status == status, target


def test_a_request_id_is_taken_only_if_it_is_short_and_plain(api: Api) -> None:
    def answered(given: str) -> str:
        return str(api.get("/healthz", headers={"X-Request-ID": given}).headers["x-request-id"])

    assert answered("abc-123.x:y") == "abc-123.x:y"
    for given in ("a" * 65, "two words", "", "<script>", "a\tb"):
        assert answered(given) != given


def test_the_log_has_one_line_a_request_and_no_token_and_no_query(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "raycontrol.api"):
        api.get("/api/v1/jobs?text=hidden", by="user", headers={"X-Request-ID": "r-1"})
        api.get("/api/v1/x%0aINFO%20forged")
    first, second = [record.getMessage() for record in caplog.records if "ms id=" in record.getMessage()]
    assert first.startswith("10.0.0.9 GET /api/v1/jobs 200 ")
    assert first.endswith(" id=r-1 token=user")
    assert "\n" not in second
    assert api.tokens["user"] not in caplog.text
    assert "hidden" not in first


def test_bodies_that_are_too_large_are_refused_before_they_are_read(make_api: Callable[..., Api]) -> None:
    api = make_api(body_bytes=1000, piece_bytes=2000)
    api.door.put(adas_job())
    for method, path, size in (
        ("POST", "/api/v1/jobs", 1001),
        ("POST", "/api/v1/doubts", 1001),
        ("POST", "/api/v1/tokens", 1001),
        ("POST", "/api/v1/jobs/digits-ab12cd/stop", 1001),
        ("POST", "/api/v1/jobs/digits-ab12cd/logs/read", 1001),
        ("PUT", f"/api/v1/packages/{DIGEST}", 2001),
    ):
        answer = api.request(method, path, content=b"x" * size)
        assert answer.status_code == 413, path
        chunked = api.request(method, path, content=endless(size))
        assert chunked.status_code == 413, path


async def endless(size: int) -> AsyncIterator[bytes]:
    """A body in chunks, whose length nobody has said."""
    for _ in range(10):
        yield b"x" * size


def test_a_piece_that_is_too_large_is_told_how_to_come(api: Api) -> None:
    answer = api.request("PUT", f"/api/v1/packages/{DIGEST}", content=bytes((8 << 20) + 1))
    assert answer.status_code == 413
    assert answer.json()["detail"] == (
        "the body must have at most 8388608 bytes; send pieces of at most 8 MiB with offset="
    )


def test_a_package_has_a_largest_size(api: Api) -> None:
    answer = api.request("PUT", f"/api/v1/packages/{DIGEST}?offset={20 << 20}", content=b"x")
    assert (answer.status_code, answer.json()["detail"]) == (413, "a package must have at most 20 MiB")
    assert api.door.packages == {}


def test_a_body_that_does_not_come_is_not_waited_for(make_api: Callable[..., Api]) -> None:
    api = make_api(body_s=0.2)

    async def slow() -> AsyncIterator[bytes]:
        yield b'{"spec": '
        await asyncio.sleep(60)

    assert api.post("/api/v1/jobs", content=slow()).status_code == 408


def test_a_client_that_leaves_within_a_body_is_no_fault_of_the_server(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "raycontrol.api"):
        assert api.leave_within_a_body("/api/v1/jobs") == [400]
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert api.door.submissions == {}


def test_nobody_without_a_token_has_his_body_read(make_api: Callable[..., Api]) -> None:
    api = make_api(body_s=0.2)
    pieces = []

    async def told() -> AsyncIterator[bytes]:
        pieces.append(1)
        yield b"{}"

    assert api.post("/api/v1/jobs", by=None, content=told()).status_code == 401
    assert pieces == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        b'{"spec": NaN}',
        b'{"spec": {"command": "a", "priority": 1e999}}',
        b'{"spec": {"priority": ' + b"9" * 5000 + b"}}",
        b'{"spec": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"spec": ' + b'{"env":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        b'{"spec": {"command": "a", "name": "\\ud800"}}',
        b'{"spec": {"\\ud800": "a"}}',
        b'{"spec": {"command": "a", "env": {"A": "\\u0000"}}}',
        b'{"spec": {"command": "a"}, "job_id": "../../x"}',
        b'{"spec": {"command": "a"}, "job_id": "\\u0000"}',
        b'{"spec": {"command": [' + b"1," * 30_000 + b"1]}}",
    ],
)
def test_broken_json_is_refused_in_words(api: Api, body: bytes) -> None:
    for path in ("jobs", "doubts"):
        answer = api.post(f"/api/v1/{path}", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 422) or (path == "doubts" and b"job_id" in body), answer.text
        assert answer.headers["content-type"] == "application/problem+json"
    assert api.door.submissions == {}


BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 9)) for n in range(9)
)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"command: [",
        b"command: a\ncommand: b\n",
        BOMB,
        b"command: !!python/object/apply:os.system ['true']\n",
        b"!!python/object:os.system {}\n",
        b"command: " + b"[" * 5000,
        b"x: &x [*x]\ncommand: a\n",
        b"- " * 100_000,
        b"command: a\n---\ncommand: b\n",
        b"\xff\xff",
        b"%YAML 9.9\n---\ncommand: a\nnope: 1\n",
        b"command: \x00\n",
    ],
)
def test_broken_yaml_is_refused_in_words(api: Api, body: bytes) -> None:
    answer = api.post("/api/v1/jobs", content=body, headers=YAML)
    assert answer.status_code in (400, 422), answer.text
    assert api.door.submissions == {}


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=501",
        "limit=x",
        "state=NONE",
        "after=x",
        "after=WzFd",
        "after=W251bGwsIm51bGwiXQ",
        "after=" + "A" * 401,
        "label=novalue",
        "text=" + "a" * 257,
        "after=WzFlOTk5LCAiYSJd",
    ],
)
def test_questions_that_break_rules_are_refused(api: Api, query: str) -> None:
    answer = api.get(f"/api/v1/jobs?{query}")
    assert answer.status_code == 422
    fields = [fault["field"].partition(".")[0] for fault in answer.json()["faults"]]
    assert fields == [query.partition("=")[0]]


def test_offsets_that_are_none_are_refused(api: Api) -> None:
    api.door.put(adas_job(JobState.SUCCEEDED))
    write_log(api.home, b"a\n")
    for path in (
        "logs/worker-0?offset=-1",
        "logs/worker-0?attempt=-1",
        "logs/worker-0?tail=999999999",
        "events?after=-1",
    ):
        assert api.get(f"/api/v1/jobs/digits-ab12cd/{path}").status_code == 422
    for event_id in ("x", "7", "-1:0", "0:-1", "0:1e3", "0:" + "9" * 30, "\u0661:0", ":"):
        answer = api.get(
            "/api/v1/jobs/digits-ab12cd/logs/worker-0?follow=1", headers={"Last-Event-ID": event_id.encode()}
        )
        assert answer.status_code == 422
    for event_id in ("x", "{}", "[]", '{"attempt":0,"offsets":[]}', '{"attempt":0,"offsets":{"a":-1}}', "9"):
        answer = api.get("/api/v1/jobs/digits-ab12cd/logs/stream", headers={"Last-Event-ID": event_id})
        assert answer.status_code == 422
    for body in ({"attempt": -1}, {"attempt": 0, "offsets": {"a": -1}}, {"attempt": 0, "wait_s": 99}, {}):
        assert api.post("/api/v1/jobs/digits-ab12cd/logs/read", json=body).status_code == 422


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("Content-Length", "5"), ("Transfer-Encoding", "chunked")], 400),
        ([("Origin", "http://127.0.0.1"), ("Origin", "https://evil.example")], 403),
    ],
)
def test_headers_that_say_two_things_are_refused(
    api: Api, headers: list[tuple[str, str]], status: int
) -> None:
    with api.live("/api/v1/jobs", headers=headers) as answer:
        until(lambda: answer.over, "the answer")
    assert answer.status == status
