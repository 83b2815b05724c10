"""Carries an instance's bytes to the archive: its log while it grows, its outputs when it has ended.

The job writes local files and knows nothing of this. The archive's answer (how many bytes it holds) is the only
memory, so a shipper that starts again, or meets an archive that did, goes on in the right place.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from raycontrol.logs import MIB

log = logging.getLogger(__name__)

Append = Callable[[int, bytes], Awaitable[int]]
"""``append(offset, data) -> held``: see ``Archive.append``."""

AppendOutput = Callable[[str, int, bytes, int, int, int], Awaitable[int]]
"""``append_output(relpath, offset, data, mode, size, mtime_ns) -> held``: see ``Archive.append_output``."""

CHUNK_BYTES = MIB
CALL_LIMIT_S = 30.0
"""An archive that has not answered for so long is in trouble."""

POLL_S = (0.1, 1.0)
"""The file's size is looked at so often while it grows, and ever more rarely, to the second, while it does not."""

RETRY_S = (0.25, 10.0)
"""First and longest wait between tries; each is twice the one before."""

HURRY_S = 1.0
"""The longest wait between tries once the job has ended."""


class Shipper:
    """Ships one growing log file. ``start`` it, and ``finish`` it when nothing writes the file any more.

    ``on_data(data)`` is called with every piece that is sent, and again with one that had to be sent again.
    ``on_trouble(message)`` is called once when the archive begins to fail (unreachable, below its floor of free
    space), ``on_recovered()`` when it takes bytes again; between them it tries on for ever. None of them may raise.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        append: Append,
        *,
        on_data: Callable[[bytes], None] = lambda data: None,
        on_trouble: Callable[[str], None] = lambda message: None,
        on_recovered: Callable[[], None] = lambda: None,
        chunk_bytes: int = CHUNK_BYTES,
        retry_s: tuple[float, float] = RETRY_S,
    ) -> None:
        self._file = GrowingFile(Path(path))
        self._append = append
        self._on_data = on_data
        self._on_trouble = on_trouble
        self._on_recovered = on_recovered
        self._chunk_bytes = chunk_bytes
        self._first_retry_s, self._last_retry_s = retry_s
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.held = 0
        """Bytes that the archive is known to hold."""
        self.trouble: str | None = None
        """Why nothing is shipped at present; ``None`` when all is well."""

    def start(self) -> None:
        """Begin to ship; a second call does nothing."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._ship())

    async def finish(self, timeout_s: float) -> int:
        """Ship to the end of the file and stop; returns the bytes that could not be shipped in the time."""
        self.start()
        assert self._task is not None
        self._ending.set()
        await asyncio.wait({self._task}, timeout=timeout_s)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
        elif not self._task.cancelled() and (error := self._task.exception()):
            log.error("shipping %s ended by an error", self._file.path, exc_info=error)
        unshipped = max(0, self._file.size() - self.held)
        self._file.close()
        return unshipped

    async def _ship(self) -> None:
        await self._until_taken(b"")
        pause_s = POLL_S[0]
        while True:
            # Looked at before the size: what was written before the end is then seen.
            ending = self._ending.is_set()
            if self._file.size() > self.held:
                await self._until_taken(None)
                pause_s = POLL_S[0]
            elif ending:
                return
            else:
                await self._sleep(pause_s)
                pause_s = min(pause_s * 1.3, POLL_S[1])

    async def _until_taken(self, data: bytes | None) -> None:
        """Send ``data`` (``None``: what follows the bytes held) until the archive has answered and moved on."""
        pause_s = self._first_retry_s
        while True:
            try:
                await self._send(data)
            # The archive is another process, often on another machine: whatever it raises, the bytes wait here.
            except Exception as error:
                self._note_trouble(str(error) or type(error).__name__)
                limit_s = HURRY_S if self._ending.is_set() else self._last_retry_s
                await self._sleep(min(pause_s, limit_s), hurry=not self._ending.is_set())
                pause_s = min(pause_s * 2, self._last_retry_s)
            else:
                self._note_recovery()
                return

    async def _send(self, data: bytes | None) -> None:
        if data is None:
            data = await asyncio.to_thread(self._file.read, self.held, self._chunk_bytes)
            self._on_data(data)
        before = self.held
        try:
            self.held = await asyncio.wait_for(self._append(before, data), CALL_LIMIT_S)
        except asyncio.TimeoutError:
            raise TimeoutError(f"the archive did not answer in {CALL_LIMIT_S:g} s") from None
        if data and self.held == before:
            raise RuntimeError(f"the archive took none of the {len(data)} bytes at {before}")

    async def _sleep(self, pause_s: float, hurry: bool = True) -> None:
        """Sleep; with ``hurry`` only until the end is announced."""
        if not hurry:
            await asyncio.sleep(pause_s)
            return
        try:
            await asyncio.wait_for(self._ending.wait(), pause_s)
        except asyncio.TimeoutError:
            pass

    def _note_trouble(self, message: str) -> None:
        first, self.trouble = self.trouble is None, message
        if first:
            self._on_trouble(message)

    def _note_recovery(self) -> None:
        if self.trouble is not None:
            self.trouble = None
            self._on_recovered()


