"""Sit at a shell in a running instance: this process's terminal becomes that of the shell, until it ends.

What is typed goes there as it is, Ctrl-C included, and what is written comes back as it is. However it ends, this
terminal is as it was before.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from raycontrol.errors import ControllerUnavailable, RaycontrolError, UsageError
from raycontrol.settings import process_environment

if TYPE_CHECKING:
    from raycontrol.terminals import Output

READ_S = 5.0
"""How long one question for output waits; well below ``terminals.ABANDONED_S``."""
PIECE_BYTES = 65536


class ShellLost(RaycontrolError):
    """The way to a shell is gone."""


class Line(Protocol):
    """The way to one shell."""

    def read(self) -> Output:
        """Return what it has written next; nothing, after a while."""

    def write(self, data: bytes) -> None: ...

    def resize(self, rows: int, columns: int) -> None: ...

    def close(self) -> None: ...


class RayLine:
    """A shell of an instance whose actor is ``actor``, by a client's ``session``."""

    def __init__(self, session: Any, actor: Any, rows: int, columns: int, term: str) -> None:
        self._session = session
        self._actor = actor
        self._number: int = self._ask(actor.shell_open.remote(rows, columns, term))

    def read(self) -> Output:
        return self._ask(self._actor.shell_read.remote(self._number, READ_S))  # type: ignore[no-any-return]

    def write(self, data: bytes) -> None:
        self._ask(self._actor.shell_write.remote(self._number, data))

    def resize(self, rows: int, columns: int) -> None:
        self._ask(self._actor.shell_resize.remote(self._number, rows, columns))

    def close(self) -> None:
        with contextlib.suppress(RaycontrolError):
            self._ask(self._actor.shell_close.remote(self._number))

    def _ask(self, reference: Any) -> Any:
        try:
            return self._session.get(reference)
        except ControllerUnavailable as error:
            raise ShellLost(f"the instance has ended, or it cannot be reached: {error}") from None


def sit(open_line: Callable[[int, int, str], Line]) -> int:
    """Sit at the shell that ``open_line(rows, columns, TERM)`` opens, on this process's terminal; return its exit status.

    Raises UsageError where there is no terminal. A hang-up or SIGTERM of this process ends the shell.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("shell: needs a terminal; `raycontrol exec --job` runs commands without one")
    there, here = sys.stdin.fileno(), sys.stdout.fileno()
    line = open_line(*_size(here), process_environment().get("TERM", "xterm"))
    try:
        with _raw(there), _woken() as wakes:
            return _Seat(line, there, here, wakes).sit()
    finally:
        line.close()


class _Seat:
    """One person at one shell. ``wakes`` is readable when a signal has come; a byte of it is the signal's number."""

    def __init__(self, line: Line, keyboard: int, screen: int, wakes: int) -> None:
        self._line = line
        self._keyboard = keyboard
        self._screen = screen
        self._wakes = wakes
        self._over, self._ends = os.pipe()
        self._status: int | None = None
        self._error: Exception | None = None

    def sit(self) -> int:
        reader = threading.Thread(target=self._show, name="raycontrol-follow-shell", daemon=True)
        reader.start()
        while self._type():
            pass
        if self._error is not None:
            raise self._error
        return 128 + signal.SIGHUP if self._status is None else self._status

    def _type(self) -> bool:
        """Wait for something to do, and do it; False when that was the end."""
        ready, _, _ = select.select([self._keyboard, self._wakes, self._over], [], [])
        if self._over in ready:
            return False
        if self._wakes in ready:
            numbers = set(os.read(self._wakes, 256))
            if numbers & {signal.SIGHUP, signal.SIGTERM}:
                return False
            if signal.SIGWINCH in numbers:
                self._line.resize(*_size(self._screen))
        if self._keyboard in ready:
            data = os.read(self._keyboard, PIECE_BYTES)
            if not data:  # the terminal is gone
                return False
            self._line.write(data)
        return True

    def _show(self) -> None:
        """Write what comes until the shell has ended."""
        try:
            while self._status is None:
                output = self._line.read()
                _write_all(self._screen, output.data)
                self._status = output.status
        except Exception as error:  # whatever it is, who sits here must get his terminal back
            self._error = error
        os.close(self._ends)


def _size(terminal: int) -> tuple[int, int]:
    size = os.get_terminal_size(terminal)
    return size.lines, size.columns


def _write_all(screen: int, data: bytes) -> None:
    while data:
        data = data[os.write(screen, data) :]


@contextlib.contextmanager
def _raw(terminal: int) -> Iterator[None]:
    """Hand on every key as it is; then everything is as before."""
    before = termios.tcgetattr(terminal)
    try:
        tty.setraw(terminal, termios.TCSADRAIN)  # what was typed ahead is for the shell
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _woken() -> Iterator[int]:
    """Yield a descriptor on which numbers of signals arrive: of a new size, and of an end from outside."""
    wakes, wake = os.pipe()
    os.set_blocking(wake, False)
    numbers = (signal.SIGWINCH, signal.SIGHUP, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    former = signal.set_wakeup_fd(wake)
    try:
        yield wakes
    finally:
        signal.set_wakeup_fd(former)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(wake)
        os.close(wakes)
