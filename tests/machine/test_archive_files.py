from __future__ import annotations

import asyncio
import hashlib
import io
import os
import random
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raycontrol.archive import Archive
from raycontrol.disk import locked
from raycontrol.errors import PackageError, StoreError
from raycontrol.outputs import Tops
from tests.support import wait_until

MIB = 1024 * 1024


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    archive = Archive(tmp_path / "home", min_free_bytes=0)
    yield archive
    archive.close()


# Links


SAMPLE = (
    '{"at": 1, "cpu_percent": 1, "memory_bytes": 1, "read_bytes": 0, "written_bytes": 0, "processes": 1}\n'
)


def test_logs_and_usage_behind_links_are_not_read(archive: Archive) -> None:
    """A job could lay one to what its user may not read."""
    job, treasure = archive.home / "jobs/job", archive.home / "treasure"
    for folder in (job / "logs/0", job / "usage/0", treasure):
        folder.mkdir(parents=True)
    (treasure / "worker-0.log").write_text("gold\n")
    (treasure / "worker-0.jsonl").write_text(SAMPLE)
    (job / "logs/0/worker-0.log").symlink_to(treasure / "worker-0.log")
    (job / "usage/0/worker-0.jsonl").symlink_to(treasure / "worker-0.jsonl")
    (job / "logs/1").symlink_to(treasure)
    (job / "usage/1").symlink_to(treasure)

    async def look() -> None:
        for attempt in (0, 1):
            assert await archive.sizes("job", attempt) == {}
            assert await archive.read("job", attempt, "worker-0", 0, 100) == b""
            assert await archive.tail_offset("job", attempt, "worker-0", 0) == 0
            assert await archive.follow("job", attempt, {}, 0, 100) == {}
            assert await archive.usage_of("job", attempt, 5) == {}

    asyncio.run(look())


# Outputs


def test_an_output_appears_whole_with_its_mode_and_time(archive: Archive) -> None:
    place = archive.home / "jobs/job/outputs/worker-0/run 1/mo\ndel"

    async def story() -> None:
        async def send(offset: int, data: bytes) -> int:
            return await archive.append_output(
                "job", "worker-0", "run 1/mo\ndel", offset, data, 0o755, 6, 5_000_000_001
            )

        assert await send(0, b"abc") == 3
        assert not place.exists()
        assert await send(2, b"cdef") == 6
        assert place.read_bytes() == b"abcdef"
        assert place.stat().st_mode & 0o777 == 0o755
        assert place.stat().st_mtime_ns == 5_000_000_001
        assert await send(0, b"abc") == 6

    asyncio.run(story())
    assert list((archive.home / "jobs/job/incoming/worker-0").iterdir()) == []


def test_a_new_version_of_an_output_starts_from_the_beginning(archive: Archive) -> None:
    async def send(data: bytes, size: int, mtime_ns: int, offset: int = 0, path: str = "x") -> int:
        return await archive.append_output("job", "w-0", path, offset, data, 0o644, size, mtime_ns)

    async def story() -> None:
        top = archive.home / "jobs/job/outputs/w-0"
        assert await send(b"first", 5, 1) == 5
        assert await send(b"sec", 6, 2) == 3
        assert (top / "x").read_bytes() == b"first"
        # A third version comes before the second was whole.
        assert await send(b"th", 5, 3) == 2
        assert await send(b"ird", 5, 3, offset=2) == 5
        assert (top / "x").read_bytes() == b"third"
        assert await send(b"", 0, 4) == 0
        assert (top / "x").read_bytes() == b""
        # Where there was a file there is a folder now, and the other way round.
        assert await send(b"1", 1, 5, path="x/y/z") == 1
        assert (top / "x/y/z").read_bytes() == b"1"
        assert await send(b"2", 1, 6) == 1
        assert (top / "x").read_bytes() == b"2"

    asyncio.run(story())
    assert list((archive.home / "jobs/job/incoming/w-0").iterdir()) == []


