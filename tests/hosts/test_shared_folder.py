"""A folder that hosts share, and one that only looks so; a large output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hosts.conftest import Cluster
from tests.hosts.jobs import events, succeeded

WRITE = 'echo $RAYCONTROL_INSTANCE > "$RAYCONTROL_OUTPUT_DIR/né \'w"; echo in $RAYCONTROL_OUTPUT_DIR'


@pytest.fixture
def settings(cluster: Cluster) -> Path:
    path = cluster.home / "settings.yaml"
    assert not path.exists()
    yield path  # type: ignore[misc]
    path.unlink(missing_ok=True)


def test_outputs_lie_in_a_folder_that_is_shared_and_are_collected_where_it_only_looks_so(
    cluster: Cluster, settings: Path, tmp_path: Path
) -> None:
    shared = cluster.hosts.shared / "all é"
    shared.mkdir()
    settings.write_text(json.dumps({"shared_dir": str(shared)}))
    ran = succeeded(cluster, 0, "--nodes", "3", "--", WRITE)
    top = shared / "jobs" / ran.info["id"] / "outputs"
    assert ran.info["outputs"] == str(top)
    assert (top / "worker-1" / "né 'w").read_text() == "worker-1\n"
    assert not (cluster.home / "jobs" / ran.info["id"] / "outputs").exists()
    fetched = cluster.json(1, "outputs", "get", ran.info["id"], tmp_path / "here")
    assert fetched["files"] == 3
    assert (tmp_path / "here" / "master-0" / "né 'w").read_text() == "master-0\n"

    settings.write_text(json.dumps({"shared_dir": "/tmp"}))  # each host has its own
    ran = succeeded(cluster, 0, "--nodes", "3", "--", WRITE)
    kept = cluster.home / "jobs" / ran.info["id"] / "outputs"
    assert len(list(kept.glob("*/*"))) >= 2
    told = [event["message"] for event in events(cluster, ran) if "not shared" in event["message"]]
    assert len(told) == 2
    assert all("(uid 0)" in message and "No such file or directory" in message for message in told)


@pytest.mark.long
def test_an_output_of_2_gb_is_collected_and_fetched(cluster: Cluster, tmp_path: Path) -> None:
    line = 'head -c 2000000000 /dev/urandom > "$RAYCONTROL_OUTPUT_DIR/model"; sha256sum < "$RAYCONTROL_OUTPUT_DIR/model"'
    ran = succeeded(cluster, 0, "--", line)
    fetched = cluster.json(0, "outputs", "get", ran.info["id"], tmp_path / "here", timeout_s=600)
    assert fetched == {"folder": str(tmp_path / "here"), "files": 1, "size": 2_000_000_000}
    summed = cluster.hosts.run(0, ["sha256sum", tmp_path / "here" / "master-0" / "model"], check=True).stdout
    assert summed.split()[0] == ran.lines("master-0")[0].split()[0]
