"""Usage without processes: the history of samples, what people are told of GPUs, and archives and drivers that stall."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from raycontrol.hardware import GpuSample, InstanceUsage
from raycontrol.samples import appended, last_of_each, rates, spread, thinned
from raycontrol.trees import Row, percent, strangers_among
from raycontrol.usage import GpuAlarms, GpuReader, Outbox, Sampler

STAT = (
    b"42 (a b) c) S 7 42 42 0 -1 4194304 96 0 0 0 "
    b"300 20 40 5 20 0 1 0 3916748 3133440 382 18446744073709551615 1 1 0 0 0"
)


def sample(at: float = 0.0, **changes: Any) -> InstanceUsage:
    facts = {"cpu_percent": 100, "memory_bytes": 1, "read_bytes": 0, "written_bytes": 0, "processes": 1}
    return InstanceUsage(**{"at": at, **facts, **changes})


def line(at: float) -> bytes:
    return sample(at).model_dump_json().encode() + b"\n"


def gpu(index: int, percent: float | None = 0, xids: tuple[int, ...] = ()) -> GpuSample:
    return GpuSample(index=index, uuid=f"GPU-{index}", utilisation_percent=percent, xids=xids)


def times(history: bytes) -> list[float]:
    return [json.loads(text)["at"] for text in history.splitlines()]


# Processes


def test_a_line_of_the_process_table_is_read_whatever_the_name_of_the_process() -> None:
    row = Row(42, STAT)
    assert (row.parent, row.alive, row.ticks, row.start_time) == (7, True, 365, 3_916_748)
    assert row.memory_bytes == 382 * os.sysconf("SC_PAGE_SIZE")


def test_two_cores_for_half_of_ten_seconds_are_100_percent() -> None:
    assert percent(used_s=10, elapsed_s=10) == 100
    assert percent(used_s=0, elapsed_s=0) == 0


def row(pid: int, parent: int) -> Row:
    return Row(pid, STAT.replace(b" S 7 ", b" S %d " % parent))


def test_strangers_are_those_that_parents_join_to_the_first_process_and_orphans_of_the_moment_are_not() -> (
    None
):
    # 1 has the stranger 2 and the supervisor 10 with 11; the parent of 30 ended while the table was read.
    rows = {row.pid: row for row in (row(1, 0), row(2, 1), row(10, 1), row(11, 10), row(30, 29), row(50, 40))}
    children = {parent: [row for row in rows.values() if row.parent == parent] for parent in (0, 1, 10)}
    assert strangers_among(rows, children, known={40}, ours={10, 11}) == {1, 2, 50}


# The history


def test_a_sample_that_comes_again_is_held_once() -> None:
    assert appended(b"", "{1}") == b"{1}\n"
    assert appended(b"{1}\n", "{2}") == b"{2}\n"
    assert appended(b"{1}\n{2}\n", "{2}") == b""


def test_a_torn_line_is_ended_before_the_next_sample() -> None:
    assert appended(b'{1}\n{"at"', "{2}") == b"\n{2}\n"


def test_thinning_drops_every_second_of_the_old_samples_and_keeps_the_newest_quarter() -> None:
    history = b"".join(line(5 * number) for number in range(16))
    assert times(thinned(history)) == [0, 10, 20, 30, 40, 50, 60, 65, 70, 75]


def test_thinning_spares_what_has_been_thinned_before() -> None:
    timed = [(at, b"%d" % at) for at in (0, 100, 200, 300, 301, 302, 303, 304)]
    assert spread(timed) == [b"0", b"100", b"200", b"300"]


def test_a_history_that_was_thinned_many_times_still_covers_the_whole_course() -> None:
    history = b""
    for number in range(20_000):
        history += line(5 * number)
        if len(history) > 20_000:
            history = thinned(history)
    held = times(history)
    gaps = [after - before for before, after in pairwise(held)]
    assert held[0] == 0
    assert held[-1] == 99_995
    assert max(gaps) < 99_995 / 20
    assert gaps[-1] == 5


def test_thinning_works_on_a_clock_that_stood_still_and_on_nothing() -> None:
    assert times(thinned(line(7) * 8)) == [7, 7, 7]
    assert thinned(b"") == b""


def test_torn_lines_are_passed_over_by_thinning_and_reading(tmp_path: Path) -> None:
    assert times(thinned(line(0) + b'{"at": 2, "cpu_per\n' + line(5) + line(10) + line(15))) == [0, 15]
    history = line(1) + b'{"at": 2, "cpu_per\n' + line(3) + b'{"at": 4'
    folder = tmp_path / "usage"
    assert last_of_each(tmp_path, folder, 2) == {}
    folder.mkdir()
    (folder / "worker-0.jsonl").write_bytes(history)
    (folder / "worker-1.jsonl").symlink_to(folder / "worker-0.jsonl")
    for count, stamps in ((2, [1, 3]), (1, [3])):
        found = last_of_each(tmp_path, folder, count)
        assert {name: [sample.at for sample in samples] for name, samples in found.items()} == {
            "worker-0": stamps
        }
    assert last_of_each(tmp_path, folder, 0) == {}


def test_rates_are_bytes_a_second_between_two_samples() -> None:
    before = sample(10, read_bytes=1000, written_bytes=500)
    assert rates(before, sample(15, read_bytes=2000, written_bytes=500)) == (200, 0)


def test_rates_are_never_below_nothing() -> None:
    before = sample(10, read_bytes=1000, written_bytes=500)
    assert rates(before, sample(15, read_bytes=0, written_bytes=600)) == (0, 20)
    assert rates(before, sample(10, read_bytes=2000)) == (0, 0)
    assert rates(before, sample(9, read_bytes=2000)) == (0, 0)


# Alarms


def test_gpus_that_are_idle_for_the_limit_are_told_of_once() -> None:
    alarms = GpuAlarms(600)
    idle = sample(gpus=(gpu(0), gpu(1)))
    assert alarms.heard(0, idle) == []
    assert alarms.heard(599, idle) == []
    assert alarms.heard(600, idle) == ["its GPUs 0, 1 have been idle for 10 min"]
    assert alarms.heard(5000, idle) == []


def test_an_idle_gpu_is_told_of_again_only_after_it_was_busy() -> None:
    alarms = GpuAlarms(30)
    alarms.heard(0, sample(gpus=(gpu(3),)))
    assert alarms.heard(30, sample(gpus=(gpu(3),))) == ["its GPU 3 has been idle for 30 s"]
    assert alarms.heard(40, sample(gpus=(gpu(3, 1),))) == []
    assert alarms.heard(50, sample(gpus=(gpu(3),))) == []
    assert alarms.heard(80, sample(gpus=(gpu(3),))) == ["its GPU 3 has been idle for 30 s"]


def test_one_idle_gpu_beside_busy_ones_is_told_of() -> None:
    alarms = GpuAlarms(60)
    alarms.heard(0, sample(gpus=(gpu(0, 97), gpu(1))))
    assert alarms.heard(60, sample(gpus=(gpu(0, 99), gpu(1)))) == ["its GPU 1 has been idle for 1 min"]


def test_idle_time_counts_only_while_something_runs() -> None:
    alarms = GpuAlarms(60)
    alarms.heard(0, sample(gpus=(gpu(0),)))
    alarms.heard(50, sample(gpus=(gpu(0),), processes=0))
    assert alarms.heard(60, sample(gpus=(gpu(0),))) == []
    assert alarms.heard(120, sample(gpus=(gpu(0),))) == ["its GPU 0 has been idle for 1 min"]


def test_samples_that_do_not_say_how_busy_a_gpu_is_change_nothing() -> None:
    alarms = GpuAlarms(60)
    alarms.heard(0, sample(gpus=(gpu(0), gpu(1, None))))
    alarms.heard(30, sample(gpus=()))
    assert alarms.heard(60, sample(gpus=(gpu(0), gpu(1, None)))) == ["its GPU 0 has been idle for 1 min"]


def test_a_limit_of_0_tells_of_no_idle_gpu() -> None:
    alarms = GpuAlarms(0)
    assert alarms.heard(0, sample(gpus=(gpu(0),))) == []
    assert alarms.heard(9000, sample(gpus=(gpu(0),))) == []


def test_each_kind_of_xid_error_of_each_gpu_is_told_of_once() -> None:
    alarms = GpuAlarms(600)
    list_of_xids = "see NVIDIA's list: https://docs.nvidia.com/deploy/xid-errors/"
    assert alarms.heard(0, sample(gpus=(gpu(3, 50, xids=(79, 140)),))) == [
        f"GPU 3 reported XID 79 (the GPU has fallen off the bus); {list_of_xids}",
        f"GPU 3 reported XID 140; {list_of_xids}",
    ]
    assert alarms.heard(5, sample(gpus=(gpu(3, 50, xids=(79,)), gpu(4, 50, xids=(79,))))) == [
        f"GPU 4 reported XID 79 (the GPU has fallen off the bus); {list_of_xids}"
    ]


# Drivers and archives that stall


class SlowMeter:
    """Answers when ``go`` is set; ``most`` is how many asked at once."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked: list[tuple[str, ...]] = []
        self.closed = threading.Event()
        self.most = 0
        self._asking = 0

    def read(self, ids: Sequence[str]) -> tuple[GpuSample, ...]:
        self.asked.append(tuple(ids))
        self._asking += 1
        self.most = max(self.most, self._asking)
        self.go.wait(20)
        self._asking -= 1
        return (gpu(len(self.asked), 50),)

    def close(self) -> None:
        self.closed.set()


