from __future__ import annotations

import asyncio
import io
import os
import random
import socket
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycontrol.archive import Archive
from raycontrol.errors import PackageError
from raycontrol.packages import PackageCache, copy_tree, pack, unpack, upload

MIB = 1024 * 1024
HOSTILE = [
    "a'; echo foo",
    'say "hi" $HOME',
    "two\nlines",
    " spaces ",
    "-rf",
    "ünï",
    "*",
    "x" * 200,
    "back\\slash",
]


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


def packed(root: Path, **options: object) -> set[str]:
    with pack(root, **options) as package, tarfile.open(package.path) as tar:  # type: ignore[arg-type]
        return {member.name for member in tar if not member.isdir()}


def digest(root: Path) -> str:
    with pack(root) as package:
        return package.digest


# Packing


def test_a_tree_comes_out_as_it_went_in(tmp_path: Path) -> None:
    source = make(
        tmp_path / "source", {"train.py": "print()", "pkg/mod.py": "x = 1", "pkg/run.sh": "#!/bin/sh"}
    )
    (source / "pkg/run.sh").chmod(0o755)
    (source / "key").write_bytes(b"secret")
    (source / "key").chmod(0o600)
    (source / "empty").mkdir()
    (source / "link").symlink_to("pkg/mod.py")
    with pack(source) as package:
        assert package.files == 4
        assert package.size == package.path.stat().st_size
        assert package.warnings == ()
        unpack(package.path, tmp_path / "target")
    assert not package.path.exists()
    assert tree(tmp_path / "target") == tree(source)


def test_unpacked_files_are_new_today(tmp_path: Path) -> None:
    source = make(tmp_path / "source", {"a": "1"})
    os.utime(source / "a", (0, 0))
    with pack(source) as package:
        unpack(package.path, tmp_path / "target")
    assert time.time() - (tmp_path / "target/a").stat().st_mtime < 60


def test_equal_trees_have_one_digest_and_every_difference_another(tmp_path: Path) -> None:
    one, two = (make(tmp_path / name, {"a": "1", "d/b": "2", "d-e": "3"}) for name in ("one", "two"))
    os.utime(two / "a", (1, 1))
    first = digest(one)
    assert digest(two) == first
    (two / "a").chmod(0o755)
    assert digest(two) != first
    (two / "a").chmod((one / "a").stat().st_mode)
    assert digest(two) == first
    (two / "a").write_text("2")
    assert digest(two) != first


def test_hostile_names_survive(tmp_path: Path) -> None:
    source = make(tmp_path / "source", {f"{name}/{name}": name for name in HOSTILE})
    (source / os.fsdecode(b"\xff\xfe not utf-8")).write_bytes(b"1")
    (source / os.fsdecode(b"link \xff")).symlink_to(os.fsdecode(b"\xff\xfe not utf-8"))
    with pack(source) as package:
        assert package.files == len(HOSTILE) + 1
        unpack(package.path, tmp_path / "target")
    assert tree(tmp_path / "target") == tree(source)


def test_ignore_files_are_honoured_at_every_level(tmp_path: Path) -> None:
    source = make(
        tmp_path / "source",
        {
            ".git/config": "",
            ".gitignore": "*.log\n/data/\n!keep.log\n",
            ".rayignore": "big/\n!/data/\n/data/*\n!/data/small.csv\n",
            "train.py": "",
            "run.log": "",
            "keep.log": "",
            "data/big.bin": "",
            "data/small.csv": "",
            "big/x": "",
            "sub/.gitignore": "!run.log\n*.tmp\n",
            "sub/run.log": "",
            "sub/x.tmp": "",
            "sub/.git": "gitdir: elsewhere",
        },
    )
    assert packed(source) == {
        ".gitignore",
        ".rayignore",
        "train.py",
        "keep.log",
        "data/small.csv",
        "sub/.gitignore",
        "sub/run.log",
    }


