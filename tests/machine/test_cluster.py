"""The controller's view of Ray while hosts say nothing; without a Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from raycontrol.cluster import RayCluster
from raycontrol.job import Job
from tests.machine.fake_cluster import in_loop
from tests.unit import lifecycle_jobs as jobs

pytestmark = pytest.mark.timeout(60)

MANY = 100
"""More than the threads of Python's own pool, of which there are 32 at most."""


class Silent(RayCluster):
    """A Ray whose hosts say nothing until ``answer`` is set."""

    def __init__(self) -> None:
        super().__init__("east", "/nowhere")
        self.answer = threading.Event()
        self.asked: list[str] = []

    def _reserve(self, job: Job) -> None:
        self.answer.wait()

    def _ask_host(self, node_id: str, ip: str) -> bool:
        self.asked.append(node_id)
        self.answer.wait()
        return True


@in_loop
async def test_reservations_on_a_silent_host_keep_nothing_else_waiting(tmp_path: Path) -> None:
    cluster = Silent()
    placing = [replace(jobs.placing(), id=f"digits-{number}") for number in range(MANY)]
    waiting = [asyncio.ensure_future(cluster.reserve(job)) for job in placing]
    went_on = await others_go_on(waiting)
    cluster.answer.set()
    await asyncio.gather(*waiting)
    assert went_on


@in_loop
async def test_hosts_that_are_asked_and_say_nothing_keep_nothing_else_waiting(tmp_path: Path) -> None:
    cluster = Silent()
    waiting = [
        asyncio.ensure_future(cluster.may_run_on(f"node-{number}", "10.0.0.1")) for number in range(MANY)
    ]
    went_on = await others_go_on(waiting)
    cluster.answer.set()
    await asyncio.gather(*waiting)
    assert went_on


@in_loop
async def test_all_who_ask_for_a_node_meanwhile_share_its_answer(tmp_path: Path) -> None:
    cluster = Silent()
    first, *others = [asyncio.ensure_future(cluster.may_run_on("node-b", "10.0.0.2")) for _ in range(8)]
    await asyncio.sleep(0)
    first.cancel()
    cluster.answer.set()
    assert await asyncio.gather(*others) == [True] * 7
    assert cluster.asked == ["node-b"]
    assert await cluster.may_run_on("node-b", "10.0.0.2")
    assert cluster.asked == ["node-b", "node-b"]


async def others_go_on(waiting: Iterable[asyncio.Future[object]]) -> bool:
    """Return whether a thread can be had while these wait."""
    await asyncio.sleep(0)
    try:
        await asyncio.wait_for(asyncio.to_thread(threading.get_ident), 5)
    except asyncio.TimeoutError:
        return False
    return not any(one.done() for one in waiting)
