"""A cluster over HTTP: which requests the verbs make, and what becomes of the answers."""

from __future__ import annotations

import base64
import gzip
import json
import logging
import pickle
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from raycontrol.access import Role, TokenInfo
from raycontrol.cli import services
from raycontrol.client import Client, send
from raycontrol.errors import (
    ControllerUnavailable,
    Forbidden,
    HeadFault,
    JobNotFound,
    PackageError,
    PlanError,
    RaycontrolError,
    ServerNotTrusted,
    ServerUnreachable,
    SpecError,
    StoreError,
    StoreRefused,
    Unauthorized,
    UsageError,
)
from raycontrol.httpcalls import Call, HttpCalls
from raycontrol.job import Submission
from raycontrol.packages import pack
from raycontrol.readers import Door
from raycontrol.remote import HttpDoor
from raycontrol.settings import Settings
from raycontrol.spec import JobSpec
from raycontrol.status import JobState
from tests.fake_client import job_info

URL = "https://head:8642"
TOKEN = "rct_k3x9_s3cret"
JOB = "digits-ab12cd"
DIGEST = "a" * 64
JOB_JSON = job_info(JOB).model_dump(mode="json")
EVENT_JSON = {
    "at": 1.5, "kind": "Noted", "state": "RUNNING", "reason": "STARTED", "attempt": 0, "message": "runs", "seq": 7, "job_id": JOB,
}  # fmt: skip
TOKEN_JSON = {"name": "ci", "role": "user", "user": "ada", "created_at": 1.0}


@dataclass
class Script(httpx.BaseTransport):
    """A server that gives prepared answers, one after the other; an exception is a connection that fails so."""

    answers: list[httpx.Response | Exception]
    requests: list[httpx.Request] = field(default_factory=list)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def asked(self) -> list[str]:
        return [f"{request.method} {request.url.raw_path.decode()}" for request in self.requests]


@dataclass
class Watch:
    """A clock that moves when somebody sleeps; ``pauses`` are for how long they did."""

    now: float = 1000.0
    pauses: list[float] = field(default_factory=list)

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def door_to(script: Script, watch: Watch | None = None, url: str = URL) -> HttpDoor:
    watch = watch or Watch()
    return HttpDoor(url, TOKEN, transport=script, clock=watch.time, sleep=watch.sleep)


def answer(document: Any, status: int = 200, **headers: str) -> httpx.Response:
    return httpx.Response(status, json=document, headers=headers)


def problem(status: int, kind: str = "", detail: str = "", **more: Any) -> httpx.Response:
    document = {"type": f"urn:raycontrol:{kind}", "title": "", "status": status, "detail": detail, **more}
    return httpx.Response(status, json=document, headers={"Content-Type": "application/problem+json"})


# Verbs