class BrokenMeter(SlowMeter):
    def read(self, ids: Sequence[str]) -> tuple[GpuSample, ...]:
        raise OSError("no driver")


def test_a_driver_that_does_not_answer_costs_a_sample_its_gpus_and_is_asked_by_one_thread_only() -> None:
    meter = SlowMeter()

    async def story() -> None:
        reader = GpuReader(lambda: meter, ("0", "3"), limit_s=0.05)
        assert await reader.read() == ()
        assert await reader.read() == ()
        meter.go.set()
        late = await patient(reader)
        assert late == (gpu(1, 50),)
        assert await patient(reader) == (gpu(2, 50),)
        reader.close()

    asyncio.run(story())
    assert (meter.asked, meter.most) == ([("0", "3"), ("0", "3")], 1)
    assert meter.closed.wait(10)


async def patient(reader: GpuReader) -> tuple[GpuSample, ...]:
    """What it says in the end: a loaded machine may be too slow for its limit."""
    for _ in range(100):
        if found := await reader.read():
            return found
    raise AssertionError("the meter's answer never came")


def test_a_meter_is_not_even_made_without_gpus() -> None:
    def make() -> SlowMeter:
        raise AssertionError("nobody asked for it")

    async def story() -> None:
        reader = GpuReader(make, ())
        assert await reader.read() == ()
        reader.close()

    asyncio.run(story())


