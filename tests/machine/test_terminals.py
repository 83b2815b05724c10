"""Shells on real terminals in an instance."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from raycontrol import process
from raycontrol.background import Background
from raycontrol.plan import Mount
from raycontrol.terminals import NoShell, Output, Terminals
from tests.machine.instances import Gang, play, until
from tests.machine.process_trees import Trees, trees

__all__ = ["trees"]


class Person:
    """Sits at a shell: types, and reads until something has been said."""

    def __init__(self, terminals: Terminals, number: int) -> None:
        self._terminals = terminals
        self.number = number
        self.seen = ""

    async def type(self, text: str) -> None:
        await self._terminals.write(self.number, text.encode())

    async def sees(self, pattern: str) -> str:
        while (found := re.search(pattern, self.seen)) is None:
            output = await self._terminals.read(self.number, 5.0)
            assert output.status is None, self.seen
            self.seen += output.data.decode()
        self.seen = self.seen[found.end() :]
        return found[0]

    async def leaves(self) -> int:
        while (output := await self._terminals.read(self.number, 5.0)).status is None:
            self.seen += output.data.decode()
        return output.status


async def at_a_shell(gang: Gang, command: str = "sleep 1000", *mounts: Mount) -> Person:
    await gang.prepared()
    await gang.instance.carry_out(
        replace(gang.orders(command, environment={"PS1": "ready> "}), mounts=mounts)
    )
    await gang.heard("StagePassed")
    return Person(gang.instance.terminals, await gang.instance.terminals.open(24, 80, "xterm-256color"))


def test_a_shell_has_a_terminal_of_that_size_the_jobs_environment_folder_and_mounts(tmp_path: Path) -> None:
    async def story() -> None:
        gang = Gang(tmp_path)
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "digits").write_text("0123\n")
        mount = Mount(str(tmp_path / "data"), "/opt/ml-test/data")
        person = await at_a_shell(gang, "sleep 1000", mount)
        await person.type(
            "stty size; tty; echo $TERM $RAYCONTROL_INSIDE; pwd; cat /opt/ml-test/data/digits; export -p | grep -c ATTEMPT_ID\n"
        )
        assert await person.sees(r"24 80\r\n/dev/pts/\d+\r\nxterm-256color shell\r\n")
        assert await person.sees(re.escape(f"{gang.code}\r\n0123\r\n1\r\n"))
        await gang.instance.terminals.resize(person.number, 50, 132)
        await person.type("stty size\n")
        assert await person.sees(r"50 132")
        await person.type("exit 7\n")
        assert await person.leaves() == 7
        await gang.closed()

    play(story())


def test_ctrl_c_goes_to_the_program_in_front_and_not_to_the_shell(tmp_path: Path) -> None:
    async def story() -> None:
        gang = Gang(tmp_path)
        person = await at_a_shell(gang)
        await person.type("sleep 1001; echo ended by $?\n")
        await until(lambda: _runs("sleep 1001", gang.attempt_id), "sleep")
        await person.type("\x03")
        await person.type("echo still $((40 + 2))\n")
        assert await person.sees(r"still 42")
        await person.type("kill -KILL $$\n")
        assert await person.leaves() == 137
        await gang.closed()

    play(story())


def test_a_shell_ends_with_its_job(tmp_path: Path) -> None:
    async def story() -> None:
        gang = Gang(tmp_path)
        person = await at_a_shell(gang)
        await person.type("trap '' HUP TERM; (setsid sleep 1002 &); sleep 1003\n")
        await until(lambda: _runs("sleep 1003", gang.attempt_id), "sleep")
        await gang.closed(grace_s=1)

    play(story())


def test_a_shell_that_nobody_reads_hangs_up(trees: Trees) -> None:
    async def start(terminal: int, term: str) -> process.Process:
        run = replace(trees.run(("bash", "-i")), stdio=(terminal, terminal, terminal), terminal=True)
        return await process.start(run)

    async def story() -> None:
        shells = Terminals(start, Background(), abandoned_s=1.0)
        person = Person(shells, await shells.open(24, 80, "dumb"))
        await person.type("sleep 1004; echo not reached\n")
        while not _runs("sleep 1004", trees.mark):
            await shells.read(person.number, 0.1)
        await until(lambda: not _runs("sleep 1004", trees.mark), "the hang-up")
        await until(lambda: process.marked(trees.mark) == [], "its end")

    play(story())


def test_output_that_nobody_reads_waits_in_the_program_and_none_is_lost(tmp_path: Path) -> None:
    async def story() -> None:
        gang = Gang(tmp_path)
        person = await at_a_shell(gang)
        await person.type("stty -echo -onlcr; PS1=; echo begin; seq 400000; exit\n")
        await person.sees(r"[\r\n]begin\n")
        assert await person.leaves() == 0
        numbers = [int(line) for line in person.seen.split() if line.isdigit()]
        assert numbers == list(range(1, 400001))
        await gang.closed()

    play(story())


def test_before_the_job_has_got_so_far_there_is_no_shell_and_after_its_end_there_is(tmp_path: Path) -> None:
    async def story() -> None:
        gang = Gang(tmp_path)
        await gang.prepared()
        with pytest.raises(NoShell, match="the job has not got so far here"):
            await gang.instance.terminals.open(24, 80, "xterm")
        await gang.instance.carry_out(gang.orders("exit 3"))
        await gang.heard("RunExited")
        await gang.instance.stop(0, "the job has failed")
        await gang.heard("InstanceClosed")
        number = await gang.instance.terminals.open(24, 80, "xterm")
        await gang.instance.terminals.write(number, b"exit 5\n")
        while (output := await gang.instance.terminals.read(number, 5.0)) and output.status is None:
            pass
        assert output == Output(output.data, 5)

    play(story())


def _runs(words: str, mark: str) -> bool:
    return any(_words_of(found.pid) == words for found in process.marked(mark))


def _words_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
