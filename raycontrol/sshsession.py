"""One session of the job-private ssh: a channel on one side, a supervised process on the other.

Bytes go through callbacks of the event loop: what the client sends is written to the command's stdin as it comes, and
what cannot be written holds the client back; the two outputs are read when the channel has room. Nothing is answered
before both outputs have ended and all of what they held is in the channel. The stream classes of asyncssh are not used
for this: they take a lost connection for the end of the input, which a command would take for the end of its data.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import asyncssh
from asyncssh.stream import SSHServerStreamSession

from raycontrol.process import Exit, Process
from raycontrol.specfaults import is_secret_name
from raycontrol.sshpipes import STEP_BYTES, Inlet, Outlet, open_pipes
from raycontrol.standin import INSIDE

WORLD = "RAYCONTROL_WORLD"
LATE_EXIT_S = 0.05
LAST_WORDS_S = 1.0
SFTP_VERSION = 3  # what OpenSSH speaks
FAILED = 255  # what ssh itself exits with when it, and not the command, has failed
DAEMONS = ("prted", "orted", "hydra_pmi_proxy", "hydra_bstrap_proxy")
NO_SHELL = "raycontrol ssh: this endpoint runs commands only, without a terminal; give one: ssh HOST COMMAND [ARGUMENT...]"
log = logging.getLogger(__name__)

OnBroken = Callable[[str, str], None]
"""``on_broken(world, text)``: what came from an MPI launcher of that world ended abnormally."""
StartCommand = Callable[[str, Mapping[str, str], tuple[int, int, int]], Awaitable[Process]]


@dataclass
class Service:
    """What the sessions of one endpoint share. ``closing`` says why no new command is taken; None: they are."""

    start: StartCommand
    on_broken: OnBroken
    cwd: str = "/"
    closing: str | None = None
    sessions: set[Session] = field(default_factory=set)


class Session(asyncssh.SSHServerSession[bytes]):
    """One channel: a command, or the file service of ``scp`` and ``sftp``. ``over`` is set when nothing of it is left.

    When the channel is lost, in whatever way, the command's whole tree is killed.
    """

    def __init__(self, service: Service, peer: str) -> None:
        self.over = asyncio.Event()
        self._service = service
        self._peer = peer
        self._channel: Any = None
        self._files: SSHServerStreamSession[bytes] | None = None
        self._stdin: Inlet | None = None
        self._outputs: tuple[Outlet, ...] = ()
        self._process: Process | None = None
        self._killed: str | None = None
        self._lost = False
        self._excused = False
        self._answered = False
        self._eof_sent = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def kill(self, why: str) -> None:
        """End what this session runs, at once; ``over`` tells when that is done."""
        self._killed = self._killed or why
        if self._process is not None:
            self._spawn(self._kill(self._process))
        elif self._files is not None:
            self._channel.abort()
            self._finish()

    # What asyncssh asks and tells.

    def connection_made(self, channel: Any) -> None:
        self._channel = channel
        channel.set_write_buffer_limits(high=STEP_BYTES)

    def shell_requested(self) -> bool:
        return True  # it gets an answer that says more than a refusal

    def exec_requested(self, command: str) -> bool:
        return True

    def subsystem_requested(self, subsystem: str) -> bool:
        return subsystem == "sftp"

    def session_started(self) -> None:
        command = self._channel.get_command()
        if self._service.closing is not None:
            self._refuse(f"raycontrol ssh: no new commands: {self._service.closing}", FAILED)
        elif self._channel.get_subsystem() is not None:
            self._serve_files()
        elif command is None:
            self._refuse(NO_SHELL, 1)
        else:
            self._run(command)

    def data_received(self, data: bytes, datatype: int | None) -> None:
        if self._files is not None:
            self._files.data_received(data, datatype)
        elif self._stdin is not None:
            self._stdin.write(data)

    def eof_received(self) -> bool:
        """The client has no more input; True: it still wants our output."""
        if self._files is not None:
            return bool(self._files.eof_received())
        if self._stdin is not None:
            self._stdin.write_eof()
        return True

    def pause_writing(self) -> None:
        if self._files is not None:
            self._files.pause_writing()
        for output in self._outputs:
            output.pause()

    def resume_writing(self) -> None:
        if self._files is not None:
            self._files.resume_writing()
        for output in self._outputs:
            output.resume()

    def signal_received(self, signal: str) -> None:
        self._spawn(self._pass_on(signal))

    def break_received(self, msec: int) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The channel is closed: after our answer, or because the client or the way to it is gone."""
        if self._files is not None:
            self._files.connection_lost(exc)
            self._finish()
        elif not self._answered and not self._lost:
            self._lost = True
            self._excused = self._service.closing is not None
            self.pause_writing()
            self.kill(f"the ssh connection from {self._peer} was lost")

    # One command.

    def _refuse(self, text: str, code: int) -> None:
        self._answered = True
        self._channel.write_stderr(text.encode() + b"\n")
        self._channel.exit(code)

    def _run(self, command: str) -> None:
        """Open the pipes, so that input that comes before the command runs has a place, and start it."""
        try:
            (stdin, stdin_ours), (stdout_ours, stdout), (stderr_ours, stderr) = open_pipes(3)
        except OSError as error:
            self._refuse(f"raycontrol ssh: the command could not be started: {error.strerror}", FAILED)
            return
        self._service.sessions.add(self)
        self._stdin = Inlet(stdin_ours, self._channel, self._is_closed)
        self._outputs = (
            Outlet(stdout_ours, self._channel.write),
            Outlet(stderr_ours, self._channel.write_stderr),
        )
        self._spawn(self._live(command, (stdin, stdout, stderr)))

    async def _live(self, command: str, theirs: tuple[int, int, int]) -> None:
        environment = _accepted(self._channel.get_environment())
        try:
            outcome = await self._carry(command, environment, theirs)
            excused = self._excused if self._lost else self._service.closing is not None
            if WORLD in environment and not excused and (fault := self._fault(command, outcome)):
                self._service.on_broken(environment[WORLD], fault)
            self._answer(outcome)
            if self._process is not None:
                await self._process.gone()
        except Exception:
            log.exception("a command of the ssh endpoint failed")
            self._answer(Exit(None, None, 0.0, error="the endpoint failed; its log says how"))
        finally:
            self._finish()

    async def _carry(
        self, command: str, environment: Mapping[str, str], theirs: tuple[int, int, int]
    ) -> Exit:
        """The command's whole life; both outputs have ended when its outcome is returned."""
        try:
            process = await self._service.start(command, environment, theirs)
        except Exception as error:
            log.exception("a command of the ssh endpoint could not be started")
            return Exit(None, None, 0.0, error=f"the command could not be started: {error}")
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self._process = process
        if self._killed is not None:
            self._spawn(self._kill(process))
        self._spawn(self._settle(process))
        for output in self._outputs:
            await output.ended.wait()
        ending = asyncio.ensure_future(process.wait())
        await asyncio.wait({ending}, timeout=LATE_EXIT_S)
        if not ending.done() and not self._lost:
            self._eof_sent = True
            self._channel.write_eof()  # it has closed its outputs and goes on
        return await ending

    async def _kill(self, process: Process) -> None:
        """Our ends stay open until it is dead, so that it does not end in a way of its own."""
        await process.kill(self._killed or "")
        if not self._lost:
            await asyncio.wait(
                [asyncio.ensure_future(output.ended.wait()) for output in self._outputs], timeout=LAST_WORDS_S
            )
        for output in self._outputs:
            output.close()

    async def _settle(self, process: Process) -> None:
        """When nothing of the tree is left, no output comes, whoever else may hold the pipes."""
        await process.gone()
        for output in self._outputs:
            output.nothing_more()

    async def _pass_on(self, name: str) -> None:
        number = getattr(signal, f"SIG{name}", None)
        if self._process is not None and isinstance(number, signal.Signals):
            await self._process.signal(number)

    def _answer(self, outcome: Exit) -> None:
        if self._answered or self._lost:
            return
        self._answered = True
        for text in filter(None, (outcome.error, self._killed)):
            try:
                self._channel.write_stderr(f"raycontrol ssh: {text}\n".encode("utf-8", "backslashreplace"))
            except OSError:
                pass  # the end of the outputs was said already
        if outcome.code is None and outcome.signal is not None:
            self._channel.exit_with_signal(_signal_name(outcome.signal).removeprefix("SIG"))
        else:
            self._channel.exit(FAILED if outcome.code is None else outcome.code)

    def _is_closed(self) -> bool:
        return self._channel.is_closing() and not self._eof_sent

    def _fault(self, command: str, outcome: Exit) -> str | None:
        """What was wrong with the end of an MPI launcher's command, if anything was.

        One that ended well by itself at the moment in which its client left is not at fault.
        """
        name = program_name(command)
        if outcome.code == 0 and outcome.error is None:
            return None
        if self._lost:
            return f"the ssh connection from {self._peer} was lost while `{name} …` ran"
        if outcome.signal is not None:
            return f"an MPI daemon ({name} …) was ended by {_signal_name(outcome.signal)} while its world ran"
        if outcome.code is None:
            return f"an MPI daemon ({name} …) could not be started"
        return f"an MPI daemon ({name} …) ended with exit code {outcome.code}"

    # Files.

    def _serve_files(self) -> None:
        """Hand the channel to asyncssh's own file service, which is a session of its own kind."""
        self._service.sessions.add(self)
        self._files = SSHServerStreamSession(None, self._file_server, SFTP_VERSION)
        self._files.connection_made(self._channel)
        self._files.session_started()

    def _file_server(self, channel: Any) -> asyncssh.SFTPServer:
        return Files(channel, self._service.cwd)

    # Ends.

    def _finish(self) -> None:
        if self._stdin is not None:
            self._stdin.close()
        for output in self._outputs:
            output.close()
        self._service.sessions.discard(self)
        self.over.set()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Files(asyncssh.SFTPServer):
    """The file service: this user's files, relative paths from ``cwd``."""

    def __init__(self, channel: Any, cwd: str) -> None:
        super().__init__(channel)
        self._cwd = os.fsencode(cwd)

    def map_path(self, path: bytes) -> bytes:
        return os.path.join(self._cwd, path)  # noqa: PTH118 (bytes)

    def exit(self) -> None:
        self.channel.exit(0)  # asyncssh only closes the channel, which `scp` takes for a failure


def program_name(command: str) -> str:
    """The program that a command line runs, without its folder and its arguments, which may hold secrets."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        words = [PurePath(word).name for word in lexer if not re.match(r"[A-Za-z_]\w*=|[();<>|&]", word)]
    except ValueError:  # quotes that do not match
        return "a command"
    for word in [*(word for word in words if word in DAEMONS), *words[:1]]:
        if re.fullmatch(r"[\w.+-]+", word):
            return word
    return "a command"


def _accepted(environment: Mapping[str, str]) -> dict[str, str]:
    """What a client may set: beside what it belongs to and the locale, secrets, which must not be on a command line.

    All else is the instance's own.
    """
    return {
        name: value
        for name, value in environment.items()
        if name in (WORLD, INSIDE, "LANG") or name.startswith("LC_") or is_secret_name(name)
    }


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
