"""The one way to run a command: ``await start(Run(...))``, always under a supervisor; and the sweep of strays.

The owner is any asyncio program. It installs no signal handlers, never forks itself (it may be full of threads) and
leaves no zombie. When it dies, in whatever way, each supervisor sees it and kills its tree; when a *supervisor* is
killed, ``Process`` sees that and sweeps up by the mark that every process of a tree carries in its environment; and
when both are killed, somebody else calls ``sweep``.

Processes of an attempt are known by ``RAYCONTROL_ATTEMPT_ID`` and, where this machine allows it, by the name of their
cgroup; a supervisor is known by ``RAYCONTROL_SUPERVISOR`` with the same value. Where there are no such cgroups, a process
that has cleared its environment, left its session and lost its parent *and* its supervisor cannot be told from a
stranger's: only that one escapes.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import json
import logging
import marshal
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from raycontrol import supervisor
from raycontrol.plan import Mount
from raycontrol.supervisor import GROUP, LOG_FILE, MARK, STATUS_FILE, SUPERVISOR_MARK, Entry

__all__ = [
    "LOG_FILE",
    "MARK",
    "STATUS_FILE",
    "Exit",
    "Process",
    "ProcessId",
    "Run",
    "marked",
    "read_status",
    "remove_groups",
    "start",
    "sweep",
    "sweep_all",
]

SWEEP_LIMIT_S = 10.0
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """One command to supervise.

    ``env`` is the whole environment (text; bytes that are no UTF-8 as surrogate escapes); the mark is added to it.
    The program is looked up in the ``PATH`` of ``env``, relative to ``cwd``. ``folder`` is the run's own: it is made
    if missing, and ``status.json`` and ``output.log`` (stdout and stderr, appended) are kept there.

    ``stdio``: open descriptors of the owner that become the main process's stdin, stdout and stderr, instead of
    /dev/null and ``output.log``, which is not made then. Once ``start`` has returned only the tree has them, if it
    began, and the owner, who closes its own.

    ``mounts`` are there for this run and what it starts (``mounts``). Each run makes its own. ``terminal``: stdin, which is
    one, controls the main process's session.

    ``through``: words such as ``sudo -n --`` through which the supervisor is executed, and with it the command. Then
    there are ``stdio``, of which stdin is not used and stderr is stdout, and ``folder`` is there already.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    folder: str
    mark: str
    stdio: tuple[int, int, int] | None = None
    mounts: tuple[Mount, ...] = ()
    terminal: bool = False
    through: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exit:
    """How a run's main process ended; ``at`` is when, in seconds since the epoch.

    One of ``code`` and ``signal`` is set, unless it could not be started for a reason that no shell has a code for.
    ``code`` is taken as it is: a shell says 137 when *its* child was killed. ``sender`` is ``raycontrol: <why>`` when
    we asked it to end (whatever the code is then) or sent the signal that ended it. ``oom``: the count of
    out-of-memory kills of this process's cgroup rose while it ran, so it or a neighbour was hit. ``error`` says why
    it could not be started (command not found: code 127, cannot be executed: 126) or how we lost sight of it.
    ``lost``: what watched over it could not begin, or went away; it is no fault of the command's.
    """

    code: int | None
    signal: int | None
    at: float
    sender: str | None = None
    oom: bool = False
    error: str | None = None
    lost: bool = False


@dataclass(frozen=True)
class ProcessId:
    """A process for good: pids come again, pid and start time (ticks since boot) do not."""

    pid: int
    start_time: int