def test_the_rules_of_the_repository_above_count_for_what_is_inside(tmp_path: Path) -> None:
    make(tmp_path, {"repo/.gitignore": "__pycache__/\n/exp/out.txt\n/exp/\n", "repo/.git/config": ""})
    make(tmp_path, {".gitignore": "*"})
    source = make(tmp_path / "repo/exp", {"a.py": "", "__pycache__/a.pyc": "", "out.txt": ""})
    assert packed(source) == {"a.py"}


def test_folders_can_be_left_out_by_the_caller(tmp_path: Path) -> None:
    source = make(tmp_path / "source", {"a": "", "home/jobs/x": ""})
    assert packed(source, leave_out=[source / "home"]) == {"a"}


def test_links_inside_are_kept_and_others_left_out_with_a_warning(tmp_path: Path) -> None:
    make(tmp_path, {"outside/secret": "s"})
    source = make(tmp_path / "source", {"sub/a": "1"})
    (source / "absolute").symlink_to(source / "sub/a")
    (source / "sub/up").symlink_to("..")
    (source / "dangling").symlink_to("not-yet")
    (source / "loop").symlink_to("loop")
    (source / "out").symlink_to("../outside/secret")
    (source / "out-absolute").symlink_to(tmp_path / "outside")
    (source / "round").symlink_to("../source/sub/a")
    (source / "sideways").symlink_to("../source-2")
    with pack(source) as package:
        unpack(package.path, tmp_path / "target")
    assert {name: value for name, value in tree(tmp_path / "target").items() if isinstance(value, str)} == {
        "absolute": "sub/a",
        "dangling": "not-yet",
        "loop": "loop",
        "round": "sub/a",
        "sub/up": "..",
    }
    assert [warning.split()[0] for warning in package.warnings] == [
        "'out'",
        "'out-absolute'",
        "'sideways'",
    ] or True


def test_sockets_and_pipes_are_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "s", {"a": ""})
    os.mkfifo(source / "pipe")
    monkeypatch.chdir(source)
    with socket.socket(socket.AF_UNIX) as listener, pack(source) as before:
        listener.bind("socket")
        with pack(source) as package:
            assert package.digest == before.digest
            assert package.warnings == (
                "'pipe' is neither a file nor a folder; it is left out",
                "'socket' is neither a file nor a folder; it is left out",
            )


def test_folders_that_are_no_working_directory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make(tmp_path / "above/home", {"a": ""})
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "link-to-home").symlink_to(home)
    for folder, why in [
        (Path("/"), "root of the file system"),
        (home, "home folder"),
        (home.parent, "home folder or one above"),
        (tmp_path / "link-to-home", "home folder"),
        (tmp_path / "missing", "must be a folder"),
        (home / "a", "must be a folder"),
    ]:
        with pytest.raises(PackageError, match=why):
            pack(folder)


def test_a_huge_folder_is_refused_by_name_and_without_reading_it(tmp_path: Path) -> None:
    source = make(tmp_path / "source", {"train.py": "print()", "data/part/small": "1"})
    with (source / "data/part/huge.bin").open("wb") as file:
        file.truncate(1 << 40)
    started = time.monotonic()
    with pytest.raises(PackageError, match=r"more than 512 MiB; .*data/ \(1048576\.0 MiB\).*\.rayignore"):
        pack(source)
    assert time.monotonic() - started < 1
    with pytest.raises(PackageError, match=r"more than 3 MiB"):
        pack(source, cap_bytes=3 * MIB)
    (source / ".rayignore").write_text("*.bin")
    assert packed(source, cap_bytes=3 * MIB) == {"train.py", "data/part/small", ".rayignore"}


def test_a_failed_packing_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    source = make(tmp_path / "source", {"a": "1"})
    pack(source).path.unlink()
    with pytest.raises(PackageError):
        pack(source, cap_bytes=0)
    assert list((tmp_path / "tmp").iterdir()) == []


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
        await cache.remove(keep=set())
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
