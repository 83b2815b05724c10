"""Real process trees for the tests of ``raycontrol.process``: making runs, owners to kill, and what is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from raycontrol import process, supervisor
from raycontrol.plan import Mount, shell_argv
from raycontrol.process import Exit, Run
from tests.support import wait_until

T = TypeVar("T")
ROOT = Path(__file__).parents[2]

# One process of each kind that a program can leave behind; each writes its pid into a file of the folder $PIDS.
FAMILY = """
stay() { echo $BASHPID > $PIDS/$1; while :; do sleep 1000; done; }
export -f stay
bash -c 'trap "" TERM; stay stubborn' &
setsid bash -c 'stay session' &
(setsid bash -c '(stay daemon) &' &)
(env -i PIDS=$PIDS setsid bash -c 'echo $$ > $PIDS/unmarked; exec sleep 1000' &)
bash -c 'bash -c "stay grandchild" & wait' &
"""
HAS_CGROUPS = (above := supervisor.own_group()) is not None and os.access(above, os.W_OK)
"""Whether what hides itself like ``unmarked`` is known by its cgroup, if its owner is one of our rights."""
FAMILY_NAMES = ("stubborn", "session", "daemon", "unmarked", "grandchild")

# An owner as a program of its own: starts one run, prints its pid, and goes on in the way that its last line says.
OWNER = """
import asyncio, json, os, signal, sys
from raycontrol.process import Run, start
fields = json.loads(sys.argv[1])
run = Run(**{**fields, "argv": tuple(fields["argv"])})
async def own():
    BEFORE
    process = await start(run)
    print(process.pid, flush=True)
    THEN
asyncio.run(own())
"""


class Trees:
    """Makes runs of one mark in one folder, and knows what is left of them.

    Their programs write pids to watch into ``$PIDS``, and say how far they are with files in ``$FLAGS``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"test-{uuid.uuid4().hex}.0"
        self.pids = folder / "pids"
        self.pids.mkdir()
        self.flags = folder / "flags"
        self.flags.mkdir()
        os.mkfifo(self.flags / "never")
        self.environment = {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "PIDS": str(self.pids),
            "FLAGS": str(self.flags),
            # A shell function that waits a moment without a child that a signal to the group would hit.
            "BASH_FUNC_nap%%": "() { read -t 0.05 <> $FLAGS/never; }",
        }
        self._runs = 0

    def run(
        self,
        command: str | tuple[str, ...],
        env: Mapping[str, str] | None = None,
        mark: str | None = None,
        cwd: str = "/",
        mounts: tuple[Mount, ...] = (),
    ) -> Run:
        self._runs += 1
        return Run(
            name="start",
            argv=shell_argv(command, pipefail=True),
            env=self.environment if env is None else env,
            cwd=cwd,
            folder=str(self.folder / f"run-{self._runs}"),
            mark=mark or self.mark,
            mounts=mounts,
        )

    def end_of(self, command: str | tuple[str, ...], **arguments: Any) -> tuple[Exit, Run]:
        """Run ``command`` to its end; nothing of it is left the moment it is said to be gone."""
        run = self.run(command, **arguments)

        async def play() -> Exit:
            handle = await process.start(run)
            outcome = await handle.gone()
            assert process.marked(run.mark) == []
            assert process.read_status(run.folder) == outcome == await handle.wait()
            return outcome

        return asyncio.run(play()), run

    def recorded(self, *names: str) -> dict[str, int]:
        """Wait until processes have written their pids, and return them."""
        files = [self.pids / name for name in names]
        wait_until(
            lambda: all(file.exists() and file.read_text().strip() for file in files), 30, f"pids of {names}"
        )
        return {file.name: int(file.read_text()) for file in files}

    def living(self, pids: Mapping[str, int]) -> list[str]:
        """The names of those that live. A pid may be another program's by now, so ours are known by ``$PIDS``."""
        return [name for name, pid in pids.items() if marks_of(pid).get("PIDS") == str(self.pids)]

    def left(self) -> list[supervisor.Entry]:
        """Living processes of our trees, and their supervisors."""
        return [row for row in supervisor.table().values() if row.alive and self._is_ours(marks_of(row.pid))]

    def _is_ours(self, environ: Mapping[str, str]) -> bool:
        marks = (environ.get(name, "") for name in (process.MARK, process.SUPERVISOR_MARK))
        return environ.get("PIDS") == str(self.pids) or any(mark.startswith(self.mark) for mark in marks)

    async def flagged(self, name: str) -> None:
        """Wait until a program has made the file ``$FLAGS/name``."""
        await until((self.flags / name).exists, what=f"the flag {name}")

    def flag(self, name: str) -> None:
        (self.flags / name).touch()


def marks_of(pid: int) -> dict[str, str]:
    return process._environ(pid)


def alive(pid: int) -> bool:
    row = supervisor.entry(pid)
    return row is not None and row.alive


def parent(pid: int) -> int:
    row = supervisor.entry(pid)
    assert row is not None, f"process {pid} is gone"
    return row.parent


def output(run: Run) -> str:
    return (Path(run.folder) / process.LOG_FILE).read_text()


def play(story: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(story, 60))


async def until(condition: Any, timeout_s: float = 20, what: str = "the condition") -> Any:
    """``wait_until`` beside a running event loop."""
    return await asyncio.to_thread(wait_until, condition, timeout_s, what)


class Owner:
    """Another program that owns a run; ``then`` is what it does after the start, ``before`` before it.

    ``prefix`` is a command that executes it in another way, such as ``setpriv``.
    """

    def __init__(
        self,
        run: Run,
        then: str = "await process.gone()",
        before: str = "pass",
        prefix: Sequence[str] = (),
    ) -> None:
        fields = {name: getattr(run, name) for name in ("name", "argv", "cwd", "folder", "mark")}
        fields["env"] = dict(run.env)
        code = OWNER.replace("BEFORE", before).replace("THEN", then)
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, "-c", code, json.dumps(fields)], cwd=ROOT, stdout=subprocess.PIPE
        )

    def main_pid(self) -> int:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"the owner ended with {self.popen.wait()}"
        return int(line)

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()

    def close(self) -> None:
        if self.popen.poll() is None:
            self.kill()
        if self.popen.stdout is not None:
            self.popen.stdout.close()


def fresh_trees(folder: Path) -> Iterator[Trees]:
    """The fixture's body: after every test nothing may be left, not even a supervisor."""
    trees = Trees(folder)
    try:
        yield trees
        wait_until(lambda: not trees.left(), 10, "the end of all processes")
    finally:
        for row in trees.left():
            supervisor.send(row, signal.SIGKILL)


@pytest.fixture
def trees(tmp_path: Path) -> Iterator[Trees]:
    yield from fresh_trees(tmp_path)
