"""Workers that wait on a node: counted among the children of its raylet, asked for when it is quiet. With Ray: ``tests/ray``."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
        assert sorted(waiting_workers(os.getpid())) == sorted([idle, starting])


def keep(asked: list[int], wanted: int, story: float) -> None:
    async def go() -> None:
        spares = SpareWorkers("unused", os.getpid(), wanted, look_s=0.05, quiet_s=0.01, trouble_s=0.05)
        keeping = asyncio.ensure_future(spares.keep())
        await asyncio.wait({keeping}, timeout=story)
        assert keeping.done() == (wanted == 0)
        keeping.cancel()

    asyncio.run(go())


def test_as_many_are_asked_for_as_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(spareworkers, "ask_for_workers", lambda _, number: asked.append(number))
    with child("ray::IDLE"):
        keep(asked, 3, story=1.0)
    assert asked and set(asked) == {2}


def test_none_are_asked_for_where_none_are_wanted_or_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(spareworkers, "ask_for_workers", lambda _, number: asked.append(number))
    keep(asked, 0, story=5.0)
    with child("ray::IDLE"):
        keep(asked, 1, story=0.5)
    assert asked == []


def test_a_ray_that_cannot_be_asked_is_asked_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def refuse(_: str, number: int) -> None:
        asked.append(number)
        raise AttributeError("no PrestartWorkers")

    monkeypatch.setattr(spareworkers, "ask_for_workers", refuse)
    keep(asked, 1, story=1.0)
    assert len(asked) > 1
    assert "this Ray cannot be asked for spare workers" in caplog.text
