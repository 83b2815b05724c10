"""Runs whose stdin, stdout and stderr are the owner's: ``Run.stdio``."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from raycontrol.process import Process, Run, read_status, start
from tests.machine.process_trees import FAMILY, FAMILY_NAMES, Owner, Trees, alive, play, trees, until
from tests.support import wait_until

__all__ = ["trees"]

EVERY_BYTE = bytes(range(256))

# What an owner does before it starts its run.
IMPORTS = "import dataclasses, os; global run; "
OWN_STREAMS = IMPORTS + "run = dataclasses.replace(run, stdio=(0, 1, 2))"
OWN_PIPES = (
    IMPORTS
    + "pipes = [os.pipe() for _ in range(3)]; "
    + "run = dataclasses.replace(run, stdio=(pipes[0][0], pipes[1][1], pipes[2][1]))"
)


class Pipes:
    """Three pipes: ``theirs`` are the ends for the run, ``stdin``, ``stdout`` and ``stderr`` ours."""

    def __init__(self) -> None:
        stdin, self.stdin = os.pipe()
        self.stdout, stdout = os.pipe()
        self.stderr, stderr = os.pipe()
        self.theirs = (stdin, stdout, stderr)

    async def start(self, run: Run) -> Process:
        process = await start(replace(run, stdio=self.theirs))
        self.close_theirs()
        return process

    def close_theirs(self) -> None:
        for descriptor in self.theirs:
            os.close(descriptor)
        self.theirs = (-1, -1, -1)

    def close_stdin(self) -> None:
        os.close(self.stdin)
        self.stdin = -1

    async def everything(self, descriptor: int) -> bytes:
        """What comes out until the end of file."""
        return await asyncio.to_thread(read_all, descriptor)

    def close(self) -> None:
        for descriptor in (self.stdin, self.stdout, self.stderr, *self.theirs):
            if descriptor >= 0:
                os.close(descriptor)


@contextmanager
def open_pipes() -> Iterator[Pipes]:
    pipes = Pipes()
    try:
        yield pipes
    finally:
        pipes.close()


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    with open_pipes() as made:
        yield made


def read_all(descriptor: int) -> bytes:
    parts = []
    while data := os.read(descriptor, 1 << 20):
        parts.append(data)
    return b"".join(parts)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def test_bytes_pass_unchanged_and_both_outputs_are_apart(trees: Trees, pipes: Pipes):
    async def story() -> None:
        run = trees.run("cat; echo problem >&2; exit 7")
        process = await pipes.start(run)
        os.write(pipes.stdin, EVERY_BYTE)
        pipes.close_stdin()
        assert await pipes.everything(pipes.stdout) == EVERY_BYTE
        assert await pipes.everything(pipes.stderr) == b"problem\n"
        outcome = await process.gone()
        assert (outcome.code, outcome.signal) == (7, None)
        assert read_status(run.folder) == outcome
        assert [file.name for file in Path(run.folder).iterdir()] == ["status.json"]

    play(story())


def test_100_mb_go_through_a_cat_unchanged(trees: Trees, pipes: Pipes):
    async def story() -> None:
        process = await pipes.start(trees.run(("cat",)))
        block = os.urandom(1 << 20)
        sent, received = hashlib.sha256(), hashlib.sha256()

        def feed() -> None:
            for _ in range(100):
                sent.update(block)
                write_all(pipes.stdin, block)
            pipes.close_stdin()

        def take() -> None:
            while data := os.read(pipes.stdout, 1 << 18):
                received.update(data)

        await asyncio.gather(asyncio.to_thread(feed), asyncio.to_thread(take))
        assert received.digest() == sent.digest()
        assert (await process.gone()).code == 0

    play(story())


def test_the_end_of_its_output_is_seen_while_the_command_goes_on(trees: Trees, pipes: Pipes):
    async def story() -> None:
        process = await pipes.start(trees.run("exec >&- 2>&-; read line; exit 5"))
        assert await pipes.everything(pipes.stdout) == b""
        assert await pipes.everything(pipes.stderr) == b""
        assert alive(process.pid)
        os.write(pipes.stdin, b"go on\n")
        assert (await process.gone()).code == 5

    play(story())


def test_the_end_of_its_input_is_seen_while_its_output_goes_on(trees: Trees, pipes: Pipes):
    async def story() -> None:
        process = await pipes.start(trees.run("cat > /dev/null; echo all read"))
        pipes.close_stdin()
        assert await pipes.everything(pipes.stdout) == b"all read\n"
        assert (await process.gone()).code == 0

    play(story())


def test_a_command_that_does_not_read_is_a_broken_pipe_for_us(trees: Trees, pipes: Pipes):
    async def story() -> None:
        await (await pipes.start(trees.run("true"))).gone()
        with pytest.raises(BrokenPipeError):
            os.write(pipes.stdin, b"x")

    play(story())


def test_one_descriptor_may_serve_for_several_streams(trees: Trees, pipes: Pipes):
    async def story() -> None:
        _, stdout, _ = pipes.theirs
        null = os.open(os.devnull, os.O_RDWR)
        process = await start(replace(trees.run("echo one; echo two >&2"), stdio=(null, stdout, stdout)))
        os.close(null)
        pipes.close_theirs()
        assert await pipes.everything(pipes.stdout) == b"one\ntwo\n"
        await process.gone()

    play(story())


def test_nothing_but_the_three_is_open_in_the_command(trees: Trees, pipes: Pipes):
    async def story() -> None:
        # `ls` itself opens the folder, as the lowest free number.
        process = await pipes.start(trees.run(("ls", "/proc/self/fd")))
        assert await pipes.everything(pipes.stdout) == b"0\n1\n2\n3\n"
        await process.gone()

    play(story())


def test_neither_the_supervisor_nor_a_run_beside_it_holds_them(trees: Trees, pipes: Pipes):
    async def story() -> None:
        with open_pipes() as others:
            other = await others.start(trees.run("read line"))
            process = await pipes.start(trees.run("exec >&- 2>&- <&-; touch $FLAGS/closed; exec sleep 1000"))
            await trees.flagged("closed")
            assert await pipes.everything(pipes.stdout) == b""
            assert await pipes.everything(pipes.stderr) == b""
            with pytest.raises(BrokenPipeError):
                os.write(pipes.stdin, b"x")
            late = await start(trees.run("sleep 1000"))
            others.close_stdin()
            assert (await other.gone()).code == 1
            await asyncio.gather(process.kill("the test is over"), late.kill("the test is over"))

    play(story())


@pytest.mark.parametrize(
    ("argv", "code", "error"),
    [
        (("trian.py",), 127, "trian.py: command not found in PATH /usr/bin:/bin"),
        (("/etc/passwd",), 126, "/etc/passwd: Permission denied"),
    ],
)
def test_a_command_that_cannot_be_started_says_so_and_closes_its_ends(
    trees: Trees, pipes: Pipes, argv: tuple[str, ...], code: int, error: str
):
    async def story() -> None:
        process = await pipes.start(trees.run(argv, env={"PATH": "/usr/bin:/bin"}))
        assert await pipes.everything(pipes.stdout) == b""
        assert await pipes.everything(pipes.stderr) == b""
        outcome = await process.gone()
        assert (outcome.code, outcome.error) == (code, error)

    play(story())


def test_a_folder_that_cannot_be_made_is_an_error(trees: Trees, pipes: Pipes, tmp_path: Path):
    (tmp_path / "run-1").write_text("a file is in the way")

    async def story() -> None:
        process = await pipes.start(trees.run("true"))
        outcome = await process.gone()
        assert outcome.error == f"its folder {tmp_path}/run-1 cannot be made: File exists"
        assert await pipes.everything(pipes.stdout) == b""

    play(story())


def test_descriptors_that_are_not_open_are_an_error_and_leave_nothing_open(trees: Trees):
    async def story() -> None:
        before = set(Path("/proc/self/fd").iterdir())
        process = await start(replace(trees.run("true"), stdio=(0, 1, 1_000_000)))
        assert (
            await process.gone()
        ).error == "its supervisor could not be started: [Errno 9] Bad file descriptor"
        await until(lambda: set(Path("/proc/self/fd").iterdir()) <= before, what="closed handles")

    play(story())


def test_a_signal_is_the_outcome_and_ends_the_outputs(trees: Trees, pipes: Pipes):
    async def story() -> None:
        process = await pipes.start(trees.run("echo on; kill -KILL $$"))
        assert await pipes.everything(pipes.stdout) == b"on\n"
        assert (await process.gone()).signal == signal.SIGKILL

    play(story())


def test_what_holds_an_output_longer_than_the_main_process_is_ended_and_so_is_the_output(
    trees: Trees, pipes: Pipes
):
    async def story() -> None:
        process = await pipes.start(
            trees.run("trap '' TERM; (echo $BASHPID > $PIDS/child; nap; sleep 1000) &")
        )
        assert (await process.wait()).code == 0
        assert await pipes.everything(pipes.stdout) == b""
        await process.gone()

    play(story())


def test_the_tree_is_killed_when_the_owner_dies(trees: Trees):
    owner = Owner(trees.run(FAMILY + "stay main"), before=OWN_PIPES)
    try:
        main = owner.main_pid()
        pids = trees.recorded(*FAMILY_NAMES, "main")
        owner.kill()
        wait_until(lambda: not trees.living(pids) and not alive(main), 10, "the end of the tree")
    finally:
        owner.close()


def test_an_owner_may_pass_on_its_own_standard_streams(trees: Trees):
    owner = Owner(trees.run("echo hello"), before=OWN_STREAMS)
    try:
        assert owner.popen.stdout is not None
        assert b"hello" in owner.popen.stdout.read().split()  # beside the pid that it prints itself
    finally:
        owner.close()


def test_fifty_at_once_do_not_hold_each_others_ends(trees: Trees):
    async def one(number: int) -> None:
        with open_pipes() as pipes:
            process = await pipes.start(trees.run(f"cat; exit {number}"))
            os.write(pipes.stdin, b"%d" % number)
            pipes.close_stdin()
            assert await pipes.everything(pipes.stdout) == b"%d" % number
            assert (await process.gone()).code == number

    async def story() -> None:
        await asyncio.gather(*(one(number) for number in range(50)))

    play(story())
