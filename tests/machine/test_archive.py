from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raycontrol.archive import Archive
from raycontrol.errors import StoreError, UsageError

MIB = 1024 * 1024
NO_ROOM = 1 << 62


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    archive = Archive(tmp_path / "home", min_free_bytes=0)
    yield archive
    archive.close()


def log_of(archive: Archive, instance: str = "worker-0") -> Path:
    return archive.home / f"jobs/job/logs/0/{instance}.log"


async def asleep(archive: Archive, followers: int = 1) -> None:
    """Return when so many calls of ``follow`` are registered."""
    deadline = time.monotonic() + 10
    while len(archive._waiting.get(("job", 0), ())) < followers:
        assert time.monotonic() < deadline
        await asyncio.sleep(0)


def test_nothing_is_made_before_the_first_write(tmp_path: Path) -> None:
    Archive(tmp_path / "home").close()
    assert not (tmp_path / "home").exists()


def test_bytes_are_held_once_however_often_they_come(archive: Archive) -> None:
    async def story() -> None:
        assert await archive.append("job", 0, "worker-0", 0, b"") == 0
        assert await archive.append("job", 0, "worker-0", 0, b"hello ") == 6
        assert await archive.append("job", 0, "worker-0", 0, b"hello ") == 6
        assert await archive.append("job", 0, "worker-0", 3, b"lo world") == 11
        assert await archive.append("job", 0, "worker-0", 20, b"past a gap") == 11
        assert await archive.read("job", 0, "worker-0", 0, 100) == b"hello world"
        assert await archive.read("job", 0, "worker-0", 6, 2) == b"wo"
        assert await archive.sizes("job", 0) == {"worker-0": 11}
        assert await archive.sizes("job", 1) == {}
        assert await archive.read("job", 1, "worker-0", 0, 100) == b""
        assert await archive.tail_offset("job", 0, "worker-0", 1) == 0
        await archive.sync("job", 0)
        await archive.sync("job", 7)

    asyncio.run(story())


def test_64_mib_of_any_bytes_arrive_as_they_were(archive: Archive) -> None:
    pieces = [random.Random(seed).randbytes(MIB) for seed in range(8)] * 8

    async def story() -> None:
        offset = 0
        for piece in pieces:
            offset = await archive.append("job", 0, "worker-0", offset, piece)
        assert offset == 64 * MIB

    asyncio.run(story())
    assert hashlib.sha256(log_of(archive).read_bytes()).digest() == hashlib.sha256(b"".join(pieces)).digest()


def test_a_successor_goes_on_where_a_killed_archive_stopped(tmp_path: Path) -> None:
    async def story() -> None:
        first, second = Archive(tmp_path, min_free_bytes=0), Archive(tmp_path, min_free_bytes=0)
        await first.append("job", 0, "worker-0", 0, b"abc")
        # The first one was killed within a write: a part of it is in the file.
        with log_of(first).open("ab") as file:
            file.write(b"de")
        assert await second.append("job", 0, "worker-0", 3, b"defg") == 7
        assert await second.read("job", 0, "worker-0", 0, 100) == b"abcdefg"

    asyncio.run(story())


def test_two_archives_on_one_home_never_double_bytes(tmp_path: Path) -> None:
    async def story() -> None:
        archives = [Archive(tmp_path, min_free_bytes=0) for _ in range(2)]
        for offset in range(0, 1000, 10):
            data = b"%010d" % offset
            await asyncio.gather(*(archive.append("job", 0, "w-0", offset, data) for archive in archives))
        assert (await archives[0].sizes("job", 0))["w-0"] == 1000

    asyncio.run(story())


def test_a_thousand_appends_at_once_need_few_threads(archive: Archive) -> None:
    async def story() -> None:
        names = [f"worker-{n}" for n in range(1000)]
        held = await asyncio.gather(*(archive.append("job", 0, name, 0, b"x" * 1000) for name in names))
        assert held == [1000] * 1000
        assert threading.active_count() < 20

    asyncio.run(story())


def test_below_the_floor_of_free_space_nothing_is_taken_and_then_it_goes_on(archive: Archive) -> None:
    async def story() -> None:
        await archive.append("job", 0, "worker-0", 0, b"abc")
        archive.min_free_bytes = NO_ROOM
        with pytest.raises(StoreError, match="below the floor"):
            await archive.append("job", 0, "worker-0", 3, b"def")
        with pytest.raises(StoreError, match="below the floor"):
            await archive.append_output("job", "worker-0", "x", 0, b"1", 0o644, 1, 1)
        with pytest.raises(StoreError, match="below the floor"):
            await archive.put_package("0" * 64, 0, b"1", True)
        assert await archive.append("job", 0, "worker-0", 3, b"") == 3
        assert await archive.read("job", 0, "worker-0", 0, 10) == b"abc"
        archive.min_free_bytes = 0
        assert await archive.append("job", 0, "worker-0", 3, b"def") == 6

    asyncio.run(story())