def test_an_output_never_goes_through_a_link(archive: Archive, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    top = archive.home / "jobs/job/outputs/w-0"
    top.mkdir(parents=True)
    (top / "link").symlink_to(tmp_path / "outside")

    asyncio.run(archive.append_output("job", "w-0", "link/x", 0, b"1", 0o644, 1, 1))
    assert list((tmp_path / "outside").iterdir()) == []
    assert (top / "link/x").read_bytes() == b"1"


# Packages


HEADER = tarfile.TarInfo("train.py").tobuf()


def package_of(size: int) -> tuple[str, bytes]:
    """Return bytes that begin as a tar archive does, of at least 512 bytes, and what they are known by."""
    data = HEADER + random.Random(size).randbytes(size - len(HEADER))
    return hashlib.sha256(data).hexdigest(), data


async def send(archive: Archive, digest: str, data: bytes, step: int = MIB) -> None:
    held = 0
    while True:
        piece = data[held : held + step]
        last = held + len(piece) >= len(data)
        held = await archive.put_package(digest, held, piece, last)
        if last and held >= len(data):
            return


def test_a_package_is_there_only_when_it_is_whole(archive: Archive) -> None:
    digest, data = package_of(3 * MIB)

    async def story() -> None:
        assert await archive.put_package(digest, 0, data[:MIB], False) == MIB
        assert not await archive.has_package(digest)
        with pytest.raises(PackageError, match="not in the archive"):
            await archive.read_package(digest, 0, 10)
        # Another archive goes on with the upload of one that was killed.
        successor = Archive(archive.home, min_free_bytes=0)
        assert await successor.put_package(digest, 0, b"", False) == MIB
        assert await successor.put_package(digest, MIB, data[MIB:], True) == 3 * MIB
        assert await archive.has_package(digest)
        assert await archive.read_package(digest, MIB, MIB) == data[MIB : 2 * MIB]
        assert await archive.read_package(digest, 3 * MIB, MIB) == b""
        assert await archive.put_package(digest, 0, data[:MIB], False) == 3 * MIB
        successor.close()

    asyncio.run(story())
    assert list((archive.home / "packages/incoming").iterdir()) == []


def test_a_package_of_other_bytes_is_dropped_and_can_be_sent_again(archive: Archive) -> None:
    digest, data = package_of(1000)

    async def story() -> None:
        with pytest.raises(PackageError, match="send it again"):
            await archive.put_package(digest, 0, data[:-1] + b"?" if data[-1:] != b"?" else b"!", True)
        assert not await archive.has_package(digest)
        await send(archive, digest, data)
        assert await archive.has_package(digest)

    asyncio.run(story())


def packed(*, mode: str = "w", **options: Any) -> bytes:
    """Return an archive of one file, as ``tarfile`` writes it."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode=mode, **options) as tar:
        tar.addfile(tarfile.TarInfo("train.py"))
    return target.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        packed(),
        packed(format=tarfile.GNU_FORMAT),
        packed(format=tarfile.PAX_FORMAT, pax_headers={"comment": "x"}),
        bytes(10240),
    ],
    ids=["ustar", "gnu", "pax", "empty"],
)
def test_every_uncompressed_tar_is_a_package(archive: Archive, data: bytes) -> None:
    digest = hashlib.sha256(data).hexdigest()
    asyncio.run(send(archive, digest, data))
    assert asyncio.run(archive.has_package(digest))


@pytest.mark.parametrize(
    "data",
    [packed(mode="w:gz"), packed(mode="w:xz"), b"PK\3\4" + bytes(600), b"print('hello')\n", b"", bytes(100)],
    ids=["gz", "xz", "zip", "script", "nothing", "few-zeros"],
)
def test_what_is_no_uncompressed_tar_is_refused_when_it_is_whole(archive: Archive, data: bytes) -> None:
    digest = hashlib.sha256(data).hexdigest()

    async def story() -> None:
        with pytest.raises(
            PackageError, match=r"is no uncompressed tar archive; pack the folder with `tar -cf`"
        ):
            await archive.put_package(digest, 0, data, True)
        assert not await archive.has_package(digest)
        assert await archive.put_package(digest, 0, b"", False) == 0

    asyncio.run(story())


def test_many_send_the_same_package_at_once(archive: Archive) -> None:
    digest, data = package_of(2 * MIB)

    async def story() -> None:
        other = Archive(archive.home, min_free_bytes=0)
        await asyncio.gather(*(send(each, digest, data, 100_000) for each in [archive, other] * 5))
        assert await archive.read_package(digest, 0, 16 * MIB) == data
        other.close()

    asyncio.run(story())
    assert list((archive.home / "packages/incoming").iterdir()) == []


def test_a_lock_is_of_the_file_that_is_there_now(tmp_path: Path) -> None:
    path = tmp_path / "part"
    entered = threading.Event()
    inodes = []

    def second() -> None:
        entered.set()
        with locked(path) as descriptor:
            inodes.append(os.fstat(descriptor).st_ino)

    with locked(path):
        thread = threading.Thread(target=second)
        thread.start()
        entered.wait()
        path.unlink()
    thread.join()
    assert inodes == [path.stat().st_ino]


# Keeping house


def test_a_removed_job_leaves_nothing_and_the_others_stay(archive: Archive) -> None:
    async def story() -> None:
        for job in ("job", "other"):
            await archive.append(job, 0, "w-0", 0, b"12345")
            await archive.append_output(job, "w-0", "out", 0, b"123", 0o644, 3, 1)
        await archive.remove_job("job")
        await archive.remove_job("never-was")
        found = await archive.usage()
        assert found["jobs"] == {"other": 8}
        assert found["free_bytes"] > 0
        assert found["min_free_bytes"] == 0

    asyncio.run(story())
    assert [path.name for path in (archive.home / "jobs").iterdir()] == ["other"]


def test_a_job_whose_shared_outputs_cannot_be_removed_is_still_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it is removed again once the file server answers."""
    home, shared, answers = tmp_path / "home", tmp_path / "shared", threading.Event()
    home.mkdir()
    (home / "settings.yaml").write_text(f"shared_dir: {shared}\n")
    (shared / "jobs/job/outputs/w-0").mkdir(parents=True)
    archive = Archive(home, min_free_bytes=0, shared_s=0.2)
    remove = Tops.remove_shared

    def removed_late(tops: Tops) -> None:
        answers.wait(60)
        remove(tops)

    monkeypatch.setattr(Tops, "remove_shared", removed_late)

    async def story() -> None:
        await archive.append("job", 0, "w-0", 0, b"12345")
        with pytest.raises(StoreError, match="the outputs of job in the shared folder were not removed"):
            await archive.remove_job("job")
        assert (await archive.usage())["jobs"] == {"job": 5}
        answers.set()
        await archive.remove_job("job")
        assert (await archive.usage())["jobs"] == {}

    asyncio.run(story())
    assert list((shared / "jobs").iterdir()) == []


def test_packages_that_nobody_needs_are_removed(archive: Archive) -> None:
    (kept, kept_data), (gone, gone_data), (new, new_data) = package_of(610), package_of(620), package_of(630)

    async def story() -> None:
        for digest, data in ((kept, kept_data), (gone, gone_data), (new, new_data)):
            await send(archive, digest, data)
            long_ago = time.time() - 2 * 3600
            os.utime(archive.home / f"packages/{digest}.tar", (long_ago, long_ago))
        assert await archive.has_package(new)  # whoever asks is about to submit a job with it
        half, other = package_of(640)[0], package_of(650)[0]
        for digest in (half, other):
            await archive.put_package(digest, 0, b"begun", False)
        os.utime(archive.home / f"packages/incoming/{half}.part", (1.0, 1.0))
        await archive.remove_packages({kept})
        assert (await archive.usage())["packages"] == {kept: 610, new: 630}
        assert await archive.put_package(half, 0, b"", False) == 0
        assert await archive.put_package(other, 0, b"", False) == 5

    asyncio.run(story())


def test_what_a_killed_archive_left_half_done_goes_at_the_next_start(tmp_path: Path) -> None:
    fresh = tmp_path / "packages/incoming" / ("0" * 64 + ".part")
    stale = tmp_path / "packages/incoming" / ("1" * 64 + ".part")
    output = tmp_path / "jobs/job/incoming/w-0/abc.1.1.part"
    removed = tmp_path / "jobs/.removed-abc/logs/0/w-0.log"
    for path in (fresh, stale, output, removed):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    for path in (stale, output):
        os.utime(path, (0, 0))
    Archive(tmp_path).close()
    assert fresh.exists()
    assert not stale.exists()
    assert not output.exists()
    assert not (tmp_path / "jobs/.removed-abc").exists()


VICTIM = """
import asyncio, sys
from raycontrol.archive import Archive

async def main(home, source):
    archive = Archive(home, min_free_bytes=0)
    data = open(source, "rb").read()
    held = 0
    while held < len(data):
        held = await archive.append("job", 0, "worker-0", held, data[held : held + 99_991])
        await archive.put_package(sys.argv[3], held, data[held : held + 99_991], False)

asyncio.run(main(*sys.argv[1:3]))
"""


def test_an_archive_may_be_killed_within_a_write(tmp_path: Path) -> None:
    digest, data = package_of(32 * MIB)
    (tmp_path / "source").write_bytes(data)
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, tmp_path / "home", tmp_path / "source", digest])
    log = tmp_path / "home/jobs/job/logs/0/worker-0.log"
    wait_until(lambda: log.exists() and log.stat().st_size > MIB, what="a MiB of the log")
    victim.kill()
    victim.wait()

    archive = Archive(tmp_path / "home", min_free_bytes=0)

    async def story() -> None:
        held = await archive.append("job", 0, "worker-0", 0, b"")
        assert MIB < held <= len(data)
        while held < len(data):
            held = await archive.append("job", 0, "worker-0", held, data[held : held + MIB])
        await send(archive, digest, data, 4 * MIB)
        assert await archive.has_package(digest)

    asyncio.run(story())
    archive.close()
    assert log.read_bytes() == data
