"""A file system of 24 MiB as RAYCONTROL_HOME, full when it must not be. Needs root, for the mount."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_state import nothing_left as watch
from tests.ray.conftest import LocalRay
from tests.ray.jobs import PYTHON, WAIT_S
from tests.support import wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts a small file system")

MIB = 1 << 20
CHATTER = """
import pathlib, sys, time
for number in range(12 * 1024):
    print(f"{number:08} {'.' * 1014}")
sys.stdout.flush()
print("all said", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRay]:
    """A Ray whose home is a file system of 24 MiB, of which 8 are to stay free."""
    home = tmp_path_factory.mktemp("small")
    with ExitStack() as stack:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", home], check=True)
        stack.callback(subprocess.run, ["umount", "--lazy", home], check=True)
        (home / "settings.yaml").write_text("min_free_mib: 8\n")
        ray = LocalRay(Path(tempfile.mkdtemp(prefix="rc-ray-")), home)
        stack.callback(ray.close)
        ray.wait_ready()
        yield ray


def test_nothing_is_submitted_where_nothing_can_be_stored(small: LocalRay) -> None:
    with watch(small):
        filler = fill(small.home, leave=0)
        refused = small.raycontrol("submit", "--cpu", "0.1", "--", "true", timeout_s=WAIT_S)
        assert refused.returncode == 125
        assert "disk" in refused.stderr and str(small.home) in refused.stderr
        assert "Traceback" not in refused.stderr
        filler.unlink()
        assert small.json("list") == []
        answer = small.raycontrol("run", "--cpu", "0.1", "--", "echo room again", timeout_s=WAIT_S)
        assert (answer.returncode, answer.stdout) == (0, "master-0 | room again\n")


def test_logs_that_fill_the_disk_wait_on_their_node(small: LocalRay, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with watch(small):
        filler = fill(small.home, leave=12 * MIB)
        job = small.raycontrol(
            *("submit", "--cpu", "0.1", "--name", "chatter", "--", PYTHON, "-c", CHATTER, go), check=True
        ).stdout.strip()
        (told,) = wait_for_events(small, job, "its log waits on the node")
        assert "below the floor of 8 MiB" in told["message"]
        assert small.json("get", job)["state"] == "RUNNING"

        fuller = fill(small.home, leave=0)  # now the store cannot be written either
        go.touch()
        fuller.unlink()
        filler.unlink()
        assert small.raycontrol("wait", job, timeout_s=WAIT_S).returncode == 0
        wait_for_events(small, job, "its log is kept again")
    kept = (small.home / "jobs" / job / "logs/0/master-0.log").read_text()
    assert kept == "".join(f"{number:08} {'.' * 1014}\n" for number in range(12 * 1024)) + "all said\n"


def wait_for_events(ray: LocalRay, job: str, text: str) -> list[dict[str, Any]]:
    def found() -> list[dict[str, Any]]:
        return [event for event in ray.json("events", job) if text in event["message"]]

    return wait_until(found, WAIT_S, f"an event with {text!r}")


def fill(folder: Path, leave: int) -> Path:
    """Write a file that leaves so many bytes of its file system free."""
    number = len(list(folder.glob("filler-*")))
    filler = folder / f"filler-{number}"
    with filler.open("wb", buffering=0) as file:
        try:
            while (free := free_bytes(folder) - leave) > 0:
                file.write(bytes(min(free, MIB)))
        except OSError:
            pass  # full, in the middle of a piece
    return filler


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
