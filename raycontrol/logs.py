"""Where a job's bytes lie on the head, and how people see them.

Files hold the bytes exactly as the job wrote them. Only views know about lines: ``LineSplitter`` turns bytes into
text as they come, ``tail`` shows the end of a file. The layout, below ``RAYCONTROL_HOME``::

    jobs/<job>/logs/<attempt>/<instance>.log
    jobs/<job>/usage/<attempt>/<instance>.jsonl   samples of what it used
    jobs/<job>/outputs/<instance>/…
    jobs/<job>/incoming/<instance>/…              outputs on their way
    packages/<sha256>.tar
    packages/incoming/<sha256>.part               packages on their way

Outputs lie in the same way on a node, and in a folder that all nodes share.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from raycontrol.beneath import file_beneath, folder_beneath, sizes_in
from raycontrol.errors import UsageError

KIB = 1024
MIB = 1024 * KIB
TAIL_BYTES = 256 * KIB
LONGEST_NAME_BYTES = 200
"""A file name may have 255 bytes; ours get suffixes."""


class OutputFolders:
    """The folders of a job's outputs, one for each instance, below ``place``: ``RAYCONTROL_HOME``, a folder that all nodes share, or a
    node's own. Names are checked, as in ``JobFolder``. ``top`` is what is trusted above them, ``job`` all that is the job's.
    """

    def __init__(self, place: str | os.PathLike[str], job_id: str) -> None:
        self.top = jobs_folder(place)
        self.job = self.top / checked_name("job", job_id)
        self.root = self.job / "outputs"

    def of(self, instance: str) -> Path:
        return self.root / checked_name("instance", instance)

    @staticmethod
    def root_of(output_dir: str) -> Path:
        """Return the folder of all instances' outputs, by that of one."""
        return Path(output_dir).parent


