"""What the disk, the file system, other processes and a SIGKILL do to the store."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raycontrol.errors import StoreError
from raycontrol.store import Store
from tests.support import wait_until
from tests.unit.store_rows import note, python, row

ROOT = os.geteuid() == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "raycontrol-test", str(disk)]
    if not ROOT or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs root and the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fails_until_full(save: Callable[[int], object]) -> tuple[int, StoreError]:
    """How many saves went through before one failed, and its error."""
    for number in range(10_000):
        try:
            save(number)
        except StoreError as error:
            return number, error
    raise AssertionError("the disk is not small")


def test_a_full_disk_refuses_a_change_whole_and_goes_on_when_there_is_space(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(300_000))
    with Store(small_disk / "home") as store:
        saved, error = fails_until_full(
            lambda number: store.add(row(f"{number:04}", doc=json.dumps("x" * 5000)), note())
        )
        assert saved > 10
        assert f"free some space in {small_disk}/home (`raycontrol prune`" in str(error)
        assert len(store.jobs()) == saved
        ballast.unlink()
        store.add(row("later"), note())
    with Store(small_disk / "home") as store:
        assert len(store.jobs()) == saved + 1
        assert all(len(store.events(job.id)) == 1 for job in store.jobs())


def test_a_store_cannot_be_made_on_a_full_disk(small_disk: Path) -> None:
    fill = os.open(small_disk / "fill", os.O_CREAT | os.O_WRONLY)
    with pytest.raises(OSError, match="No space left"):
        while True:
            os.write(fill, bytes(4096))
    os.close(fill)
    with pytest.raises(StoreError, match=r"free some space|see whether the disk is full"):
        Store(small_disk / "home")
    (small_disk / "fill").unlink()
    with Store(small_disk / "home") as store:
        store.add(row(), note())


def test_a_read_only_disk_is_an_error_that_says_so(small_disk: Path) -> None:
    Store(small_disk / "home").close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError, match="set RAYCONTROL_HOME to another folder"):
        Store(small_disk / "home")
    with pytest.raises(StoreError, match=r"Read-only file system; set RAYCONTROL_HOME to another folder"):
        Store(small_disk / "other")


def test_a_file_size_limit_refuses_a_change_whole(tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from raycontrol.errors import StoreError
from raycontrol.store import Store
from tests.unit.store_rows import note, row
store = Store(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))
for number in range(1000):
    try:
        store.add(row(f"{number:04}", doc='"' + "x" * 5000 + '"'), note())
    except StoreError as error:
        print(number, len(store.jobs()), error)
        break
"""
    output, _ = python(code, tmp_path / "home").communicate(timeout=30)
    saved, seen, error = output.split(" ", 2)
    assert int(saved) == int(seen) > 10
    assert "see whether the disk is full, over quota or failing" in error
    with Store(tmp_path / "home") as store:
        assert len(store.jobs()) == int(saved)


def test_folders_without_permission_are_an_error_that_says_so() -> None:
    code = """
import os, sys
from pathlib import Path
from raycontrol.errors import StoreError
from raycontrol.store import Store
folder = Path(sys.argv[1])
Store(folder / "made").close()
(folder / "made" / "store.db").chmod(0o400)
for name, mode in (("made", 0o555), ("bare", 0o555), ("shut", 0o000)):
    (folder / name).mkdir(exist_ok=True)
    (folder / name).chmod(mode)
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
for name in ("made", "bare", "shut"):
    for open in (Store, Store.open_existing):
        try:
            print(name, open(folder / name))
        except StoreError as error:
            print(name, error)
"""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        output, _ = python(code, folder).communicate(timeout=30)
        (Path(folder) / "shut").chmod(0o700)
    made, opened, bare, absent, shut, hidden = output.splitlines()
    for line in (made, opened):
        assert "unable to open database file: see that" in line or "may not write there" in line
    assert f"{folder}/bare/locks: Permission denied; see that user" in bare
    assert absent == "bare None"
    for line in (shut, hidden):
        assert "Permission denied" in line
        assert "RAYCONTROL_HOME" in line


def corrupt_header(path: Path) -> None:
    path.write_bytes(b"this is no database at all, only text" * 100)


def corrupt_page(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (path.stat().st_size - 4096))


