"""A node's folders, leases and processes, without a cluster."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import subprocess
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raycontrol import process
from raycontrol.disk import HIDDEN, TEMP_LINK, short_folder
from raycontrol.node import PROBES_AT_ONCE, AlreadyReleased, Node, NotReleased
from raycontrol.packages import KEPT_TREES, pack
from raycontrol.sharedprobe import PROBES
from tests.machine.process_trees import Trees, alive, parent, play, trees, until
from tests.node_facts import plain_facts

__all__ = ["trees"]


class Shelf:
    """An archive with packages on it; ``held`` keeps a reader waiting until it is set."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._packages: dict[str, bytes] = {}
        self.held: asyncio.Event | None = None
        self.reads = 0

    def put(self, **files: str) -> str:
        source = self._folder / f"source-{uuid.uuid4().hex}"
        source.mkdir(parents=True)
        for name, text in files.items():
            (source / name).write_text(text)
        with pack(source) as package:
            self._packages[package.digest] = package.path.read_bytes()
        return package.digest

    async def read(self, digest: str, offset: int, max_bytes: int) -> bytes:
        self.reads += 1
        if self.held is not None:
            await self.held.wait()
        return self._packages[digest][offset : offset + max_bytes]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "scratch"


@pytest.fixture
def stray() -> Iterator[Callable[[str], int]]:
    """Starts a process of an attempt that nobody supervises; returns its pid."""
    started: list[subprocess.Popen[bytes]] = []

    def start(attempt_id: str) -> int:
        started.append(
            subprocess.Popen(["sleep", "1000"], env={process.MARK: attempt_id}, executable="/bin/sleep")
        )
        return started[-1].pid

    yield start
    for stray in started:
        stray.kill()
        stray.wait()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# Ending


def test_a_release_ends_what_nobody_supervises_and_what_an_owner_that_dies_leaves(
    trees: Trees, scratch: Path, shelf: Shelf, stray: Callable[[str], int]
) -> None:
    attempt_id = trees.mark

    async def story() -> None:
        node = Node(str(scratch), shelf.read, plain_facts)
        alone, neighbour = stray(attempt_id), stray(attempt_id + "0")
        handle = await process.start(trees.run("trap '' TERM; touch $FLAGS/up; while :; do sleep 1000; done"))
        await trees.flagged("up")
        releasing = asyncio.ensure_future(node.release("job", attempt_id, last=True))
        await until(lambda: not alive(alone), what="the end of the stray")
        assert not releasing.done()
        assert alive(handle.pid)
        ending = asyncio.ensure_future(handle.kill("its owner dies"))
        await releasing
        assert process.marked(attempt_id, supervisors=True) == []
        assert alive(neighbour)
        await ending

    play(story())


def test_a_release_that_cannot_end_a_process_names_it_and_keeps_the_folder(
    trees: Trees, scratch: Path, shelf: Shelf
) -> None:
    async def story() -> None:
        node = Node(str(scratch), shelf.read, plain_facts, release_s=0.3)
        code = await node.code_dir("job", None)
        handle = await process.start(trees.run("sleep 1000"))
        with pytest.raises(NotReleased, match=rf"still alive on this node: .*\b{handle.pid}\b"):
            await node.release("job", trees.mark, last=True)
        assert Path(code).is_dir()
        await handle.kill("the test goes on")
        await until(lambda: process.marked(trees.mark, supervisors=True) == [], what="the supervisor's end")
        await node.release("job", trees.mark, last=True)
        assert names(scratch / "jobs") == set()

    play(story())


def test_a_supervisor_that_still_writes_holds_up_the_release(
    trees: Trees, scratch: Path, shelf: Shelf
) -> None:
    async def story() -> None:
        node = Node(str(scratch), shelf.read, plain_facts, release_s=0.2)
        handle = await process.start(trees.run("sleep 1000"))
        above = parent(handle.pid)
        os.kill(above, 19)  # SIGSTOP: it has seen to nothing yet when its tree is dead
        os.kill(handle.pid, 9)
        with pytest.raises(NotReleased, match=rf"\b{above}\b"):
            await node.release("job", trees.mark, last=True)
        os.kill(above, 18)
        await handle.gone()

    play(story())


# Late comers


