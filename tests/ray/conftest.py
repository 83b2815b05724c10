"""One Ray on this machine for the whole session, and the watch over what each test leaves behind. Needs no root."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from raycontrol import Client
from raycontrol.settings import Settings
from tests.cluster_state import Observer, descendants, environment_of
from tests.cluster_state import nothing_left as watch
from tests.support import wait_until

BIN = Path(sys.executable).parent

FOREGROUND = ("env", "--default-signal=INT")
"""Starts a command as a shell does in the foreground; where these tests run in the background, Ctrl-C is ignored."""

KEEPALIVE = {"RAY_grpc_client_keepalive_timeout_ms": "16000"}
"""What this Ray has of the settings that ``raycontrol ray-env`` prints: some and not all, for the doctor to see."""

MARK = "RC_TEST_SHELL"
"""In the environment of everything that a shell of these tests starts, Ray and jobs included: how to find it again."""


class Shell:
    """A user's shell: RAY_TMPDIR is ``folder``, RAYCONTROL_HOME is ``home``, and ``env`` is what else is set in it."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        self.home = home
        self.address = ""  # of the Ray that commands are to use
        self.mark = uuid.uuid4().hex

    @property
    def env(self) -> dict[str, str]:
        """What is set beside the plain environment."""
        return {"RAYCONTROL_HOME": str(self.home), "RAY_ADDRESS": self.address}

    def popen(
        self, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a command with the plain environment, ``self.env`` and ``env``."""
        given: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **options,
        }
        whole = self._environment({**self.env, **(env or {})})
        return subprocess.Popen(list(map(str, argv)), env=whole, text=True, errors="replace", **given)

    def raycontrol(
        self,
        *arguments: str | Path,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60,
        check: bool = False,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run the command line to its end; at ``timeout_s`` its whole process tree is killed and it fails."""
        process = self.popen([BIN / "raycontrol", *arguments], env=env, **options)
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            end(descendants(process.pid))
            process.wait()
            raise
        finished = subprocess.CompletedProcess(list(map(str, arguments)), process.returncode, stdout, stderr)
        assert not (check and finished.returncode), (
            f"raycontrol {finished.args}: exit {finished.returncode}\n{stdout[-4000:]}\n{stderr[-4000:]}"
        )
        return finished

    def json(self, *arguments: str | Path, **options: Any) -> Any:
        """The same with ``--json`` at the end: what the command printed, read."""
        return json.loads(self.raycontrol(*arguments, "--json", check=True, **options).stdout)

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """A plain login's, with RAY_TMPDIR so that nobody else on this machine takes this Ray for theirs."""
        kept = {name: os.environ[name] for name in ("HOME", "USER") if name in os.environ}
        plain = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "RAY_TMPDIR": str(self.folder)}
        return {**plain, **kept, "RAY_AUTH_MODE": "disabled", MARK: self.mark, **more}


class LocalRay(Shell):
    """Ray on this machine. ``home`` is RAYCONTROL_HOME for every command that is run through this object."""

    def __init__(self, folder: Path, home: Path, env: Mapping[str, str] | None = None) -> None:
        """``env`` is what is set for `ray start` beside the plain environment."""
        super().__init__(folder, home)
        gcs, dashboard, client = free_ports(3)
        self.dashboard = f"http://127.0.0.1:{dashboard}"
        self._observer: Observer | None = None
        self._log = (folder / "start.log").open("w+")
        self._process = subprocess.Popen(
            [
                str(BIN / "ray"),
                "start",
                "--head",
                "--block",
                f"--port={gcs}",
                f"--dashboard-port={dashboard}",
                f"--ray-client-server-port={client}",
                "--dashboard-agent-listen-port=0",
                "--num-cpus=4",
                "--num-gpus=4",
                "--object-store-memory=100000000",
                f"--temp-dir={folder / 'ray'}",
                "--disable-usage-stats",
            ],
            env=self._environment({"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", **KEEPALIVE, **(env or {})}),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        wait_until(lambda: self._started() or self._process.poll() is not None, 180, "Ray is up")
        assert self._process.poll() is None, f"`ray start` ended:\n{self._output()[-4000:]}"
        self.address = (self.folder / "ray/ray_current_cluster").read_text().strip()

    def close(self) -> None:
        """End everything of this Ray, its jobs too."""
        if self._observer is not None:
            self._observer.close()
        end([*descendants(self._process.pid), *marked(self.mark)])
        self._process.wait(timeout=20)
        wait_until(lambda: not end(marked(self.mark)), 20, "Ray's processes are gone")
        self._log.close()
        shutil.rmtree(self.folder)

    # -- as ``cluster_state.World``

    def pids(self) -> list[int]:
        own = set(self._observer.pids()) if self._observer else set()
        return sorted({*descendants(self._process.pid), *marked(self.mark)} - own)

    def reapers(self) -> list[int]:
        return [os.getpid()]

    def folders(self) -> list[Path]:
        return [self.folder]

    def ask(self) -> dict[str, Any]:
        """Actors, placement groups and nodes, as Ray itself says (see ``tests/observer.py``)."""
        if self._observer is None:
            self._observer = Observer(self._start_observer, self.address)
        return self._observer.ask()

    def _start_observer(self, argv: Sequence[str]) -> subprocess.Popen[str]:
        return self.popen(argv, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def _started(self) -> bool:
        return "Ray runtime started" in self._output()

    def _output(self) -> str:
        return (self.folder / "start.log").read_text()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRay]:
    """One node with 4 CPUs and 4 GPUs by Ray's count."""
    # Not below pytest's folder: Ray puts sockets there, whose paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="rc-ray-"))
    with ExitStack() as stack:
        local = LocalRay(folder, tmp_path_factory.mktemp("home"))
        stack.callback(local.close)
        local.wait_ready()
        yield local


@pytest.fixture(scope="session")
def client(cluster: LocalRay) -> Iterator[Client]:
    """This process as a driver of the session's Ray, which Ray allows once per process.

    It reads before there may be a controller; what it saw then must not stay its view of things.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with Client(settings=Settings.load(cluster.env)) as client:
            client.list()
            yield client


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test on the shared Ray, everything that its jobs made is gone."""
    if "cluster" not in request.fixturenames:
        yield
        return
    with watch(request.getfixturevalue("cluster")):
        yield


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def marked(mark: str) -> list[int]:
    """Processes that carry this mark, what descends from them, and the supervisors just above them.

    Ray's workers retitle themselves and lose the mark; a supervisor never has it. Nobody else's process is ever
    taken for ours: ``close`` kills what this returns.
    """
    variable = f"{MARK}={mark}".encode()
    found = {pid for pid in psutil.pids() if variable in environment_of(pid)}
    above = {parent for pid in found if (parent := parent_of(pid)) and supervises(parent)}
    return sorted(found.union(above, *(descendants(pid) for pid in found)))


def parent_of(pid: int) -> int | None:
    try:
        return psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return None


def supervises(pid: int) -> bool:
    return any(variable.startswith(b"RAYCONTROL_SUPERVISOR=") for variable in environment_of(pid))


def end(pids: list[int]) -> list[int]:
    for pid in pids:
        try:
            psutil.Process(pid).kill()
        except psutil.NoSuchProcess:
            pass
    return pids
