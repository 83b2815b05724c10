"""A program on a terminal of its own, and a person before it."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class Person:
    """Starts a program on a new terminal, types, and reads until something has been said."""

    def __init__(
        self, argv: Sequence[str | Path], env: Mapping[str, str] | None = None, limit_s: float = 60.0
    ) -> None:
        self._ours, self._theirs = os.openpty()
        self._limit_s = limit_s
        self.seen = ""
        self.resize(24, 80)
        self.before = termios.tcgetattr(self._theirs)
        streams = {"stdin": self._theirs, "stdout": self._theirs, "stderr": self._theirs}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *map(str, argv)],
            env=None if env is None else dict(env),
            **streams,  # type: ignore[call-overload]
        )

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def sees(self, pattern: str) -> str:
        """Read until the pattern is there; return what fits it. What comes after it is left for the next time."""
        deadline = time.monotonic() + self._limit_s
        while (found := re.search(pattern, self.seen)) is None:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} not within {self._limit_s} s:\n{self.seen[-3000:]}"
            self.seen += os.read(self._ours, 65536).decode(errors="replace")
        self.seen = self.seen[found.end() :]
        return found[0]

    def leaves(self) -> int:
        """Wait for the program's end; its terminal is as it was before."""
        status = self.process.wait(self._limit_s)
        assert termios.tcgetattr(self._theirs) == self.before
        self.close()
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)
