"""Outputs: listed on the head by no link, laid down whole, whatever they are called."""

from __future__ import annotations

import io
import os
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest

from raycontrol.errors import UsageError
from raycontrol.outputs import Fetched, OutputFile, OutputsError, Piece, Tops, from_tar, lay_down, pieces

ODD = "a 'b' \"c\"\nd é"


def left(top: Path, path: str, data: bytes, at: float | None = None) -> None:
    file = top / "jobs" / "digits-1" / "outputs" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    if at is not None:
        os.utime(file, (at, at))


def fetched(tops: Tops, folder: Path, piece_bytes: int = 4) -> Fetched:
    return lay_down(pieces(tops.files(), lambda path, at: tops.read(path, at, piece_bytes)), folder)


def still_open(folder: Path) -> list[str]:
    """What this process has open below a folder."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one of this listing
            found.append(str(descriptor.readlink()))
    return [path for path in found if path.startswith(str(folder))]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_files_come_whole_with_their_times_and_modes_whatever_they_are_called(tmp_path: Path) -> None:
    left(tmp_path, f"worker-0/{ODD}/model.pt", b"0123456789")
    left(tmp_path, "master-0/empty", b"")
    model = tmp_path / "jobs" / "digits-1" / "outputs" / "worker-0" / ODD / "model.pt"
    model.chmod(0o750)
    os.utime(model, ns=(5, 1_000_000_000_000_000_007))
    target = tmp_path / f"to {ODD}"
    assert fetched(Tops(tmp_path, None, "digits-1"), target) == Fetched(str(target), 2, 10)
    assert contents(target) == {f"worker-0/{ODD}/model.pt": b"0123456789", "master-0/empty": b""}
    state = (target / "worker-0" / ODD / "model.pt").stat()
    assert (state.st_mtime_ns, state.st_mode & 0o777) == (1_000_000_000_000_000_007, 0o750)


def test_a_file_may_have_any_name(tmp_path: Path) -> None:
    """Also that of a file which an `outputs get` that was killed has left."""
    names = [".raycontrol-partial", ".raycontrol-0123456789abcdef"]
    for name in names:
        left(tmp_path, f"worker-0/{name}", name.encode())
    assert fetched(Tops(tmp_path, None, "digits-1"), tmp_path / "to").files == 2
    assert contents(tmp_path / "to") == {f"worker-0/{name}": name.encode() for name in names}


def test_for_no_outputs_no_folder_is_made(tmp_path: Path) -> None:
    assert fetched(Tops(tmp_path, None, "digits-1"), tmp_path / "to").files == 0
    assert not (tmp_path / "to").exists()


def test_links_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("not the job's")
    left(tmp_path, "worker-0/real", b"x")
    folder = tmp_path / "jobs" / "digits-1" / "outputs" / "worker-0"
    (folder / "link").symlink_to(tmp_path / "secret")
    tops = Tops(tmp_path, None, "digits-1")
    assert [file.path for file in tops.files()] == ["worker-0/real"]
    assert tops.read("worker-0/link", 0, 10) == b""


def test_those_of_a_shared_folder_are_among_them_and_of_two_of_one_name_the_newer_counts(
    tmp_path: Path,
) -> None:
    home, shared = tmp_path / "home", tmp_path / "shared"
    for path, archived_at, shared_at in (
        ("master-0/old", 1, 2),
        ("master-0/new", 2, 1),
        ("master-0/same", 1, 1),
    ):
        left(home, path, b"archive", archived_at)
        left(shared, path, b"shared", shared_at)
    left(shared, "worker-0/model", b"01")
    tops = Tops(home, str(shared), "digits-1")
    both = {"master-0/old": b"shared", "master-0/new": b"archive", "master-0/same": b"archive"}
    assert [(file.path, file.size) for file in tops.files()] == [
        ("master-0/new", 7),
        ("master-0/old", 6),
        ("master-0/same", 7),
        ("worker-0/model", 2),
    ]
    assert {path: tops.read(path, 0, 10) for path in both} == both
    tops.remove_shared()
    assert list((shared / "jobs").iterdir()) == []
    assert {file.path for file in tops.files()} == set(both)


@pytest.mark.parametrize("path", ["../x", "a/../x", "/etc/passwd", "a//b", "", "a\0b", "."])
def test_a_path_that_leads_elsewhere_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(UsageError, match="output: must be a path inside the folder"):
        lay_down([Piece(OutputFile(path, 1, 0o644, 0), 0, b"x")], tmp_path)
    with pytest.raises(UsageError, match="output: must be a path inside the folder"):
        Tops(tmp_path, None, "digits-1").read(path, 0, 1)


def test_a_file_that_breaks_off_is_not_there_and_an_old_one_stays(tmp_path: Path) -> None:
    (tmp_path / "worker-0").mkdir()
    (tmp_path / "worker-0" / "model").write_text("old")

    def broken() -> object:
        yield Piece(OutputFile("worker-0/model", 10, 0o644, 0), 0, b"new")
        raise OutputsError("it broke off")

    with pytest.raises(OutputsError, match="it broke off"):
        lay_down(broken(), tmp_path)  # type: ignore[arg-type]
    assert contents(tmp_path) == {"worker-0/model": b"old"}
    assert still_open(tmp_path) == []


def test_of_files_that_shrink_or_vanish_while_they_are_fetched_nothing_is_left(tmp_path: Path) -> None:
    for path in ("master-0/vanishes", "worker-0/shrinks", "worker-1/stays", "worker-2/shrinks"):
        left(tmp_path, path, b"0123456789")
    tops = Tops(tmp_path, None, "digits-1")
    listed = tops.files()
    (tmp_path / "jobs/digits-1/outputs/master-0/vanishes").unlink()
    left(tmp_path, "worker-0/shrinks", b"01234")
    left(tmp_path, "worker-2/shrinks", b"01234")
    target = tmp_path / "here"
    fetched = lay_down(pieces(listed, lambda path, at: tops.read(path, at, 4)), target)
    assert fetched == Fetched(str(target), 1, 10)
    assert contents(target) == {"worker-1/stays": b"0123456789"}
    assert still_open(target) == []


def test_a_tar_archive_is_taken_apart_as_it_comes(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in ((f"worker-0/{ODD}", b"0123"), ("worker-0/empty", b"")):
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.mtime = len(data), 0o600, 1000
            archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("worker-0/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    packed.seek(0)
    assert lay_down(from_tar(packed), tmp_path) == Fetched(str(tmp_path), 2, 4)
    assert contents(tmp_path) == {f"worker-0/{ODD}": b"0123", "worker-0/empty": b""}
