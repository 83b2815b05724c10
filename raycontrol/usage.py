"""The sampler of an instance: every 5 seconds what its process trees and GPUs use, told and sent to the archive."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from raycontrol.hardware import GpuSample, InstanceUsage
from raycontrol.trees import Trees

log = logging.getLogger(__name__)

PERIOD_S = 5.0
GPU_LIMIT_S = 2.0
"""A sample goes without GPUs when they have not answered in this time."""
KEEP_LIMIT_S = 30.0
"""An archive that has not answered for so long does not get the sample."""
XID_LIST = "https://docs.nvidia.com/deploy/xid-errors/"
XID_WORDS = {
    13: "a fault in a program's kernel",
    31: "a program's access to an address that is not its own",
    48: "an uncorrectable memory error",
    63: "a memory row was remapped",
    64: "a memory row could not be remapped",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "its own processor does not answer",
}


class Meter(Protocol):
    """What measures GPUs; ``nvml.Meter`` in earnest."""

    def read(self, ids: Sequence[str]) -> tuple[GpuSample, ...]:
        """Return a sample of each GPU, () where they cannot be measured; may block."""

    def close(self) -> None:
        """Let the GPUs' library go."""


class Sampler:
    """Samples an instance from the first run on that it is told of (``watch``) until ``close``.

    ``keep(line)`` sends a sample as one line of JSON to the archive, ``tell(message)`` says what people should know of
    the GPUs ``gpus`` (ids as in CUDA_VISIBLE_DEVICES; without any, ``meter`` is never made). ``idle_gpu_warn_s`` is as in
    ``GpuAlarms``.
    """

    def __init__(
        self,
        *,
        gpus: Sequence[str],
        meter: Callable[[], Meter],
        keep: Callable[[str], Awaitable[None]],
        tell: Callable[[str], None],
        idle_gpu_warn_s: float,
        period_s: float = PERIOD_S,
    ) -> None:
        self._trees = Trees()
        self._gpus = GpuReader(meter, gpus)
        self._alarms = GpuAlarms(idle_gpu_warn_s)
        self._outbox = Outbox(keep)
        self._tell = tell
        self._period_s = period_s
        self._task: asyncio.Task[None] | None = None
        self._trouble = ""

    def watch(self, main_pid: int) -> None:
        """From now on count the tree of a run that has just been started, known by its main process."""
        try:
            self._trees.add(main_pid)
        except Exception as error:  # whoever starts a run must not stumble over how it is measured
            self._note_trouble(error)
        if self._task is None:
            self._task = asyncio.ensure_future(self._sample_for_ever())

    def close(self) -> None:
        """Sample no more; nothing is waited for."""
        if self._task is not None:
            self._task.cancel()
        self._outbox.close()
        self._gpus.close()

    async def _sample_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            try:
                await self._sample()
            except Exception as error:  # a sample less is no harm to the job, and the next may be whole
                self._note_trouble(error)
            else:
                self._trouble = ""

    async def _sample(self) -> None:
        gpus = await self._gpus.read()
        used = await asyncio.to_thread(self._trees.look)
        sample = InstanceUsage(
            at=round(time.time(), 3),
            cpu_percent=round(used.cpu_percent, 1),
            memory_bytes=used.memory_bytes,
            read_bytes=used.read_bytes,
            written_bytes=used.written_bytes,
            processes=used.processes,
            gpus=gpus,
        )
        for message in self._alarms.heard(time.monotonic(), sample):
            self._tell(message)
        self._outbox.send(sample.model_dump_json())

    def _note_trouble(self, error: Exception) -> None:
        """Log a fault once, not every 5 seconds."""
        if repr(error) != self._trouble:
            log.warning("usage could not be sampled", exc_info=error)
        self._trouble = repr(error)


# GPUs.


class GpuReader:
    """Asks a meter in a thread of its own, for a driver may never answer; never twice at once.

    The thread is a daemon: one that is stuck in the driver keeps no process from ending.
    """

    def __init__(
        self, meter: Callable[[], Meter], ids: Sequence[str], *, limit_s: float = GPU_LIMIT_S
    ) -> None:
        self._make = meter
        self._meter: Meter | None = None
        self._ids = tuple(ids)
        self._limit_s = limit_s
        self._answer: asyncio.Future[tuple[GpuSample, ...]] | None = None

    async def read(self) -> tuple[GpuSample, ...]:
        """Return the GPUs' samples, () when they do not come in time: then the next call gets them.

        So no XID error is lost that the meter has told of.
        """
        if not self._ids:
            return ()
        if self._answer is None:
            self._answer = self._ask()
        done, _ = await asyncio.wait({self._answer}, timeout=self._limit_s)
        if not done:
            return ()
        answer, self._answer = self._answer, None
        return answer.result()

    def close(self) -> None:
        """Let the meter go, unless it is still being asked: then it goes with the process."""
        meter, self._meter = self._meter, None
        if meter is not None and (self._answer is None or self._answer.done()):
            threading.Thread(target=meter.close, name="gpu meter", daemon=True).start()

    def _ask(self) -> asyncio.Future[tuple[GpuSample, ...]]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[GpuSample, ...]] = loop.create_future()

        def measure() -> None:
            try:
                self._meter = self._meter or self._make()
                found = self._meter.read(self._ids)
            except Exception as error:  # it is raised to whoever waits for the answer
                self._hand_over(loop, answer.set_exception, error)
            else:
                self._hand_over(loop, answer.set_result, found)

        threading.Thread(target=measure, name="gpu meter", daemon=True).start()
        return answer

    def _hand_over(self, loop: asyncio.AbstractEventLoop, take: Callable[..., None], value: object) -> None:
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            loop.call_soon_threadsafe(take, value)


