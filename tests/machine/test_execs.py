"""Commands across nodes at one place, with real processes: what they are given, what they write, how they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from raycontrol import process
from raycontrol.execs import Execs, Surroundings, own_name
from raycontrol.execution import PIECE_BYTES, Chunk, Command, Over, PlaceFailed, command_of

T = TypeVar("T")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}


class Here:
    """Execs of this test's own; ``run`` reads a command to its end, piece by piece."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.mark = f"test-{folder.parent.name}"
        self.environment = ENVIRONMENT
        self.execs = Execs(folder, self.mark, self._surroundings, **options)

    async def _surroundings(self, command: Command) -> Surroundings:
        return Surroundings(self.environment, str(self.folder.parent))

    async def run(self, command: Command, exec_id: str = "1") -> tuple[bytes, Over]:
        await self.execs.start(exec_id, "host-a", command)
        return await self.rest(exec_id)

    async def rest(self, exec_id: str = "1", offset: int = 0) -> tuple[bytes, Over]:
        pieces = []
        while True:
            chunk = await self.execs.read(exec_id, offset, 10)
            pieces.append(chunk.data)
            offset += len(chunk.data)
            if chunk.over is not None:
                return b"".join(pieces), chunk.over

    async def nothing_is_left(self) -> None:
        deadline = time.monotonic() + 10
        while list(self.folder.glob("*")) or process.marked(self.mark, supervisors=True):
            assert time.monotonic() < deadline, [*self.folder.glob("*"), *process.marked(self.mark)]
            await asyncio.sleep(0.02)


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path / "execs")