VERBS: list[tuple[Callable[[HttpDoor], Any], Any, str, Any, Any]] = [
    (lambda door: door.find("dig"), [JOB], "GET /api/v1/ids?prefix=dig", None, [JOB]),
    (lambda door: door.info(JOB), JOB_JSON, f"GET /api/v1/jobs/{JOB}", None, job_info(JOB)),
    (
        lambda door: door.jobs([JobState.RUNNING, JobState.FAILED], "ada", 10, labels={"team": "a=b"}, text="dig"),
        {"jobs": [JOB_JSON], "next": None},
        "GET /api/v1/jobs?state=RUNNING&state=FAILED&user=ada&label=team%3Da%3Db&text=dig&limit=10",
        None,
        [job_info(JOB)],
    ),
    (lambda door: door.events(JOB, 7, 0), [], f"GET /api/v1/jobs/{JOB}/events?after=7&wait_s=0", None, []),
    (lambda door: door.events(JOB, 7, 99), [], f"GET /api/v1/jobs/{JOB}/events?after=7&wait_s=20.0", None, []),
    (lambda door: door.log_sizes(JOB, 1), {"worker-0": 5}, f"GET /api/v1/jobs/{JOB}/logs?attempt=1", None, {"worker-0": 5}),
    (
        lambda door: door.log_news(JOB, 0, {"worker-0": 3}, 0.5, 100, None),
        {"worker-0": "AP8K"},
        f"POST /api/v1/jobs/{JOB}/logs/read",
        {"attempt": 0, "offsets": {"worker-0": 3}, "wait_s": 0.5, "max_bytes": 100, "instances": None},
        {"worker-0": b"\0\xff\n"},
    ),
    (
        lambda door: door.log_news(JOB, 0, {}, 0, 100, ("worker-1",)),
        {},
        f"POST /api/v1/jobs/{JOB}/logs/read",
        {"attempt": 0, "offsets": {}, "wait_s": 0, "max_bytes": 100, "instances": ["worker-1"]},
        {},
    ),
    (
        lambda door: door.tail_offset(JOB, 0, "worker-0", 5),
        {"offset": 42},
        f"GET /api/v1/jobs/{JOB}/logs/worker-0/tail_offset?lines=5&attempt=0",
        None,
        42,
    ),
    (lambda door: door.usage(JOB, 0, 2), {"w-0": []}, f"GET /api/v1/jobs/{JOB}/usage?last=2&attempt=0", None, {"w-0": ()}),
    (
        lambda door: door.stop(JOB, "enough", True),
        JOB_JSON,
        f"POST /api/v1/jobs/{JOB}/stop",
        {"why": "enough", "force": True},
        job_info(JOB),
    ),
    (lambda door: door.members(JOB), [], f"GET /api/v1/jobs/{JOB}/members", None, []),
    (lambda door: door.sizes_of_jobs(), {JOB: 12}, "GET /api/v1/sizes", None, {JOB: 12}),
    (lambda door: door.nodes(["a", "b"], True), [], "GET /api/v1/nodes?name=a&name=b&check=true", None, []),
    (lambda door: door.nodes(None, False), [], "GET /api/v1/nodes?check=false", None, []),
    (lambda door: door.tokens(), [TOKEN_JSON], "GET /api/v1/tokens", None, [TokenInfo(**TOKEN_JSON)]),
    (lambda door: door.revoke_token("ci"), TOKEN_JSON, "DELETE /api/v1/tokens/ci", None, TokenInfo(**TOKEN_JSON)),
    (
        lambda door: door.create_token("ci", Role.USER, "ada", 60.0, "me"),
        {"token": "rct_new", "info": TOKEN_JSON},
        "POST /api/v1/tokens",
        {"name": "ci", "role": "user", "user": "ada", "ttl_s": 60.0},
        (TokenInfo(**TOKEN_JSON), "rct_new"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "answered", "request_line", "body", "result"), VERBS)
def test_a_verb_is_one_request(
    ask: Callable[[HttpDoor], Any], answered: Any, request_line: str, body: Any, result: Any
) -> None:
    script = Script([answer(answered)])
    assert ask(door_to(script)) == result
    assert script.asked == [request_line]
    sent = script.requests[0].content
    assert (json.loads(sent) if sent else None) == body


def test_every_request_says_who_asks_and_of_which_version() -> None:
    script = Script([answer([])])
    door_to(script).find("")
    headers = script.requests[0].headers
    assert headers["Authorization"] == "Bearer rct_k3x9_s3cret"
    assert headers["X-Raycontrol-Version"] == headers["User-Agent"].removeprefix("raycontrol/")


def test_a_door_over_http_is_a_door() -> None:
    door: Door = door_to(Script([answer([EVENT_JSON])]))
    assert [event.seq for event in door.events(JOB, 0, 0)] == [7]


def test_a_list_is_read_page_by_page_until_there_are_enough() -> None:
    pages = [
        {"jobs": [{**JOB_JSON, "id": "c"}, {**JOB_JSON, "id": "b"}], "next": "Yg"},
        {"jobs": [{**JOB_JSON, "id": "a"}], "next": None},
    ]
    script = Script([*map(answer, pages)])
    assert [job.id for job in door_to(script).jobs(None, None, None)] == ["c", "b", "a"]
    assert script.asked == ["GET /api/v1/jobs?limit=500", "GET /api/v1/jobs?limit=500&after=Yg"]
    script = Script([*map(answer, pages)])
    assert [job.id for job in door_to(script).jobs(None, None, 2)] == ["c", "b"]
    assert script.asked == ["GET /api/v1/jobs?limit=2"]


def test_a_list_goes_on_before_a_job() -> None:
    script = Script([answer({"jobs": [{**JOB_JSON, "id": "a"}], "next": None})])
    assert [job.id for job in door_to(script).jobs(None, None, 5, before=(2.0, "b"))] == ["a"]
    assert script.asked == ["GET /api/v1/jobs?limit=5&after=WzIuMCwgImIiXQ"]


@pytest.mark.parametrize(
    ("job_id", "path"),
    [
        ("..", "/api/v1/jobs/%2E%2E"),
        ("a/../b", "/api/v1/jobs/a%2F%2E%2E%2Fb"),
        ("a?b#c%2e", "/api/v1/jobs/a%3Fb%23c%252e"),
        ("ä\n", "/api/v1/jobs/%C3%A4%0A"),
    ],
)
def test_an_id_is_one_part_of_the_path_whatever_is_in_it(job_id: str, path: str) -> None:
    script = Script([answer(JOB_JSON)])
    door_to(script).info(job_id)
    assert script.asked == [f"GET {path}"]


def test_a_server_may_live_below_a_path() -> None:
    script = Script([answer([])])
    door_to(script, url="https://head/raycontrol/").find("")
    assert str(script.requests[0].url) == "https://head/raycontrol/api/v1/ids?prefix="


# Submitting


def test_a_submission_carries_its_secrets_and_may_be_repeated() -> None:
    script = Script([httpx.ReadError("reset"), answer(JOB_JSON, 201)])
    spec = JobSpec.from_dict({"command": "true", "secret_env": {"HF_TOKEN": "hf_s3cret"}})
    submission = Submission(JOB, spec, user="ada", package=DIGEST, version="0.1.0")
    assert door_to(script).submit(submission) == job_info(JOB)
    assert script.asked == ["POST /api/v1/jobs", "POST /api/v1/jobs"]
    assert script.requests[0].content == script.requests[1].content
    sent = json.loads(script.requests[0].content)
    assert (sent["job_id"], sent["package"]) == (JOB, DIGEST)
    assert (sent["spec"]["command"], sent["spec"]["secret_env"]) == ("true", {"HF_TOKEN": "hf_s3cret"})
    assert JobSpec.from_dict(sent["spec"]) == spec


def test_doubts_are_asked_for_without_secrets() -> None:
    script = Script([answer({"doubts": "needs 2 GPUs"})])
    spec = JobSpec.from_dict({"command": "true", "secret_env": {"HF_TOKEN": "hf_s3cret"}})
    assert door_to(script).doubts(spec) == "needs 2 GPUs"
    assert script.asked == ["POST /api/v1/doubts"]
    assert b"s3cret" not in script.requests[0].content


def test_a_server_that_does_not_know_of_doubts_has_none() -> None:
    assert door_to(Script([problem(404)])).doubts(JobSpec(command="true")) is None


def test_a_working_directory_is_uploaded_unless_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print()")
    with pack(tmp_path) as package:
        path, size = f"/api/v1/packages/{package.digest}", package.size
        script = Script([httpx.Response(200)])
        send(door_to(script), package, print)
        assert script.asked == [f"HEAD {path}"]
        script = Script([httpx.Response(404), answer({"held": 0}), answer({"held": size})])
        send(door_to(script), package, print)
        assert script.asked == [
            f"HEAD {path}",
            f"PUT {path}?offset=0&last=false",
            f"PUT {path}?offset=0&last=true",
        ]
        assert script.requests[2].content == package.path.read_bytes()
        assert script.requests[2].headers["Content-Type"] == "application/octet-stream"


def test_jobs_are_removed_one_by_one_also_when_one_is_gone() -> None:
    script = Script([problem(404, "not-there"), httpx.Response(204)])
    door_to(script).prune(["a", "b"])
    assert script.asked == ["DELETE /api/v1/jobs/a", "DELETE /api/v1/jobs/b"]


# A server that is away


def test_a_call_is_repeated_with_growing_pauses() -> None:
    watch = Watch()
    away = [httpx.ConnectError("refused"), httpx.ReadTimeout(""), answer({}, 502), answer({}, 503)]
    script = Script([*away, answer({}, 504), httpx.RemoteProtocolError("cut"), answer([JOB])])
    assert door_to(script, watch).find("") == [JOB]
    assert watch.pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0]


