"""Collective calls of three instances: their gatekeepers in one process, the stand-ins as programs, a script as the MPI."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from raycontrol import standin
from raycontrol.gate import Finished, Outcome
from raycontrol.gatekeeper import SOCKET, Gatekeeper
from tests.machine.instances import play, until

MEETING = ("launcher-0", "worker-0", "worker-1")
PATIENCE_S = 0.2
CALL_0, CALL_1 = 0, 1


class Way:
    """The way from an instance to the launcher's: it can be broken for some calls, and tells which have come."""

    def __init__(self) -> None:
        self.launcher: Gatekeeper | None = None
        self.faults = 0
        self.joined: list[tuple[str, int]] = []
        self.left: list[str] = []

    async def join(self, instance: str, call: int, timeout_s: float) -> Outcome | None:
        self._pass()
        self.joined.append((instance, call))
        assert self.launcher is not None
        return await self.launcher.join(instance, call, timeout_s)

    async def leave(self, instance: str) -> None:
        self._pass()
        self.left.append(instance)
        assert self.launcher is not None
        await self.launcher.leave(instance)

    def _pass(self) -> None:
        if self.faults:
            self.faults -= 1
            raise ConnectionError("the launcher's instance cannot be reached")


class Instance:
    """One instance: its private folder with the stand-in of mpirun, and its gatekeeper."""

    def __init__(self, top: Path, name: str, way: Way) -> None:
        self.name = name
        self.out = top
        self.private = top / ("long" * 40) / name
        (self.private / "bin").mkdir(parents=True)
        settings = {"instance": name, "launcher": MEETING[0], "run_on": "every_instance", "hidden": []}
        (self.private / "standin.json").write_text(json.dumps(settings, indent=1))
        words = (sys.executable, "-I", "-S", standin.__file__, str(self.private), "mpirun")
        write_program(self.private / "bin" / "mpirun", f'exec {shlex.join(words)} "$@"')
        self.keeper = Gatekeeper(self.private, name, MEETING, way, patience_s=PATIENCE_S)
        self.started: list[Process] = []

    async def call(self, *args: str) -> Process:
        """Call mpirun, as the start command would."""
        path = f"{self.private / 'bin'}:{self.out / 'mpi'}:/usr/bin:/bin"
        process = await asyncio.create_subprocess_exec(
            *(str(self.private / "bin" / "mpirun"), *args),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env={"PATH": path, "ME": self.name, "OUT": str(self.out)},
        )
        self.started.append(process)
        return process


class Gang:
    """Three instances that meet. ``mpirun`` is what they all find behind their stand-ins."""

    def __init__(self, top: Path) -> None:
        self.out = top
        self.way = Way()
        (top / "mpi").mkdir()
        self.mpirun("exit 0")
        self.launcher, self.first, self.second = self.all = [
            Instance(top, name, self.way) for name in MEETING
        ]
        self.way.launcher = self.launcher.keeper

    def mpirun(self, text: str) -> None:
        """What the launcher does; that it has been started is written down first."""
        line = 'echo "$ME: world $RAYCONTROL_WORLD: $*" >> "$OUT/started"\n'
        write_program(self.out / "mpi" / "mpirun", line + text)

    def worlds(self) -> list[str]:
        file = self.out / "started"
        return file.read_text().splitlines() if file.exists() else []

    async def has_joined(self, instance: Instance, call: int) -> None:
        await until(lambda: (instance.name, call) in self.way.joined, f"call {call} of {instance.name}")

    async def call_everywhere(self, *args: str) -> list[tuple[int, str]]:
        """Exit codes (or negative signals) and errors of one call of each instance, in the order of the meeting."""
        return [await end_of(process) for process in [await instance.call(*args) for instance in self.all]]


@asynccontextmanager
async def open_gang(top: Path) -> AsyncIterator[Gang]:
    gang = Gang(top)
    for instance in gang.all:
        await instance.keeper.open()
    try:
        yield gang
    finally:
        for instance in gang.all:
            instance.keeper.close()
            for process in instance.started:
                if process.returncode is None:
                    process.kill()
                    await process.wait()


async def end_of(process: Process) -> tuple[int, str]:
    out, errors = await asyncio.wait_for(process.communicate(), 20)
    assert (out, process.returncode is None) == (b"", False)
    return process.returncode or 0, errors.decode()


async def line_of(process: Process) -> str:
    assert process.stderr is not None
    return (await asyncio.wait_for(process.stderr.readline(), 20)).decode()


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


