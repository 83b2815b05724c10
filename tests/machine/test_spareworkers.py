"""Workers that wait on a node: counted among the children of its raylet, asked for when it is quiet. With Ray: ``tests/ray``."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest

from raycontrol import spareworkers
from raycontrol.spareworkers import SpareWorkers, waiting_workers


@contextmanager
def child(word: str) -> Iterator[int]:
    """A process of ours with this word on its command line; gives its pid."""
    started = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", word], stdin=subprocess.PIPE
    )
    try:
        yield started.pid
    finally:
        started.kill()
        started.communicate()


def test_workers_count_that_have_nothing_to_do_or_are_being_started() -> None:
    with child("ray::IDLE") as idle, child("/x/default_worker.py") as starting, child("ray::InstanceActor"):
        assert waiting_workers(os.getpid()) == {idle, starting}


@dataclass
class FakeRaylet:
    """Starts workers that do nothing, as children of this process; ``error`` is raised instead."""

    asked: list[int] = field(default_factory=list)
    error: Exception | None = None
    workers: ExitStack = field(default_factory=ExitStack)
    pids: list[int] = field(default_factory=list)

    def start(self, _: str, number: int) -> None:
        self.asked.append(number)
        if self.error is not None:
            raise self.error
        self.pids += [self.workers.enter_context(child("/x/default_worker.py")) for _ in range(number)]


@pytest.fixture
def raylet(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRaylet]:
    made = FakeRaylet()
    monkeypatch.setattr(spareworkers, "ask_for_workers", made.start)
    with made.workers:
        yield made


def keep(wanted: int, until: Callable[[], bool], trouble_s: float = 0.05) -> None:
    """Keep so many until this is true, and for ten looks longer."""

    async def go() -> None:
        spares = SpareWorkers("unused", os.getpid(), wanted, look_s=0.05, quiet_s=0.01, trouble_s=trouble_s)
        keeping = asyncio.ensure_future(spares.keep())
        deadline = time.monotonic() + 20
        while not until() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert until(), "within 20 s"
        await asyncio.wait({keeping}, timeout=0.5)
        assert keeping.done() == (wanted == 0)
        keeping.cancel()

    asyncio.run(go())


def test_as_many_are_asked_for_as_are_missing_of_ours(raylet: FakeRaylet) -> None:
    """Workers that wait for somebody else's tasks do not count."""
    with child("ray::IDLE"):
        keep(2, until=lambda: len(raylet.pids) == 2)
    assert raylet.asked == [2]


def test_one_that_is_gone_is_replaced(raylet: FakeRaylet) -> None:
    killed: list[int] = []

    def replaced() -> bool:
        if raylet.pids and not killed:
            killed.append(raylet.pids[0])
            os.kill(killed[0], signal.SIGKILL)
        return len(raylet.pids) == 2

    keep(1, until=replaced)
    assert raylet.asked == [1, 1]


def test_none_are_asked_for_where_none_are_wanted(raylet: FakeRaylet) -> None:
    keep(0, until=lambda: True)
    assert raylet.asked == []


def test_a_ray_that_cannot_be_asked_is_asked_again_later(
    raylet: FakeRaylet, caplog: pytest.LogCaptureFixture
) -> None:
    raylet.error = AttributeError("no PrestartWorkers")
    keep(1, until=lambda: len(raylet.asked) > 1)
    assert "this Ray cannot be asked for spare workers" in caplog.text


def test_a_ray_that_starts_none_is_not_asked_again_and_again(
    raylet: FakeRaylet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may start all of them later."""
    monkeypatch.setattr(spareworkers, "ask_for_workers", lambda _, number: raylet.asked.append(number))
    monkeypatch.setattr(spareworkers, "BEGIN_S", 0.1)
    keep(1, until=lambda: "has started none" in caplog.text, trouble_s=600)
    assert raylet.asked == [1]