def test_after_a_minute_nobody_waits_for_a_server_any_more(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch()
    script = Script([httpx.ConnectError("[Errno 111] Connection refused") for _ in range(30)])
    with pytest.raises(ServerUnreachable) as caught:
        door_to(script, watch).find("")
    assert 50 < sum(watch.pauses) <= 60
    assert str(caught.value).startswith(
        "no raycontrol server answers at https://head:8642 ([Errno 111] Connection refused); is `raycontrol serve` "
    )
    assert [record.getMessage() for record in caplog.records if record.name == "raycontrol.httpcalls"] == [
        "https://head:8642: [Errno 111] Connection refused; trying again for up to 60 s"
    ]


def test_a_server_that_is_asked_too_often_says_how_long_to_wait() -> None:
    watch = Watch()
    script = Script([answer({}, 429, **{"Retry-After": "7"}), answer({}, 429), answer([])])
    assert door_to(script, watch).find("") == []
    assert watch.pauses == [7.0, 0.4]


def test_nobody_waits_for_longer_than_a_minute_because_a_server_wants_it() -> None:
    watch = Watch()
    busy = problem(503, "busy", "too many follow this job")
    busy.headers["Retry-After"] = "3600"
    with pytest.raises(ControllerUnavailable, match=r"^too many follow this job$"):
        door_to(Script([busy]), watch).find("")
    assert watch.pauses == []


def test_a_certificate_that_is_not_trusted_is_told_at_once() -> None:
    refused = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate")
    refused.reason = "CERTIFICATE_VERIFY_FAILED"
    failed = httpx.ConnectError("self-signed certificate")
    failed.__cause__ = refused
    with pytest.raises(ServerNotTrusted) as caught:
        door_to(Script([failed])).find("")
    assert str(caught.value) == (
        "the certificate of https://head:8642 is not trusted here (self-signed certificate); it has to be for the name in "
        "the URL, and signed by one whom this machine trusts: SSL_CERT_FILE may name a file of certificates to trust"
    )


def test_one_side_that_speaks_tls_and_the_other_not_is_guessed() -> None:
    cut = httpx.RemoteProtocolError("Server disconnected without sending a response.")
    with pytest.raises(
        ServerUnreachable, match=r"sending a response; does it speak https\?\); is `raycontrol"
    ):
        door_to(Script([cut] * 40), url="http://localhost:1").find("")
    plain = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number")
    plain.reason = "WRONG_VERSION_NUMBER"
    failed = httpx.ConnectError("wrong version number")
    failed.__cause__ = plain
    with pytest.raises(ServerUnreachable, match=r"\(wrong version number; does it speak plain http\?\)"):
        door_to(Script([failed])).find("")


@pytest.mark.parametrize(
    ("name", "text"),
    [("nope.pem", "cannot be read: No such file or directory"), ("none.pem", "holds no certificates in PEM")],
)
def test_a_file_of_certificates_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    (tmp_path / "none.pem").write_text("none")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / name))
    with pytest.raises(UsageError) as caught:
        HttpDoor(URL, TOKEN)
    assert str(caught.value) == f"SSL_CERT_FILE: {tmp_path / name}: {text}"
    HttpDoor("http://localhost:1", TOKEN).close()


