"""Removal that copes with what a job may leave behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from raycontrol.disk import HIDDEN, erase, erase_hidden, private_folder, remove_tree, replace_file
from tests.unit.rights import unprivileged


def module_cache(root: Path) -> Path:
    """As Go keeps its modules: files and folders that even the owner may not write."""
    for name in ("mod/a/go.mod", "mod/b/c/x.go"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("module x")
        (root / name).chmod(0o444)
    (root / "mod/closed").mkdir()
    (root / "mod/closed/file").write_text("x")
    (root / "mod/closed").chmod(0)
    (root / "mod/link").symlink_to("/")
    for folder in ("mod/a", "mod/b/c", "mod/b", "mod", "."):
        (root / folder).chmod(0o555)
    return root


def test_a_tree_of_read_only_folders_is_removed(tmp_path: Path) -> None:
    with unprivileged(tmp_path):
        root = module_cache(tmp_path / "job")
        with pytest.raises(PermissionError):
            (root / "mod/a/go.mod").unlink()
        remove_tree(root)
    assert list(tmp_path.iterdir()) == []
    assert Path("/").stat().st_mode & 0o777 == 0o755


def test_a_removal_that_was_broken_off_is_ended_later(tmp_path: Path) -> None:
    for name in ("one/x", "two/y"):
        (tmp_path / f"{HIDDEN}{name}").parent.mkdir()
        (tmp_path / f"{HIDDEN}{name}").write_text("left")
    (tmp_path / "job").mkdir()
    erase_hidden(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["job"]
    erase_hidden(tmp_path / "not there")


def test_what_is_not_there_is_removed_already(tmp_path: Path) -> None:
    remove_tree(tmp_path / "job")
    erase(tmp_path / "job")


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "job").symlink_to("theirs")
    remove_tree(tmp_path / "job")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_two_may_remove_the_same_tree_at_once(tmp_path: Path) -> None:
    root = tmp_path / "job"
    for number in range(400):
        (root / f"{number % 20}/{number}").mkdir(parents=True)
        (root / f"{number % 20}/{number}/file").touch()
    failures: list[BaseException] = []
    begin = threading.Barrier(2)

    def remove() -> None:
        begin.wait()
        try:
            erase(root)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=remove) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert not root.exists()


def test_a_private_folder_is_private_also_if_it_was_there(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    for name in ("open", "new"):
        private_folder(tmp_path / name)
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("sync", [False, True])
def test_a_file_is_replaced_and_not_what_it_leads_to(tmp_path: Path, sync: bool) -> None:
    path, other = tmp_path / "token", tmp_path / "other"
    other.write_bytes(b"theirs")
    path.symlink_to(other)
    (tmp_path / ".token.new").write_bytes(b"of one who was killed meanwhile")
    replace_file(path, b"mine", 0o600, sync=sync)
    assert (path.read_bytes(), other.read_bytes(), path.is_symlink()) == (b"mine", b"theirs", False)
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(tmp_path.iterdir()) == [other, path]
