"""Logs as lines: reads what the archive holds of each instance and splits it for people."""

from __future__ import annotations

from collections.abc import Iterator

from raycontrol.errors import UsageError
from raycontrol.logs import LineSplitter
from raycontrol.readers import Reader
from raycontrol.status import JobInfo

POLL_S = 0.5
VIEW_BYTES = 1 << 20


class LogView:
    """The lines of a job's current attempt, of all instances or of one, from where the view stands."""

    def __init__(self, reader: Reader, job_id: str, *, instance: str | None, prefix: bool) -> None:
        self._reader = reader
        self._job_id = job_id
        self._instance = instance
        self._prefix = prefix
        self._attempt = 0
        self._offsets: dict[str, int] = {}
        self._splitters: dict[str, LineSplitter] = {}
        self._refuse_unknown(self._look())

    def tail(self, lines: int) -> Iterator[str]:
        """Yield the last lines of each instance; the view then stands at the end of what was there."""
        for name, size in self._reader.log_sizes(self._job_id, self._attempt).items():
            if self._instance in (None, name):
                start = self._reader.tail_offset(self._job_id, self._attempt, name, lines) if lines else size
                self._offsets[name] = start
        yield from self._read(0.0)

    def rest(self) -> Iterator[str]:
        """Yield what is there, and end. What is read of a very long line may hold no whole line, and be no end."""
        before = None
        while before != self._offsets:
            before = dict(self._offsets)
            yield from self._read(0.0)
        yield from self._close()

    def follow(self) -> Iterator[str]:
        """Yield lines as they come, until the job has ended and everything was read."""
        while True:
            ended = self._look().over
            before = dict(self._offsets)
            yield from self._read(0.0 if ended else POLL_S)
            if ended and before == self._offsets:
                break
        yield from self._close()

    def _look(self) -> JobInfo:
        info = self._reader.info(self._job_id)
        self._attempt = info.attempt
        return info

    def _read(self, timeout_s: float) -> Iterator[str]:
        news = self._reader.log_news(
            self._job_id, self._attempt, self._offsets, timeout_s, VIEW_BYTES, self._instance
        )
        for name, data in sorted(news.items()):
            self._offsets[name] = self._offsets.get(name, 0) + len(data)
            if name not in self._splitters:
                self._splitters[name] = LineSplitter(f"{name} | " if self._prefix else "")
            yield from self._splitters[name].feed(data)

    def _close(self) -> Iterator[str]:
        for splitter in self._splitters.values():
            yield from splitter.close()

    def _refuse_unknown(self, info: JobInfo) -> None:
        names = [item.name for item in info.instances]
        if self._instance is not None and names and self._instance not in names:
            raise UsageError(
                f"job {self._job_id} has no instance {self._instance!r}; it has {', '.join(names)}"
            )