def test_what_comes_after_the_end_is_refused_and_makes_nothing(scratch: Path, shelf: Shelf) -> None:
    async def story() -> None:
        node = Node(str(scratch), shelf.read, plain_facts)
        digest = shelf.put(a="1")
        await node.release("job", "job.0", last=False)
        with pytest.raises(AlreadyReleased, match=r"attempt job\.0 has ended on this node"):
            await node.lease_port("job.0", "rendezvous")
        await node.code_dir("job", digest)  # the job goes on, with another attempt
        port = await node.lease_port("job.1", "rendezvous")
        assert port == await node.lease_port("job.1", "rendezvous")
        await node.release("job", "job.1", last=True)
        with pytest.raises(AlreadyReleased, match="job job has ended on this node"):
            await node.code_dir("job", digest)
        with pytest.raises(AlreadyReleased):
            await node.lease_port("job.1", "rendezvous")
        assert names(scratch / "jobs") == set()
        assert (scratch / "ports.json").read_text() == "{}"
        await node.code_dir("job.1", digest)  # a job may be called as an attempt was
        await node.release("job", "job.1", last=True)  # the same again changes nothing

    play(story())


def test_a_job_that_ends_while_its_package_arrives_gets_no_folder(scratch: Path, shelf: Shelf) -> None:
    async def story() -> None:
        node = Node(str(scratch), shelf.read, plain_facts)
        digest = shelf.put(a="1")
        shelf.held = asyncio.Event()
        coming = asyncio.ensure_future(node.code_dir("job", digest))
        await until(lambda: shelf.reads, what="the transfer has begun")
        await node.release("job", "job.0", last=True)
        shelf.held.set()
        with pytest.raises(AlreadyReleased):
            await coming
        assert names(scratch / "jobs") == set()

    play(story())


def test_a_copy_under_way_is_waited_for_and_removed(scratch: Path, shelf: Shelf) -> None:
    async def story() -> None:
        node = Node(str(scratch), shelf.read, plain_facts)
        digest = shelf.put(**{f"file-{number}": "x" for number in range(300)})
        await node.code_dir("before", digest)
        copying = asyncio.ensure_future(node.code_dir("job", digest))
        # Between its first file and its last.
        while not copying.done() and not (scratch.parent / "code/job").exists():
            await asyncio.sleep(0)
        copying.cancel()  # whoever asked is gone; the copy goes on
        await node.release("job", "job.0", last=True)
        assert {path.name for path in (scratch.parent / "code").iterdir()} == {"before", ".before.owner"}

    play(story())


def test_code_is_at_one_path_on_all_nodes_and_of_two_nodes_on_one_machine_the_first_has_it(
    tmp_path: Path, shelf: Shelf
) -> None:
    async def story() -> None:
        first, second = (Node(str(tmp_path / name), shelf.read, plain_facts) for name in ("node-a", "node-b"))
        digest = shelf.put(file="x")
        shared = tmp_path / "code/job"
        assert await first.code_dir("job", digest) == await first.code_dir("job", digest) == str(shared)
        own = Path(await second.code_dir("job", digest))
        assert own == tmp_path / "node-b/jobs/job/code"
        await second.release("job", "job.0", last=True)
        assert (shared.exists(), own.exists()) == (True, False)
        await Node(str(tmp_path / "node-a"), shelf.read, plain_facts).release("job", "job.0", last=True)
        assert list((tmp_path / "code").iterdir()) == []

    play(story())


def test_a_folder_that_a_dying_instance_makes_once_more_goes_at_the_next_pass(
    scratch: Path, shelf: Shelf
) -> None:
    async def story() -> None:
        node = Node(str(scratch), shelf.read, plain_facts, sweep_s=0.01)
        await node.release("job", "job.0", last=True)
        (scratch / "jobs/job/runs/job.0/worker-0").mkdir(parents=True)
        (scratch / f"jobs/{HIDDEN}abc/code").mkdir(parents=True)
        (scratch / "jobs/other/code").mkdir(parents=True)
        cleaning = asyncio.ensure_future(node.keep_clean())
        await until(lambda: names(scratch / "jobs") == {"other"}, what="the leftovers are removed")
        cleaning.cancel()

    play(story())


# The shared folder


