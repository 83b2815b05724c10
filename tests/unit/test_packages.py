from __future__ import annotations

import os
import shutil
import socket
import tarfile
import tempfile
import threading
import time
from pathlib import Path

import pytest

from raycontrol.errors import PackageError
from raycontrol.packages import pack, unpack
from raycontrol.packing import Source, Walk, write_tar
from tests.unit.rights import unprivileged

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
        (tmp_path / "missing", "does not exist"),
        (home / "a", "is not a folder"),
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
    assert time.monotonic() - started < 5
    with pytest.raises(PackageError, match=r"more than 3 MiB"):
        pack(source, cap_bytes=3 * MIB)
    (source / ".rayignore").write_text("*.bin")
    assert packed(source, cap_bytes=3 * MIB) == {"train.py", "data/part/small", ".rayignore"}


def test_what_may_not_be_read_is_named(tmp_path: Path) -> None:
    make(tmp_path, {"rules/.gitignore": "*.log", "file/model": "x", "folder/closed/a": "x"})
    (tmp_path / "rules/.gitignore").chmod(0)
    (tmp_path / "file/model").chmod(0)
    (tmp_path / "folder/closed").chmod(0)
    with unprivileged(tmp_path):
        for name, path in {
            "rules": "rules/.gitignore",
            "file": "file/model",
            "folder": "folder/closed",
        }.items():
            with pytest.raises(PackageError, match=f"{path}' cannot be read: Permission denied"):
                pack(tmp_path / name)
        with pytest.raises(PackageError, match="may not enter"):
            pack(tmp_path / "folder/closed/below")


def test_what_changes_after_it_was_found_is_packed_as_it_is_or_left_out(tmp_path: Path) -> None:
    source = make(tmp_path / "source", {"gone": "1", "grows": "22", "keeps": "333", "shrinks": "4444"})
    warnings: list[str] = []
    entries = Walk(source, MIB, set(), warnings).entries()
    (source / "gone").unlink()
    (source / "grows").write_text("22 and more")
    (source / "shrinks").write_text("4")
    assert write_tar(tmp_path / "package.tar", entries, warnings) == 3
    assert warnings == ["'gone' vanished while the folder was packed; it is left out"]
    unpack(tmp_path / "package.tar", tmp_path / "target")
    contents = {path.name: path.read_text() for path in (tmp_path / "target").iterdir()}
    assert contents == {"grows": "22", "keeps": "333", "shrinks": "4"}


def test_a_file_that_shrinks_while_it_is_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("22")
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(PackageError, match="'/x/file' cannot be read: it changed while it was packed"):
        Source(descriptor, "/x/file").read(3)
    os.close(descriptor)


def test_a_folder_in_which_files_come_and_go_is_packed(tmp_path: Path) -> None:
    source = make(tmp_path / "source", {"stays": "1"})
    ended = threading.Event()

    def churn() -> None:
        while not ended.is_set():
            make(source, {f"d{number}/file": "x" * 99 for number in range(20)})
            for number in range(20):
                shutil.rmtree(source / f"d{number}")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(30):
            assert "stays" in packed(source)
    finally:
        ended.set()
        thread.join()


def test_without_a_place_for_temporary_files_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    with pytest.raises(PackageError, match=r"no temporary file of .* can be made: .*No such file"):
        pack(make(tmp_path / "source", {"a": "1"}))


def test_a_failed_packing_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    source = make(tmp_path / "source", {"a": "1"})
    pack(source).path.unlink()
    with pytest.raises(PackageError):
        pack(source, cap_bytes=0)
    assert list((tmp_path / "tmp").iterdir()) == []
