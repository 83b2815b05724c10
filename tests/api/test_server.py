"""The server on real sockets: who is slow, who comes with TLS, and what `raycontrol serve` says before it begins."""

from __future__ import annotations

import datetime
import gc
import io
import ipaddress
import json
import logging
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from raycontrol import cli
from raycontrol.access import Role, TokenInfo
from raycontrol.api.app import Config
from raycontrol.api.limits import Limits
from raycontrol.api.server import Listen, make_server, serve
from raycontrol.cli.output import Output
from raycontrol.cli.serve import exposure, refuse_elsewhere, token_place
from raycontrol.cli.services import Services
from raycontrol.errors import UsageError
from raycontrol.settings import Settings
from raycontrol.status import JobState
from tests.api.fakes import FakeDoor, adas_job, until, write_log

LOCAL = Listen("127.0.0.1", 0)


@contextmanager
def running(home: Path, door: FakeDoor, listen: Listen = LOCAL, **limits: Any) -> Iterator[str]:
    """Give the URL of a server that runs in a thread."""
    urls: list[str] = []
    config = Config(home, limits=Limits(**limits))
    server = make_server(lambda: door, config, listen, urls.append)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: urls, "the server")
    try:
        yield urls[0]
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.fixture
def door() -> FakeDoor:
    found = FakeDoor()
    found.put(adas_job(JobState.SUCCEEDED))
    return found


def connect(url: str, **options: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10, **options)


def test_a_server_that_ends_says_so(tmp_path: Path, door: FakeDoor, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "raycontrol.api")
    with running(tmp_path, door):
        assert "has ended" not in caplog.text
    assert caplog.messages[-1] == "the server has ended; jobs run on"


def test_a_server_answers_and_its_streams_end_with_it(tmp_path: Path, door: FakeDoor) -> None:
    token = door.let_in("root", "root", Role.ADMIN)
    door.put(adas_job(JobState.RUNNING))
    write_log(tmp_path, b"one\n")
    headers = {"Authorization": f"Bearer {token}"}
    follow = "/api/v1/jobs/digits-ab12cd/logs/worker-0?follow=1"
    with running(tmp_path, door) as url, httpx.Client(base_url=url, headers=headers, timeout=20) as client:
        answer = client.get("/api/v1/jobs")
        assert [job["id"] for job in answer.json()["jobs"]] == ["digits-ab12cd"]
        assert "server" not in answer.headers
        with client.stream("GET", follow) as stream:
            lines = stream.iter_lines()
            assert "data: one" in [next(lines) for _ in range(5)]


def test_a_head_that_does_not_come_is_not_waited_for(tmp_path: Path, door: FakeDoor) -> None:
    with running(tmp_path, door, request_s=2) as url, connect(url) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /heal")
        received = b""
        while piece := client.recv(1000):
            received += piece
        assert received.count(b"HTTP/1.1 200") == 1


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01 this is TLS\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (80 << 10)],
    ids=["no-http", "large-head"],
)
def test_what_is_no_request_is_answered_with_a_problem_and_logged(
    tmp_path: Path, door: FakeDoor, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "raycontrol.api")
    with running(tmp_path, door) as url, connect(url) as client:
        client.sendall(sent)
        received = b""
        while piece := received_piece(client):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    document = json.loads(body)
    assert (document["type"], document["status"]) == ("urn:raycontrol:bad-request", 400)
    assert f"x-request-id: {document['instance']}".encode() in head
    assert f"127.0.0.1 sent what is no HTTP id={document['instance']}" in caplog.text


HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (
            b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 51\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (
            b"GET /healthz HTTP/1.1\r\nHost: evil\r\nContent-Length: 51\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            421,
        ),
        (
            b"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 51\r\nExpect: 100-continue\r\n\r\n",
            401,
        ),
    ],
    ids=["two-lengths", "two-lengths-of-another-host", "expects"],
)
def test_nothing_is_answered_after_a_request_that_nobody_knows_the_end_of(
    tmp_path: Path, door: FakeDoor, sent: bytes, status: int
) -> None:
    with running(tmp_path, door) as url, connect(url) as client:
        client.sendall(sent + HEALTH)
        received = b""
        while piece := received_piece(client):
            received += piece
    assert received.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nconnection: close\r\n" in received
    assert received.count(b"HTTP/1.1 ") == 1


def received_piece(client: socket.socket) -> bytes:
    """Return what came; nothing at the end, also when the server has left things unread."""
    try:
        return client.recv(1000)
    except ConnectionResetError:
        return b""


def test_a_server_answers_so_many_requests_at_a_time(tmp_path: Path, door: FakeDoor) -> None:
    token = door.let_in("root", "root", Role.ADMIN)
    door.put(adas_job(JobState.RUNNING))
    write_log(tmp_path, b"one\n")
    headers = {"Authorization": f"Bearer {token}"}
    follow = "/api/v1/jobs/digits-ab12cd/logs/worker-0?follow=1"
    with (
        running(tmp_path, door, requests=1) as url,
        httpx.Client(base_url=url, headers=headers, timeout=20) as client,
    ):
        with client.stream("GET", follow):
            refused = client.get("/api/v1/jobs")
            assert (refused.status_code, refused.json()["type"]) == (503, "urn:raycontrol:busy")
            assert refused.headers["x-request-id"] == refused.json()["instance"]
        until(lambda: client.get("/api/v1/jobs").status_code == 200, "room for another request")


