"""An ssh client for nodes without one: ``python -I -m raycontrol.sshclient PRIVATE [SSH ARGUMENT...]``.

It knows the hosts of one job and nothing else: ``PRIVATE/ssh/hosts.json`` names them, each with its address, port and
host key, which must be the one that answers; it logs in with ``PRIVATE/ssh/login_key``. It takes the options that MPI
launchers, horovodrun and rsync give to ``ssh``. The exit code is the command's; 255 is for everything else, a signal
included, as with ssh.

A signal that ends this program closes the connection, and the other side ends the command.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import asyncssh

from raycontrol.standin import INSIDE

T = TypeVar("T")
FAILED = 255
STEP_BYTES = 256 * 1024
CONNECT_LIMIT_S = 30
KEEPALIVE_S = 10
FLAGS = "46AaCgKkMnqTtvXxYy"  # without a value; all but n mean nothing here
VALUES = "BbceFIilmoOPpSU"  # with a value; all but l and o mean nothing here
USAGE = "usage: ssh [OPTION...] [USER@]HOST [COMMAND [ARGUMENT...]]"


class Refused(Exception):
    """The call or the connection cannot be; the text is for people."""


@dataclass
class Call:
    """What the user asked for. ``command``: as ssh does, the words with spaces between them; None: no command."""

    host: str = ""
    user: str | None = None
    command: str | None = None
    no_input: bool = False
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Host:
    """A row of ``hosts.json``."""

    ip: str
    port: int
    alias: str
    host_key: str


def main() -> NoReturn:
    try:
        private = Path(sys.argv[1])
        call = parse(sys.argv[2:])
        host = find(private, call.host)
        code = run(private, call, host)
    except Refused as error:
        write_all(2, f"ssh: {error}\n".encode(errors="backslashreplace"))
        code = FAILED
    os._exit(code)  # a thread may be waiting for input that never comes


def parse(words: Sequence[str]) -> Call:
    """Read ssh's command line: options, the host, options again, the command."""
    call = Call()
    rest = _take_options(call, list(words))
    if not rest:
        raise Refused(USAGE)
    user, at, call.host = rest.pop(0).rpartition("@")
    if at:
        call.user = user
    rest = _take_options(call, rest)
    call.command = " ".join(rest) if rest else None
    return call


def find(private: Path, name: str) -> Host:
    """The host of the job that has this name."""
    file = private / "ssh" / "hosts.json"
    try:
        rows = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise Refused(f"the job's table of hosts cannot be read: {error}") from error
    row = rows.get(name) or rows.get(name.lower())
    if row is None:
        known = ", ".join(sorted({row["alias"] for row in rows.values()}))
        raise Refused(
            f"{name} is not a host of this job (they are {known}), and there is no ssh client here for others"
        )
    return Host(**{column: row[column] for column in ("ip", "port", "alias", "host_key")})


def run(private: Path, call: Call, host: Host) -> int:
    """Run the command to its end, and return the exit code for this program."""
    return asyncio.new_event_loop().run_until_complete(_run(private, call, host))


# The command line.


def _take_options(call: Call, words: list[str]) -> list[str]:
    """Take the options that ``words`` begin with, and return what comes after them."""
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        _take_option(call, word[1:], words)
    return words


def _take_option(call: Call, letters: str, words: list[str]) -> None:
    """One word of options: letters without a value, then perhaps one with it, which may be the next word."""
    for place, letter in enumerate(letters):
        if letter in FLAGS:
            call.no_input = call.no_input or letter == "n"
            continue
        if letter not in VALUES:
            raise Refused(
                f"option -{letter} is not known to raycontrol's own client; install OpenSSH's for it"
            )
        value = letters[place + 1 :]
        if not value and not words:
            raise Refused(f"option -{letter} needs a value")
        _set(call, letter, value or words.pop(0))
        return