class RestartedServer(httpx.BaseTransport):
    """Serves the log of a job that ends; every other request finds it away, every third answer gets lost."""

    def __init__(self, log: bytes) -> None:
        self._log = log
        self._requests = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._requests += 1
        if self._requests % 2:
            raise httpx.ConnectError("refused")
        given = self._answer(request)
        if self._requests % 3 == 0:
            raise httpx.ReadError("reset")
        return given

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/logs/read"):
            offset = json.loads(request.read())["offsets"].get("worker-0", 0)
            piece = self._log[offset : offset + 5]
            return answer({"worker-0": base64.b64encode(piece).decode()} if piece else {})
        if request.url.path.endswith("/ids"):
            return answer([JOB])
        state = "SUCCEEDED" if self._requests > 8 else "RUNNING"
        return answer({**JOB_JSON, "state": state})


def test_a_follower_reads_on_without_a_gap_or_a_repeat_when_the_server_is_started_again(
    tmp_path: Path,
) -> None:
    watch = Watch()
    client = Client(settings=Settings(home=str(tmp_path)))
    server = RestartedServer(b"one\ntwo\nthree\nfour\n")
    client._reader = HttpDoor(URL, TOKEN, transport=server, clock=watch.time, sleep=watch.sleep)
    lines = list(client.job(JOB).logs(follow=True, prefix=False))
    assert lines == ["one", "two", "three", "four"]
    assert watch.pauses != []