class GpuAlarms:
    """Decides what people should hear of an instance's GPUs, from its samples.

    A GPU that has been at 0 % for ``idle_gpu_warn_s`` seconds while a run of the instance lives is told of once, and
    again only after it was busy (0: never). Each kind of XID error of each GPU is told of once.
    """

    def __init__(self, idle_gpu_warn_s: float) -> None:
        self._limit_s = idle_gpu_warn_s
        self._idle_since: dict[str, float] = {}
        self._told_idle: set[str] = set()
        self._told_xids: set[tuple[str, int]] = set()

    def heard(self, now_s: float, sample: InstanceUsage) -> list[str]:
        """Return what a sample gives reason to say; ``now_s`` is of a clock that only goes forward."""
        messages = [*self._new_xids(sample.gpus)]
        idle = self._newly_idle(now_s, sample) if self._limit_s > 0 else []
        if idle:
            messages.append(idle_words(idle, self._limit_s))
        return messages

    def _new_xids(self, gpus: Sequence[GpuSample]) -> Iterator[str]:
        for gpu in gpus:
            for xid in gpu.xids:
                if (gpu.uuid, xid) not in self._told_xids:
                    self._told_xids.add((gpu.uuid, xid))
                    yield xid_words(gpu.index, xid)

    def _newly_idle(self, now_s: float, sample: InstanceUsage) -> list[int]:
        """Return the indexes of the GPUs whose idle time passes the limit with this sample.

        A sample that does not say how busy a GPU is changes nothing.
        """
        if not sample.processes:
            self._idle_since.clear()
        found = []
        for gpu in sample.gpus:
            if gpu.utilisation_percent is None:
                continue
            if gpu.utilisation_percent > 0:
                self._idle_since.pop(gpu.uuid, None)
                self._told_idle.discard(gpu.uuid)
            elif sample.processes:
                since = self._idle_since.setdefault(gpu.uuid, now_s)
                if now_s - since >= self._limit_s and gpu.uuid not in self._told_idle:
                    self._told_idle.add(gpu.uuid)
                    found.append(gpu.index)
        return found


def idle_words(indexes: Sequence[int], idle_s: float) -> str:
    """Return ``its GPUs 0, 1 have been idle for 10 min``."""
    which = "GPU {} has" if len(indexes) == 1 else "GPUs {} have"
    span = f"{idle_s / 60:g} min" if idle_s % 60 == 0 else f"{idle_s:g} s"
    return f"its {which.format(', '.join(map(str, indexes)))} been idle for {span}"


def xid_words(index: int, xid: int) -> str:
    """Return what an XID error of a GPU is in words, as far as it is one of those that are often met."""
    words = f" ({XID_WORDS[xid]})" if xid in XID_WORDS else ""
    return f"GPU {index} reported XID {xid}{words}; see NVIDIA's list: {XID_LIST}"


# To the archive.


class Outbox:
    """Sends lines one at a time; those that come before the last has been taken are dropped, and never sent again."""

    def __init__(self, keep: Callable[[str], Awaitable[None]], *, limit_s: float = KEEP_LIMIT_S) -> None:
        self._keep = keep
        self._limit_s = limit_s
        self._sending: asyncio.Task[None] | None = None
        self._failing = False

    def send(self, line: str) -> None:
        """Begin to send a line, or drop it."""
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send(line))

    def close(self) -> None:
        """Give up what is on its way."""
        if self._sending is not None:
            self._sending.cancel()

    async def _send(self, line: str) -> None:
        try:
            await asyncio.wait_for(self._keep(line), self._limit_s)
        except Exception:  # the archive restarts or has no room: a sample less is no harm
            if not self._failing:
                log.warning("the archive takes no samples of usage; they are dropped", exc_info=True)
            self._failing = True
        else:
            self._failing = False