async def start(run: Run) -> Process:
    """Start ``run`` and return when its program was executed, or could not be: then its ``Exit`` has an ``error``.

    Cancelling this call ends whatever it had started.
    """
    try:
        control, launcher = _spawn(run)
    except OSError as error:
        return await _stillborn(run, f"its supervisor could not be started: {error}")
    writer = None
    try:
        reader, writer = await asyncio.open_unix_connection(sock=control)
        writer.write(supervisor.frame(("run", _config(run))))
        await writer.drain()
        process = Process(run, reader, writer)
        await process._launched()
        return process
    except (OSError, EOFError) as error:
        _give_up(control, writer)
        return await _stillborn(run, f"its supervisor ended before the command began: {error}")
    except BaseException:
        _give_up(control, writer)
        with contextlib.suppress(PermissionError):  # another user's: that we have given up ends it
            launcher.kill()
        raise
    finally:
        launcher.wait()  # it had exited before we heard of the launch, or is dying


class Process:
    """A run under way. ``pid`` is its main process, also the id of that process's session and group.

    ``unsaved`` says, once the run is gone, why its outcome is not on disk (None: it is).
    """

    def __init__(
        self, run: Run, reader: asyncio.StreamReader | None = None, writer: asyncio.StreamWriter | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.run = run
        self.pid = 0
        self.unsaved: str | None = None
        self._start_time = 0
        self._reader = reader
        self._writer = writer
        self._broken: str | None = None
        self._ended: asyncio.Future[Exit] = loop.create_future()
        self._gone: asyncio.Future[Exit] = loop.create_future()

    async def wait(self) -> Exit:
        """The main process has ended; what it left behind may still be ending, and the outcome on its way to disk."""
        return await asyncio.shield(self._ended)

    async def gone(self) -> Exit:
        """Nothing of the tree is left, and the outcome is on disk (fsynced)."""
        return await asyncio.shield(self._gone)

    async def stop(self, grace_s: float, why: str) -> Exit:
        """Ask the tree to end, kill what is left after ``grace_s``, and return when it is gone.

        SIGTERM goes to the main process's group, once, and to processes that have lost their parent. When the main
        process ends the others keep the rest of the grace. Calling it again can shorten the grace, not lengthen it.
        """
        self._tell("stop", float(grace_s), why)
        return await self.gone()

    async def kill(self, why: str) -> Exit:
        """Kill the whole tree now, and return when it is gone."""
        return await self.stop(0, why)

    async def signal(self, number: int) -> None:
        """Send a signal to the main process's group, as a terminal would; nothing happens when it has ended."""
        self._tell("signal", int(number))

    async def _launched(self) -> None:
        match await self._receive():
            case ("started", pid, start_time):
                self.pid, self._start_time = pid, start_time
            case ("broken", description):
                raise OSError(description)
        task = asyncio.create_task(self._follow(), name=f"run {self.run.name} of {self.run.mark}")
        _following.add(task)
        task.add_done_callback(self._on_followed)

    async def _follow(self) -> None:
        try:
            await self._hear()
        except (OSError, EOFError):
            await self._clear()

    def _on_followed(self, task: asyncio.Task[None]) -> None:
        """Whoever waits hears of an end in any case; that our socket closes brings it about.

        No ``finally`` in the task: one that is cancelled before its first step would not come to it.
        """
        _following.discard(task)
        failure = "its owner stopped following it"
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("run %s of %s: following it failed", self.run.name, self.run.mark, exc_info=error)
            failure = f"its owner lost sight of it: {error!r}"
        if not self._gone.done():
            known = self._ended.result() if self._ended.done() else _lost(None, failure)
            self._finish(replace(known, error=known.error or failure))
        if self._writer is not None:
            self._writer.close()

    async def _hear(self) -> None:
        """Take in the supervisor's news until the tree is gone."""
        while not self._gone.done():
            match await self._receive():
                case ("ended", outcome):
                    self._ended.set_result(Exit(**outcome))
                case ("gone", unsaved):
                    self.unsaved = unsaved
                    self._finish(self._ended.result())
                case ("broken", description):
                    self._broken = description

    async def _clear(self) -> None:
        """The supervisor is dead and the tree has nobody: end it, and find or make the outcome."""
        error = f"its supervisor failed: {self._broken}" if self._broken else "its supervisor was killed"
        if not self._ended.done():
            known = await _aside(read_status, self.run.folder)
            self._ended.set_result(known or _lost(None if self._broken else 9, error))
        outcome = self._ended.result()
        log.warning("run %s of %s: %s; sweeping", self.run.name, self.run.mark, error)
        self.unsaved = await _aside(_bury, self.run, ProcessId(self.pid, self._start_time), outcome)
        self._finish(outcome)

    def _finish(self, outcome: Exit) -> None:
        if self.unsaved is not None:
            log.warning("run %s of %s: %s", self.run.name, self.run.mark, self.unsaved)
        if not self._ended.done():
            self._ended.set_result(outcome)
        self._gone.set_result(outcome)

    async def _receive(self) -> Any:
        assert self._reader is not None
        size = int.from_bytes(await self._reader.readexactly(4), "big")
        return marshal.loads(await self._reader.readexactly(size))

    def _tell(self, *command: object) -> None:
        if self._writer is not None and not self._gone.done():
            self._writer.write(supervisor.frame(command))


_following: set[asyncio.Task[None]] = set()  # the event loop itself keeps tasks by weak references only


def read_status(folder: str | Path) -> Exit | None:
    """The outcome that the run of this folder left on disk; None while it has none."""
    try:
        status = json.loads((Path(folder) / STATUS_FILE).read_bytes())
        return Exit(**{field.name: status[field.name] for field in fields(Exit) if field.name in status})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def marked(mark: str, *, prefix: bool = False, supervisors: bool = False) -> list[ProcessId]:
    """Living processes of attempt ``mark``, supervised or not; with ``supervisors``, its supervisors too.

    With ``prefix``, those of all attempts whose mark starts with it. This and the sweeps read the whole process
    table and can block: call them in a thread. ``OSError`` when the table cannot be read.
    """
    processes = supervisor.table()
    if not processes:
        raise OSError("the process table cannot be read")

    def is_marked(row: Entry) -> bool:
        environ = _environ(row.pid)
        marks = _marks(row.pid, environ)
        if supervisors and SUPERVISOR_MARK in environ:
            marks.add(environ[SUPERVISOR_MARK])
        return any(found.startswith(mark) if prefix else found == mark for found in marks)

    return [ProcessId(row.pid, row.start_time) for row in processes.values() if row.alive and is_marked(row)]


def sweep(mark: str, *, prefix: bool = False) -> int:
    """Kill the processes of attempt ``mark`` that have no living supervisor; return how many were killed.

    With ``prefix``, those of all attempts whose mark starts with it. Unmarked descendants of such processes, and
    unmarked ones in sessions that such processes led, go with them. Processes under a living supervisor of their
    attempt are left alone (it ends them when its owner dies), and so are this process and those above it. Returns
    when nothing is left to kill, or after 10 seconds.
    """
    return _sweep(lambda candidate: candidate.startswith(mark) if prefix else candidate == mark, None)


def sweep_all(marks: Collection[str]) -> int:
    """``sweep`` for many attempts, in the time of one."""
    return _sweep(lambda candidate: candidate in marks, None)


def remove_groups() -> None:
    """Remove the cgroups of attempts that have no processes, which those leave that are killed with their supervisors."""
    above = supervisor.own_group()
    for folder in Path(above).glob(f"{GROUP}*") if above is not None else ():
        supervisor.remove_group(folder.name)


# Starting.


def _spawn(run: Run) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the supervisor's first process, which forks the second and exits."""
    control, remote = socket.socketpair()
    try:
        control.setblocking(False)
        remote.setblocking(True)
        # Nothing of the run is on this command line or in this environment, where others could read it.
        env = {SUPERVISOR_MARK: run.mark}
        if "LD_LIBRARY_PATH" in os.environ:  # some installations of Python find their own library by it
            env["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        if run.through:
            return control, _spawn_through(run, remote, env)
        with remote, _above_the_standard_ones(run.stdio or ()) as stdio:
            numbers = (remote.fileno(), os.getpid(), *stdio)
            launcher = subprocess.Popen(
                [sys.executable, "-I", "-S", _program(), *map(str, numbers)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[remote.fileno(), *stdio],
                start_new_session=True,
            )
    except BaseException:
        control.close()
        raise
    return control, launcher


def _spawn_through(run: Run, remote: socket.socket, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start it through a program that closes all descriptors but the standard ones, and changes the user."""
    assert run.stdio is not None, "a log in the run's folder would be another user's"
    with remote:
        return subprocess.Popen(
            [*run.through, sys.executable, "-I", "-S", _program(), "sudo"],
            env={**env, "PATH": os.defpath},
            stdin=remote.fileno(),
            stdout=run.stdio[1],
            stderr=run.stdio[1],
            start_new_session=True,
        )


@contextlib.contextmanager
def _above_the_standard_ones(descriptors: Sequence[int]) -> Iterator[list[int]]:
    """Copies that are 3 or more and all different: a program's own 0, 1 and 2 are set before others are passed."""
    with contextlib.ExitStack() as copies:
        numbers = []
        for descriptor in descriptors:
            numbers.append(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3))
            copies.callback(os.close, numbers[-1])
        yield numbers


def _give_up(control: socket.socket, writer: asyncio.StreamWriter | None) -> None:
    """Close our end, which is the order to kill everything."""
    if writer is None:
        control.close()
    else:
        writer.transport.abort()


async def _stillborn(run: Run, error: str) -> Process:
    """A run that ended before it began and has no supervisor to keep its outcome."""
    process = Process(run)
    outcome = _lost(None, error)
    await _aside(sweep, run.mark)
    process.unsaved = await _aside(_keep, run, 0, outcome)
    process._finish(outcome)
    return process


def _lost(signal: int | None, error: str) -> Exit:
    return Exit(None, signal, time.time(), error=error, lost=True)


async def _aside(work: Callable[..., T], *arguments: Any) -> T:
    """Run what may block in a thread or, where the system gives us no more threads, right here."""
    try:
        return await asyncio.to_thread(work, *arguments)
    except RuntimeError:
        return work(*arguments)


@functools.cache
def _program() -> str:
    """The supervisor's compiled file if it is that of its source (Python would compile a script at every start)."""
    source = supervisor.__file__
    cached = supervisor.__spec__.cached if supervisor.__spec__ else None
    try:
        header = Path(cached or "").read_bytes()[:16]
        state = Path(source).stat()
    except OSError:
        return source
    expected = b"".join(
        number.to_bytes(4, "little")
        for number in (0, int(state.st_mtime) & 0xFFFFFFFF, state.st_size & 0xFFFFFFFF)
    )
    return cached if cached and header[4:] == expected else source


def _config(run: Run) -> dict[str, Any]:
    env = {**run.env, MARK: run.mark}
    env.pop(SUPERVISOR_MARK, None)
    return {
        "name": run.name,
        "mark": run.mark,
        "argv": [_bytes(word) for word in run.argv],
        "env": {_bytes(name): _bytes(value) for name, value in env.items()},
        "cwd": _bytes(run.cwd),
        "folder": _bytes(run.folder),
        "terminal": run.terminal,
        "package": os.fsencode(Path(supervisor.__file__).parent),
        "mounts": [(_bytes(mount.source), _bytes(mount.target), mount.read_only) for mount in run.mounts],
    }


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


# Ending what has no supervisor.


def _bury(run: Run, main: ProcessId, outcome: Exit) -> str | None:
    """Sweep after a supervisor's death, then make sure of the outcome on disk; say why, if it is not there."""
    _sweep(lambda mark: mark == run.mark, main)
    supervisor.remove_group(GROUP + run.mark)
    return None if read_status(run.folder) is not None else _keep(run, main.pid, outcome)


def _keep(run: Run, pid: int, outcome: Exit) -> str | None:
    try:
        Path(run.folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{STATUS_FILE} could not be written: {error}"
    status = {"run": run.name, "mark": run.mark, "pid": pid, "started_at": None, **asdict(outcome)}
    error_number = supervisor.save_status(_bytes(run.folder), status)
    return f"{STATUS_FILE} could not be written: {os.strerror(error_number)}" if error_number else None


def _sweep(wanted: Callable[[str], bool], main: ProcessId | None) -> int:
    killed: set[ProcessId] = set()
    deadline = time.monotonic() + SWEEP_LIMIT_S
    while strays := _strays(wanted, main):
        killed |= {ProcessId(stray.pid, stray.start_time) for stray in strays if supervisor.send(stray, 9)}
        if time.monotonic() > deadline:
            log.warning("processes that do not die: %s", ", ".join(str(stray.pid) for stray in strays))
            break
        time.sleep(0.01)
    return len(killed)


def _strays(wanted: Callable[[str], bool], main: ProcessId | None) -> list[Entry]:
    """What to kill now: marked processes without a supervisor, and what is theirs without carrying a mark.

    ``main`` is the main process of a run whose supervisor is known to be dead; its session is the run's.
    """
    processes = supervisor.table()
    living = [row for row in processes.values() if row.alive]
    environs = {row.pid: _environ(row.pid) for row in living}
    ours = _lineage(processes, os.getpid())

    def is_stray(row: Entry) -> bool:
        marks = _marks(row.pid, environs[row.pid])
        return any(wanted(mark) and not _supervised(row.pid, mark) for mark in marks)

    strays = {row.pid: row for row in living if row.pid not in ours and is_stray(row)}
    sessions = {row.session for row in strays.values() if row.session in strays}
    if main is not None and main.pid:
        leader = processes.get(main.pid)
        if leader is None or leader.start_time == main.start_time:
            sessions.add(main.pid)
    below = {
        child.pid for row in list(strays.values()) for child in supervisor.descendants(processes, row.pid)
    }
    for row in living:
        theirs = row.session in sessions or row.pid in below
        unmarked = MARK not in environs[row.pid] and SUPERVISOR_MARK not in environs[row.pid]
        if theirs and unmarked and row.pid not in ours and not _supervised(row.pid, None):
            strays[row.pid] = row
    return list(strays.values())


def _lineage(processes: Mapping[int, Entry], pid: int) -> set[int]:
    """``pid`` and those above it."""
    found: set[int] = set()
    while pid in processes and pid not in found:
        found.add(pid)
        pid = processes[pid].parent
    return found


def _supervised(pid: int, mark: str | None) -> bool:
    """Whether a living supervisor (of ``mark``, or of any) is above ``pid``.

    Read anew from the process upwards, because in a table read earlier a process may have changed its parent. When
    it changes under our eyes too, we look again; a process that we cannot settle is left alone.
    """
    for _ in range(20):
        answer = _look_for_supervisor(pid, mark)
        if answer is not None:
            return answer
    return True


def _look_for_supervisor(pid: int, mark: str | None) -> bool | None:
    row = supervisor.entry(pid)
    if row is None:
        return True
    while row.parent > 0:
        above = _environ(row.parent).get(SUPERVISOR_MARK)
        if above is not None and mark in (None, above):
            return True
        row = supervisor.entry(row.parent)
        if row is None:
            return None
    return False


def _marks(pid: int, environ: Mapping[str, str]) -> set[str]:
    """The attempts that a process belongs to, by its environment and its cgroup: several, where one has been started in another."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        lines = []
    places = [line.removeprefix("0::").split("/") for line in lines if line.startswith("0::")]
    marks = {name.removeprefix(GROUP) for place in places for name in place if name.startswith(GROUP)}
    return marks | ({environ[MARK]} if MARK in environ else set())


def _environ(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty for zombies and those we may not look into."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}  # any other fault (no file handle left) must not pass for a process without a supervisor
    pairs = (pair.partition("=") for pair in text.decode("utf-8", "surrogateescape").split("\0"))
    return {name: value for name, _, value in pairs}
