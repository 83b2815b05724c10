"""Logs as lines: reads what the archive holds of each instance and splits it for people."""

from __future__ import annotations

from collections.abc import Iterator

from raycontrol.errors import UsageError
from raycontrol.logs import LineSplitter
from raycontrol.readers import Reader
from raycontrol.status import InstanceInfo, JobInfo

POLL_S = 0.5
VIEW_BYTES = 1 << 20


class LogView:
    """The lines of a job, of all its instances, of one or of a group, from where the view stands.

    It begins with the current attempt and follows the job into further ones; with ``attempt`` it shows that one alone.
    """

    def __init__(
        self,
        reader: Reader,
        job_id: str,
        *,
        instance: str | None,
        group: str | None,
        prefix: bool,
        attempt: int | None = None,
        prefixed: str | None = None,
    ) -> None:
        """``prefixed`` stands before every line instead of an instance's name."""
        self._reader = reader
        self._job_id = job_id
        self._instance = instance
        self._group = group
        self._shown: tuple[str, ...] | None = None
        self._prefix = prefix
        self._prefixed = prefixed
        self.ended = False
        """Whether there is nothing to come any more."""
        self.behind = False
        """Whether the last turn has read something of what may have more."""
        self._alone = attempt is not None
        self._offsets: dict[str, int] = {}
        self._splitters: dict[str, LineSplitter] = {}
        current = self._look().attempt
        self._attempt = current if attempt is None else attempt
        if self._attempt > current:
            raise UsageError(f"job {job_id} has had no attempt {attempt}; the current one is {current}")

    def tail(self, lines: int) -> Iterator[str]:
        """Yield the last lines of each instance; the view then stands at the end of what was there."""
        for name, size in self._reader.log_sizes(self._job_id, self._attempt).items():
            if self._shown is None or name in self._shown:
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
        """Yield lines as they come, until the job (or the one attempt) has ended and everything was read."""
        while not self.ended:
            yield from self.turn(POLL_S)

    def turn(self, timeout_s: float) -> Iterator[str]:
        """Yield what there is now; where there is nothing yet, wait for it. Sets ``ended`` and ``behind``."""
        info = self._look()
        attempt_ended = info.over or info.attempt > self._attempt
        before = dict(self._offsets)
        yield from self._read(0.0 if attempt_ended else timeout_s)
        self.behind = before != self._offsets
        if not attempt_ended or self.behind:
            return
        yield from self._close()
        self.ended = self._alone or info.attempt == self._attempt
        if not self.ended:
            self._attempt += 1
            self._offsets, self._splitters = {}, {}
            self.behind = True

    def _look(self) -> JobInfo:
        info = self._reader.info(self._job_id)
        if (self._instance is not None or self._group is not None) and (
            info.instances or self._shown is None
        ):
            self._shown = tuple(item.name for item in info.instances if self._shows(item))
            self._refuse_unknown(info)
        return info

    def _shows(self, item: InstanceInfo) -> bool:
        return self._instance in (None, item.name) and self._group in (None, item.group)

    def _read(self, timeout_s: float) -> Iterator[str]:
        news = self._reader.log_news(
            self._job_id, self._attempt, self._offsets, timeout_s, VIEW_BYTES, self._shown
        )
        for name, data in sorted(news.items()):
            self._offsets[name] = self._offsets.get(name, 0) + len(data)
            if name not in self._splitters:
                own = f"{name} | " if self._prefix else ""
                self._splitters[name] = LineSplitter(own if self._prefixed is None else self._prefixed)
            yield from self._splitters[name].feed(data)

    def _close(self) -> Iterator[str]:
        for splitter in self._splitters.values():
            yield from splitter.close()

    def _refuse_unknown(self, info: JobInfo) -> None:
        """Refuse names that the job does not have; before it is placed nothing is known."""
        names = [item.name for item in info.instances]
        groups = list(dict.fromkeys(item.group for item in info.instances))
        for what, wanted, found in (("instance", self._instance, names), ("group", self._group, groups)):
            if wanted is not None and found and wanted not in found:
                raise UsageError(f"job {self._job_id} has no {what} {wanted!r}; it has {', '.join(found)}")
        if names and self._shown == ():
            raise UsageError(f"{self._instance} is not of the group {self._group}")
