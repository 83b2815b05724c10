"""What one pass of the queue costs, beside the least it has to do: ``python -m tests.bench.queue [--jobs N] …``.

1,000 nodes of 8 GPUs; 1,000 and 10,000 jobs of 15 shapes, ten priorities and three limits. The first pass fills the
cluster; then the same is asked again with nothing changed, with one job added, and with one ended. The floor, in the same run: sort the
jobs by what they are ordered by, and make one answer for each. Times are CPU seconds of this process, medians.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from raycontrol.choosing import Choices
from raycontrol.placement import Node
from raycontrol.queue import Capacity, KeepWaiting, PlaceNow, Policy, Rules, Running, Wait, Waiting, decide
from raycontrol.room import Room, Usage
from raycontrol.spec import JobSpec, Resources, Timeouts


def cluster(count: int) -> list[Node]:
    whole = {"CPU": 64.0, "GPU": 8.0, "memory": 1e12}
    return [
        Node(f"id-{number}", f"node-{number:04}", f"10.0.{number // 256}.{number % 256}", whole, whole)
        for number in range(count)
    ]


def line(count: int, chance: random.Random) -> list[Waiting]:
    specs = [
        JobSpec(
            command="train",
            nodes=nodes,
            priority=priority,
            resources=Resources(cpu=8, gpu=gpus),
            timeouts=Timeouts(run_s=run_s),
        )
        for nodes in (1, 2, 4, 8, 16)
        for gpus in (1, 4, 8)
        for priority in range(10)
        for run_s in (None, 600.0, 3600.0)
    ]
    return [
        Waiting(f"job-{number:05}", chance.choice(specs), float(number), user=f"user-{number % 20}")
        for number in range(count)
    ]


def started(
    waiting: Sequence[Waiting], decisions: Sequence[object], now: float, chance: random.Random
) -> list[Running]:
    """The jobs that were placed, as if each had started some time ago: no two end at the same moment."""
    rooms = {one.job_id: one.assignments for one in decisions if isinstance(one, PlaceNow)}
    return [
        Running(item.job_id, item.spec, item.user, rooms[item.job_id], since, item.over_by(since))
        for item in waiting
        if item.job_id in rooms
        for since in [now - chance.uniform(0, 500)]
    ]


def floor(waiting: Sequence[Waiting]) -> list[KeepWaiting]:
    return [
        KeepWaiting(item.job_id, Wait.BEHIND, "", number)
        for number, item in enumerate(sorted(waiting, key=lambda item: item.turn))
    ]


def median_ms(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return statistics.median(times) * 1000


def measure(policy: Policy, nodes: Sequence[Node], waiting: Sequence[Waiting], rounds: int) -> str:
    rules, capacity = Rules(policy), Capacity()
    began = time.process_time()
    decisions = decide(waiting, nodes, (), rules, 1000.0, capacity)
    first = (time.process_time() - began) * 1000
    running = started(waiting, decisions, 1000.0, random.Random(2))
    placed = {job.job_id for job in running}
    rest = [item for item in waiting if item.job_id not in placed]
    more = [*rest, replace(rest[0], job_id="added", submitted_at=1000.5)]
    room = Room(nodes, Usage(rules), Choices(nodes))
    for job in running:
        room.take(job, job.rooms)
    full = list(room.nodes.values())
    room.give_back(running[5])
    relieved, fewer = list(room.nodes.values()), running[:5] + running[6:]

    least = median_ms(partial(floor, rest), rounds)
    passes = ((rest, full, running), (more, full, running), (rest, relieved, fewer))
    costs = [median_ms(partial(decide, *asked, rules, 1001.0, capacity), rounds) for asked in passes]
    told = "".join(f"{cost:9.1f} ({cost / least:4.1f})" for cost in costs)
    return f"{len(waiting):7} {policy:10}{first:12.0f}{len(running):9}{told}{least:8.1f}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--jobs", type=int, nargs="*", default=[1_000, 10_000])
    options.add_argument("--nodes", type=int, default=1_000)
    options.add_argument("--rounds", type=int, default=15)
    given = options.parse_args()
    print(f"{given.nodes} nodes; CPU ms, medians of {given.rounds}; in brackets: floors")
    columns = "".join(f"{name:>16}" for name in ("unchanged", "one added", "one ended"))
    print(f"{'jobs':>7} {'policy':10}{'first pass':>12}{'started':>9}{columns}{'floor':>8}")
    for count in given.jobs:
        nodes, waiting = cluster(given.nodes), line(count, random.Random(1))
        floor(waiting)
        for policy in Policy:
            print(measure(policy, nodes, waiting, given.rounds), flush=True)


if __name__ == "__main__":
    main()