def test_who_takes_nothing_of_an_answer_is_cut_off(tmp_path: Path, door: FakeDoor) -> None:
    token = door.let_in("root", "root", Role.ADMIN)
    write_log(tmp_path, b"x" * (32 << 20))
    request = f"GET /api/v1/jobs/digits-ab12cd/logs/worker-0 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n"
    with running(tmp_path, door, write_s=0.3) as url, connect(url) as client:
        client.sendall(request.encode())
        until(lambda: cut_off(client), "the end of the connection")
        assert received_of(client) < 32 << 20


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_who_takes_an_answer_slowly_gets_all_of_it(tmp_path: Path, door: FakeDoor, tls: bool) -> None:
    token = door.let_in("root", "root", Role.ADMIN)
    write_log(tmp_path, b"x" * (8 << 20))
    cert, key = certificate(tmp_path)
    listen = Listen("127.0.0.1", 0, str(cert), str(key)) if tls else LOCAL
    request = (
        "GET /api/v1/jobs/digits-ab12cd/logs/worker-0 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Authorization: Bearer {token}\r\n\r\n"
    )
    with running(tmp_path, door, listen, write_s=0.5) as url, little_by_little(url) as plain:
        context = ssl.create_default_context(cafile=str(cert))
        client = context.wrap_socket(plain, server_hostname="127.0.0.1") if tls else plain
        client.sendall(request.encode())
        received = read_slowly(client, 0.02, until_s=2)
        received += received_of(client)
    assert received > 8 << 20


