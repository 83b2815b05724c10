from __future__ import annotations

import asyncio
import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raycontrol.archive import Archive
from raycontrol.shipping import OutputReport, Shipper, ship_outputs

MIB = 1024 * 1024


class FlakyArchive:
    """Holds bytes as the archive does; fails, loses or refuses what the test says."""

    def __init__(self) -> None:
        self.data = b""
        self.calls = 0
        self.fails: Exception | None = None
        self.takes = True

    async def append(self, offset: int, data: bytes) -> int:
        self.calls += 1
        if self.fails is not None:
            raise self.fails
        if self.takes and offset <= len(self.data):
            self.data += data[len(self.data) - offset :]
        return len(self.data)


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within 10 s"
        await asyncio.sleep(0.01)


def write(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_log_is_shipped_while_it_grows_and_to_its_end(tmp_path: Path) -> None:
    log, archive = tmp_path / "output.log", FlakyArchive()

    async def story() -> None:
        shipper = Shipper(log, archive.append, chunk_bytes=4)
        shipper.start()
        await until(lambda: archive.calls, "the shipper asked what is held")
        write(log, b"hello ")
        await until(lambda: archive.data == b"hello ", "the first words")
        write(log, b"wor\xff\x00ld, without a newline")
        assert await shipper.finish(5) == 0
        assert shipper.held == len(archive.data)

    asyncio.run(story())
    assert archive.data == log.read_bytes()


def test_a_job_that_wrote_nothing_has_an_empty_log(tmp_path: Path) -> None:
    archive = FlakyArchive()

    async def story() -> None:
        assert await Shipper(tmp_path / "none.log", archive.append).finish(5) == 0

    asyncio.run(story())
    assert archive.calls == 1


def test_a_shipper_goes_on_from_what_the_archive_holds(tmp_path: Path) -> None:
    log, archive = tmp_path / "output.log", FlakyArchive()
    write(log, b"abcdef")
    archive.data = b"abc"
    sent: list[tuple[int, bytes]] = []

    async def append(offset: int, data: bytes) -> int:
        sent.append((offset, data))
        return await archive.append(offset, data)

    async def story() -> None:
        assert await Shipper(log, append).finish(5) == 0

    asyncio.run(story())
    assert sent == [(0, b""), (3, b"def")]


def test_an_archive_that_lost_its_file_gets_everything_again(tmp_path: Path) -> None:
    log, archive = tmp_path / "output.log", FlakyArchive()
    write(log, b"abc")

    async def story() -> None:
        shipper = Shipper(log, archive.append)
        shipper.start()
        await until(lambda: archive.data == b"abc", "the first bytes")
        archive.data = b""
        write(log, b"def")
        assert await shipper.finish(5) == 0

    asyncio.run(story())
    assert archive.data == b"abcdef"


def test_a_spell_of_trouble_is_told_once_and_so_is_its_end(tmp_path: Path) -> None:
    log, archive = tmp_path / "output.log", FlakyArchive()
    told: list[str] = []

    async def story() -> None:
        archive.fails = ConnectionResetError("nobody there")
        shipper = Shipper(
            log,
            archive.append,
            on_trouble=told.append,
            on_recovered=lambda: told.append("recovered"),
            retry_s=(0.01, 0.05),
        )
        shipper.start()
        write(log, b"abc")
        await until(lambda: archive.calls >= 3, "three tries")
        assert told == ["nobody there"]
        assert shipper.trouble == "nobody there"
        archive.fails = None
        await until(lambda: archive.data == b"abc", "the bytes after the trouble")
        archive.takes = False
        write(log, b"def")
        await until(lambda: len(told) == 3, "the second spell")
        archive.takes = True
        assert await shipper.finish(5) == 0

    asyncio.run(story())
    assert told == [
        "nobody there",
        "recovered",
        "the archive took none of the 3 bytes at 3",
        "recovered",
    ]
    assert archive.data == b"abcdef"


@pytest.mark.parametrize("trouble", ["fails", "hangs"])
def test_what_cannot_be_shipped_in_time_is_counted_and_the_shipper_gone(tmp_path: Path, trouble: str) -> None:
    log, archive = tmp_path / "output.log", FlakyArchive()
    write(log, b"abcdef")

    async def append(offset: int, data: bytes) -> int:
        if offset + len(data) > 3:
            if trouble == "fails":
                raise RuntimeError("full")
            await asyncio.Event().wait()
        return await archive.append(offset, data)

    async def story() -> None:
        before = len(asyncio.all_tasks())
        assert await Shipper(log, append, chunk_bytes=3).finish(0.3) == 3
        assert len(asyncio.all_tasks()) == before

    asyncio.run(story())
    assert archive.data == b"abc"


def test_a_log_that_is_removed_while_it_is_shipped_is_shipped_all_the_same(tmp_path: Path) -> None:
    log, archive = tmp_path / "output.log", FlakyArchive()
    write(log, b"abc")

    async def story() -> None:
        shipper = Shipper(log, archive.append)
        shipper.start()
        await until(lambda: archive.data == b"abc", "the first bytes")
        with log.open("ab") as file:
            log.unlink()
            file.write(b"def")
        assert await shipper.finish(5) == 0

    asyncio.run(story())
    assert archive.data == b"abcdef"


def test_an_idle_shipper_costs_next_to_nothing(tmp_path: Path) -> None:
    log, archive = tmp_path / "output.log", FlakyArchive()
    write(log, b"abc")

    async def story() -> None:
        shippers = [Shipper(log, archive.append) for _ in range(50)]
        for shipper in shippers:
            shipper.start()
        await until(lambda: all(shipper.held == 3 for shipper in shippers), "all shipped")
        calls, cpu = archive.calls, time.process_time()
        await asyncio.sleep(0.4)
        assert archive.calls == calls
        assert time.process_time() - cpu < 0.2
        assert sum(await asyncio.gather(*(shipper.finish(5) for shipper in shippers))) == 0

    asyncio.run(story())


def test_64_mib_through_a_real_archive_are_the_same_bytes(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    blocks = [random.Random(seed).randbytes(MIB) for seed in range(4)]
    blocks[1] = b"x" * 10 * MIB + b"\r" * MIB
    written = hashlib.sha256()

    async def story() -> None:
        archive = Archive(tmp_path / "home", min_free_bytes=0)
        shipper = Shipper(log, lambda offset, data: archive.append("job", 0, "worker-0", offset, data))
        shipper.start()
        size = 0
        while size < 64 * MIB:
            for block in blocks:
                await asyncio.to_thread(write, log, block)
                written.update(block)
                size += len(block)
        assert await shipper.finish(60) == 0
        archive.close()

    asyncio.run(story())
    held = (tmp_path / "home/jobs/job/logs/0/worker-0.log").read_bytes()
    assert len(held) >= 64 * MIB
    assert hashlib.sha256(held).digest() == written.digest()


# Outputs


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    archive = Archive(tmp_path / "home", min_free_bytes=0)
    yield archive
    archive.close()


class Sender:
    """``append_output`` of one instance, counting its calls."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.calls = 0
        self.failures: list[Exception] = []

    async def __call__(
        self, relpath: str, offset: int, data: bytes, mode: int, size: int, mtime_ns: int
    ) -> int:
        self.calls += 1
        if self.failures:
            raise self.failures.pop()
        return await self.archive.append_output("job", "w-0", relpath, offset, data, mode, size, mtime_ns)

    @property
    def held(self) -> dict[str, bytes]:
        top = self.archive.home / "jobs/job/outputs/w-0"
        return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}


def test_outputs_are_shipped_and_a_second_time_only_what_changed(archive: Archive, tmp_path: Path) -> None:
    folder, sender = tmp_path / "outputs", Sender(archive)
    (folder / "a b").mkdir(parents=True)
    (folder / "a b/it's \n").write_bytes(b"1")
    (folder / "big").write_bytes(b"x" * (3 * MIB + 5))
    (folder / "empty").touch()
    (folder / os.fsdecode(b"\xff")).write_bytes(b"2")

    async def story() -> None:
        assert await ship_outputs(folder, sender) == OutputReport(4, 3 * MIB + 7)
        assert sender.calls == 7
        assert await ship_outputs(folder, sender) == OutputReport(4, 3 * MIB + 7)
        assert sender.calls == 7 + 4
        (folder / "big").write_bytes(b"y" * 10)
        assert await ship_outputs(folder, sender) == OutputReport(4, 12)

    asyncio.run(story())
    assert sender.held == {
        "a b/it's \n": b"1",
        "big": b"y" * 10,
        "empty": b"",
        os.fsdecode(b"\xff"): b"2",
    }


def test_a_folder_that_was_never_made_has_no_outputs(archive: Archive, tmp_path: Path) -> None:
    assert asyncio.run(ship_outputs(tmp_path / "none", Sender(archive))) == OutputReport()


def test_links_and_pipes_are_reported_and_not_followed(archive: Archive, tmp_path: Path) -> None:
    folder, sender = tmp_path / "outputs", Sender(archive)
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"s")
    (folder / "file").symlink_to(tmp_path / "secret")
    (folder / "folder").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    report = asyncio.run(ship_outputs(folder, sender))
    assert report.skipped == (
        ("file", "is a link"),
        ("folder", "is a link"),
        ("pipe", "is not a regular file"),
    )
    assert sender.calls == 0


def test_small_outputs_are_kept_when_a_large_one_passes_the_limit(archive: Archive, tmp_path: Path) -> None:
    folder, sender = tmp_path / "outputs", Sender(archive)
    folder.mkdir()
    (folder / "a-checkpoint").write_bytes(b"x" * 101)
    (folder / "metrics").write_bytes(b"m" * 60)
    report = asyncio.run(ship_outputs(folder, sender, cap_bytes=160))
    assert report == OutputReport(
        1, 60, (("a-checkpoint", "101 bytes would pass the limit of 160 bytes for outputs"),)
    )


def test_an_archive_in_trouble_is_tried_again_and_then_the_rest_is_reported(
    archive: Archive, tmp_path: Path
) -> None:
    folder, sender = tmp_path / "outputs", Sender(archive)
    folder.mkdir()
    (folder / "a").write_bytes(b"1")
    (folder / "b").write_bytes(b"22")

    async def story() -> None:
        sender.failures = [ConnectionResetError("gone"), TimeoutError("slow")]
        assert await ship_outputs(folder, sender, retry_s=(0, 0)) == OutputReport(2, 3)
        sender.failures = [RuntimeError("gone")] * 9
        why = "the archive did not take it: gone"
        assert await ship_outputs(folder, sender, retry_s=(0, 0)) == OutputReport(
            0, 0, (("a", why), ("b", why))
        )

    asyncio.run(story())