def test_a_dead_file_server_holds_up_nothing_but_the_probes(
    scratch: Path, shelf: Shelf, tmp_path: Path
) -> None:
    (tmp_path / PROBES).mkdir()
    dead = tmp_path / PROBES / "dead"
    os.mkfifo(dead)  # as a dead server does, it lets who opens it wait

    async def meet_it() -> Node:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        node = Node(str(scratch), shelf.read, plain_facts, probe_s=0.05)
        for name in ["dead"] * PROBES_AT_ONCE + ["other"]:
            probed = await node.probe_shared("find", str(tmp_path), name, "")
            assert probed.fault == "no answer within 0.05 s, as of a dead file server"
        assert Path(await node.code_dir("job", None)).is_dir()
        return node

    async def story() -> None:
        try:
            node = await asyncio.wait_for(meet_it(), 20)
        finally:
            os.close(os.open(dead, os.O_RDWR))  # it is back
        deadline = time.monotonic() + 20
        while (await node.probe_shared("leave", str(tmp_path), "other", "text")).text != "text":
            assert time.monotonic() < deadline

    play(story())


# Keeping clean


def test_strays_of_every_attempt_are_killed_and_a_failing_pass_is_not_the_last(
    scratch: Path, shelf: Shelf, stray: Callable[[str], int]
) -> None:
    job_id = f"test-{uuid.uuid4().hex}"

    async def story() -> None:
        node = Node(str(scratch), shelf.read, plain_facts, sweep_s=0.01)
        for number in range(2):
            (scratch / f"jobs/{job_id}/runs/{job_id}.{number}").mkdir(parents=True)
        pids = [stray(f"{job_id}.{number}") for number in range(3)]
        loop = asyncio.get_running_loop()
        exhausted = ThreadPoolExecutor(1)
        exhausted.shutdown()
        loop.set_default_executor(exhausted)
        cleaning = asyncio.ensure_future(node.keep_clean())
        await asyncio.sleep(0.1)
        loop.set_default_executor(ThreadPoolExecutor())
        assert not cleaning.done()
        await until(lambda: not alive(pids[0]) and not alive(pids[1]), what="the end of two strays")
        assert alive(pids[2])  # of an attempt that has no folder here: another node's on this machine
        cleaning.cancel()

    play(story())


# Leases


def test_leases_outlive_a_restart(scratch: Path, shelf: Shelf) -> None:
    async def story() -> None:
        port = await Node(str(scratch), shelf.read, plain_facts).lease_port("job.0", "rendezvous")
        assert await Node(str(scratch), shelf.read, plain_facts).lease_port("job.0", "rendezvous") == port

    play(story())


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"job.0 x": "many"}', '{"job.0 x": null}', "\0" * 9])
def test_a_damaged_ledger_is_an_empty_one(scratch: Path, shelf: Shelf, damage: str) -> None:
    scratch.mkdir()
    (scratch / "ports.json").write_text(damage)

    async def story() -> None:
        port = await Node(str(scratch), shelf.read, plain_facts).lease_port("job.0", "rendezvous")
        assert await Node(str(scratch), shelf.read, plain_facts).lease_port("job.0", "rendezvous") == port

    play(story())


def test_without_room_for_the_ledger_leases_work_on(scratch: Path, shelf: Shelf) -> None:
    async def story() -> None:
        node = Node(str(scratch), shelf.read, plain_facts)
        (scratch / "ports.new").symlink_to("/dev/full")
        try:
            (scratch / "ports.new").write_text("x")
        except OSError as error:
            assert error.errno == errno.ENOSPC
        ports = {await node.lease_port("job.0", purpose) for purpose in "ab"}
        assert len(ports) == 2
        assert await node.lease_port("job.0", "a") in ports
        await node.release("job", "job.0", last=True)

    play(story())


# The package cache


def test_everything_in_scratch_is_private(scratch: Path, shelf: Shelf) -> None:
    (scratch / "jobs").mkdir(parents=True, mode=0o755)
    Node(str(scratch), shelf.read, plain_facts)
    folders = [scratch, scratch / "jobs", scratch / "packages"]
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700] * 3