def another_programs(path: Path) -> None:
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE photographs (x)")
    connection.close()


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (corrupt_header, r"file is not a database: it is no raycontrol store; set RAYCONTROL_HOME"),
        (corrupt_page, r"malformed: the file is damaged; move it and its -wal and -shm files away"),
        (another_programs, r"is another program's database; set RAYCONTROL_HOME to another folder"),
        (replace_by_folder, r"unable to open database file: see that .*/home exists and is writable"),
    ],
)
def test_a_damaged_file_is_an_error_that_says_what_to_do(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    with Store(tmp_path / "home") as store:
        for number in range(50):
            store.add(row(f"job-{number}", doc="x" * 1000), note())
    damage(tmp_path / "home" / "store.db")
    with pytest.raises(StoreError, match=message), Store(tmp_path / "home") as store:
        store.jobs()


def test_a_locked_store_is_waited_for_and_then_an_error(tmp_path: Path) -> None:
    with Store(tmp_path, busy_s=0.1) as store:
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"is locked: another process has kept it locked for 0\.1 s"):
            store.add(row(), note())
        assert store.jobs() == []  # readers do not wait
        other.execute("ROLLBACK")
        other.close()
        store.add(row(), note())


def test_a_store_that_was_removed_takes_no_more_changes(tmp_path: Path) -> None:
    with Store(tmp_path / "home") as store:
        shutil.rmtree(tmp_path / "home")
        with pytest.raises(StoreError, match=r"store\.db was removed or replaced while in use"):
            store.add(row(), note())


def test_threads_share_a_store(tmp_path: Path) -> None:
    with Store(tmp_path) as store:

        def work(name: int) -> None:
            for number in range(10):
                store.add(row(f"{name}-{number}"), note())
                assert store.job(f"{name}-{number}") is not None

        threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(store.jobs()) == 80


FORKS = """
import os, sys
from pathlib import Path
from raycontrol.store import Store
from tests.unit.store_rows import note, row
ready, go = os.pipe()
children = []
for name in range(8):
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(ready, 1)  # until all are there
        store = Store(Path(sys.argv[1]))
        for number in range(10):
            store.add(row(f"{name}-{number}"), note())
        os._exit(0)
    children.append(child)
os.close(go)
print([os.waitpid(child, 0)[1] for child in children])
"""


def test_eight_processes_make_the_store_and_add_to_it_at_once(tmp_path: Path) -> None:
    adding = python(FORKS, tmp_path / "home")
    with wait_until(lambda: Store.open_existing(tmp_path / "home"), 30, "the store") as reader:
        wait_until(lambda: len(reader.jobs()) == 80, 30, "all jobs, seen while others write")
    assert adding.communicate()[0] == "[0, 0, 0, 0, 0, 0, 0, 0]\n"
    with Store(tmp_path / "home") as store:
        assert len(store.jobs()) == 80
        assert sorted(store.events(job.id)[0].seq for job in store.jobs()) == list(range(1, 81))


WRITER = """
import os, sys
from pathlib import Path
from raycontrol.store import Change, Store
from tests.unit.store_rows import note, row
for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        store = Store(Path(sys.argv[1]))
        number = int(store.job("a").doc)
        os.write(1, f"{os.getpid()}\\n".encode())
        while True:
            number += 1
            changes = [Change(row(name, doc=str(number)), (note(str(number)),)) for name in "ab"]
            store.save(changes)
            os.write(1, f"{number}\\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"dead\\n")
"""


def test_a_writer_killed_at_any_moment_leaves_every_acknowledged_change_and_no_half_one(
    tmp_path: Path,
) -> None:
    with Store(tmp_path) as store:
        for name in "ab":
            store.add(row(name, doc="0"), note("0"))
    writer = python(WRITER, tmp_path)
    assert writer.stdin is not None
    assert writer.stdout is not None
    for acknowledged in (1, 7, 40, 100):
        print("go", file=writer.stdin, flush=True)
        pid = int(writer.stdout.readline())
        for _ in range(acknowledged):
            last = int(writer.stdout.readline())
        os.kill(pid, signal.SIGKILL)
        while (line := writer.stdout.readline()) != "dead\n":
            last = int(line)
        with Store(tmp_path) as store:
            stored = [(job.id, int(job.doc)) for job in store.jobs()]
            number = stored[0][1]
            assert stored == [("b", number), ("a", number)]
            assert number in (last, last + 1)  # the last one may be on disk without its acknowledgement
            for name in "ab":
                messages = [event.message for event in store.events(name, limit=10_000)]
                assert messages == [str(count) for count in range(number + 1)]
    writer.stdin.close()
    assert writer.wait(10) == 0
    check = sqlite3.connect(tmp_path / "store.db")
    assert check.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    check.close()