def test_a_meter_that_fails_is_asked_again_next_time() -> None:
    async def story() -> None:
        reader = GpuReader(BrokenMeter, ("0",))
        for _ in range(2):
            with pytest.raises(OSError, match="no driver"):
                await reader.read()

    asyncio.run(story())


class Archive:
    """Takes a line when it is let to."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.tried = 0
        self.open = asyncio.Event()
        self.error: Exception | None = None

    async def keep(self, line: str) -> None:
        self.tried += 1
        await self.open.wait()
        if self.error is not None:
            raise self.error
        self.lines.append(line)


async def until(condition: Callable[[], object]) -> None:
    deadline = asyncio.get_running_loop().time() + 10
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.001)


def test_what_comes_while_the_archive_does_not_answer_is_dropped() -> None:
    async def story() -> None:
        archive = Archive()
        outbox = Outbox(archive.keep)
        outbox.send("1")
        await until(lambda: archive.tried)
        outbox.send("2")
        archive.open.set()
        await until(lambda: archive.lines)
        await until(lambda: (outbox.send("3"), len(archive.lines) > 1)[1])
        assert archive.lines[:2] == ["1", "3"]
        outbox.close()

    asyncio.run(story())


def test_an_archive_that_refuses_or_is_silent_too_long_gets_the_next_sample(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        archive = Archive()
        outbox = Outbox(archive.keep, limit_s=0.01)
        outbox.send("1")
        await until(lambda: (outbox.send("2"), archive.tried > 2)[1])
        archive.error = OSError("full")
        archive.open.set()
        refused = archive.tried
        await until(lambda: (outbox.send("3"), archive.tried > refused + 1)[1])
        archive.error = None
        await until(lambda: (outbox.send("4"), archive.lines)[1])
        assert set(archive.lines) <= {"3", "4"}
        outbox.close()

    asyncio.run(story())
    assert [record.message for record in caplog.records] == [
        "the archive takes no samples of usage; they are dropped"
    ]


def test_a_sampler_that_was_told_of_no_run_samples_nothing() -> None:
    async def story() -> None:
        archive = Archive()
        sampler = Sampler(
            gpus=(), meter=SlowMeter, keep=archive.keep, tell=print, idle_gpu_warn_s=0, period_s=0
        )
        assert sampler._task is None
        sampler.close()

    asyncio.run(story())
