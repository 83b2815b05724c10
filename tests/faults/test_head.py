"""The head's Ray is lost, wholly or for a moment, while a job runs on the other hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.conftest import GPUS, HEAD_GPUS, four_hosts, left
from tests.faults.scene import STARTED_S, Scene
from tests.support import wait_until

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def stored(needs_hosts: None, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Iterator[Scene]:
    """Hosts whose head keeps Ray's tables on its disk."""
    tables = tmp_path / "gcs"
    tables.mkdir()
    env = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tables)}
    with four_hosts(tmp_path_factory.mktemp("home"), tmp_path_factory.getbasetemp(), env) as cluster:
        scene = Scene(cluster, tmp_path)
        scene.begin()
        yield scene
        scene.end()
        wait_until(lambda: not left(cluster), 30, "no process, actor or reservation of a job is left")


def test_the_gcs_is_killed_and_started_again(stored: Scene) -> None:
    hosts = stored.hosts
    (gcs,) = [one for pid in hosts.pids(0) if (one := psutil.Process(pid)).name() == "gcs_server"]
    command, environment = gcs.cmdline(), gcs.environ()
    gcs.kill()
    hosts.popen(0, command, env=environment, stdout=None, stderr=None)
    stored.is_not_disturbed()


@pytest.fixture
def headless(needs_hosts: None, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Iterator[Scene]:
    """A job on two of the hosts 1 to 3, and nothing beside it."""
    with four_hosts(tmp_path_factory.mktemp("home"), tmp_path_factory.getbasetemp()) as cluster:
        scene = Scene(cluster, tmp_path)
        blocker = scene.submit(
            "--gpu", str(HEAD_GPUS), "--", "sleep 600"
        )  # so that none of it is on the head
        wait_until(lambda: cluster.json(0, "get", blocker)["state"] == "RUNNING", STARTED_S)
        scene.begin_job()
        cluster.raycontrol(0, "stop", "--force", blocker, check=True)
        cluster.raycontrol(0, "wait", blocker, timeout_s=STARTED_S)
        yield scene
        wait_until(lambda: not left(cluster), 30, "no process, actor or reservation of a job is left")


def test_a_new_head_of_the_same_name_takes_the_store_over(headless: Scene) -> None:
    """It is there, and has room for the next attempt, before the hosts of the old Ray have noticed that theirs is gone."""
    hosts = headless.hosts
    headless.cluster.close()
    hosts.kill(0)
    hosts.boot(0)
    hosts.start_ray(0, gpus=HEAD_GPUS)
    fresh = hosts.add()
    hosts.start_ray(fresh, gpus=GPUS)
    headless.cluster.raycontrol(0, "controller", "restart", check=True, timeout_s=STARTED_S)
    headless.is_tried_again("INSTANCE_LOST", "")
