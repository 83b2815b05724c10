"""The controller's clock is set while jobs run and wait: no limit moves by it, and no job ends early.

Not by Debian's ``faketime`` (0.9.10): with it ``time.sleep`` of Python 3.11 raises EINVAL where monotonic clocks are left
alone, and ``threading.Event.wait`` does not return where they are set too.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_state import nothing_left
from tests.ray.conftest import LocalRay
from tests.ray.test_faults import actor_pid, until
from tests.support import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STARTED_S = 120
HOUR_S = 3600
RUN_S, QUEUE_S = 40, 60
LATE_S = 30
"""How much later than its limit a job may be seen to have ended, on a busy machine."""


class SetClock:
    """The wall clock of the controller, which goes by what stands in a file (``set_clock.c``)."""

    def __init__(self, folder: Path) -> None:
        library, source = folder / "set_clock.so", Path(__file__).with_name("set_clock.c")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        self._file = folder / "clock"
        self._file.write_bytes(struct.pack("qqq", 0, 0, 0))
        self.environment = {"LD_PRELOAD": str(library), "RC_SET_CLOCK": str(self._file)}

    def set(self, pid: int, ahead_s: int) -> None:
        with self._file.open("r+b") as file:  # in place: it is mapped into the memory of that process
            file.write(struct.pack("qqq", pid, ahead_s, 0))

    def is_read(self) -> bool:
        """Whether that process has asked for the time since it was set."""
        return struct.unpack("qqq", self._file.read_bytes())[2] > 0


@pytest.fixture
def clock(tmp_path: Path) -> SetClock:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    return SetClock(tmp_path)


@pytest.fixture
def local(clock: SetClock, tmp_path: Path) -> Iterator[LocalRay]:
    local = LocalRay(Path(tempfile.mkdtemp(prefix="rc-ray-")), tmp_path / "home", clock.environment)
    try:
        local.wait_ready()
        yield local
    finally:
        local.close()


def test_a_clock_that_is_set_back_an_hour_moves_no_limit_and_loses_no_job(
    local: LocalRay, clock: SetClock, tmp_path: Path
) -> None:
    done = submit(local, "--gpu", "1", "--", "true")
    before = ends(local, done, STARTED_S)
    with nothing_left(local):
        go = tmp_path / "go"
        stays = submit(local, "--gpu", "3", "--", until(go))
        limited = submit(local, "--gpu", "1", "--set", f"timeouts.run_s={RUN_S}", "--", "sleep 600")
        for job in (stays, limited):
            wait_until(lambda job=job: state(local, job) == "RUNNING", STARTED_S, f"{job} runs")
        limited_since = time.monotonic()
        waits = submit(local, "--gpu", "4", "--set", f"timeouts.queue_s={QUEUE_S}", "--", "true")
        waits_since = time.monotonic()
        pid = actor_pid(local, "rc-controller")
        assert pid is not None
        clock.set(pid, -HOUR_S)
        wait_until(clock.is_read, 30, "the controller goes by the clock that is set")

        ended = ends(local, limited, RUN_S + LATE_S)
        assert (ended["state"], ended["reason"]) == ("FAILED", "RUN_TIMEOUT")
        assert time.monotonic() - limited_since > RUN_S - 15
        assert state(local, waits) == "QUEUED"
        ended = ends(local, waits, QUEUE_S + LATE_S)
        assert (ended["state"], ended["reason"]) == ("FAILED", "QUEUE_TIMEOUT")
        assert time.monotonic() - waits_since > QUEUE_S - 5

        later = submit(local, "--gpu", "1", "--", "true")
        assert ends(local, later, STARTED_S)["state"] == "SUCCEEDED"
        clock.set(pid, 0)
        assert state(local, stays) == "RUNNING"
        go.touch()
        assert ends(local, stays, STARTED_S)["state"] == "SUCCEEDED"
        for job in (stays, limited, waits, later):
            is_in_order(local, job)
        assert local.json("get", done) == before


def submit(local: LocalRay, *arguments: str) -> str:
    submitted = local.raycontrol("submit", "--cpu", "0.1", *arguments, check=True, timeout_s=STARTED_S)
    return submitted.stdout.strip()


def state(local: LocalRay, job: str) -> str:
    return str(local.json("get", job)["state"])


def ends(local: LocalRay, job: str, timeout_s: float) -> dict[str, Any]:
    local.raycontrol("wait", job, timeout_s=timeout_s)
    found: dict[str, Any] = local.json("get", job)
    return found


def is_in_order(local: LocalRay, job: str) -> None:
    """What is told of a job happened in the order in which it is told, and within the minutes of this test."""
    info = local.json("get", job)
    times = [info["submitted_at"], *([info["started_at"]] if info["started_at"] else []), info["ended_at"]]
    told = [event["at"] for event in local.json("events", job)]
    assert times == sorted(times) and times[-1] - times[0] < 300
    # Instances measure how far their clock is from the controller's to some milliseconds.
    assert all(later > earlier - 1 for earlier, later in pairwise(told)) and told[-1] - told[0] < 300
