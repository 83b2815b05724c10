from __future__ import annotations

import os
from pathlib import Path

import pytest

from raycontrol.beneath import file_beneath, files_beneath, folder_beneath


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """The folder of all jobs, itself reached by a link, beside a treasure."""
    (tmp_path / "disk/job/outputs").mkdir(parents=True)
    (tmp_path / "disk/job/outputs/model").write_text("weights")
    (tmp_path / "treasure").mkdir()
    (tmp_path / "treasure/model").write_text("gold")
    (tmp_path / "jobs").symlink_to("disk")
    return tmp_path / "jobs"


def contents(jobs: Path, path: str) -> bytes | None:
    found = file_beneath(jobs, jobs / path)
    if found is None:
        return None
    with found:
        return found.read()


def test_a_plain_file_is_opened(jobs: Path) -> None:
    assert contents(jobs, "job/outputs/model") == b"weights"
    assert contents(jobs, "job/outputs/none") is None
    assert contents(jobs, "job/none/model") is None
    assert contents(jobs, "job/outputs/model/more") is None
    assert contents(jobs, "job/outputs") is None


@pytest.mark.parametrize(("link", "path"), [("a", "a/model"), ("job/b", "job/b/model"), ("c", "c/../job/outputs/model")])  # fmt: skip
def test_no_link_on_the_way_is_followed(jobs: Path, link: str, path: str) -> None:
    (jobs / link).symlink_to(jobs.parent / "treasure")
    assert contents(jobs, path) is None
    with folder_beneath(jobs, jobs / link) as folder:
        assert folder is None


def test_neither_a_link_nor_a_pipe_is_a_file(jobs: Path) -> None:
    (jobs / "job/link").symlink_to(jobs.parent / "treasure/model")
    os.mkfifo(jobs / "job/pipe")
    assert contents(jobs, "job/link") is None
    assert contents(jobs, "job/pipe") is None


def test_files_are_listed_folder_by_folder_and_links_left_out(jobs: Path) -> None:
    top = jobs / "job/outputs"
    (top / "sub/deep").mkdir(parents=True)
    (top / "sub/b").touch()
    (top / "sub/deep/c").touch()
    (top / "also").mkdir()
    (top / "also/a").touch()
    (top / "treasure").symlink_to(jobs.parent / "treasure")
    found = [str(path.relative_to(top)) for path in files_beneath(jobs, top)]
    assert found == ["model", "also/a", "sub/b", "sub/deep/c"]
    assert list(files_beneath(jobs, jobs / "none")) == []


def test_a_folder_that_becomes_a_link_meanwhile_is_left_out(jobs: Path) -> None:
    top = jobs / "job/outputs"
    (top / "sub").mkdir()
    (top / "sub/file").touch()
    listed = files_beneath(jobs, top)
    assert next(listed) == top / "model"
    (top / "sub").rename(top / "old")
    (top / "sub").symlink_to(jobs.parent / "treasure")
    assert list(listed) == []


def test_no_descriptor_is_left_open(jobs: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for path in ("job/outputs/model", "job/none/model", "job/outputs"):
        contents(jobs, path)
    list(files_beneath(jobs, jobs / "job"))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
