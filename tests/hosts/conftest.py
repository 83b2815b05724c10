"""Three hosts with Ray on them, for the whole session, and the watch over what each test leaves behind."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_state import Observer
from tests.cluster_state import nothing_left as watch
from tests.hosts.network import BIN, HostProcess, Hosts, why_no_hosts


class Cluster:
    """Ray on ``hosts``. ``home`` is RAYCONTROL_HOME for every command that is run through this object."""

    def __init__(self, hosts: Hosts, home: Path) -> None:
        self.hosts = hosts
        self.home = home
        self.address = hosts.address
        self._observer: Observer | None = None

    @property
    def env(self) -> dict[str, str]:
        """What a user's shell on a host of the cluster has set."""
        return {"RAYCONTROL_HOME": str(self.home), "RAY_ADDRESS": self.address, "RAY_AUTH_MODE": "disabled"}

    def raycontrol(
        self, i: int, *arguments: str | Path, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run the command line on host ``i``; ``options`` as of ``Hosts.run`` (``timeout_s``, ``check``, ``cwd``, …)."""
        return self.hosts.run(i, [BIN / "raycontrol", *arguments], env={**self.env, **(env or {})}, **options)

    def json(self, i: int, *arguments: str | Path, **options: Any) -> Any:
        """The same with ``--json`` at the end: what the command printed, read."""
        return json.loads(self.raycontrol(i, *arguments, "--json", check=True, **options).stdout)

    def popen(
        self, i: int, *arguments: str | Path, env: Mapping[str, str] | None = None, **options: Any
    ) -> HostProcess:
        """Start the command line on host ``i`` and leave it running; ``options`` as of ``Hosts.popen``."""
        return self.hosts.popen(
            i, [BIN / "raycontrol", *arguments], env={**self.env, **(env or {})}, **options
        )

    # -- as ``cluster_state.World``

    def pids(self) -> list[int]:
        own = set(self._observer.pids()) if self._observer else set()
        return [pid for pid in self.hosts.pids() if pid not in own]

    def reapers(self) -> list[int]:
        return [host.pid1 for host in self.hosts.hosts if host.pid1 is not None]

    def folders(self) -> list[Path]:
        return [host.tmp for host in self.hosts.hosts]

    def ask(self) -> dict[str, Any]:
        """Actors, placement groups and nodes, as Ray itself says (see ``tests/observer.py``)."""
        if self._observer is None:
            self._observer = Observer(self._start_observer, self.address)
        return self._observer.ask()

    def close(self) -> None:
        if self._observer is not None:
            self._observer.close()
            self._observer = None

    def _start_observer(self, argv: Any) -> HostProcess:
        return self.hosts.popen(
            0, argv, env={"RAY_AUTH_MODE": "disabled"}, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        )


@pytest.fixture(scope="session")
def needs_hosts() -> None:
    """Skip, with the reason, where hosts cannot be made."""
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(needs_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three hosts, each with 4 CPUs and 8 GPUs by Ray's count; host 0 is the head, hosts 0 and 2 are on one shelf."""
    with Hosts(3, keep=[tmp_path_factory.getbasetemp()]) as hosts:
        hosts.start_cluster(labels=["shelf=s2", "shelf=s1", "shelf=s2"])
        cluster = Cluster(hosts, tmp_path_factory.mktemp("home"))
        yield cluster
        cluster.close()


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test on a cluster that outlives it, everything that its jobs made is gone."""
    lasting = {"cluster", "fresh", "unprivileged"}.intersection(request.fixturenames)
    if not lasting:
        yield
        return
    with watch(request.getfixturevalue(lasting.pop())):
        yield
