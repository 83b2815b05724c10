"""How the server asks the cluster: not too often at a time, not for ever, and once for all who want the same."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from raycontrol.api.calls import Calls, Crew, Entrance
from raycontrol.api.limits import Limits
from raycontrol.api.problems import Busy
from raycontrol.errors import ControllerUnavailable
from tests.api.fakes import FakeDoor, lost


class Doorkeeper:
    """Opens a door, or raises ``error``, as soon as ``may`` is set; counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.may = threading.Event()
        self.error: Exception | None = None
        self.now = 100.0

    def open(self) -> FakeDoor:
        self.asked += 1
        assert self.may.wait(10)
        if self.error is not None:
            raise self.error
        return FakeDoor()

    def clock(self) -> float:
        return self.now


@pytest.fixture
def keeper() -> Doorkeeper:
    return Doorkeeper()


def test_all_who_wait_for_the_door_share_one_opening(keeper: Doorkeeper) -> None:
    entrance = Entrance(keeper.open)
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(entrance.at_the_door, id) for _ in range(8)]
        keeper.may.set()
        assert len({future.result(10) for future in waiting}) == 1
    assert keeper.asked == 1


def test_a_door_that_could_not_be_opened_is_left_alone_for_a_second(keeper: Doorkeeper) -> None:
    keeper.may.set()
    keeper.error = lost()
    entrance = Entrance(keeper.open, keeper.clock)
    for now, asked in ((100.0, 1), (100.9, 1), (101.0, 2), (101.5, 2)):
        keeper.now = now
        with pytest.raises(ControllerUnavailable):
            entrance.at_the_door(id)
        assert keeper.asked == asked
    keeper.now, keeper.error = 103.0, None
    assert entrance.at_the_door(id) == entrance.at_the_door(id)
    assert keeper.asked == 3


def test_a_controller_that_is_gone_is_looked_for_anew(keeper: Doorkeeper) -> None:
    keeper.may.set()
    entrance = Entrance(keeper.open)

    def gone(door: Any) -> None:
        raise lost()

    with pytest.raises(ControllerUnavailable):
        entrance.at_the_door(gone)
    entrance.at_the_door(id)
    assert keeper.asked == 2


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """Set at the end, so that no thread waits on."""
    event = threading.Event()
    yield event
    event.set()


def test_only_so_much_waits_for_a_thread(stuck: threading.Event) -> None:
    async def ask() -> str:
        crew = Crew("test", 1, 1)
        under_way = [asyncio.ensure_future(crew.do(lambda: stuck.wait(10))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await crew.do(lambda: None)
        stuck.set()
        await asyncio.gather(*under_way)
        done = await crew.do(lambda: "there is room again")
        crew.close()
        return done

    assert asyncio.run(ask()) == "there is room again"


def test_a_call_is_not_waited_for_for_ever(stuck: threading.Event) -> None:
    async def ask() -> None:
        calls = Calls(FakeDoor, replace(Limits(), answer_s=0.05))
        with pytest.raises(Busy, match=r"has not answered in 0\.05 s"):
            await calls.ask(lambda door: stuck.wait(10))
        with pytest.raises(Busy, match=r"in 0\.05 s; it may have been done; look before you repeat it"):
            await calls.change(lambda door: stuck.wait(10))
        stuck.set()
        calls.close()

    asyncio.run(ask())


def test_however_many_ask_what_was_done_is_recorded(stuck: threading.Event) -> None:
    async def ask() -> bool:
        calls = Calls(FakeDoor, replace(Limits(), calls=1, waiting_calls=0))
        under_way = asyncio.ensure_future(calls.ask(lambda door: stuck.wait(10)))
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await calls.ask(lambda door: True)
        recorded = await calls.record(lambda door: True)
        stuck.set()
        await under_way
        calls.close()
        return recorded

    assert asyncio.run(ask())


def test_outputs_on_a_file_server_that_is_dead_hold_up_nothing_else() -> None:
    async def scene() -> None:
        calls, lives = Calls(FakeDoor, Limits()), threading.Event()
        stuck = [asyncio.ensure_future(calls.read_outputs(lambda: lives.wait(30))) for _ in range(20)]
        assert await asyncio.wait_for(calls.read(lambda: "a line"), 10) == "a line"
        lives.set()
        assert await asyncio.gather(*stuck) == [True] * 20
        calls.close()

    asyncio.run(scene())