# Refusals


ERRORS: list[tuple[httpx.Response, type[RaycontrolError], str]] = [
    (problem(400, "usage-error", "no node 'x'"), UsageError, "no node 'x'"),
    (problem(403, "forbidden", "this needs the role admin; that of this token is viewer"), Forbidden, "this needs the role admin; that of this token is viewer"),
    (problem(404, "not-there"), JobNotFound, f"no job '{JOB}'; `raycontrol list --all` shows the ids"),
    (problem(404, "job-not-found"), JobNotFound, f"no job '{JOB}'; `raycontrol list --all` shows the ids"),
    (problem(404, "", "there is nothing at this path"), UsageError, "there is nothing at this path"),
    (httpx.Response(404, text="<h1>Not Found"), UsageError, "https://head:8642 answers 404 Not Found"),
    (problem(408, "body-too-slow", "not in 30 s"), UsageError, "not in 30 s"),
    (problem(409, "conflict", "stop it before it is removed"), UsageError, "stop it before it is removed"),
    (problem(409, "store-refused", "has ended"), StoreRefused, "has ended"),
    (problem(409, "key-reused", "idempotency key 'a'"), UsageError, "idempotency key 'a'"),
    (problem(413, "too-large", "at most 8 bytes"), UsageError, "at most 8 bytes"),
    (problem(415, "unknown-media", "must be JSON"), UsageError, "must be JSON"),
    (problem(416, "no-such-range", "past the end"), UsageError, "past the end"),
    (problem(421, "wrong-host", "name it with --allowed-host"), UsageError, "name it with --allowed-host"),
    (problem(422, "package-error", "damaged"), PackageError, "damaged"),
    (problem(422, "plan-error", "no way"), PlanError, "no way"),
    (problem(422, "unfit", "limit: too large"), UsageError, "limit: too large"),
    (problem(429, "too-many", "wait an hour"), UsageError, "wait an hour"),
    (problem(500, "internal-error", "its log tells more"), HeadFault, "a call to the head failed: its log tells more"),
    (
        httpx.Response(502, text="<h1>Bad Gateway"),
        ControllerUnavailable,
        "https://head:8642 answers 502 Bad Gateway",
    ),
    (
        httpx.Response(418, text="[]"),
        ControllerUnavailable,
        "https://head:8642 answers 418 I'm a teapot",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("refused", "kind", "text"), ERRORS)
def test_a_refusal_is_the_error_that_it_would_be_over_ray(
    refused: httpx.Response, kind: type[RaycontrolError], text: str
) -> None:
    refused.headers["Retry-After"] = "3600"
    with pytest.raises(RaycontrolError) as caught:
        door_to(Script([refused])).info(JOB)
    assert (type(caught.value), str(caught.value)) == (kind, text)


def test_a_store_that_takes_nothing_is_a_store_error() -> None:
    refused = problem(503, "store-error", "disk full")
    refused.headers["Retry-After"] = "3600"
    with pytest.raises(StoreError, match=r"^disk full$"):
        door_to(Script([refused])).find("")


def test_a_wrong_spec_is_a_spec_error_with_every_fault() -> None:
    faults = [
        {"field": "nodes", "rule": "must be at least 1", "got": "0", "line": 2, "column": 1},
        {"field": "mode", "rule": "must be ddp", "got": None, "line": None, "column": None},
    ]
    with pytest.raises(SpecError) as caught:
        door_to(Script([problem(422, "spec-error", "2 faults", faults=faults)])).doubts(JobSpec(command="a"))
    assert [str(fault) for fault in caught.value.faults] == [
        "line 2, column 1: nodes: must be at least 1, got 0",
        "mode: must be ddp",
    ]


def test_a_piece_that_is_too_large_is_a_package_error() -> None:
    with pytest.raises(PackageError, match=r"^at most 8 bytes$"):
        door_to(Script([problem(413, "too-large", "at most 8 bytes")])).put_package(DIGEST, 0, b"a", True)


def test_a_refused_token_says_what_to_do() -> None:
    with pytest.raises(Unauthorized) as caught:
        door_to(Script([problem(401, "unauthorized", "give a token")])).find("")
    assert str(caught.value) == (
        "https://head:8642 refused the token: it is missing, wrong, expired or revoked; set RAYCONTROL_TOKEN to one "
        "that an admin made with `raycontrol token create`"
    )
    assert caught.value.exit_status == 2


def test_a_redirect_is_not_followed() -> None:
    script = Script([httpx.Response(307, headers={"Location": "https://elsewhere/"})])
    with pytest.raises(ControllerUnavailable, match="a redirect, which is not followed"):
        door_to(script).find("")
    assert len(script.requests) == 1


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            httpx.Response(200, text="<html>"),
            "what https://head:8642 answers cannot be read (the whole: Invalid JSON: expected value at line 1 column 1)",
        ),
        (
            answer({"id": 1}, **{"X-Raycontrol-Version": "9.0"}),
            "what https://head:8642 answers cannot be read (id: Input should be a valid string); it is raycontrol 9.0, "
            "this client 0.1.0: install the same version here",
        ),
    ],
)
def test_an_answer_that_cannot_be_read_is_told_with_the_versions(given: httpx.Response, text: str) -> None:
    with pytest.raises(ControllerUnavailable) as caught:
        door_to(Script([given])).info(JOB)
    assert str(caught.value) == text