class GrowingFile:
    """A file that may not be there yet, and may be removed by its name while it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size if self._opened() and self._descriptor is not None else 0

    def read(self, offset: int, max_bytes: int) -> bytes:
        return os.pread(self._descriptor, max_bytes, offset) if self._descriptor is not None else b""

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _opened(self) -> bool:
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
        return True


@dataclass(frozen=True)
class OutputReport:
    """What became of an output folder: files the archive now holds, their bytes, and (path, why) of the others."""

    files: int = 0
    size: int = 0
    skipped: tuple[tuple[str, str], ...] = ()


@dataclass
class Shipment:
    """A report in the making."""

    files: int = 0
    size: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def skip(self, relpath: str, why: str) -> None:
        self.skipped.append((relpath, why))


async def ship_outputs(
    folder: str | os.PathLike[str],
    append_output: AppendOutput,
    cap_bytes: int = 2048 * MIB,
    *,
    retry_s: tuple[float, ...] = (0.5, 2.0),
) -> OutputReport:
    """Ship every regular file below ``folder``; nothing raised, the report says what was skipped and why.

    Links are not followed. Small files go first, so that a checkpoint over ``cap_bytes`` (for the whole folder)
    never keeps the metrics away. Files that the archive holds with the same size and time cost one call. An archive
    that fails on a file is tried again after each of ``retry_s``; then the rest is skipped.
    """
    shipment = Shipment()
    files = await asyncio.to_thread(lambda: list(regular_files(Path(folder), shipment)))
    failure: str | None = None
    for size, relpath in sorted(files):
        if failure is not None:
            shipment.skip(relpath, failure)
        elif shipment.size + size > cap_bytes:
            shipment.skip(relpath, f"{size} bytes would pass the limit of {cap_bytes} bytes for outputs")
        else:
            failure = await ship_with_retries(Path(folder), relpath, append_output, retry_s, shipment)
    return OutputReport(shipment.files, shipment.size, tuple(sorted(shipment.skipped)))


def regular_files(folder: Path, shipment: Shipment) -> Iterator[tuple[int, str]]:
    """Size and relative path of each file."""
    waiting = [folder]
    while waiting:
        current = waiting.pop()
        try:
            entries = list(os.scandir(current))
        except FileNotFoundError:
            continue
        except OSError as error:
            shipment.skip(os.path.relpath(current, folder), f"cannot be read: {error.strerror}")
            continue
        for entry in entries:
            relpath = os.path.relpath(entry.path, folder)
            if entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                yield entry.stat(follow_symlinks=False).st_size, relpath
            else:
                shipment.skip(relpath, "is a link" if entry.is_symlink() else "is not a regular file")


class Unreadable(Exception):
    """A file of the output folder that cannot be read, and why."""


async def ship_with_retries(
    folder: Path, relpath: str, append_output: AppendOutput, retry_s: tuple[float, ...], shipment: Shipment
) -> str | None:
    """Ship one file and book it; returns why the archive failed for good."""
    pauses_s = iter(retry_s)
    while True:
        try:
            shipment.size += await ship_file(folder / relpath, relpath, append_output)
            shipment.files += 1
            return None
        except Unreadable as error:
            shipment.skip(relpath, str(error))
            return None
        # The archive is another process: whatever it raises, the next try or the report is the answer.
        except Exception as error:
            pause_s = next(pauses_s, None)
            if pause_s is None:
                why = f"the archive did not take it: {str(error) or type(error).__name__}"
                shipment.skip(relpath, why)
                return why
            await asyncio.sleep(pause_s)


async def ship_file(path: Path, relpath: str, append_output: AppendOutput) -> int:
    """Ship one file as it is now; returns its size."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        mode, size, mtime_ns = stat.S_IMODE(found.st_mode), found.st_size, found.st_mtime_ns
        held = 0
        while True:
            data = await asyncio.to_thread(read_exactly, descriptor, min(CHUNK_BYTES, size - held), held)
            before = held
            call = append_output(relpath, held, data, mode, size, mtime_ns)
            held = await asyncio.wait_for(call, CALL_LIMIT_S)
            if held >= size:
                return size
            if held == before:
                raise RuntimeError(f"it took none of the {len(data)} bytes at {before}")
    finally:
        os.close(descriptor)


def read_exactly(descriptor: int, count: int, offset: int) -> bytes:
    try:
        data = os.pread(descriptor, count, offset)
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from error
    if len(data) < count:
        raise Unreadable("shrank while it was shipped")
    return data