def _set(call: Call, letter: str, value: str) -> None:
    if letter == "l":
        call.user = value
    elif letter == "o":
        option = re.match(r"\s*setenv(?:\s*=\s*|\s+)(.*)", value, re.IGNORECASE | re.DOTALL)
        if option:
            call.environment |= dict(_pairs(option[1]))


def _pairs(text: str) -> list[tuple[str, str]]:
    try:
        pairs = [word.partition("=") for word in shlex.split(text)]
    except ValueError as error:
        raise Refused(f"option SetEnv cannot be read: {error}") from error
    return [(name, value) for name, _, value in pairs]


# The connection.


async def _run(private: Path, call: Call, host: Host) -> int:
    task = asyncio.ensure_future(_converse(private, call, host))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return FAILED


async def _converse(private: Path, call: Call, host: Host) -> int:
    try:
        connection = await _connect(private, call, host)
    except (OSError, asyncssh.Error) as error:
        raise Refused(f"no connection to {host.alias} ({host.ip} port {host.port}): {error}") from error
    try:
        return await _carry(connection, call)
    except (OSError, asyncssh.Error) as error:
        raise Refused(f"the connection to {host.alias} ({host.ip}) failed: {error}") from error
    finally:
        connection.close()


async def _connect(private: Path, call: Call, host: Host) -> asyncssh.SSHClientConnection:
    return await asyncssh.connect(
        host.ip,
        host.port,
        username=call.user or "raycontrol",
        client_keys=[str(private / "ssh" / "login_key")],
        known_hosts=([asyncssh.import_public_key(host.host_key)], [], []),
        config=None,
        agent_path=None,
        preferred_auth="publickey",
        gss_host=None,
        compression_algs=None,
        kex_algs=["curve25519-sha256", "ecdh-sha2-nistp256"],
        encryption_algs=["aes128-gcm@openssh.com", "aes256-gcm@openssh.com"],
        connect_timeout=CONNECT_LIMIT_S,
        keepalive_interval=KEEPALIVE_S,
        keepalive_count_max=2,
    )


async def _carry(connection: asyncssh.SSHClientConnection, call: Call) -> int:
    """Carry the three streams; the command is over when both outputs have ended and the channel is closed."""
    stdin, stdout, stderr = await connection.open_session(
        call.command, env=call.environment, send_env=(INSIDE,), encoding=None, request_pty=False
    )
    channel = cast("asyncssh.SSHClientChannel[bytes]", stdin.channel)
    feeding = asyncio.ensure_future(_feed(stdin, os.devnull if call.no_input else None))
    await asyncio.gather(_take(stdout, 1), _take(stderr, 2))
    await channel.wait_closed()
    feeding.cancel()
    status = channel.get_exit_status()
    if status is None and channel.get_exit_signal() is None:
        raise ConnectionError("it ended before the command did")
    return FAILED if status is None or status < 0 else status


async def _feed(stdin: asyncssh.SSHWriter[bytes], path: str | None) -> None:
    """Our stdin to the command's, until its end or until the command takes no more."""
    descriptor = 0 if path is None else os.open(path, os.O_RDONLY)
    try:
        while data := await _in_thread(read_some, descriptor):
            stdin.write(data)
            await stdin.drain()
    except OSError:
        pass  # ours is not open, or the command has ended
    if not stdin.is_closing():
        stdin.write_eof()


async def _take(reader: asyncssh.SSHReader[bytes], descriptor: int) -> None:
    while data := await reader.read(STEP_BYTES):
        try:
            await _in_thread(write_all, descriptor, data)
        except OSError as error:
            raise Refused(f"output cannot be written: {error.strerror}") from error


async def _in_thread(work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, work, *arguments)


# Streams that somebody else may have made non-blocking.


def read_some(descriptor: int) -> bytes:
    while True:
        try:
            return os.read(descriptor, STEP_BYTES)
        except BlockingIOError:
            select.select([descriptor], [], [])


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


if __name__ == "__main__":
    main()
