"""The logs of an array, as its members write them: read from the store and the files of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycontrol.arraylogs import ArrayLogs
from raycontrol.logs import JobFolder
from raycontrol.status import JobState
from raycontrol.storereader import StoreReader
from tests.machine.fake_cluster import FakeCluster, Site, in_loop
from tests.unit.fake_gangs import Program, nodes


def write(home: Path, index: int, text: str) -> None:
    path = JobFolder(home, f"sweep-1~{index}").log("master-0", 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


async def begun(here: Site) -> None:
    """Let two members run, and a third wait."""
    await here.submit("sweep-1", nodes=1, command="python train.py", array="0-2%2")
    for index in (0, 1):
        await here.shows("sweep-1", lambda info: info.array is not None and info.array.begun == 2)
        await here.reaches(f"sweep-1~{index}", JobState.RUNNING)


@in_loop
async def test_lines_of_all_members_carry_their_indices(tmp_path: Path) -> None:
    here = Site(tmp_path, FakeCluster(nodes("host-a", cpu=4), {"master-0": Program(seconds=None)}))
    await begun(here)
    write(tmp_path, 0, "step 1\nstep 2\nhalf")
    write(tmp_path, 1, "step 1\n")
    reader = StoreReader(tmp_path)
    logs = ArrayLogs(reader, "sweep-1", prefix=True)
    assert list(logs.lines(follow=False, tail=None)) == ["0 | step 1", "0 | step 2", "0 | half", "1 | step 1"]
    last = ArrayLogs(reader, "sweep-1", prefix=False)
    assert list(last.lines(follow=False, tail=1)) == ["half", "step 1"]
    await here.kill()


@in_loop
async def test_an_array_is_followed_to_the_end_of_its_last_member(tmp_path: Path) -> None:
    here = Site(tmp_path, FakeCluster(nodes("host-a", cpu=4), {"master-0": Program(seconds=None)}))
    await begun(here)
    lines: Iterator[str] = ArrayLogs(StoreReader(tmp_path), "sweep-1", prefix=True).lines(True, None)
    write(tmp_path, 1, "begins\n")
    assert await asyncio.to_thread(next, lines) == "1 | begins"
    write(tmp_path, 1, "ends\n")
    here.cluster.find("sweep-1~1.0", "master-0").exit(0)
    await here.ends("sweep-1~1")
    write(tmp_path, 2, "last\n")
    await here.shows("sweep-1", lambda info: info.array is not None and info.array.begun == 3)
    await here.reaches("sweep-1~2", JobState.RUNNING)
    await here.controller.stop("sweep-1", "seen enough", True)
    await here.ends("sweep-1")
    assert sorted(await asyncio.to_thread(list, lines)) == ["1 | ends", "2 | last"]
    await here.kill()


@pytest.mark.parametrize("job_id", ["sweep-1~0", "sweep-1"])
def test_a_member_has_a_folder_of_its_own(tmp_path: Path, job_id: str) -> None:
    assert JobFolder(tmp_path, job_id).root.name == job_id