def done(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def test_a_line_is_bashs_and_several_words_are_a_program(here: Here) -> None:
    async def work() -> None:
        assert await here.run(command_of(("echo $((6 * 7)); exit 3",)), "1") == (
            b"42\n",
            Over("host-a", 3, 3),
        )
        assert await here.run(command_of(("echo", "$HOME", "a  b")), "2") == (
            b"$HOME a  b\n",
            Over("host-a", 0, 0),
        )
        await here.nothing_is_left()

    done(work())


def test_what_goes_to_both_streams_comes_in_its_order(here: Here) -> None:
    async def work() -> None:
        output, over = await here.run(Command("for i in 1 2 3; do echo out$i; echo err$i >&2; done"))
        assert (output.split(), over.status) == ([b"out1", b"err1", b"out2", b"err2", b"out3", b"err3"], 0)

    done(work())


def test_a_fast_command_is_told_of_with_the_first_answer(here: Here) -> None:
    async def work() -> None:
        await here.execs.start("1", "host-a", Command("true"))
        assert await here.execs.read("1", 0, 10) == Chunk(b"", Over("host-a", 0, 0))

    done(work())


def test_an_answer_that_got_lost_is_given_again(here: Here) -> None:
    async def work() -> None:
        await here.execs.start("1", "host-a", Command("echo one; sleep 0.2; echo two; sleep 1000"))
        first = await here.execs.read("1", 0, 10)
        assert (first, await here.execs.read("1", 0, 10)) == (Chunk(b"one\n"), first)
        second = await here.execs.read("1", 4, 10)
        assert (second, await here.execs.read("1", 4, 10)) == (Chunk(b"two\n"), second)
        with pytest.raises(PlaceFailed, match="output from byte 0 on is gone"):
            await here.execs.read("1", 0, 10)
        await here.execs.stop("1", 0, "the test is over")

    done(work())


def test_the_same_id_starts_nothing_twice(here: Here, tmp_path: Path) -> None:
    async def work() -> None:
        command = Command(f"echo x >> {tmp_path}/started")
        await asyncio.gather(*(here.execs.start("1", "host-a", command) for _ in range(3)))
        await here.rest()
        assert (tmp_path / "started").read_text() == "x\n"

    done(work())


def test_all_of_a_large_output_comes_and_waits_in_no_memory(here: Here) -> None:
    async def work() -> None:
        await here.execs.start("1", "host-a", Command("yes 0123456789abcde | head -c 50M"))
        count, offset, over = 0, 0, None
        while over is None:
            chunk = await here.execs.read("1", offset, 10)
            assert len(chunk.data) <= PIECE_BYTES
            assert (
                chunk.data
                == (b"0123456789abcde\n" * (len(chunk.data) // 16 + 2))[offset % 16 :][: len(chunk.data)]
            )
            offset, over, count = offset + len(chunk.data), chunk.over, count + 1
        assert (offset, over.status) == (50 << 20, 0)

    done(work())


def test_a_command_waits_while_nobody_reads(here: Here, tmp_path: Path) -> None:
    async def work() -> None:
        await here.execs.start("1", "host-a", Command(f"yes | head -c 20M; touch {tmp_path}/written"))
        await here.execs.read("1", 0, 10)
        await asyncio.sleep(0.3)  # to see that something does not happen
        assert not (tmp_path / "written").exists()
        await here.execs.stop("1", 0, "the test is over")

    done(work())


def test_a_script_comes_as_its_bytes_and_runs_by_its_first_line(here: Here) -> None:
    async def work() -> None:
        python = Command(
            ("a b",), script=b"#!/usr/bin/env python3\nimport sys; print('\xc3\xa9', sys.argv[1:])\n"
        )
        bash = Command(("x",), script=b"[[ $1 == x ]] && echo $BASH_VERSION\n")
        assert (await here.run(python, "1"))[0].decode() == "é ['a b']\n"
        assert (await here.run(bash, "2"))[0].startswith(b"5.")
        await here.nothing_is_left()

    done(work())


def test_of_a_script_that_could_not_be_begun_nothing_is_left(here: Here) -> None:
    async def work() -> None:
        here.environment = {"ODD": "\ud800"}  # no system takes it
        with pytest.raises(UnicodeEncodeError):
            await here.execs.start("1", "host-a", Command((), script=b"echo s3cret\n"))
        await here.nothing_is_left()

    done(work())


def test_a_time_limit_ends_it_and_its_children(here: Here) -> None:
    async def work() -> None:
        output, over = await here.run(Command("sleep 1000 & echo began; wait", timeout_s=0.3))
        assert (output, over.status, over.why) == (b"began\n", 124, "its time limit of 0.3 s was over")
        await here.nothing_is_left()

    done(work())


def test_a_stop_is_term_then_kill(here: Here) -> None:
    async def work() -> None:
        await here.execs.start(
            "1", "host-a", Command("trap 'echo asked' TERM; echo began; while :; do sleep 0.1; done")
        )
        assert (await here.execs.read("1", 0, 10)).data == b"began\n"
        await here.execs.stop("1", 0.5, "Ctrl-C")
        output, over = await here.rest("1", 6)
        assert b"asked" in output and (over.status, over.signal, over.why) == (130, 9, "Ctrl-C")
        await here.nothing_is_left()

    done(work())


def test_what_it_leaves_in_the_background_is_ended(here: Here) -> None:
    async def work() -> None:
        _, over = await here.run(Command("setsid sleep 1000 & disown; echo gone"))
        assert over.status == 0
        await here.nothing_is_left()

    done(work())


def test_a_command_of_which_nobody_asks_any_more_is_ended(tmp_path: Path) -> None:
    async def work() -> None:
        here = Here(tmp_path / "execs", unasked_s=0.5)
        await here.execs.start("1", "host-a", Command("trap '' HUP; yes"))
        await here.nothing_is_left()
        with pytest.raises(PlaceFailed, match="not known here any more"):
            await here.execs.read("1", 0, 1)

    done(work())


def test_who_says_so_keeps_it(tmp_path: Path) -> None:
    async def work() -> None:
        here = Here(tmp_path / "execs", unasked_s=1)
        await here.execs.start("1", "host-a", Command("sleep 1.5; echo done"))
        for _ in range(8):
            await asyncio.sleep(0.25)  # longer, all in all, than it would be kept
            await here.execs.keep("1")
        assert await here.rest() == (b"done\n", Over("host-a", 0, 0))

    done(work())


def test_what_is_no_program_says_so(here: Here) -> None:
    async def work() -> None:
        _, over = await here.run(Command(("no-such-program", "x")))
        assert (over.status, over.why) == (127, "no-such-program: command not found in PATH /usr/bin:/bin")

    done(work())


def test_a_job_s_end_ends_what_runs_in_it(here: Here) -> None:
    async def work() -> None:
        await here.execs.start("1", "host-a", Command("sleep 1000"))
        await here.execs.close(0, "the job ends")
        assert (await here.rest())[1].why == "the job ends"

    done(work())


def test_it_reads_nothing_and_has_no_terminal(here: Here) -> None:
    async def work() -> None:
        output, _ = await here.run(
            Command("cat; tty; test -e /proc/self/fd/0 && (: < /dev/tty) 2>&1 | grep -c 'No such device'")
        )
        assert output == b"not a tty\n1\n"

    done(work())


def test_as_whom_it_runs_is_told(here: Here) -> None:
    async def work() -> None:
        began = await here.execs.start("1", "host-a", Command("id -un"))
        assert (await here.rest())[0].decode().strip() == began.user
        assert began.remark is None

    done(work())


def test_of_a_user_without_a_name_the_number_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 54_321)
    own_name.cache_clear()
    try:
        assert own_name() == "54321"
    finally:
        own_name.cache_clear()


def test_root_goes_through_sudo_and_ends_with_all_that_is_roots(tmp_path: Path) -> None:
    """The stand-in for sudo keeps the standard descriptors and no variable, as sudo does; nobody but it becomes root."""
    sudo = tmp_path / "sudo"
    sudo.write_text('#!/bin/sh\nexec env -i SUDO_USER=ada $0.real "$@"\n')
    real = tmp_path / "sudo.real"
    real.write_text(
        "#!/usr/bin/env python3\nimport os, sys\nos.closerange(3, 1000)\nos.execvp(sys.argv[1], sys.argv[1:])\n"
    )
    for program in (sudo, real):
        program.chmod(0o755)

    async def work() -> None:
        here = Here(tmp_path / "execs", sudo=[str(sudo)])
        began = await here.execs.start(
            "1", "host-a", Command("echo $LANG; cat; echo err >&2; exit 4", root=True)
        )
        assert (began.user, await here.rest()) == ("root", (b"C.UTF-8\nerr\n", Over("host-a", 4, 4)))
        await here.execs.start("2", "host-a", Command("setsid sleep 1000 & echo $!; wait", root=True))
        pid = int((await here.execs.read("2", 0, 10)).data)
        await here.execs.stop("2", 0.2, "Ctrl-C")
        assert (await here.rest("2", len(str(pid)) + 1))[1].status == 130
        await here.nothing_is_left()
        assert not Path(f"/proc/{pid}").exists()

    done(work())


def test_where_sudo_is_refused_its_words_are_told(tmp_path: Path) -> None:
    sudo = tmp_path / "sudo"
    sudo.write_text("#!/bin/sh\necho 'sudo: a password is required' >&2\nexit 1\n")
    sudo.chmod(0o755)

    async def work() -> None:
        here = Here(tmp_path / "execs", sudo=[str(sudo)])
        with pytest.raises(
            PlaceFailed, match=r"`sudo -n` is refused to .*: sudo: a password is required; allow it"
        ):
            await here.execs.start("1", "host-a", Command("true", root=True))
        missing = Here(tmp_path / "others", sudo=["no-such-sudo"])
        with pytest.raises(PlaceFailed, match="command not found"):
            await missing.execs.start("1", "host-a", Command("true", root=True))
        await here.nothing_is_left()

    done(work())
