"""The job-private ssh endpoint of one instance: it runs commands for those who hold a key of the job.

The keys are made where they are used and stay there; only the public halves travel. Public keys only, any user name
(everything runs as the user of this process), commands and files only: no terminal, no shell without a command, no
forwarding of ports, of X11 or of an agent. What a session does is in ``sshsession``.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh

from raycontrol import disk
from raycontrol.sshsession import OnBroken, Service, Session, StartCommand

__all__ = ["HOST_KEY", "LOGIN_KEY", "Endpoint", "Keys", "StartCommand", "make_keys"]

LOGIN_KEY = "login_key"
HOST_KEY = "host_key"
BACKLOG = 1024
LOGIN_LIMIT_S = 120
SILENCE_S = 30.0
GOODBYE_S = 1.0
KEY_EXCHANGE = ["curve25519-sha256", "curve25519-sha256@libssh.org", "ecdh-sha2-nistp256"]
CIPHERS = ["aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "chacha20-poly1305@openssh.com", "aes128-ctr"]
# What asyncssh would take from the environment or the system by itself is named here, so that nothing is.
RULES: dict[str, Any] = {
    "config": (),
    "public_key_auth": True,
    "password_auth": False,
    "kbdint_auth": False,
    "host_based_auth": False,
    "gss_host": None,
    "agent_forwarding": False,
    "x11_forwarding": False,
    "allow_pty": False,
    "line_editor": False,
    "encoding": None,
    "compression_algs": None,
    "kex_algs": KEY_EXCHANGE,
    "encryption_algs": CIPHERS,
    "signature_algs": ["ssh-ed25519"],
    "login_timeout": LOGIN_LIMIT_S,
}


@dataclass(frozen=True)
class Keys:
    """The public halves, as one-line OpenSSH text (``ssh-ed25519 AAAA… comment``)."""

    login: str
    host: str


def make_keys(folder: Path) -> Keys:
    """Make ``login_key`` and ``host_key`` in ``folder``, which nobody else can look into, unless they are there."""
    disk.private_folder(folder)
    return Keys(login=_public(_key(folder / LOGIN_KEY)), host=_public(_key(folder / HOST_KEY)))


class Endpoint:
    """Listens from ``open`` on, lets holders of the authorised keys in from ``serve`` on, until ``drain`` or ``close``.

    ``start`` starts a command; ``on_broken`` gets the number of the world and a text for people, once for each command of an MPI launcher's (it had
    ``RAYCONTROL_WORLD`` in its environment) that ended in another way than with exit code 0 while we were not closing.
    A peer that is silent for ``silence_s`` seconds is gone.
    """

    def __init__(
        self,
        keys_folder: Path,
        start: StartCommand,
        on_broken: OnBroken,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._host_key = keys_folder / HOST_KEY
        self._service = Service(start, on_broken)
        self._silence_s = silence_s
        self._authorized: frozenset[bytes] = frozenset()
        self._acceptor: asyncssh.SSHAcceptor | None = None
        self._connections: set[asyncssh.SSHServerConnection] = set()

    async def open(self, ip: str) -> int:
        """Listen on a free port of ``ip`` and return it. Nobody is let in yet. Raises ``OSError``."""
        # At its usual level asyncssh logs every command line, and there may be secrets on one.
        logging.getLogger("asyncssh").setLevel(logging.WARNING)
        self._acceptor = await asyncssh.listen(
            ip,
            0,
            server_factory=lambda: Door(self._service, self._connections, self._is_authorized),
            server_host_keys=[_key(self._host_key)],
            backlog=BACKLOG,
            keepalive_interval=self._silence_s / 3,
            keepalive_count_max=2,
            **RULES,
        )
        return self._acceptor.get_port()

    def serve(self, authorized: Sequence[str], cwd: str) -> None:
        """From now on let these public keys in and run their commands, in ``cwd`` where paths are relative."""
        self._service.cwd = cwd
        self._authorized = frozenset(asyncssh.import_public_key(text).public_data for text in authorized)

    @property
    def sessions(self) -> int:
        """Commands and file transfers under way."""
        return len(self._service.sessions)

    async def drain(self, limit_s: float, why: str) -> None:
        """Take no new command, kill after ``limit_s`` what is still under way, and return when all of it is gone."""
        self._service.closing = self._service.closing or why
        ends = [asyncio.ensure_future(session.over.wait()) for session in self._service.sessions]
        if ends:
            await asyncio.wait(ends, timeout=limit_s)
        sessions = tuple(self._service.sessions)
        for session in sessions:
            session.kill(why)
        for session in sessions:
            await session.over.wait()

    async def close(self) -> None:
        """Kill what runs, let nobody in any more, and return when nothing of it is left."""
        if self._acceptor is not None:
            self._acceptor.close()
        await self.drain(0, "the job's ssh endpoint closes")
        # Clients that have their answers leave by themselves; to close a connection is to drop what is on its way.
        ends = [asyncio.ensure_future(connection.wait_closed()) for connection in self._connections]
        if ends:
            await asyncio.wait(ends, timeout=GOODBYE_S)
        for connection in tuple(self._connections):
            connection.abort()
        for end in ends:
            await end

    def _is_authorized(self, key: bytes) -> bool:
        return key in self._authorized


class Door(asyncssh.SSHServer):
    """One connection: who may log in, and what a session is."""

    def __init__(
        self,
        service: Service,
        connections: set[asyncssh.SSHServerConnection],
        is_authorized: Callable[[bytes], bool],
    ) -> None:
        self._service = service
        self._connections = connections
        self._is_authorized = is_authorized
        self._connection: asyncssh.SSHServerConnection | None = None
        self._peer = "an unknown host"

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        self._connections.add(conn)
        if address := conn.get_extra_info("peername"):
            self._peer = address[0]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._connection is not None:
            self._connections.discard(self._connection)

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return self._is_authorized(key.public_data)

    def session_requested(self) -> Session:
        return Session(self._service, self._peer)


def _key(file: Path) -> asyncssh.SSHKey:
    """The private key of this file, made if there is none, readable for nobody else."""
    try:
        return asyncssh.read_private_key(file)
    except FileNotFoundError:
        key = asyncssh.generate_private_key("ssh-ed25519", comment=f"raycontrol {file.name}")
    new = file.with_name(f"{file.name}.new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as text:
        text.write(key.export_private_key())
    new.rename(file)
    return key


def _public(key: asyncssh.SSHKey) -> str:
    return key.export_public_key().decode().strip()
