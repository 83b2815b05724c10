"""Places for commands across nodes without a cluster: ``Execs`` in this process, and places that fail as nodes do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from raycontrol.execs import Execs, Surroundings
from raycontrol.execution import Began, Chunk, Command, Place, PlaceFailed
from raycontrol.spread import Spread, SpreadExecution


class LocalWay:
    """``spread.Way`` to places that live on in a thread of their own, whoever asks them and leaves.

    ``silent`` ones never answer, ``broken`` ones say why not, ``late`` ones begin only when they were asked to stop.
    ``begun`` tells where commands were to be started.
    """

    def __init__(
        self,
        folder: Path,
        silent: Sequence[str] = (),
        broken: Sequence[str] = (),
        late: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._silent = set(silent)
        self._broken = set(broken)
        self._late = {name: asyncio.Event() for name in late}
        self._execs: dict[str, Execs] = {}
        self.begun: list[str] = []

    async def start(self, place: Place, exec_id: str, command: Command) -> Began:
        self.begun.append(place.name)
        if place.name in self._late:
            await self._late[place.name].wait()
        return await self._there(place, lambda execs: execs.start(exec_id, place.name, command))

    async def read(self, place: Place, exec_id: str, offset: int, wait_s: float) -> Chunk:
        return await self._there(place, lambda execs: execs.read(exec_id, offset, wait_s))

    async def keep(self, place: Place, exec_id: str) -> None:
        await self._there(place, lambda execs: execs.keep(exec_id))

    async def stop(self, place: Place, exec_id: str, grace_s: float, why: str) -> None:
        await self._there(place, lambda execs: execs.stop(exec_id, grace_s, why))
        if place.name in self._late:
            self._late[place.name].set()

    async def _there(self, place: Place, call: Any) -> Any:
        if place.name in self._silent:
            await asyncio.sleep(3600)
        if place.name in self._broken:
            raise PlaceFailed("this node has no raycontrol actor (yet)")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._asked(place, call), _loop()))

    async def _asked(self, place: Place, call: Any) -> Any:
        if place.name not in self._execs:
            folder = self._folder / place.name
            self._execs[place.name] = Execs(folder, f"test-{self._folder.name}", _around(place.name))
        return await call(self._execs[place.name])


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="places", daemon=True).start()
    return loop


def _around(name: str) -> Any:
    async def surroundings(command: Command) -> Surroundings:
        return Surroundings({"PATH": "/usr/bin:/bin", "NODE": name}, "/")

    return surroundings


def place(name: str) -> Place:
    return Place(name, f"id of {name}", "test")


def spread(
    way: LocalWay, names: Sequence[str], command: Command, parallel: int | None = None, answer_s: float = 15
) -> Spread:
    return Spread(way, [place(name) for name in names], command, parallel, answer_s)


def execution(
    way: LocalWay, names: Sequence[str], command: Command, parallel: int | None = None, answer_s: float = 15
) -> SpreadExecution:
    return SpreadExecution(spread(way, names, command, parallel, answer_s))