def test_an_answer_that_unpacks_to_more_than_any_of_ours_is_not_taken_in() -> None:
    packed = gzip.compress(b" " * (64 << 20))
    script = Script([httpx.Response(200, stream=Pieces(packed), headers={"Content-Encoding": "gzip"})])
    watch = Watch()
    calls = HttpCalls(
        URL,
        TOKEN,
        insecure_http=False,
        transport=script,
        clock=watch.time,
        sleep=watch.sleep,
        largest_bytes=1 << 20,
    )
    with pytest.raises(ControllerUnavailable, match="answers with more than 1 MiB"):
        calls.ask(Call("GET", "/ids"))


def test_a_compressed_answer_is_read() -> None:
    packed = gzip.compress(b'["digits-ab12cd"]')
    script = Script([httpx.Response(200, stream=Pieces(packed), headers={"Content-Encoding": "gzip"})])
    assert door_to(script).find("") == ["digits-ab12cd"]


class Pieces(httpx.SyncByteStream):
    def __init__(self, data: bytes) -> None:
        self._data = data

    def __iter__(self) -> Iterator[bytes]:
        for at in range(0, len(self._data), 1000):
            yield self._data[at : at + 1000]


@pytest.mark.parametrize(
    "error",
    [Unauthorized(URL), Forbidden("no"), ServerUnreachable(URL, "refused"), ServerNotTrusted(URL, "no")],
)
def test_errors_cross_a_process_border(error: RaycontrolError) -> None:
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# The token


