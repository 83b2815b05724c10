from __future__ import annotations

import hashlib
import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycontrol.errors import UsageError
from raycontrol.logs import JobFolder, LineSplitter, PackageFolder, read_at, tail, tail_offset

MIB = 1024 * 1024


def lines_of(data: bytes, piece: int | None = None, **options: object) -> list[str]:
    splitter = LineSplitter(**options)  # type: ignore[arg-type]
    step = piece or max(1, len(data))
    shown = [line for at in range(0, len(data), step) for line in splitter.feed(data[at : at + step])]
    return shown + splitter.close()


def test_lines_end_at_newlines_and_carry_the_prefix() -> None:
    assert lines_of(b"one\ntwo\r\n\nthree", prefix="worker-0 | ") == [
        "worker-0 | one",
        "worker-0 | two",
        "worker-0 | ",
        "worker-0 | three",
    ]


def test_nothing_shows_of_an_empty_stream() -> None:
    assert lines_of(b"") == []


@pytest.mark.parametrize("text", ["a\u2028b", "a\x0bb", "a\x85b", "a\x1cb", "a\x0cb"])
def test_only_a_newline_ends_a_line(text: str) -> None:
    assert lines_of(text.encode()) == [text]


def test_a_progress_bar_shows_as_its_last_state() -> None:
    assert lines_of(b"\r 10%\r 50%\r100%\nnext\n") == ["100%", "next"]
    assert lines_of(b"10%\r100%\r\r\n") == ["100%"]


def test_a_stream_of_nothing_but_carriage_returns_is_one_line_and_no_memory() -> None:
    splitter = LineSplitter(cap=100)
    for step in range(20_000):
        assert splitter.feed(b"\r%6d of 20000" % step) == []
    assert splitter.unfinished == " 19999 of 20000"
    assert splitter.close() == [" 19999 of 20000"]
    assert splitter.close() == []


@pytest.mark.parametrize("piece", [1, 2, 3, 5])
def test_characters_cut_between_pieces_arrive_whole(piece: int) -> None:
    assert lines_of("grün 中文 🚀\nend".encode(), piece) == ["grün 中文 🚀", "end"]


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    assert lines_of(b"a\xff\xfeb\n\xc3") == ["a\ufffd\ufffdb", "\ufffd"]


def test_a_line_of_10_mb_is_cut_in_the_view_and_the_next_one_is_whole() -> None:
    data = b"x" * (10 * MIB) + b"\nnext\n"
    first, second = lines_of(data, piece=MIB)
    assert first == "x" * (64 * 1024) + f"… [{10 * MIB - 64 * 1024} bytes more]"
    assert second == "next"


def test_a_cut_never_splits_a_character() -> None:
    assert lines_of("äöü".encode(), cap=3) == ["ä… [4 bytes more]"]
    assert lines_of("äöü".encode(), cap=6) == ["äöü"]


@given(
    st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\xc3\xa4", b"\xff", b"bcd"]), max_size=60),
    st.integers(1, 7),
)
def test_the_size_of_the_pieces_changes_nothing(words: list[bytes], piece: int) -> None:
    data = b"".join(words)
    assert lines_of(data, piece, cap=5) == lines_of(data, cap=5)


@given(st.binary(max_size=300))
def test_any_bytes_can_be_shown(data: bytes) -> None:
    assert all(len(line.encode()) <= 100 for line in lines_of(data, 7, cap=20))


def test_the_tail_is_the_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"".join(b"line %d\n" % n for n in range(100_000)))
    assert tail(log, 2) == ["line 99998", "line 99999"]
    assert read_at(log, tail_offset(log, 2), 100) == b"line 99998\nline 99999\n"
    log.write_bytes(b"one\ntwo")
    assert tail(log, 1) == ["two"]
    assert tail(log, 5) == ["one", "two"]
    assert tail(log, 0) == []


def test_the_tail_of_a_missing_or_empty_file_is_empty(tmp_path: Path) -> None:
    assert tail(tmp_path / "none") == []
    (tmp_path / "empty").touch()
    assert tail(tmp_path / "empty") == []
    assert tail_offset(tmp_path / "empty") == 0


def test_the_tail_reads_no_more_than_it_may(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * MIB + b"\nlast\n")
    assert tail(log, 3, max_bytes=100) == ["last"]
    log.write_bytes(b"x" * MIB)
    assert tail(log, 3, max_bytes=10) == ["x" * 10]
    log.write_bytes(b"x" * MIB + b"\n")
    assert tail(log, 3, max_bytes=10) == ["x" * 9]


@given(st.lists(st.sampled_from([b"a", b"\n", b"bc\n", b"\r"]), max_size=40), st.integers(1, 6))
def test_the_tail_equals_the_end_of_the_whole_view(words: list[bytes], count: int) -> None:
    data = b"".join(words)
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        assert tail(file.name, count) == lines_of(data)[-count:]


def test_paths_follow_the_layout(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, "job-1")
    assert folder.log("worker-0", 2) == tmp_path / "jobs/job-1/logs/2/worker-0.log"
    assert folder.output("worker-0", "a/b c") == tmp_path / "jobs/job-1/outputs/worker-0/a/b c"
    assert PackageFolder(tmp_path).path("0" * 64) == tmp_path / "packages" / ("0" * 64 + ".tar")


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "/etc", "../x", "a\0b", "x" * 201])
def test_names_that_could_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        JobFolder(tmp_path, name)
    with pytest.raises(UsageError):
        JobFolder(tmp_path, "job").log(name, 0)
    with pytest.raises(UsageError):
        JobFolder(tmp_path, "job").outputs(name)


@pytest.mark.parametrize("relpath", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", "a\0"])
def test_outputs_stay_in_their_folder(tmp_path: Path, relpath: str) -> None:
    with pytest.raises(UsageError):
        JobFolder(tmp_path, "job").output("worker-0", relpath)


@pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 65, "G" * 64, "../" + "0" * 61, "0" * 64 + "\n"])
def test_only_digests_name_packages(tmp_path: Path, digest: str) -> None:
    with pytest.raises(UsageError):
        PackageFolder(tmp_path).path(digest)


def test_a_view_of_16_mib_of_binary_takes_no_harm() -> None:
    splitter = LineSplitter()
    block = random.Random(0).randbytes(MIB)
    for _ in range(16):
        assert all(isinstance(line, str) for line in splitter.feed(block))


def test_sizes_name_each_log(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, "job")
    assert folder.sizes(0) == {}
    folder.logs(0).mkdir(parents=True)
    folder.log("b-1", 0).write_bytes(b"12")
    folder.log("a-0", 0).write_bytes(b"")
    assert folder.sizes(0) == {"a-0": 0, "b-1": 2}


def test_reading_past_the_end_is_empty(tmp_path: Path) -> None:
    data = os.urandom(100)
    (tmp_path / "f").write_bytes(data)
    assert hashlib.sha256(read_at(tmp_path / "f", 0, 1000)).digest() == hashlib.sha256(data).digest()
    assert read_at(tmp_path / "f", 100, 10) == b""
    assert read_at(tmp_path / "none", 0, 10) == b""
