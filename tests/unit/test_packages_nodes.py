from __future__ import annotations

import asyncio
import io
import random
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycontrol.archive import Archive
from raycontrol.errors import PackageError
from raycontrol.packages import PackageCache, copy_tree, pack, unpack, upload

MIB = 1024 * 1024


def make(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def tree(root: Path) -> dict[str, object]:
    """Every entry below ``root``: a file's mode and content, a folder's mode, a link's target."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name, mode = str(path.relative_to(root)), path.lstat().st_mode & 0o777
        if path.is_symlink():
            found[name] = str(path.readlink())
        else:
            found[name] = mode if path.is_dir() else (mode, path.read_bytes())
    return found


# Unpacking


def tar_of(path: Path, *members: tuple[str, bytes, str]) -> Path:
    """A tar file of (name, type, content or link)."""
    with tarfile.open(path, "w") as tar:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, content
            if kind == tarfile.REGTYPE:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content.encode()))
    return path


FILE, DIR, LINK, HARD = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.mark.parametrize(
    "members",
    [
        [("../evil", FILE, "x")],
        [("/tmp/evil", FILE, "x")],
        [("a", DIR, ""), ("a/../../evil", FILE, "x")],
        [("..", DIR, "")],
        [(".", DIR, "")],
        [("a//b", FILE, "x")],
        [("no-parent/x", FILE, "x")],
        [("out", LINK, "../outside")],
        [("out", LINK, "/etc/passwd")],
        [("out", LINK, "..")],
        [("out", LINK, "../outside"), ("out/evil", FILE, "x")],
        [("in", LINK, "d"), ("d", DIR, ""), ("in/evil", FILE, "x")],
        [("a", DIR, ""), ("a/up", LINK, ".."), ("out", LINK, "a/up/../outside")],
        [("x", LINK, "y"), ("y", LINK, "../outside/secret")],
        [("f", FILE, "x"), ("hard", HARD, "f")],
        [("hard", HARD, "/etc/passwd")],
        [("null", tarfile.CHRTYPE, "")],
        [("disk", tarfile.BLKTYPE, "")],
        [("pipe", tarfile.FIFOTYPE, "")],
        [("f", FILE, "1"), ("f", FILE, "2")],
        [("f", FILE, "1"), ("f", DIR, "")],
        [("f", FILE, "1"), ("f", LINK, "g")],
    ],
)
def test_nothing_gets_out_of_the_folder(tmp_path: Path, members: list[tuple[str, bytes, str]]) -> None:
    make(tmp_path, {"outside/secret": "s"})
    before = set(tmp_path.rglob("*"))
    hostile = tar_of(tmp_path / "hostile.tar", *members)
    with pytest.raises(PackageError):
        unpack(hostile, tmp_path / "target")
    assert set(tmp_path.rglob("*")) == before | {hostile}


def test_special_mode_bits_are_not_taken_over(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        info = tarfile.TarInfo("f")
        info.mode = 0o6777
        tar.addfile(info)
    unpack(tmp_path / "x.tar", tmp_path / "target")
    assert (tmp_path / "target/f").stat().st_mode & 0o7777 == 0o777


def test_a_damaged_package_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    source = make(tmp_path / "source", {f"d{n}/f{n}": "x" * 700 * n for n in range(6)})
    (source / "ü\n").write_text("1")
    chance = random.Random(1)
    with pack(source) as package:
        whole = package.path.read_bytes()
    damaged = tmp_path / "damaged.tar"
    for cut in (0, 1, 511, 512, 5000, len(whole) - 10240, len(whole) // 2):
        damaged.write_bytes(whole[:cut])
        with pytest.raises(PackageError):
            unpack(damaged, tmp_path / "target")
    for _ in range(40):
        flipped = bytearray(whole)
        for _ in range(chance.choice([1, 1, 20])):
            flipped[chance.randrange(len(whole))] ^= chance.randrange(1, 256)
        damaged.write_bytes(flipped)
        try:
            unpack(damaged, tmp_path / "target")
        except PackageError:
            assert not (tmp_path / "target").exists()
        else:
            # Damage within a file's content: the digest, not the format, is what finds it.
            (tmp_path / "target").rename(tmp_path / f"ok-{time.monotonic_ns()}")
    assert not list(tmp_path.glob(".*"))


def test_a_package_is_never_unpacked_over_something(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with (
        pack(make(tmp_path / "source", {"a": ""})) as package,
        pytest.raises(PackageError, match="there already"),
    ):
        unpack(package.path, tmp_path / "target")


def test_a_copy_is_writable_and_its_own(tmp_path: Path) -> None:
    source = make(tmp_path / "source", {"d/a": "1"})
    (source / "link").symlink_to("d/a")
    (source / "d/a").chmod(0o444)
    (source / "d").chmod(0o555)
    copy_tree(source, tmp_path / "copy")
    assert tree(tmp_path / "copy") == {"d": 0o755, "d/a": (0o644, b"1"), "link": "d/a"}
    (tmp_path / "copy/link").write_text("2")
    assert (source / "d/a").read_text() == "1"


# The cache of a node


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    archive = Archive(tmp_path / "home", min_free_bytes=0)
    yield archive
    archive.close()


def test_many_nodes_fetch_one_package_at_once(archive: Archive, tmp_path: Path) -> None:
    source = make(tmp_path / "source", {"train.py": "print()"})
    (source / "weights").write_bytes(random.Random(0).randbytes(16 * MIB))

    async def story() -> None:
        with pack(source) as package:
            await upload(package, archive.put_package)
            await upload(package, archive.put_package)
        nodes = [PackageCache(tmp_path / f"node-{n}") for n in range(4)]
        trees = await asyncio.gather(*(node.ensure(package.digest, archive.read_package) for node in nodes))
        assert all(tree(found) == tree(source) for found in trees)

    asyncio.run(story())


def test_callers_share_one_transfer_and_one_may_give_up(archive: Archive, tmp_path: Path) -> None:
    source = make(tmp_path / "source", {"a": "1"})
    reads: list[int] = []
    may_read = asyncio.Event()

    async def read(digest: str, offset: int, max_bytes: int) -> bytes:
        reads.append(offset)
        await may_read.wait()
        return await archive.read_package(digest, offset, max_bytes)

    async def story() -> None:
        with pack(source) as package:
            await upload(package, archive.put_package)
        cache = PackageCache(tmp_path / "cache")
        callers = [asyncio.ensure_future(cache.ensure(package.digest, read)) for _ in range(5)]
        while not reads:
            await asyncio.sleep(0)
        callers[0].cancel()
        may_read.set()
        found = await asyncio.gather(*callers, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert found[1:] == [cache.path(package.digest)] * 4
        await cache.ensure(package.digest, read)
        assert reads == [0, package.size]

    asyncio.run(story())
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")] == []


def test_a_transfer_that_fails_leaves_nothing_and_the_next_one_works(
    archive: Archive, tmp_path: Path
) -> None:
    source = make(tmp_path / "source", {"a": "1"})

    async def damaged(digest: str, offset: int, max_bytes: int) -> bytes:
        data = await archive.read_package(digest, offset, max_bytes)
        return b"?" + data[1:] if data else b""

    async def story() -> None:
        with pack(source) as package:
            await upload(package, archive.put_package)
        cache = PackageCache(tmp_path / "cache")
        with pytest.raises(PackageError, match="not its own"):
            await cache.ensure(package.digest, damaged)
        with pytest.raises(PackageError, match="not in the archive"):
            await cache.ensure("0" * 64, archive.read_package)
        assert list((tmp_path / "cache").iterdir()) == []
        assert tree(await cache.ensure(package.digest, archive.read_package)) == tree(source)

    asyncio.run(story())


def test_code_dirs_are_made_once_and_each_job_has_its_own(archive: Archive, tmp_path: Path) -> None:
    source = make(tmp_path / "source", {"a": "1"})

    async def story() -> None:
        with pack(source) as package:
            await upload(package, archive.put_package)
        cache = PackageCache(tmp_path / "cache")
        with pytest.raises(PackageError, match="not in this node's cache"):
            await cache.make_code_dir(package.digest, tmp_path / "jobs/1")
        await cache.ensure(package.digest, archive.read_package)
        # What a killed predecessor left of the same job goes; the same of another job stays.
        make(tmp_path / "jobs", {".1.abcdefgh.tmp/tree/a": "", ".10.abcdefgh.tmp/tree/a": ""})
        one, ten = tmp_path / "jobs/1", tmp_path / "jobs/10"
        await asyncio.gather(*(cache.make_code_dir(package.digest, one) for _ in range(5)))
        assert sorted(path.name for path in one.parent.iterdir()) == [".10.abcdefgh.tmp", "1"]
        (one / "a").write_text("changed by the job")
        await cache.make_code_dir(package.digest, one)
        await cache.make_code_dir(package.digest, ten)
        await cache.make_code_dir(None, tmp_path / "jobs/empty")
        assert (one / "a").read_text() == "changed by the job"
        assert tree(ten) == tree(source)
        assert tree(tmp_path / "jobs/empty") == {}
        await cache.shrink(keep=0)
        assert list((tmp_path / "cache").iterdir()) == []

    asyncio.run(story())


def test_the_upload_of_a_damaged_package_is_sent_once_more(archive: Archive, tmp_path: Path) -> None:
    source = make(tmp_path / "source", {"a": "1"})

    async def story() -> None:
        with pack(source) as package:
            # Somebody else began with other bytes.
            await archive.put_package(package.digest, 0, b"?" * 100, False)
            await upload(package, archive.put_package)
            assert await archive.has_package(package.digest)

    asyncio.run(story())


@pytest.mark.parametrize("short", [False, True], ids=["whole pieces", "short answers"])
def test_a_package_comes_in_pieces_of_which_some_are_asked_for_ahead(
    archive: Archive, tmp_path: Path, short: bool
) -> None:
    source = tmp_path / "large"
    source.mkdir()
    (source / "data").write_bytes(random.Random(7).randbytes(19 * MIB))
    under_way: list[int] = []
    most = 0

    async def read(digest: str, offset: int, max_bytes: int) -> bytes:
        nonlocal most
        under_way.append(offset)
        most = max(most, len(under_way))
        data = await archive.read_package(digest, offset, max_bytes - MIB if short else max_bytes)
        under_way.remove(offset)
        return data

    async def story() -> None:
        with pack(source) as package:
            await upload(package, archive.put_package)
            cache = PackageCache(tmp_path / "cache")
            assert tree(await cache.ensure(package.digest, read)) == tree(source)

    asyncio.run(story())
    assert (most, under_way) == (1 if short else 3, [])
