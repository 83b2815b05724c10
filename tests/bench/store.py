"""How many jobs a second a controller takes in from 8 clients, and how long a page of its list takes.

``python -m tests.bench.store [--rounds N] …``, without root or Ray: the real controller over a simulated cluster
without room, its store on the disk of ``--home``. A round is a few seconds in which clients submit, each one job after the other,
and then as many of the floor: one row of the same size and one commit after the other in a plain SQLite file on
the same disk, as durable (``synchronous=FULL``). Then the list of all jobs is read page by page, once while they wait and
once when they have ended: the first time each page is read, and again.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from raycontrol.controller import Controller
from raycontrol.job import Job
from raycontrol.jobrows import row_of
from raycontrol.spec import JobSpec
from raycontrol.status import JobState, Note, Reason
from raycontrol.store import New, Store
from tests.machine.fake_cluster import FakeCluster, submission
from tests.unit.fake_gangs import nodes

CLUSTER = "bench"


@dataclass(frozen=True)
class Round:
    """Seconds that each submit took, how many came to an end per second, and what one took of this process's CPU time;
    ``floor`` is how many a second plain SQLite takes."""

    submits_s: Sequence[float]
    rate: float
    cpu_ms: float
    floor: float


def a_job(number: int, state: JobState) -> Job:
    at = time.time() - 10_000 + number / 10
    return Job(
        id=f"job-{number:06}",
        cluster=CLUSTER,
        spec=JobSpec(name="digits", command="torchrun train.py", nodes=2),
        user="ada",
        submitted_at=at,
        since=at,
        state=state,
        pending=None if state.terminal else "needs 2 instances with cpu 1 free",
        ended_at=at if state.terminal else None,
    )


def fill(home: Path, count: int, state: JobState) -> None:
    """Store so many jobs at once."""
    new = []
    for number in range(count):
        job = a_job(number, state)
        note = Note(
            at=job.since,
            kind="Submitted",
            state=state,
            reason=Reason.SUBMITTED,
            attempt=0,
            message="submitted by ada",
        )
        new.append(New(row_of(job), note))
    with Store(home) as store:
        if new:
            store.add_all(new)


def new_controller(home: Path) -> Controller:
    return Controller(str(home), CLUSTER, FakeCluster(nodes("ab", cpu=0)))


# Submits.


async def submit_for(controller: Controller, numbers: Iterator[int], seconds: float) -> list[float]:
    """Submit one job after the other; return how long each took."""
    usual = submission("new")
    took, over = [], time.perf_counter() + seconds
    while (began := time.perf_counter()) < over:
        await controller.submit(replace(usual, job_id=f"new-{next(numbers):06}"))
        took.append(time.perf_counter() - began)
    return took


def floor_of(folder: Path, seconds: float) -> float:
    """Rows per second, each in a commit of its own."""
    doc = row_of(a_job(0, JobState.QUEUED)).doc
    connection = sqlite3.connect(folder / "floor.db", isolation_level=None)
    for statement in ("journal_mode=WAL", "synchronous=FULL"):
        connection.execute(f"PRAGMA {statement}")
    connection.execute("CREATE TABLE IF NOT EXISTS rows (doc TEXT)")
    count, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO rows VALUES (?)", (doc,))
        connection.execute("COMMIT")
        count += 1
    connection.close()
    return count / took


async def submits(folder: Path, clients: int, rounds: int, seconds: float, waiting: int) -> list[Round]:
    home = folder / f"submits-{waiting}"
    fill(home, waiting, JobState.QUEUED)
    controller, numbers, found = new_controller(home), itertools.count(), []
    await controller.started()
    await submit_for(controller, numbers, seconds)  # what is built once is built
    for _ in range(rounds):
        began, cpu = time.perf_counter(), time.process_time()
        took = await asyncio.gather(*(submit_for(controller, numbers, seconds) for _ in range(clients)))
        each = [one for client in took for one in client]
        rate = len(each) / (time.perf_counter() - began)
        cpu_ms = (time.process_time() - cpu) / len(each) * 1000
        found.append(Round(each, rate, cpu_ms, floor_of(folder, seconds)))
    return found


# Pages.


async def pages_ms(controller: Controller, size: int) -> list[float]:
    """Read the whole list, newest first; return how long each page took."""
    took: list[float] = []
    before: tuple[float, str] | None = None
    while True:
        began = time.perf_counter()
        found = await controller.jobs(None, None, size, before=before)
        if not found:
            return took
        took.append((time.perf_counter() - began) * 1000)
        before = found[-1].submitted_at, found[-1].id


async def lists(folder: Path, jobs: int, sizes: Sequence[int], state: JobState) -> None:
    home = folder / f"list-{state}"
    fill(home, jobs, state)
    controller = new_controller(home)
    await controller.started()
    if state is JobState.QUEUED:  # so that the queue has seen all of them
        await controller.submit(submission("last-1"))
    for size in sizes:
        pages = await pages_ms(controller, size)
        print(
            f"{state:10}{size:5} a page: median {statistics.median(pages):6.1f} ms, worst {max(pages):6.1f} ms",
            flush=True,
        )


def told(rounds: Sequence[Round]) -> Iterator[str]:
    each = sorted(one * 1000 for found in rounds for one in found.submits_s)
    rates, floors = [found.rate for found in rounds], [found.floor for found in rounds]
    ratios = [found.rate / found.floor for found in rounds]
    yield f"submits/s: median {statistics.median(rates):.0f}, from {min(rates):.0f} to {max(rates):.0f}"
    yield f"floor/s: median {statistics.median(floors):.0f}, from {min(floors):.0f} to {max(floors):.0f}"
    yield f"submits beside the floor: {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}"
    yield f"CPU ms a submit: median {statistics.median(found.cpu_ms for found in rounds):.1f}"
    yield f"a submit: p50 {each[len(each) // 2]:.1f} ms, p99 {each[len(each) * 99 // 100]:.1f} ms"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=2.0)
    options.add_argument("--jobs", type=int, default=10_000)
    options.add_argument(
        "--home", type=Path, help="a folder on the disk to measure; default: that of temporary files"
    )
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="rc-bench-store-", dir=given.home) as name:
        folder = Path(name)
        for waiting in (0, given.jobs):
            print(f"{given.clients} clients, {waiting} jobs wait already; {given.rounds} rounds")
            rounds = asyncio.run(submits(folder, given.clients, given.rounds, given.seconds, waiting))
            print("\n".join(f"  {line}" for line in told(rounds)), flush=True)
        print(f"a list of {given.jobs} jobs")
        for state in (JobState.QUEUED, JobState.SUCCEEDED):
            asyncio.run(lists(folder, given.jobs, (100, 500), state))


if __name__ == "__main__":
    main()