def test_the_cache_keeps_what_was_used_last_whoever_remembers(scratch: Path, shelf: Shelf) -> None:
    digests = [shelf.put(name=str(number)) for number in range(KEPT_TREES + 3)]

    async def story() -> None:
        node = Node(str(scratch), shelf.read, plain_facts)
        for age, digest in enumerate(reversed(digests)):
            await node.code_dir("job", digest)
            os.utime(scratch / "packages" / digest, (1e9 - age, 1e9 - age))
            (scratch.parent / "code/job").rename(scratch.parent / f"code/job-{age}")
        successor = Node(str(scratch), shelf.read, plain_facts)
        await successor.code_dir("other", digests[0])  # the oldest is in use again
        await successor.release("job", "job.0", last=True)
        assert names(scratch / "packages") == {digests[0], *digests[-KEPT_TREES + 1 :]}

    play(story())


def test_a_tree_in_use_is_not_removed_between_its_arrival_and_its_copy(scratch: Path, shelf: Shelf) -> None:
    digests = [shelf.put(name=str(number)) for number in range(KEPT_TREES + 1)]

    async def story() -> None:
        node = Node(str(scratch), shelf.read, plain_facts)
        for number, digest in enumerate(digests):
            await node.code_dir(f"job-{number}", digest)
        # Many come and go at once; nobody's tree vanishes before his copy is made.
        for turn in range(10):
            jobs = [f"turn-{turn}-{number}" for number in range(len(digests))]
            coming = [node.code_dir(job, digest) for job, digest in zip(jobs, digests, strict=True)]
            going = [node.release(f"gone-{turn}", f"gone-{turn}.{number}", last=True) for number in range(3)]
            await asyncio.gather(*coming, *going)
        await node.release("gone", "gone.0", last=True)
        assert len(names(scratch / "packages")) == KEPT_TREES

    play(story())


def test_a_package_that_is_damaged_on_its_way_fails_the_call_and_not_the_next(
    scratch: Path, shelf: Shelf
) -> None:
    async def nothing(digest: str, offset: int, max_bytes: int) -> bytes:
        return b""

    reads: list[Callable[[str, int, int], Awaitable[bytes]]] = [nothing]

    async def read(digest: str, offset: int, max_bytes: int) -> bytes:
        return await reads[-1](digest, offset, max_bytes)

    async def story() -> None:
        node = Node(str(scratch), read, plain_facts)
        digest = shelf.put(a="1")
        assert digest != hashlib.sha256(b"").hexdigest()
        with pytest.raises(Exception, match="not its own"):
            await node.code_dir("job", digest)
        reads.append(shelf.read)
        assert names(Path(await node.code_dir("job", digest))) == {"a"}

    play(story())


# Short folders


def test_the_short_folders_of_an_attempt_go_with_it(scratch: Path, shelf: Shelf) -> None:
    async def story() -> None:
        node = Node(str(scratch), shelf.read, plain_facts)
        links = [
            scratch / "jobs" / "job" / "runs" / attempt / "head-0" / TEMP_LINK
            for attempt in ("job.0", "job.1")
        ]
        folders = []
        for link in links:
            link.parent.mkdir(parents=True)
            folders.append(short_folder(link))
            (folders[-1] / "session").mkdir()
        await node.release("job", "job.0", last=False)
        assert [folder.exists() for folder in folders] == [False, True]
        await node.release("job", "job.2", last=True)
        assert [folder.exists() for folder in folders] == [False, False]
        assert names(scratch / "jobs") == set()

    play(story())


def test_a_link_that_leads_elsewhere_removes_nothing(scratch: Path, shelf: Shelf, tmp_path: Path) -> None:
    async def story() -> None:
        node = Node(str(scratch), shelf.read, plain_facts)
        treasure = tmp_path / "treasure"
        treasure.mkdir()
        link = scratch / "jobs" / "job" / "runs" / "job.0" / "head-0" / TEMP_LINK
        link.parent.mkdir(parents=True)
        link.symlink_to(treasure)
        await node.release("job", "job.0", last=True)
        assert treasure.is_dir()

    play(story())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder away")
def test_a_short_folder_of_somebody_without_a_name_is_left_alone(scratch: Path, shelf: Shelf) -> None:
    async def story() -> None:
        node = Node(str(scratch), shelf.read, plain_facts)
        link = scratch / "jobs" / "job" / "runs" / "job.0" / "head-0" / TEMP_LINK
        link.parent.mkdir(parents=True)
        folder = short_folder(link)
        try:
            os.chown(folder, 54321, 54321)
            await node.release("job", "job.0", last=True)
            assert folder.is_dir()
        finally:
            folder.rmdir()

    play(story())
