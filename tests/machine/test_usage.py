"""Usage of real process trees, and its history on disk."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from raycontrol.archive import Archive
from raycontrol.errors import StoreError, UsageError
from raycontrol.hardware import GpuSample, InstanceUsage
from raycontrol.preparing import Preparation
from raycontrol.process import start
from raycontrol.storereader import StoreReader
from raycontrol.trees import Trees as UsedTrees
from raycontrol.trees import Used
from tests.machine.instances import Gang
from tests.machine.process_trees import FAMILY, FAMILY_NAMES, Trees, play, trees, until

__all__ = ["trees"]

MIB = 2**20
NO_ROOM = 1 << 62

# Uses half a second of CPU time, 200 MiB of memory and 8 MiB of the disk, then says so and stays.
HUNGRY = """
import os, pathlib, sys, time
flags = pathlib.Path(os.environ["FLAGS"])
block = b"x" * (200 << 20)
with open(flags / "written", "wb") as file:
    file.write(b"y" * (8 << 20))
    os.fsync(file.fileno())
while time.process_time() < 0.5:
    pass
(flags / sys.argv[1]).touch()
while len(sys.argv) == 2:
    time.sleep(1000)
"""


class Watched:
    """The trees of an instance, and the CPU time in seconds that was found in the looks so far."""

    def __init__(self) -> None:
        self.trees = UsedTrees()
        self.cpu_s = 0.0
        self._looked_at = time.monotonic()

    def look(self) -> Used:
        used = self.trees.look()
        now = time.monotonic()
        self.cpu_s += used.cpu_percent / 100 * (now - self._looked_at)
        self._looked_at = now
        return used


def python(name: str, *more: str) -> tuple[str, ...]:
    return (sys.executable, "-c", HUNGRY, name, *more)


def test_cpu_memory_and_writing_of_a_program_are_counted(trees: Trees) -> None:
    async def story() -> None:
        handle = await start(trees.run(python("done")))
        watched = Watched()
        watched.trees.add(handle.pid)
        await trees.flagged("done")
        used = watched.look()
        assert 0.4 < watched.cpu_s < 1.5
        assert 200 * MIB < used.memory_bytes < 300 * MIB
        assert 8 * MIB <= used.written_bytes < 20 * MIB
        assert used.processes == 1
        assert watched.look().cpu_percent < 20  # it sleeps
        await handle.kill("the test is over")
        await until(lambda: watched.look() == Used(0, 0, 0, 0, 0), what="the end of its supervisor")

    play(story())


def test_what_a_child_used_counts_also_when_it_has_ended_before_the_look(trees: Trees) -> None:
    async def story() -> None:
        command = f"{sys.executable} -c '{HUNGRY}' child end; touch $FLAGS/waited; exec sleep 1000"
        handle = await start(trees.run(command))
        watched = Watched()
        watched.trees.add(handle.pid)
        await trees.flagged("waited")
        used = watched.look()
        assert (used.processes, used.memory_bytes < 50 * MIB) == (1, True)
        assert 0.4 < watched.cpu_s < 1.5
        assert used.written_bytes >= 8 * MIB
        await handle.kill("the test is over")

    play(story())


def test_daemons_and_processes_that_hide_themselves_are_counted(trees: Trees) -> None:
    async def story() -> None:
        handle = await start(trees.run(FAMILY + "exec sleep 1000"))
        watched = Watched()
        watched.trees.add(handle.pid)
        await asyncio.to_thread(trees.recorded, *FAMILY_NAMES)
        await until(lambda: watched.look().processes >= len(FAMILY_NAMES) + 1, what="the whole family")
        await handle.kill("the test is over")

    play(story())


def test_processes_of_another_run_of_the_same_attempt_are_not_counted(trees: Trees) -> None:
    async def story() -> None:
        ours = await start(trees.run("touch $FLAGS/ours; exec sleep 1000"))
        other = await start(trees.run(python("other")))
        await trees.flagged("ours")
        await trees.flagged("other")
        watched = Watched()
        watched.trees.add(ours.pid)
        used = watched.look()
        assert (used.processes, used.memory_bytes < 50 * MIB) == (1, True)
        await ours.kill("the test is over")
        await other.kill("the test is over")

    play(story())


def test_runs_and_processes_that_begin_between_looks_are_counted_from_the_next_one(trees: Trees) -> None:
    async def story() -> None:
        first = await start(trees.run("until [ -e $FLAGS/go ]; do nap; done; sleep 1000 & sleep 1000 & wait"))
        second = await start(trees.run("touch $FLAGS/second; exec sleep 1000"))
        await trees.flagged("second")
        watched = Watched()
        watched.trees.add(first.pid)
        assert watched.look().processes == 1
        assert watched.look().processes == 1
        watched.trees.add(second.pid)
        assert watched.look().processes == 2
        trees.flag("go")
        await until(lambda: watched.look().processes == 4, what="two more processes")
        await first.kill("the test is over")
        assert watched.look().processes == 1
        third = await start(trees.run("sleep 1000 & sleep 1000 & touch $FLAGS/third; wait"))
        watched.trees.add(third.pid)
        await trees.flagged("third")
        await until(lambda: watched.look().processes == 4, what="three more processes")
        await second.kill("the test is over")
        await third.kill("the test is over")

    play(story())


def test_a_run_that_has_ended_already_is_not_taken_for_another(trees: Trees) -> None:
    async def story() -> None:
        handle = await start(trees.run("exit 0"))
        await handle.gone()
        watched = Watched()
        watched.trees.add(handle.pid)
        assert watched.look() == Used(0, 0, 0, 0, 0)

    play(story())


# An instance


class IdleMeter:
    """Two GPUs that do nothing; the second has an error to report."""

    def __init__(self) -> None:
        self.ids: list[tuple[str, ...]] = []
        self.closed = threading.Event()

    def read(self, ids: Sequence[str]) -> tuple[GpuSample, ...]:
        self.ids.append(tuple(ids))
        first = GpuSample(index=0, uuid="GPU-a", utilisation_percent=0)
        second = GpuSample(index=3, uuid="GPU-b", utilisation_percent=0, xids=(79,))
        return (first, second)

    def close(self) -> None:
        self.closed.set()


def test_an_instance_sends_its_usage_and_tells_of_its_gpus_while_a_run_lives(tmp_path: Path) -> None:
    meter = IdleMeter()
    gang = Gang(tmp_path, gpus=("0", "3"), meter=lambda: meter, sample_s=0.2)

    async def story() -> None:
        await gang.instance.prepare(replace(Preparation(None, ()), idle_gpu_warn_s=0.001))
        await gang.heard("InstancePrepared")
        await gang.instance.carry_out(gang.orders("sleep 1000"))
        await gang.heard("InstanceNoted", 2)
        await gang.closed()

    play(story())
    assert set(meter.ids) == {("0", "3")}
    assert meter.closed.wait(10)
    sent = [InstanceUsage.model_validate_json(line) for line in gang.links.usage]
    assert [len(sample.gpus) for sample in sent[:2]] == [2, 2]
    assert 1 <= sent[0].processes <= 2
    assert 0 < sent[0].memory_bytes < 100 * MIB
    assert [report.message for report in gang.told("InstanceNoted")] == [
        "GPU 3 reported XID 79 (the GPU has fallen off the bus); "
        "see NVIDIA's list: https://docs.nvidia.com/deploy/xid-errors/",
        "its GPUs 0, 3 have been idle for 0.001 s",
    ]


# The archive


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    archive = Archive(tmp_path / "home", min_free_bytes=0)
    yield archive
    archive.close()


def sample(at: float) -> InstanceUsage:
    return InstanceUsage(at=at, cpu_percent=50, memory_bytes=MIB, read_bytes=0, written_bytes=0, processes=2)


def line(at: float) -> str:
    return sample(at).model_dump_json()


def history(archive: Archive) -> Path:
    return archive.home / "jobs/job/usage/0/worker-0.jsonl"


def test_samples_are_kept_by_instance_and_attempt_and_go_with_the_job(archive: Archive) -> None:
    async def story() -> None:
        for at in (1, 2, 3):
            await archive.append_usage("job", 0, "worker-0", line(at))
        await archive.append_usage("job", 0, "worker-0", line(3))
        await archive.append_usage("job", 0, "worker-1", line(9))
        await archive.append_usage("job", 1, "worker-0", line(20))
        assert await archive.usage_of("job", 0, 2) == {
            "worker-0": (sample(2), sample(3)),
            "worker-1": (sample(9),),
        }
        assert await archive.usage_of("job", 1, 5) == {"worker-0": (sample(20),)}
        assert await archive.usage_of("job", 2, 5) == {}
        assert StoreReader(archive.home).usage("job", 1, 1) == {"worker-0": (sample(20),)}
        await archive.remove_job("job")
        assert await archive.usage_of("job", 0, 2) == {}

    asyncio.run(story())


def test_a_line_that_a_killed_archive_tore_is_passed_over(archive: Archive) -> None:
    async def story() -> None:
        await archive.append_usage("job", 0, "worker-0", line(1))
        with history(archive).open("ab") as file:
            file.write(line(2).encode()[:20])
        assert await archive.usage_of("job", 0, 5) == {"worker-0": (sample(1),)}
        await archive.append_usage("job", 0, "worker-0", line(3))
        assert await archive.usage_of("job", 0, 5) == {"worker-0": (sample(1), sample(3))}

    asyncio.run(story())


def test_a_history_never_passes_a_mebibyte_and_keeps_its_beginning_and_its_end(archive: Archive) -> None:
    async def story() -> None:
        await archive.append_usage("job", 0, "worker-0", line(0))
        room = MIB - history(archive).stat().st_size
        many = [f"{line(5 * number)}\n" for number in range(1, room // (len(line(99_999)) + 1))]
        with history(archive).open("a") as file:
            file.write("".join(many))
        for number in range(len(many) + 1, len(many) + 200):
            await archive.append_usage("job", 0, "worker-0", line(5 * number))
            assert history(archive).stat().st_size <= MIB
        assert history(archive).stat().st_size < 0.8 * MIB
        held = (await archive.usage_of("job", 0, 100_000))["worker-0"]
        assert held[0].at == 0
        assert [found.at for found in held[-2:]] == [5 * (len(many) + 198), 5 * (len(many) + 199)]
        assert {after.at - before.at for before, after in pairwise(held)} == {5, 10}
        assert [file.name for file in history(archive).parent.iterdir()] == ["worker-0.jsonl"]

    asyncio.run(story())


def test_below_the_floor_of_free_space_no_sample_is_taken(archive: Archive) -> None:
    async def story() -> None:
        await archive.append_usage("job", 0, "worker-0", line(1))
        archive.min_free_bytes = NO_ROOM
        with pytest.raises(StoreError, match="below the floor"):
            await archive.append_usage("job", 0, "worker-0", line(2))
        assert await archive.usage_of("job", 0, 5) == {"worker-0": (sample(1),)}

    asyncio.run(story())


@pytest.mark.parametrize("name", ["../../x", ".hidden", "a/b", ""])
def test_no_name_leads_out_of_the_job(archive: Archive, name: str) -> None:
    with pytest.raises(UsageError):
        asyncio.run(archive.append_usage("job", 0, name, line(1)))
