"""Four hosts with Ray: the head has 4 GPUs by Ray's count, the others 2 each. RAYCONTROL_HOME is a small file system."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster_state import look
from tests.cluster_state import nothing_left as watch
from tests.faults.scene import Scene
from tests.hosts.conftest import Cluster, needs_hosts
from tests.hosts.network import Hosts
from tests.support import wait_until

__all__ = ["needs_hosts"]

HOSTS = 4
HEAD_GPUS, GPUS = 4, 2


@contextmanager
def four_hosts(home: Path, keep: Path, env: dict[str, str] | None = None) -> Iterator[Cluster]:
    with small_disk(home), Hosts(HOSTS, keep=[keep, home]) as hosts:
        options = {"env": env or {}}
        hosts.start_ray(0, gpus=HEAD_GPUS, **options)
        for i in range(1, HOSTS):
            hosts.start_ray(i, gpus=GPUS, **options)
        cluster = Cluster(hosts, home)
        yield cluster
        cluster.close()


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
    try:
        (folder / "settings.yaml").write_text("min_free_mib: 8\n")
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="session")
def lasting(needs_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Hosts for tests that break none of them."""
    with four_hosts(tmp_path_factory.mktemp("home"), tmp_path_factory.getbasetemp()) as cluster:
        yield cluster


@pytest.fixture
def scene(lasting: Cluster, tmp_path: Path) -> Iterator[Scene]:
    """A job on two hosts and one beside it, both running; afterwards nothing of them is left."""
    with watch(lasting):
        yield from on_stage(Scene(lasting, tmp_path))


@pytest.fixture
def doomed(needs_hosts: None, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Iterator[Scene]:
    """The same on hosts of their own, which a test may break."""
    with four_hosts(tmp_path_factory.mktemp("home"), tmp_path_factory.getbasetemp()) as cluster:
        yield from on_stage(Scene(cluster, tmp_path))
        wait_until(lambda: not left(cluster), 30, "no process, actor or reservation of a job is left")


def on_stage(scene: Scene) -> Iterator[Scene]:
    scene.begin()
    yield scene
    scene.end()


def left(cluster: Cluster) -> list[str]:
    """What jobs have left on the hosts that are up. Folders of a host without Ray stay: nobody is there to remove them."""
    return [
        thing
        for thing in look(cluster).things
        if not thing.startswith("file ") and " of attempt None" not in thing
    ]