def test_a_fault_of_the_disk_is_a_store_error_and_later_appends_go_on(archive: Archive) -> None:
    async def story() -> None:
        await archive.append("job", 0, "worker-0", 0, b"abc")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5, hard))
        try:
            with pytest.raises(StoreError, match=os.strerror(errno.EFBIG)):
                await archive.append("job", 0, "worker-0", 3, b"defgh")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert await archive.append("job", 0, "worker-0", 3, b"defgh") == 8
        assert await archive.read("job", 0, "worker-0", 0, 10) == b"abcdefgh"

    asyncio.run(story())


@pytest.mark.parametrize("name", ["..", "a/b", "/etc", ".x", ""])
def test_no_name_leads_out_of_home(archive: Archive, name: str) -> None:
    async def refused(call: Callable[[], object]) -> None:
        with pytest.raises(UsageError):
            await call()  # type: ignore[misc]

    async def story() -> None:
        await refused(lambda: archive.append(name, 0, "worker-0", 0, b"x"))
        await refused(lambda: archive.append("job", 0, name, 0, b"x"))
        await refused(lambda: archive.append("job", -1, "worker-0", 0, b"x"))
        await refused(lambda: archive.append_output("job", "worker-0", "../" + name, 0, b"x", 0o644, 1, 1))
        await refused(lambda: archive.put_package(name, 0, b"x", True))
        await refused(lambda: archive.read_package(name, 0, 1))
        await refused(lambda: archive.remove_job(name))

    asyncio.run(story())
    assert not archive.home.exists()


# Following


def test_a_follower_is_woken_by_an_append(archive: Archive) -> None:
    async def story() -> None:
        await archive.append("job", 0, "worker-0", 0, b"old")
        waiting = asyncio.ensure_future(archive.follow("job", 0, {"worker-0": 3}, 20, 1000))
        await asleep(archive)
        started = time.monotonic()
        await archive.append("job", 0, "worker-0", 3, b"new")
        assert await waiting == {"worker-0": b"new"}
        assert time.monotonic() - started < 5

    asyncio.run(story())


def test_a_follower_hears_of_new_instances_but_of_one_alone_when_asked(archive: Archive) -> None:
    async def story() -> None:
        one = asyncio.ensure_future(archive.follow("job", 0, {}, 20, 1000, instances=["worker-1"]))
        every = asyncio.ensure_future(archive.follow("job", 0, {}, 20, 1000))
        await asleep(archive, 2)
        await archive.append("job", 0, "worker-0", 0, b"zero")
        assert await every == {"worker-0": b"zero"}
        await archive.append("job", 0, "worker-1", 0, b"one")
        assert await one == {"worker-1": b"one"}

    asyncio.run(story())


def test_a_follower_shares_the_answer_fairly_and_gets_the_rest_with_the_next(archive: Archive) -> None:
    async def story() -> None:
        await archive.append("job", 0, "a-0", 0, b"a" * 100)
        await archive.append("job", 0, "b-0", 0, b"b" * 10)
        news = await archive.follow("job", 0, {}, 20, 40)
        assert news == {"a-0": b"a" * 20, "b-0": b"b" * 10}
        assert await archive.follow("job", 0, {"a-0": 20, "b-0": 10}, 20, 200) == {"a-0": b"a" * 80}

    asyncio.run(story())


def test_a_poll_that_nobody_answers_ends_in_time_and_uses_no_cpu(archive: Archive) -> None:
    async def story() -> None:
        before = time.process_time()
        polls = [archive.follow("job", 0, {}, 0.3, 1000) for _ in range(100)]
        assert await asyncio.gather(*polls) == [{}] * 100
        assert time.process_time() - before < 0.5
        assert archive._waiting == {}

    asyncio.run(story())


def test_reading_outputs_takes_no_thread_from_logs_and_packages(archive: Archive) -> None:
    over = threading.Event()
    left = archive.home / "jobs/job/outputs/worker-0/model"
    left.parent.mkdir(parents=True)
    left.write_text("weights")

    async def story() -> None:
        (found,) = await asyncio.wait_for(archive.outputs("job"), 10)
        reading = archive.read_output("job", found.path, 0, 100)
        assert await asyncio.wait_for(reading, 10) == b"weights"

    for pool in (archive._quick, archive._slow):
        for _ in range(pool._max_workers):
            pool.submit(over.wait)
    try:
        asyncio.run(story())
    finally:
        over.set()


def test_every_byte_reaches_a_follower_of_many_writers(archive: Archive) -> None:
    async def write(instance: str) -> None:
        offset = 0
        for n in range(100):
            offset = await archive.append("job", 0, instance, offset, b"%s %d\n" % (instance.encode(), n))

    async def story() -> None:
        names = [f"worker-{n}" for n in range(8)]
        writers = asyncio.gather(*(write(name) for name in names))
        seen: dict[str, bytes] = {}
        whole = {name: b"".join(b"%s %d\n" % (name.encode(), n) for n in range(100)) for name in names}
        while seen != whole:
            offsets = {name: len(data) for name, data in seen.items()}
            news = await archive.follow("job", 0, offsets, 5, 500)
            assert news, "nothing came in 5 s"
            for name, data in news.items():
                seen[name] = seen.get(name, b"") + data
        await writers

    asyncio.run(story())
