"""Commands inside a running instance, and what an instance makes of its node's shell."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from raycontrol.execution import Command, Over, PlaceFailed
from raycontrol.preparing import Preparation
from raycontrol.shellenv import ShellEnv
from tests.machine.instances import Gang, play


@pytest.fixture
def gang(tmp_path: Path) -> Gang:
    return Gang(tmp_path)


async def output(gang: Gang, exec_id: str) -> tuple[bytes, Over]:
    data = b""
    while True:
        chunk = await gang.instance.execs.read(exec_id, len(data), 10)
        data += chunk.data
        if chunk.over is not None:
            return data, chunk.over


def test_a_command_has_the_environment_and_the_folder_of_the_start_command(gang: Gang) -> None:
    async def story() -> None:
        await gang.prepared()
        with pytest.raises(PlaceFailed, match="has not got so far here"):
            await gang.instance.execs.start("early", "worker-0", Command("true"))
        await gang.instance.carry_out(gang.orders("sleep 1000", environment={"SEEN": "a b"}))
        await gang.heard("StagePassed")
        await gang.instance.execs.start("1", "worker-0", Command("echo $SEEN; pwd"))
        assert await output(gang, "1") == (f"a b\n{gang.code}\n".encode(), Over("worker-0", 0, 0))
        await gang.closed()

    play(story())


def test_a_command_ends_with_the_job(gang: Gang) -> None:
    async def story() -> None:
        await gang.prepared()
        await gang.instance.carry_out(gang.orders("sleep 1000"))
        await gang.heard("StagePassed")
        await gang.instance.execs.start("1", "worker-0", Command("sleep 1000"))
        ending = asyncio.ensure_future(gang.closed(why="the job was stopped"))
        assert (await output(gang, "1"))[1].why == "the job was stopped"
        await ending

    play(story())


def test_where_a_job_is_ending_no_command_begins_until_somebody_may_look_inside(gang: Gang) -> None:
    async def story() -> None:
        await gang.prepared()
        await gang.instance.carry_out(gang.orders("trap '' TERM; echo deaf; while :; do sleep 0.1; done"))
        await gang.heard("StagePassed")
        await gang.instance.stop(30, "the job was stopped")
        with pytest.raises(PlaceFailed, match="the job is ending here"):
            await gang.instance.execs.start("1", "worker-0", Command("true"))
        await gang.instance.stop(0, "the job was stopped")
        await gang.heard("InstanceClosed")
        await gang.instance.execs.start("2", "worker-0", Command("echo inside"))
        assert await output(gang, "2") == (b"inside\n", Over("worker-0", 0, 0))

    play(story())


def test_what_the_shell_sets_is_among_the_facts_where_the_job_wants_it(gang: Gang) -> None:
    async def story() -> None:
        gang.links.shell = ShellEnv({"PATH": "/cuda/bin:/usr/bin", "CUDA_HOME": "/cuda"})
        await gang.instance.prepare(Preparation(None, (), shell_env=True))
        facts = (await gang.heard("InstancePrepared")).facts
        first, second = facts.shell_env["PATH"].split(":")[:2]
        assert (first, second, facts.shell_env["CUDA_HOME"]) == (
            str(Path(sys.executable).parent),
            "/cuda/bin",
            "/cuda",
        )
        await gang.closed()

    play(story())
