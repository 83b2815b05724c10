"""Services of an instance: they end after the start command, tell their own end, and what they need is made for them."""

from __future__ import annotations

import asyncio
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from raycontrol import nodefacts
from raycontrol.disk import TEMP_LINK, remove_short_folder
from raycontrol.plan import ASKED, Alive, Orders, PlannedRun, SharedSecret
from raycontrol.preparing import Preparation
from raycontrol.spec import Resources
from tests.machine.instances import Gang, play, until


@pytest.fixture
def gang(tmp_path: Path) -> Gang:
    return Gang(tmp_path)


def serving(gang: Gang, service: str, command: str | None = None) -> Orders:
    """One stage with a service and, perhaps, a start command."""
    runs = (PlannedRun("server", service, service=True),)
    if command is not None:
        runs += (PlannedRun("start", command),)
    until = tuple(Alive("worker-0", run.name) for run in runs)
    return replace(gang.orders(None), runs=runs, until=until)


def test_a_start_command_that_saves_its_work_still_has_its_service(gang: Gang) -> None:
    saves = "trap 'sleep 0.3; kill -0 $(cat server.pid) && echo served > saved; exit 0' TERM; touch ready; sleep 1000 & wait"

    async def story() -> None:
        await gang.prepared()
        await gang.instance.carry_out(serving(gang, "echo $$ > server.pid; exec sleep 1000", saves))
        await until((gang.code / "ready").exists, "the start command is up")
        await until((gang.code / "server.pid").exists, "the service is up")
        await gang.closed(grace_s=10)
        assert (gang.code / "saved").read_text() == "served\n"
        (ended,) = gang.told("ServiceEnded")
        assert (ended.run, ended.ended.signal, ended.asked) == ("server", 9, False)
        assert ended.ended.sender.startswith("raycontrol: ")

    play(story())


def test_a_service_alone_is_ended_at_once(gang: Gang) -> None:
    async def story() -> None:
        await gang.prepared()
        await gang.instance.carry_out(serving(gang, "trap '' TERM; touch ready; sleep 1000; true"))
        await until((gang.code / "ready").exists, "the service is up")
        await asyncio.wait_for(gang.closed(grace_s=600), 20)
        assert gang.told("RunExited") == []

    play(story())


def test_a_service_that_ends_tells_its_last_words_and_they_are_not_the_jobs_log(gang: Gang) -> None:
    async def story() -> None:
        await gang.prepared()
        await gang.instance.carry_out(
            serving(gang, "echo no port is free; exit 4", "echo working; exec sleep 1000")
        )
        ended = (await gang.heard("ServiceEnded")).ended
        assert (ended.code, ended.sender, ended.last_lines) == (4, None, ("no port is free",))
        await until(lambda: gang.links.log == b"working\n", "the start command's log")
        await gang.closed()
        assert gang.links.log == b"working\n"

    play(story())


def test_a_service_that_the_job_itself_has_ended_says_so(gang: Gang) -> None:
    async def story() -> None:
        await gang.prepared()
        await gang.instance.carry_out(serving(gang, f"touch {gang.private}/server/{ASKED}"))
        assert (await gang.heard("ServiceEnded")).asked
        await gang.closed()

    play(story())


def test_all_instances_of_an_attempt_have_the_secret_of_one(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "worker").mkdir()
    head, worker = Gang(tmp_path / "head", instance="head-0"), Gang(tmp_path / "worker")

    async def story() -> None:
        worker.links.peers["head-0"] = head.instance
        for gang in (head, worker):
            await gang.prepared()
            orders = replace(gang.orders(None, until=()), secret=SharedSecret("head-0", "ray/token"))
            await gang.instance.carry_out(orders)
            await gang.heard("StagePassed")
        files = [gang.private / "ray" / "token" for gang in (head, worker)]
        first, second = (file.read_text() for file in files)
        assert first == second and len(first) == 64
        assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
        assert first not in str(head.links.reports) + str(worker.links.reports)
        await head.closed()
        await worker.closed()

    play(story())


def test_a_ray_node_has_a_short_folder_and_memory_of_its_own(gang: Gang) -> None:
    async def story() -> None:
        order = Preparation(None, (), ray_node=Resources(cpu=1, memory=1 << 30))
        await gang.instance.prepare(order)
        facts = (await gang.heard("InstancePrepared")).facts
        folder = Path(facts.temp_dir)
        try:
            assert len(facts.temp_dir) == len("/tmp/rc-01234567")
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert facts.memory == str(1 << 30)
            assert nodefacts.LEAST_OBJECT_STORE <= int(facts.object_store) <= 0.3 * (1 << 30)
            await gang.closed()
        finally:
            remove_short_folder(gang.private / TEMP_LINK)
        assert not folder.exists()

    play(story())


def test_without_a_wish_for_memory_it_is_what_goes_with_the_cpus(gang: Gang) -> None:
    async def story() -> None:
        await gang.instance.prepare(Preparation(None, (), ray_node=Resources(cpu=1)))
        one = (await gang.heard("InstancePrepared")).facts
        remove_short_folder(gang.private / TEMP_LINK)
        await gang.closed()
        assert 0 < int(one.object_store) <= 0.3 * int(one.memory)

    play(story())
