"""A real ssh endpoint on this machine for the tests, with the files that its clients need."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import threading
import uuid
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from raycontrol import process, sshd, supervisor
from raycontrol.process import Process, Run
from tests.support import wait_until

T = TypeVar("T")
IP = "127.0.0.1"

CONFIG = """
Host *
  HostName {ip}
  Port {port}
  User anybody
  IdentityFile {folder}/ssh/login_key
  IdentitiesOnly yes
  IdentityAgent none
  BatchMode yes
  UserKnownHostsFile {folder}/ssh/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  Ciphers aes128-gcm@openssh.com
  LogLevel {log_level}
"""


class Site:
    """An endpoint in an event loop of its own thread. ``folder`` is the instance's PRIVATE, ``code`` its cwd.

    Commands see ``$FLAGS``, a folder for files that say how far they are; ``broken`` is what the endpoint reported.
    """

    def __init__(self, folder: Path, silence_s: float = 30.0) -> None:
        self.folder = folder
        self.code = folder / "code"
        self.flags = folder / "flags"
        for made in (self.code, self.flags):
            made.mkdir(parents=True)
        self.mark = f"test-{uuid.uuid4().hex}.0"
        self.broken: list[str] = []
        self.seen: list[Mapping[str, str]] = []
        self._numbers = itertools.count(1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.keys = sshd.make_keys(folder / "ssh")
        self.endpoint = sshd.Endpoint(
            folder / "ssh", self._start, lambda world, text: self.broken.append(text), silence_s
        )
        self.port = self.play(self.endpoint.open(IP))
        self.write_files(self.keys.host)

    def serve(self) -> Site:
        self._loop.call_soon_threadsafe(self.endpoint.serve, [self.keys.login], str(self.code))
        return self

    def write_files(self, host_key: str) -> None:
        """What a client gets to know: configuration, known hosts, and the table of our own client."""
        self.config = self.folder / "ssh" / "config"
        self.config.write_text(CONFIG.format(ip=IP, port=self.port, folder=self.folder, log_level="ERROR"))
        (self.folder / "ssh" / "known_hosts").write_text(f"[{IP}]:{self.port} {host_key}\n")
        host = {"ip": IP, "port": self.port, "alias": "worker-0", "host_key": host_key}
        (self.folder / "ssh" / "hosts.json").write_text(json.dumps({IP: host, "worker-0": host}))

    def play(self, story: Coroutine[Any, Any, T], timeout_s: float = 60) -> T:
        """Run a coroutine in the endpoint's loop."""
        return asyncio.run_coroutine_threadsafe(story, self._loop).result(timeout_s)

    def argv(self, *arguments: str, program: str = "ssh") -> list[str]:
        return [program, "-F", str(self.config), *arguments]

    def ssh(self, *arguments: str, input: bytes = b"", **more: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            self.argv("host", *arguments), input=input, capture_output=True, timeout=60, check=False, **more
        )

    def popen(self, *arguments: str, **more: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.argv("host", *arguments), **more)

    def flagged(self, name: str) -> None:
        wait_until((self.flags / name).exists, 20, f"the flag {name}")

    def idle(self, timeout_s: float = 10) -> None:
        wait_until(lambda: self.endpoint.sessions == 0, timeout_s, "the end of all sessions")

    def left(self) -> list[int]:
        """What lives of the commands."""
        return [found.pid for found in process.marked(self.mark)]

    def close(self) -> None:
        try:
            self.play(self.endpoint.close())
            assert self.endpoint.sessions == 0
            assert self.left() == []
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            for found in process.marked(self.mark, supervisors=True):
                if row := supervisor.entry(found.pid):
                    supervisor.send(row, 9)

    async def _start(
        self, command: str, environment: Mapping[str, str], stdio: tuple[int, int, int]
    ) -> Process:
        if command == "no start":
            raise OSError("the disk is full")
        self.seen.append(environment)
        argv: Sequence[str] = ("bash", "-c", command)
        if command == "no bash":
            argv = ("/no/such/bash", "-c", command)
        own = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "FLAGS": str(self.flags)}
        folder = self.folder / "runs" / str(next(self._numbers))
        return await process.start(
            Run("ssh", tuple(argv), {**own, **environment}, str(self.code), str(folder), self.mark, stdio)
        )


@contextmanager
def open_site(folder: Path, silence_s: float = 30.0) -> Iterator[Site]:
    site = Site(folder, silence_s)
    try:
        yield site
    finally:
        site.close()
