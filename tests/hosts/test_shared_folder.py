"""A folder that hosts share, one that only looks so, and one whose mount goes away; a large output."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycontrol.sharedprobe import PROBES
from tests.hosts.conftest import Cluster
from tests.hosts.jobs import Ran, events, succeeded

NAME = "né 'w"
LEFT = {f"{instance}/{NAME}": f"{instance}\n" for instance in ("master-0", "worker-0", "worker-1")}
"""What a job of three instances leaves."""
WRITE = 'echo $RAYCONTROL_INSTANCE > "$RAYCONTROL_OUTPUT_DIR/né \'w"; echo in $RAYCONTROL_OUTPUT_DIR'


@pytest.fixture
def settings(cluster: Cluster) -> Iterator[Path]:
    path = cluster.home / "settings.yaml"
    assert not path.exists()
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def point(cluster: Cluster) -> Iterator[Path]:
    """A mount point on every host, below its own ``/tmp``; it is empty again at the end, whatever was mounted there."""
    path = Path("/tmp/mounted é")
    for i in range(cluster.hosts.count):
        cluster.hosts.run(i, ["mkdir", path], check=True)
    yield path
    for i in range(cluster.hosts.count):
        cluster.hosts.run(i, ["umount", "--lazy", path])
        cluster.hosts.run(i, ["rmdir", path], check=True)


def files(top: Path) -> dict[str, str]:
    """What lies below a folder, by its path there."""
    return {str(path.relative_to(top)): path.read_text() for path in top.rglob("*") if path.is_file()}


def by_host(ran: Ran) -> dict[str, str]:
    """Which instance of a job was on which host."""
    found = {item["node"]: item["name"] for item in ran.info["instances"]}
    assert len(found) == 3
    return found


def of(*instances: str) -> dict[str, str]:
    """What these instances leave."""
    return {path: text for path, text in LEFT.items() if path.split("/")[0] in instances}


def fetched(cluster: Cluster, i: int, ran: Ran, folder: Path) -> dict[str, str]:
    """What `outputs get` on host ``i`` lays down."""
    told = cluster.json(i, "outputs", "get", ran.info["id"], folder)
    found = files(folder)
    size = sum(len(text.encode()) for text in found.values())
    assert told == {"folder": str(folder), "files": len(found), "size": size}
    return found


def whys(cluster: Cluster, ran: Ran) -> list[str]:
    """What the job was told of outputs that were collected although a folder is shared."""
    messages = [event["message"] for event in events(cluster, ran)]
    return [message for message in messages if "its outputs are collected" in message]


def test_outputs_lie_in_a_folder_that_is_shared_and_are_collected_where_it_only_looks_so(
    cluster: Cluster, settings: Path, tmp_path: Path
) -> None:
    shared = cluster.hosts.shared / "all é"
    shared.mkdir()
    settings.write_text(json.dumps({"shared_dir": str(shared)}))
    ran = succeeded(cluster, 0, "--nodes", "3", "--", WRITE)
    top = shared / "jobs" / ran.info["id"] / "outputs"
    assert ran.info["outputs"] == str(top)
    assert files(top) == LEFT
    assert ran.lines("worker-1") == [f"in {top}/worker-1"]
    assert not (cluster.home / "jobs" / ran.info["id"] / "outputs").exists()
    assert whys(cluster, ran) == []
    assert fetched(cluster, 1, ran, tmp_path / "shared") == LEFT

    settings.write_text(json.dumps({"shared_dir": "/tmp"}))  # each host has its own
    ran = succeeded(cluster, 0, "--nodes", "3", "--", WRITE)
    hosts, instances = cluster.hosts, by_host(ran)
    on_head = instances.pop(hosts.name(0))
    jobs = hosts.hosts[0].tmp / "jobs"
    assert files(jobs / ran.info["id"] / "outputs") == of(on_head)
    assert ran.lines(on_head) == [f"in /tmp/jobs/{ran.info['id']}/outputs/{on_head}"]
    kept = cluster.home / "jobs" / ran.info["id"] / "outputs"
    assert ran.info["outputs"] == str(kept)
    assert files(kept) == of(*instances.values())
    told = whys(cluster, ran)
    assert len(told) == 2
    for host in instances:
        fault = (
            f"shared_dir /tmp is not shared by {host}: what the head (uid 0) wrote, {host} (uid 0) does not find there: "
            "No such file or directory"
        )
        assert any(fault in message for message in told), told
    for host in hosts.hosts[1:]:
        assert not (host.tmp / "jobs").exists()
        assert not (host.tmp / PROBES).exists()
    assert fetched(cluster, 1, ran, tmp_path / "half shared") == LEFT
    shutil.rmtree(jobs)


def test_where_the_mount_goes_away_outputs_are_collected_and_nothing_is_made_in_its_place(
    cluster: Cluster, settings: Path, point: Path, tmp_path: Path
) -> None:
    hosts = cluster.hosts
    backing = hosts.shared / "backing"
    backing.mkdir()
    for i in range(hosts.count):
        hosts.run(i, ["mount", "--bind", backing, point], check=True)
    settings.write_text(json.dumps({"shared_dir": str(point)}))
    ran = succeeded(cluster, 0, "--nodes", "3", "--", WRITE)
    assert files(backing / "jobs" / ran.info["id"] / "outputs") == LEFT
    assert whys(cluster, ran) == []

    hosts.run(1, ["umount", point], check=True)
    ran = succeeded(cluster, 0, "--nodes", "3", "--", WRITE)
    instances = by_host(ran)
    alone = instances.pop(hosts.name(1))
    assert files(backing / "jobs" / ran.info["id"] / "outputs") == of(*instances.values())
    assert files(cluster.home / "jobs" / ran.info["id"] / "outputs") == of(alone)
    (told,) = whys(cluster, ran)
    assert hosts.name(1) in told
    assert "No such file or directory" in told
    assert list((hosts.hosts[1].tmp / point.name).iterdir()) == []
    assert fetched(cluster, 1, ran, tmp_path / "here") == LEFT


@pytest.mark.long
def test_an_output_of_2_gb_is_collected_and_fetched(cluster: Cluster, tmp_path: Path) -> None:
    line = 'head -c 2000000000 /dev/urandom > "$RAYCONTROL_OUTPUT_DIR/model"; sha256sum < "$RAYCONTROL_OUTPUT_DIR/model"'
    ran = succeeded(cluster, 0, "--", line)
    fetched = cluster.json(0, "outputs", "get", ran.info["id"], tmp_path / "here", timeout_s=600)
    assert fetched == {"folder": str(tmp_path / "here"), "files": 1, "size": 2_000_000_000}
    summed = cluster.hosts.run(0, ["sha256sum", tmp_path / "here" / "master-0" / "model"], check=True).stdout
    assert summed.split()[0] == ran.lines("master-0")[0].split()[0]
