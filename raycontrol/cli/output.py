"""The two streams of a command: results on stdout, everything for the person beside it on stderr."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.table import Table

COLOURS = {
    "SUCCEEDED": "green",
    "RUNNING": "cyan",
    "FAILED": "red",
    "LOST": "red",
    "STOPPED": "yellow",
    "STOPPING": "yellow",
}
_CODES = {"red": 31, "green": 32, "yellow": 33, "cyan": 36}


class OutputClosed(Exception):
    """Nobody reads stdout any more (as with ``| head``), or it takes nothing, and ``str(error)`` says why (a full disk)."""


class Output:
    """Writes whole lines, safely from several threads; ``terminal`` says whether stdout is one.

    The streams have a lock each: a stdout that nobody empties must not hold up what is said on stderr.
    """

    def __init__(self, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self._stdout = stdout or sys.stdout or _nowhere()
        self._stderr = stderr or sys.stderr or _nowhere()
        self._stdout_lock = threading.Lock()
        self._stderr_lock = threading.Lock()
        self.terminal = self._stdout.isatty()

    def line(self, text: str = "", *, flush: bool = False) -> None:
        """Write a line of the result; raises OutputClosed when there is no reader."""
        with self._stdout_lock, self._reader():
            self._stdout.write(f"{text}\n")
            if flush:
                self._stdout.flush()

    def log(self, text: str) -> None:
        """Write one line of a stream that somebody follows."""
        self.line(text, flush=True)

    def data(self, data: bytes) -> None:
        """Write bytes of a result as they are; raises OutputClosed when there is no reader."""
        with self._stdout_lock, self._reader():
            binary = getattr(self._stdout, "buffer", None)
            if binary is None:  # a stream in memory
                self._stdout.write(data.decode(errors="backslashreplace"))
                return
            self._stdout.flush()
            binary.write(data)
            binary.flush()

    def flush(self) -> None:
        with self._stdout_lock, self._reader():
            self._stdout.flush()

    def json(self, document: object, *, flush: bool = False) -> None:
        """Write one JSON document, indented for a person on a terminal, else as one line."""
        self.line(json.dumps(document, ensure_ascii=False, indent=2 if self.terminal else None), flush=flush)

    def json_line(self, document: object) -> None:
        """Write one document of a stream of JSON lines."""
        self.line(json.dumps(document, ensure_ascii=False), flush=True)

    def note(self, text: str) -> None:
        """Tell the person something on stderr; a stderr that is gone (its terminal was closed) is no reason to fail."""
        with self._stderr_lock, contextlib.suppress(OSError, ValueError):
            self._stderr.write(f"{text}\n")
            self._stderr.flush()

    def note_from_signal(self, text: str) -> None:
        """Tell the person something from a signal handler, which may have come upon any lock in this thread's hands."""
        try:
            os.write(self._stderr.fileno(), f"{text}\n".encode())
        except io.UnsupportedOperation:  # a stream in memory
            self._stderr.write(f"{text}\n")
        except (OSError, ValueError):
            pass  # as in ``note``

    def state(self, state: str) -> str:
        """Return the word of a state for stderr, coloured if stderr is a terminal that may be coloured."""
        if state not in COLOURS or not self._stderr.isatty() or not _colours_wanted():
            return state
        return f"\x1b[{_CODES[COLOURS[state]]}m{state}\x1b[0m"

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Write a table: fitted and coloured on a terminal, else whole words in plain columns for other programs."""
        if self.terminal:
            self._rich_table(columns, rows)
        else:
            self._plain_table(columns, rows)

    def details(self, facts: Mapping[str, str | None]) -> None:
        """Write ``name  value`` lines, leaving out what is None."""
        width = max((len(name) for name in facts), default=0)
        for name, value in facts.items():
            if value is not None:
                self.line(f"{name:<{width}}  {value}")

    @contextlib.contextmanager
    def live(self, columns: Sequence[str]) -> Iterator[Callable[[Sequence[Sequence[str]]], None]]:
        """Give what shows rows of a table in one place of the terminal; the last ones stay."""
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self._stdout)
        with (
            self._reader(),
            Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as place,
        ):
            yield lambda rows: place.update(_fitted(columns, rows), refresh=True)

    def _rich_table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        from rich.console import Console

        with self._stdout_lock, self._reader():
            Console(file=self._stdout).print(_fitted(columns, rows))

    def _plain_table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        lines = [columns, *rows]
        widths = [max(len(line[number]) for line in lines) for number in range(len(columns))]
        for line in lines:
            self.line(
                "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
            )

    @contextlib.contextmanager
    def _reader(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._forget_stdout()
            raise OutputClosed from None
        except OSError as error:
            self._forget_stdout()
            raise OutputClosed(f"stdout cannot be written: {error.strerror}") from None

    def _forget_stdout(self) -> None:
        """Send what is still buffered to nowhere, so that the interpreter's last flush is silent."""
        with contextlib.suppress(OSError, io.UnsupportedOperation):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stdout.fileno())
            os.close(nowhere)


def _nowhere() -> TextIO:
    """What a stream is that was closed before the command began (``>&-``)."""
    return open(os.devnull, "w")


def _fitted(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in row))
    return table


def _colours_wanted() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
