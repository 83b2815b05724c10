"""Four hosts with Ray, whose head keeps Ray's tables on its disk. RAYCONTROL_HOME is a small file system, where the fence is set
to fall sooner than by itself."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster_state import look
from tests.faults.scene import GPUS, HEAD
from tests.hosts.conftest import Cluster, needs_hosts
from tests.hosts.network import Hosts
from tests.support import wait_until

__all__ = ["needs_hosts"]

FENCE_S = 30


@contextmanager
def four_hosts(base: Path) -> Iterator[Cluster]:
    home, tables = base / "home", base / "gcs"
    home.mkdir()
    tables.mkdir()
    env = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tables)}
    with small_disk(home), Hosts(len(GPUS), keep=[base]) as hosts:
        for i, gpus in GPUS.items():
            hosts.start_ray(i, gpus=gpus, env=env if i == HEAD else {})
        cluster = Cluster(hosts, home)
        yield cluster
        cluster.close()


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
    try:
        (folder / "settings.yaml").write_text(f"min_free_mib: 8\nfence_s: {FENCE_S}\n")
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="session")
def cluster(needs_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """For all faults after which the hosts, or others in their place, are there again."""
    with four_hosts(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def headless(needs_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """For the loss of the head."""
    with four_hosts(tmp_path_factory.mktemp("headless")) as cluster:
        yield cluster


def nothing_is_left(cluster: Cluster) -> None:
    """No process, actor or reservation of a job. Folders of a host without Ray stay: nobody is there to remove them."""

    def left() -> list[str]:
        return [
            thing
            for thing in look(cluster).things
            if not thing.startswith("file ") and " of attempt None" not in thing
        ]

    wait_until(lambda: not left(), 30, "nothing of the jobs is left")