class JobFolder:
    """The folder of one job. Names are checked, so that no path made here leads out of it (``UsageError``)."""

    def __init__(self, home: str | os.PathLike[str], job_id: str) -> None:
        self.root = jobs_folder(home) / checked_name("job", job_id)
        self._outputs = OutputFolders(home, job_id)

    def logs(self, attempt: int) -> Path:
        return self.root / "logs" / checked_attempt(attempt)

    def usages(self, attempt: int) -> Path:
        return self.root / "usage" / checked_attempt(attempt)

    def usage(self, instance: str, attempt: int) -> Path:
        return self.usages(attempt) / f"{checked_name('instance', instance)}.jsonl"

    def log(self, instance: str, attempt: int) -> Path:
        return self.logs(attempt) / f"{checked_name('instance', instance)}.log"

    def sizes(self, attempt: int) -> dict[str, int]:
        """Bytes held of each instance's log, by name; empty when nothing has arrived."""
        with folder_beneath(self.root.parent, self.logs(attempt)) as folder:
            return {} if folder is None else sizes_in(folder, ".log")

    def opened_log(self, instance: str, attempt: int) -> FileIO | None:
        """A log, to be read; None when there is none, or a link on the way there or instead of it."""
        return file_beneath(self.root.parent, self.log(instance, attempt))

    def size(self, instance: str, attempt: int) -> int | None:
        """Bytes held of a log; None when there is none."""
        with _or_none(self.opened_log(instance, attempt)) as log:
            return None if log is None else os.fstat(log.fileno()).st_size

    def read(self, instance: str, attempt: int, offset: int, max_bytes: int) -> bytes:
        """Up to ``max_bytes`` of a log from ``offset``; empty past its end and when there is none."""
        with _or_none(self.opened_log(instance, attempt)) as log:
            return b"" if log is None else os.pread(log.fileno(), max(0, max_bytes), max(0, offset))

    def tail_offset(self, instance: str, attempt: int, lines: int) -> int:
        """Where the last ``lines`` lines of a log begin (``tail_offset``)."""
        with _or_none(self.opened_log(instance, attempt)) as log:
            if log is None:
                return 0
            descriptor = log.fileno()
            size = os.fstat(descriptor).st_size
            return _place_of_tail(
                lambda place, count: os.pread(descriptor, count, place), size, lines, TAIL_BYTES
            )

    def news(
        self, attempt: int, offsets: Mapping[str, int], max_bytes: int, instances: Collection[str] | None
    ) -> dict[str, bytes]:
        """What logs hold past the offsets, ``max_bytes`` in all; with ``instances`` of these only."""
        grown = [
            name
            for name, size in self.sizes(attempt).items()
            if size > offsets.get(name, 0) and (instances is None or name in instances)
        ]
        share = max(1, max_bytes // max(1, len(grown)))
        news = {name: self.read(name, attempt, offsets.get(name, 0), share) for name in grown}
        return {name: data for name, data in news.items() if data}

    def outputs(self, instance: str) -> Path:
        return self._outputs.of(instance)

    def output(self, instance: str, relpath: str) -> Path:
        """Where the output file ``relpath`` lies; absolute paths and ``..`` are refused."""
        parts = relpath.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise UsageError(f"output: must be a path inside the folder, got {relpath!r}")
        return self.outputs(instance).joinpath(*parts)

    def incoming(self, instance: str, relpath: str, size: int, mtime_ns: int) -> Path:
        """Where an output file grows until it is whole; another size or time of the same file is another path."""
        path = hashlib.sha256(os.fsencode(relpath)).hexdigest()[:40]
        return (
            self.root
            / "incoming"
            / checked_name("instance", instance)
            / f"{path}.{int(size)}.{int(mtime_ns)}.part"
        )


def _or_none(log: FileIO | None) -> AbstractContextManager[FileIO | None]:
    return nullcontext() if log is None else log


def jobs_folder(home: str | os.PathLike[str]) -> Path:
    return Path(home) / "jobs"


@dataclass(frozen=True)
class PackageFolder:
    """The folder of packed working directories, each named by the SHA-256 of its bytes."""

    home: Path

    @property
    def root(self) -> Path:
        return self.home / "packages"

    def path(self, digest: str) -> Path:
        return self.root / f"{checked_digest(digest)}.tar"

    def incoming(self, digest: str) -> Path:
        return self.root / "incoming" / f"{checked_digest(digest)}.part"


def checked_name(what: str, name: str) -> str:
    """``name`` if it can be one file or folder name of ours; a leading dot is kept for our temporary ones."""
    if (
        not name
        or name[0] == "."
        or "/" in name
        or "\0" in name
        or len(os.fsencode(name)) > LONGEST_NAME_BYTES
    ):
        raise UsageError(
            f"{what}: must be a name of 1 to {LONGEST_NAME_BYTES} bytes without '/' and without a dot in front, "
            f"got {name!r}"
        )
    return name


def checked_attempt(attempt: int) -> str:
    if attempt < 0:
        raise UsageError(f"attempt: must be at least 0, got {attempt}")
    return str(int(attempt))


def checked_digest(digest: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise UsageError(f"package: must be the 64 hexadecimal digits of a SHA-256, got {digest!r}")
    return digest


class LineSplitter:
    r"""Turns a stream of bytes, fed in pieces of any size, into lines of text for a view.

    Lines end at ``\n`` (or ``\r\n``) and nowhere else. After a lone ``\r`` the line is written anew, so that a
    progress bar shows as its last state. Bytes that are not UTF-8 become U+FFFD. Of a line longer than ``cap``
    bytes the start is shown and ``… [n bytes more]``; memory stays within the cap.
    """

    def __init__(self, prefix: str = "", cap: int = 64 * KIB) -> None:
        self._prefix = prefix
        self._cap = cap
        self._line = bytearray()
        self._cut = 0
        self._returned = False

    def feed(self, data: bytes) -> list[str]:
        """The lines that ``data`` completes, without their ends."""
        *ended, rest = data.split(b"\n")
        lines = []
        for piece in ended:
            if not self._line and len(piece) <= self._cap and b"\r" not in piece:
                # Nearly every line of nearly every log: whole, short and plain.
                lines.append(self._prefix + piece.decode("utf-8", errors="replace"))
            else:
                self._write(piece)
                lines.append(self.unfinished)
            self._restart()
        self._write(rest)
        return lines

    def close(self) -> list[str]:
        """The last line, if the stream stopped within one."""
        lines = [self.unfinished] if self._line else []
        self._restart()
        return lines

    @property
    def unfinished(self) -> str:
        """The line that has not ended, as it stands: what a terminal would show of a progress bar."""
        if not self._cut:
            return self._prefix + self._line.decode("utf-8", errors="replace")
        kept = codecs.getincrementaldecoder("utf-8")("replace")
        text = kept.decode(bytes(self._line), final=False)
        left_over = len(kept.getstate()[0])
        return f"{self._prefix}{text}… [{self._cut + left_over} bytes more]"

    def _write(self, piece: bytes) -> None:
        for place, state in enumerate(piece.split(b"\r")):
            if place:
                self._returned = True
            if state:
                self._add(state)

    def _add(self, text: bytes) -> None:
        if self._returned:
            self._restart()
        room = max(0, self._cap - len(self._line))
        self._line += text[:room]
        self._cut += max(0, len(text) - room)

    def _restart(self) -> None:
        if self._line:
            self._line.clear()
            self._cut = 0
        self._returned = False


def tail(path: str | os.PathLike[str], lines: int = 20, max_bytes: int = 256 * KIB) -> list[str]:
    """The last ``lines`` lines of a log as a view shows them, looking at no more than its last ``max_bytes``.

    Empty when there is no such file. A line that began before ``max_bytes`` is shown only if it is the only one.
    """
    start = tail_offset(path, lines, max_bytes)
    splitter = LineSplitter()
    shown = splitter.feed(read_at(path, start, max_bytes)) + splitter.close()
    return shown[-lines:] if lines > 0 else []


def tail_offset(path: str | os.PathLike[str], lines: int = 20, max_bytes: int = TAIL_BYTES) -> int:
    """Where the last ``lines`` lines of a file begin, but at most ``max_bytes`` before its end. 0 without a file."""
    try:
        size = Path(path).stat().st_size
    except FileNotFoundError:
        return 0
    return _place_of_tail(lambda place, count: read_at(path, place, count), size, lines, max_bytes)


def _place_of_tail(read: Callable[[int, int], bytes], size: int, lines: int, max_bytes: int) -> int:
    if lines <= 0:
        return size
    start = max(0, size - max_bytes)
    window = read(start, size - start)
    # An unfinished line of nothing but returns shows as nothing and does not count.
    begin = len(window.rstrip(b"\r").removesuffix(b"\n"))
    for _ in range(lines):
        begin = window.rfind(b"\n", 0, begin)
        if begin < 0:
            break
    if begin < 0 and start == 0:
        return 0
    # Not enough lines in the window: leave out the one that began before it, unless there is no other.
    if begin < 0:
        begin = window.find(b"\n", 0, len(window) - 1)
    return start + begin + 1


def read_at(path: str | os.PathLike[str], offset: int, max_bytes: int) -> bytes:
    """Up to ``max_bytes`` of a file from ``offset``; empty past its end and when there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(descriptor, max(0, max_bytes), offset)
    finally:
        os.close(descriptor)