# One world.


@pytest.mark.parametrize(
    ("text", "launchers", "workers"),
    [("exit 0", 0, 0), ("exit 3", 3, 3), ("ulimit -c 0; kill -SEGV $$", -11, 139), ("kill -9 $$", -9, 137)],
)
def test_three_calls_start_one_world_and_end_as_it_does(
    tmp_path: Path, text: str, launchers: int, workers: int
) -> None:
    async def story() -> None:
        async with open_gang(tmp_path) as gang:
            gang.mpirun(text)
            ends = await gang.call_everywhere("-n", "3", "python", "a b.py")
            assert ends == [(launchers, ""), (workers, ""), (workers, "")]
            assert gang.worlds() == ["launcher-0: world 0: -n 3 python a b.py"]

    play(story())


def test_nothing_starts_before_the_last_has_called(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_gang(tmp_path) as gang:
            calls = [await gang.launcher.call("x"), await gang.first.call("x")]
            await gang.has_joined(gang.first, CALL_0)
            assert (await line_of(calls[0])).endswith(" to call it too\n")
            assert gang.worlds() == []
            calls.append(await gang.second.call("x"))
            assert [code for code, _ in [await end_of(call) for call in calls]] == [0, 0, 0]
            assert gang.worlds() == ["launcher-0: world 0: x"]

    play(story())


def test_for_whom_it_waits_is_said_after_a_while_and_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_gang(tmp_path) as gang:
            launcher = await gang.launcher.call("x")
            assert (
                await line_of(launcher)
                == "raycontrol: mpirun waits for worker-0 and worker-1 to call it too\n"
            )
            workers = [await gang.first.call("x"), await gang.second.call("x")]
            assert [await end_of(call) for call in (launcher, *workers)] == [(0, ""), (0, ""), (0, "")]

    play(story())


def test_an_instance_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_gang(tmp_path) as gang:
            calls = [await gang.launcher.call("x"), await gang.first.call("x")]
            await gang.has_joined(gang.first, CALL_0)
            assert gang.worlds() == []
            await gang.second.keeper.start_command_ended()
            assert [code for code, _ in [await end_of(call) for call in calls]] == [0, 0]
            assert len(gang.worlds()) == 1

    play(story())


def test_the_launcher_goes_alone_when_all_others_have_ended_before(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_gang(tmp_path) as gang:
            for instance in (gang.first, gang.second):
                await instance.keeper.start_command_ended()
            assert await end_of(await gang.launcher.call("x")) == (0, "")

    play(story())


# Several worlds.


def test_the_second_call_of_each_is_the_second_world(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_gang(tmp_path) as gang:
            gang.mpirun("exit $1")
            assert [code for code, _ in await gang.call_everywhere("4")] == [4, 4, 4]
            assert [code for code, _ in await gang.call_everywhere("5")] == [5, 5, 5]
            assert gang.worlds() == ["launcher-0: world 0: 4", "launcher-0: world 1: 5"]

    play(story())


def test_who_is_ahead_waits_for_the_others_next_call(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_gang(tmp_path) as gang:
            gang.mpirun("exit $1")
            early = []
            for number in (CALL_0, CALL_1):
                early.append(await gang.first.call("x"))
                await gang.has_joined(gang.first, number)
            others = [await gang.launcher.call("4"), await gang.second.call("x")]
            assert [(await end_of(call))[0] for call in (*others, early[0])] == [4, 4, 4]
            assert early[1].returncode is None
            others = [await gang.launcher.call("5"), await gang.second.call("x")]
            assert [(await end_of(call))[0] for call in (*others, early[1])] == [5, 5, 5]

    play(story())


def test_who_connects_and_says_nothing_has_not_called(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_gang(tmp_path) as gang:
            folder = os.open(gang.first.private, os.O_PATH)
            with socket.socket(socket.AF_UNIX) as silent:
                silent.connect(f"/proc/self/fd/{folder}/{SOCKET}")
            os.close(folder)
            assert [code for code, _ in await gang.call_everywhere("x")] == [0, 0, 0]

    play(story())


# What goes wrong.


def test_a_launcher_that_ends_without_the_call_fails_the_others_with_advice(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_gang(tmp_path) as gang:
            calls = [await gang.first.call("x"), await gang.second.call("x")]
            for instance in (gang.first, gang.second):
                await gang.has_joined(instance, CALL_0)
            await gang.launcher.keeper.start_command_ended()
            advice = (
                "raycontrol: the launcher instance launcher-0 ended without calling mpirun for the 1st time while "
                "worker-0 and worker-1 did. Let every instance call it equally often, or set `run_on: launcher` so "
                "that the command runs once, on the launcher.\n"
            )
            assert [await end_of(call) for call in calls] == [(1, advice), (1, advice)]
            late = await gang.first.call("x")
            assert (await end_of(late))[0] == 1
            assert gang.worlds() == []

    play(story())


def test_a_stand_in_that_is_killed_takes_its_world_along_and_releases_the_others(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_gang(tmp_path) as gang:
            gang.mpirun('echo $$ > "$OUT/pid.new"; mv "$OUT/pid.new" "$OUT/pid"; exec sleep 100')
            calls = [await instance.call("x") for instance in gang.all]
            pid_file = gang.out / "pid"
            await until(pid_file.exists, "the world")
            calls[0].send_signal(signal.SIGKILL)
            assert [await end_of(call) for call in calls] == [(-9, ""), (137, ""), (137, "")]
            world = Path("/proc") / pid_file.read_text().strip()
            await until(lambda: not world.exists(), "the end of the world")

    play(story())


def test_a_launcher_that_is_killed_while_it_waits_releases_the_others(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_gang(tmp_path) as gang:
            launcher, first = await gang.launcher.call("x"), await gang.first.call("x")
            await gang.has_joined(gang.first, CALL_0)
            await line_of(launcher)
            launcher.send_signal(signal.SIGTERM)
            assert (await end_of(launcher))[0] == -15
            assert await end_of(first) == (137, "")
            assert gang.worlds() == []

    play(story())


def test_a_launcher_that_is_killed_while_it_waits_releases_the_others_when_all_have_called(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with open_gang(tmp_path) as gang:
            launcher, first = await gang.launcher.call("x"), await gang.first.call("x")
            await line_of(launcher)
            launcher.send_signal(signal.SIGTERM)
            assert (await end_of(launcher))[0] == -15
            second = await gang.second.call("x")
            assert [await end_of(call) for call in (first, second)] == [(137, ""), (137, "")]
            assert gang.worlds() == []

    play(story())


def test_a_worker_that_is_killed_while_it_waits_counts_as_arrived(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_gang(tmp_path) as gang:
            first = await gang.first.call("x")
            await gang.has_joined(gang.first, CALL_0)
            first.send_signal(signal.SIGTERM)
            assert await end_of(first) == (-15, "")
            calls = [await gang.launcher.call("x"), await gang.second.call("x")]
            assert [(await end_of(call))[0] for call in calls] == [0, 0]

    play(story())


def test_a_way_to_the_launcher_that_fails_is_tried_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_gang(tmp_path) as gang:
            gang.mpirun("exit 3")
            gang.way.faults = 2
            calls = [await gang.launcher.call("x"), await gang.first.call("x")]
            await gang.has_joined(gang.first, CALL_0)
            assert gang.way.faults == 0
            gang.way.faults = 2
            await gang.second.keeper.start_command_ended()
            assert gang.way.left == ["worker-1"]
            assert [(await end_of(call))[0] for call in calls] == [3, 3]

    play(story())


def test_news_that_come_twice_change_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_gang(tmp_path) as gang:
            gang.mpirun("exit 3")
            keeper = gang.launcher.keeper
            assert await keeper.join("worker-0", CALL_0, 0.01) is None
            again = asyncio.ensure_future(keeper.join("worker-0", CALL_0, 20))
            for _ in range(2):
                await gang.second.keeper.start_command_ended()
            assert await end_of(await gang.launcher.call("x")) == (3, "")
            assert await again == Finished(3)
            assert await keeper.join("worker-0", CALL_0, 20) == Finished(3)
            assert await end_of(await gang.first.call("x")) == (3, "")
            assert len(gang.worlds()) == 1

    play(story())


def test_a_socket_that_an_earlier_instance_left_is_replaced(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_gang(tmp_path) as gang:
            for instance in gang.all:
                instance.keeper.close()
                assert (instance.private / SOCKET).is_socket()
                await instance.keeper.open()
            assert [code for code, _ in await gang.call_everywhere("x")] == [0, 0, 0]

    play(story())


def test_with_a_closed_gatekeeper_the_instance_is_gone(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_gang(tmp_path) as gang:
            gang.first.keeper.close()
            assert await end_of(await gang.first.call("x")) == (125, "raycontrol: the instance is gone\n")

    play(story())
