"""How a node's Ray was started, read from a /proc that is made for each test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from raycontrol.hardware import RayStart
from raycontrol.raystart import ray_start

NODE_ID = "c7b7b2d6aa01"
RAYLET = 40


def process(proc: Path, pid: int, command: list[str], environment: Mapping[str, str]) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in command))
    (folder / "environ").write_bytes(
        b"".join(f"{name}={environment[name]}\0".encode() for name in environment)
    )


def raylet(proc: Path, **environment: str) -> None:
    process(proc, RAYLET, ["/venv/ray/core/src/ray/raylet/raylet", f"--node_id={NODE_ID}"], environment)


def gcs(proc: Path, *words: str, pid: int = 30, node_id: str = NODE_ID, **environment: str) -> None:
    program = "/venv/ray/core/src/ray/gcs/gcs_server"
    process(proc, pid, [program, "--gcs_server_port=6379", f"--node-id={node_id}", *words], environment)


def test_a_node_has_what_its_raylet_was_given_and_no_secrets(tmp_path: Path) -> None:
    raylet(tmp_path, RAY_worker_niceness="0", RAY_AUTH_TOKEN="secret", PATH="/bin")
    assert ray_start(RAYLET, NODE_ID, tmp_path) == RayStart(raylet={"RAY_worker_niceness": "0"})


def test_on_the_head_it_is_the_gcs_of_the_same_ray(tmp_path: Path) -> None:
    raylet(tmp_path)
    gcs(tmp_path, pid=20, node_id="0123abcd", RAY_health_check_period_ms="1")
    gcs(tmp_path, pid=30, RAY_health_check_period_ms="1000")
    found = ray_start(RAYLET, NODE_ID, tmp_path)
    assert found == RayStart(gcs={"RAY_health_check_period_ms": "1000"}, storage="memory")


@pytest.mark.parametrize(
    ("words", "environment", "storage"),
    [
        ([], {}, "memory"),
        ([], {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": "/var/lib/ray"}, "rocksdb"),
        (["--redis_address=10.0.0.9", "--redis_password=secret"], {}, "redis"),
    ],
)
def test_where_rays_tables_are(
    words: list[str], environment: dict[str, str], storage: str, tmp_path: Path
) -> None:
    raylet(tmp_path)
    gcs(tmp_path, *words, **environment)
    assert ray_start(RAYLET, NODE_ID, tmp_path) == RayStart(gcs={}, storage=storage)


def test_processes_that_have_ended_or_are_closed_to_us_are_passed_over(tmp_path: Path) -> None:
    assert ray_start(RAYLET, NODE_ID, tmp_path) is None
    raylet(tmp_path)
    gcs(tmp_path)
    (tmp_path / "30/environ").unlink()
    (tmp_path / "31").mkdir()
    process(tmp_path, 32, [], {})
    assert ray_start(RAYLET, NODE_ID, tmp_path) == RayStart()
