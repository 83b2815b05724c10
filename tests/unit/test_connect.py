"""Finding a cluster, and what connecting does to this process, without a Ray."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from raycontrol.connect import environment, find_address, head_fault, start_elsewhere, wait_for_another
from raycontrol.errors import ControllerUnavailable, HeadFault
from raycontrol.settings import Settings
from tests.unit.rights import NOBODY

SETTINGS_FRAME = b"\0\0\0\x04\0\0\0\0\0"


@contextmanager
def gcs() -> Iterator[str]:
    """Something that greets as a gRPC server does; its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(64)
                    connection.sendall(SETTINGS_FRAME)

        thread = threading.Thread(target=greet)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def note(tmp_path: Path) -> Path:
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray/ray_current_cluster"


def found(note: Path) -> str | None:
    return find_address(Settings(ray_tmpdir=str(note.parents[1])))


def test_the_cluster_that_this_user_started_is_found(note: Path) -> None:
    assert found(note) is None
    with gcs() as address:
        note.write_text(f"{address}\n")
        assert found(note) == address
    assert found(note) is None  # it does not answer any more


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
def test_the_cluster_of_another_user_is_not_believed_but_roots_is(note: Path) -> None:
    with gcs() as address:
        note.write_text(address)
        os.chown(note, NOBODY, NOBODY)
        assert found(note) is None
        for folder in (note, *note.parents):
            if folder.is_relative_to("/tmp") and folder != Path("/tmp"):
                folder.chmod(folder.stat().st_mode | 0o055)
        os.chown(note, 0, 0)
        os.seteuid(NOBODY)
        try:
            assert found(note) == address
        finally:
            os.seteuid(0)
        note.chmod(0o600)
        os.seteuid(NOBODY)
        try:
            assert found(note) is None
        finally:
            os.seteuid(0)


def test_what_is_no_note_names_no_cluster(note: Path) -> None:
    with gcs() as address:
        other = note.with_name("other")
        other.write_text(address)
        note.symlink_to(other)
        assert found(note) is None
        note.unlink()
        os.mkfifo(note)
        assert found(note) is None
        note.unlink()
        note.mkdir()
        assert found(note) is None
        note.rmdir()
        note.write_bytes(b"\xff\xfe:6379")
        assert found(note) is None


class Gcs(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Lets in who shows ``token``, as a GCS does; None: everybody."""

    def __init__(self, token: str | None) -> None:
        self.token = token

    def service(self, details: Any) -> Any:
        shown = dict(details.invocation_metadata).get("authorization")

        def answer(request: bytes, context: Any) -> bytes:
            if self.token is not None and shown != f"Bearer {self.token}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken: it is missing or incorrect")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def gcs_with(token: str | None) -> Iterator[str]:
    """Give the address of a GCS that wants this token."""
    server = grpc.server(ThreadPoolExecutor(1), handlers=[Gcs(token)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


TOKEN = "0123456789abcdef" * 4
HAVE = "have ~/.ray/auth_token as it is on the head, or RAY_AUTH_TOKEN"
SHELL = "import sys; from raycontrol import rayauth; rayauth.check(sys.argv[1])"


def checked_in(folder: Path, address: str, **env: str) -> str:
    """Return the last line of what a shell with this environment is told at the cluster; Ray reads it once a process."""
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), **env}
    done = subprocess.run(
        [sys.executable, "-c", SHELL, address],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return "".join(done.stderr.splitlines()[-1:]).removeprefix("raycontrol.errors.UsageError: ")


def test_a_cluster_that_asks_for_rays_token_is_recognised_at_once(tmp_path: Path) -> None:
    token, other = {"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}
    with gcs_with(TOKEN) as address:
        asks = f"the Ray cluster at {address} asks for Ray's token: set RAY_AUTH_MODE=token, and {HAVE}"
        assert checked_in(tmp_path, address) == asks
        assert checked_in(tmp_path, address, RAY_AUTH_MODE="disabled") == asks
        assert checked_in(tmp_path, address, **other) == (
            f"the Ray cluster at {address} refuses the token of Ray that is here: {HAVE}"
        )
        assert checked_in(tmp_path, address, **token) == (
            f"RAY_AUTH_MODE is token, but there is no token of Ray here: {HAVE}"
        )
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray/auth_token").write_text(TOKEN)
        assert checked_in(tmp_path, address, **token) == ""


def test_a_cluster_that_asks_for_no_token_takes_everybody(tmp_path: Path) -> None:
    with gcs_with(None) as address:
        assert checked_in(tmp_path, address) == ""
        assert checked_in(tmp_path, address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) == ""


def test_what_else_is_wrong_is_left_to_ray(tmp_path: Path) -> None:
    with gcs() as address:  # it greets, and then says nothing
        assert checked_in(tmp_path, address) == ""


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    with pytest.raises(KeyError), environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "secret"}):
        assert os.environ["RAY_AUTH_TOKEN"] == "secret"
        raise KeyError
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_an_error_on_the_head_that_nobody_foresaw_is_no_absence_of_the_head() -> None:
    fault = head_fault(KeyError("worker-0"))
    assert str(fault) == "a call to the head failed: KeyError: 'worker-0'"
    assert not isinstance(fault, ControllerUnavailable)
    copy = pickle.loads(pickle.dumps(fault))
    assert (type(copy), str(copy)) == (HeadFault, str(fault))


def test_a_restart_is_over_when_another_process_answers() -> None:
    answers = [7, 7, 7, 8]
    wait_for_another(7, lambda: answers.pop(0), timeout_s=10)
    assert answers == []
    wait_for_another(None, lambda: 7, timeout_s=10)  # who did not answer before is not waited for
    wait_for_another(7, lambda: None, timeout_s=10)  # the next call will say what is wrong
    begin = time.monotonic()
    with pytest.raises(ControllerUnavailable, match="process 7 did not end"):
        wait_for_another(7, lambda: 7, timeout_s=0.2)
    assert time.monotonic() - begin < 5


def test_a_controller_that_another_process_cannot_start_is_an_error_in_its_words(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(ControllerUnavailable, match=f"not be started: no Ray cluster answers at {address}"):
        start_elsewhere(address, Settings(home=str(tmp_path), cluster="lab"))


def test_settings_cross_to_another_process() -> None:
    settings = Settings(
        home="~/here", cluster="lab", user="ann", keep_days=2.5, min_free_mib=7, scratch="/fast"
    )
    assert Settings.load(settings.variables()) == settings
    assert Settings.load(Settings().variables()) == Settings()