def test_the_token_is_in_no_url_no_log_no_error_and_no_repr(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    script = Script([answer([]), problem(401), *[httpx.ConnectError("refused") for _ in range(30)]])
    door = door_to(script)
    seen = [repr(door), str(door.find("a"))]
    for kind in (Unauthorized, ServerUnreachable):
        with pytest.raises(kind) as caught:
            door.find("a")
        seen += [repr(caught.value), str(caught.value), str(caught.getrepr(showlocals=True))]
    seen += [str(request.url) for request in script.requests]
    assert "s3cret" not in "\n".join([*seen, caplog.text])
    assert repr(door) == "HttpDoor('https://head:8642')"


@pytest.mark.parametrize("token", ["", "two s3crets", "s3cret\r\nX-Other: 1", "s3crét", "s3cret" * 100])
def test_what_cannot_be_a_token_is_refused_without_being_told(token: str) -> None:
    with pytest.raises(UsageError) as caught:
        HttpDoor(URL, token)
    assert str(caught.value) == "token: must be 1 to 512 printable ASCII characters without spaces"


def test_without_a_token_none_is_sent() -> None:
    script = Script([answer([])])
    HttpDoor(URL, None, transport=script).find("")
    assert "Authorization" not in script.requests[0].headers


@pytest.mark.parametrize(
    "url", ["http://head:8642", "http://10.0.0.1", "http://localhost.example.org", "HTTP://head"]
)
def test_a_token_does_not_go_over_plain_http_to_another_machine(url: str) -> None:
    with pytest.raises(UsageError, match=r"^plain http to .* would show the token"):
        HttpDoor(url, TOKEN)
    HttpDoor(url, TOKEN, insecure_http=True).close()


@pytest.mark.parametrize("url", ["http://127.0.0.1:8642", "http://localhost:8642", "http://[::1]:8642"])
def test_plain_http_is_good_enough_on_this_machine(url: str) -> None:
    HttpDoor(url, TOKEN).close()


def test_a_url_that_is_none_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"^url: must be a URL such as https://head:8642, without"):
        HttpDoor("head:8642", TOKEN)


# The client


def client_of(tmp_path: Path, **settings: Any) -> Client:
    return Client(settings=Settings(home=str(tmp_path), **settings))


def test_a_url_stands_alone(tmp_path: Path) -> None:
    settings = Settings(home=str(tmp_path))
    for ways in ({"address": "10.0.0.1:6379"}, {"embedded": True}):
        with pytest.raises(UsageError, match=r"^a url is a way to a cluster by itself"):
            Client(url=URL, settings=settings, **ways)
    with pytest.raises(UsageError, match=r"^a token is for a url"):
        Client(token=TOKEN, settings=settings)


def test_a_controller_is_nothing_to_look_at_over_http(tmp_path: Path) -> None:
    client = client_of(tmp_path, url=URL)
    for ask in (client.controller_status, client.controller_restart):
        with pytest.raises(
            UsageError, match=r"^not over HTTP: run it on a node of the cluster, with --address$"
        ):
            ask()


def test_url_and_token_of_the_settings_are_the_defaults(tmp_path: Path) -> None:
    with client_of(tmp_path, url=URL, token=TOKEN) as client:
        assert repr(client._read()) == repr(client._open()) == "HttpDoor('https://head:8642')"
        assert client.offline is None
    with Client(url="http://localhost:1", settings=Settings(home=str(tmp_path), url=URL)) as client:
        assert repr(client._read()) == "HttpDoor('http://localhost:1')"


def test_an_address_wins_over_the_url_of_the_settings(tmp_path: Path) -> None:
    settings = Settings(home=str(tmp_path), url=URL)
    assert Client("10.0.0.1:6379", settings=settings).url is None
    assert Client(embedded=True, settings=settings).url is None


# The command line


def test_an_address_on_the_command_line_wins_over_the_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYCONTROL_HOME", str(tmp_path))
    monkeypatch.setenv("RAYCONTROL_URL", URL)
    assert services.find_address(None) == URL
    assert services.find_address("10.0.0.1:6379") == "10.0.0.1:6379"