def little_by_little(url: str) -> socket.socket:
    """Return a connection whose kernel takes no more for its reader than a few pieces."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    client.settimeout(10)
    client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    return client


def read_slowly(client: socket.socket, every_s: float, until_s: float) -> int:
    """Read a piece each time, and no more; return how much that was."""
    began, received = time.monotonic(), 0
    for number in range(int(until_s / every_s)):
        until(lambda: time.monotonic() >= began + number * every_s, "the next piece")  # noqa: B023
        received += len(client.recv(8 << 10))
    return received


def cut_off(client: socket.socket) -> bool:
    """Whether the other side has ended the connection, without taking anything of what it sent."""
    info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    established = 1
    return info[0] != established


def received_of(client: socket.socket) -> int:
    count = 0
    try:
        while piece := client.recv(1 << 20):
            count += len(piece)
    except ConnectionResetError:
        pass
    return count


def test_half_a_body_leaves_no_job(tmp_path: Path, door: FakeDoor) -> None:
    token = door.let_in("root", "root", Role.ADMIN)
    head = (
        f"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
        "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    )
    with running(tmp_path, door) as url:
        with connect(url) as client:
            client.sendall(head.encode() + b'{"spec": {"command": "true"}}')
        answer = httpx.get(f"{url}/api/v1/jobs", headers={"Authorization": f"Bearer {token}"})
        assert [job["id"] for job in answer.json()["jobs"]] == ["digits-ab12cd"]
    assert door.submissions == {}


def test_tls_is_served_with_a_certificate(tmp_path: Path, door: FakeDoor) -> None:
    cert, key = certificate(tmp_path)
    listen = Listen("127.0.0.1", 0, str(cert), str(key))
    with running(tmp_path, door, listen) as url:
        assert url.startswith("https://127.0.0.1:")
        assert (
            httpx.get(f"{url}/healthz", verify=ssl.create_default_context(cafile=str(cert))).status_code
            == 200
        )


def certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate of 127.0.0.1 that signs itself, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(hours=1))
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    signed = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False).sign(
        key, hashes.SHA256()
    )
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, none))
    return cert_file, key_file


def test_a_port_in_use_is_told(tmp_path: Path, door: FakeDoor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot serve at http://127.0.0.1:{port}"):
            serve(lambda: door, Config(tmp_path), Listen("127.0.0.1", port), lambda url: None)


def test_what_is_loaded_before_a_server_begins_is_spared_by_the_collector(
    tmp_path: Path, door: FakeDoor
) -> None:
    gc.unfreeze()
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError):
        serve(lambda: door, Config(tmp_path), Listen("127.0.0.1", taken.getsockname()[1]), lambda url: None)
    assert gc.get_freeze_count() > 10_000
    gc.unfreeze()


def test_a_certificate_that_is_none_is_told(tmp_path: Path, door: FakeDoor) -> None:
    (tmp_path / "cert.pem").write_text("none")
    listen = Listen("127.0.0.1", 0, str(tmp_path / "cert.pem"), str(tmp_path / "missing.pem"))
    with pytest.raises(UsageError, match=r"cannot serve at https://127\.0\.0\.1:0"):
        serve(lambda: door, Config(tmp_path), listen, lambda url: None)


def test_a_certificate_that_cannot_be_used_is_named_before_anything_begins(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    Listen("127.0.0.1", 0, str(cert), str(key)).check_certificate()
    nope, none = tmp_path / "nope.pem", tmp_path / "none.pem"
    none.write_text("none")
    for tls_cert, tls_key, said in (
        (nope, key, f"--tls-cert: {nope}: cannot be read: No such file or directory"),
        (cert, nope, f"--tls-key: {nope}: cannot be read: No such file or directory"),
        (
            cert,
            none,
            f"--tls-cert, --tls-key: {cert} and {none} are no certificate in PEM and its private key",
        ),
        (none, key, f"--tls-cert, --tls-key: {none} and {key} are no certificate in PEM and its private key"),
    ):
        stderr = io.StringIO()
        arguments = ["serve", "--tls-cert", str(tls_cert), "--tls-key", str(tls_key)]
        assert cli.invoke(arguments, Services(Output(io.StringIO(), stderr))) == 2
        assert stderr.getvalue().startswith(f"raycontrol: {said}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--host", "0.0.0.0"],
        ["--host", "::"],
        ["--host", "10.0.0.1"],
        ["--host", "head"],
        ["--tls-cert", "x"],
    ],
)
def test_an_open_address_without_tls_is_refused(arguments: list[str]) -> None:
    stderr = io.StringIO()
    assert cli.invoke(["serve", *arguments], Services(Output(io.StringIO(), stderr))) == 2
    assert "--tls-cert and --tls-key" in stderr.getvalue()


def test_an_open_address_is_taken_with_tls_or_on_ones_word() -> None:
    assert Listen("0.0.0.0", 8642, insecure_http=True).url == "http://0.0.0.0:8642"
    assert Listen("::1", 8642).url == "http://[::1]:8642"
    assert Listen("[::1]", 8642).url == "http://[::1]:8642"
    assert Listen("head", 8642, "cert", "key").url == "https://head:8642"


def test_the_first_server_makes_a_token_and_the_next_ones_use_it(tmp_path: Path) -> None:
    door, settings = FakeDoor(), Settings(home=str(tmp_path), user="ada")
    path = tmp_path / "serve.token"
    assert token_place(door, settings) == f"{path} (an admin's, made now)"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (info,) = door.tokens()
    assert (info.name, info.role, info.user, info.expires_at) == ("serve", Role.ADMIN, "ada", None)
    text = path.read_text()
    assert token_place(door, settings) == f"{path} (an admin's)"
    assert path.read_text() == text
    path.unlink()
    assert token_place(door, settings) == (
        "make one with `raycontrol token create NAME --role ROLE`; `serve`, an admin's, is in force and not in "
        f"{path} any more: end it with `raycontrol token revoke serve`"
    )
    door.revoke_token("serve")
    assert token_place(door, settings) == "make one with `raycontrol token create NAME --role ROLE`"


class LateDoor(FakeDoor):
    """Another server makes the first token between our look and our own."""

    def tokens(self) -> list[TokenInfo]:
        found = super().tokens()
        if not found:
            super().create_token("serve", Role.ADMIN, "ada", None, "ada")
        return found


def test_of_two_servers_that_start_at_once_one_makes_the_token(tmp_path: Path) -> None:
    settings = Settings(home=str(tmp_path), user="ada")
    assert token_place(LateDoor(), settings) == "make one with `raycontrol token create NAME --role ROLE`"
    assert not (tmp_path / "serve.token").exists()


def test_a_cluster_that_others_can_reach_past_the_server_is_told() -> None:
    said = exposure("10.0.0.5:6379", "disabled")
    assert said is not None
    assert said.startswith("the Ray cluster itself listens at 10.0.0.5:6379 without authentication")
    assert exposure("10.0.0.5:6379", "token") is None
    assert exposure("127.0.0.1:6379", "disabled") is None


def test_a_server_runs_where_the_files_are(tmp_path: Path) -> None:
    facts = {"host": "head", "home": str(tmp_path)}
    refuse_elsewhere(facts, "head", tmp_path)
    with pytest.raises(UsageError, match="on head"):
        refuse_elsewhere(facts, "laptop", tmp_path)
    with pytest.raises(UsageError, match="set RAYCONTROL_HOME to it"):
        refuse_elsewhere(facts, "head", tmp_path / "other")


def test_an_address_cannot_be_made_up(tmp_path: Path, door: FakeDoor) -> None:
    statuses = []
    with running(tmp_path, door, failures_burst=2, failures_per_s=0.01) as url:
        for number in range(3):
            headers = {"Authorization": "Bearer no", "X-Forwarded-For": f"10.0.0.{number}"}
            statuses.append(httpx.get(f"{url}/api/v1/jobs", headers=headers).status_code)
    assert statuses == [401, 401, 429]
