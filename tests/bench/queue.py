"""What one pass of the queue costs, beside the least it has to do: ``python -m tests.bench.queue [--jobs N] …``.

1,000 nodes of 8 GPUs, 10,000 waiting jobs of 15 shapes, ten priorities and three limits. The first pass fills the
cluster; then the same is asked again with nothing changed, and with one job ended. The floor, in the same run: sort the
jobs by what they are ordered by, and make one answer for each. Times are CPU seconds of this process, medians.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

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


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--jobs", type=int, default=10_000)
    options.add_argument("--nodes", type=int, default=1_000)
    options.add_argument("--rounds", type=int, default=15)
    given = options.parse_args()
    nodes, waiting = cluster(given.nodes), line(given.jobs, random.Random(1))
    floor(waiting)
    print(f"{given.jobs} jobs, {given.nodes} nodes; CPU ms, medians of {given.rounds}; in brackets: floors")
    print(f"{'policy':10}{'first pass':>14}{'started':>9}{'unchanged':>16}{'one ended':>16}{'floor':>8}")
    for policy in Policy:
        rules, capacity = Rules(policy), Capacity()
        began = time.process_time()
        decisions = decide(waiting, nodes, (), rules, 1000.0, capacity)
        first = (time.process_time() - began) * 1000
        running = started(waiting, decisions, 1000.0, random.Random(2))
        placed = {job.job_id for job in running}
        rest = [item for item in waiting if item.job_id not in placed]
        room = Room(nodes, Usage(rules))
        for job in running:
            room.take(job, job.rooms)
        full = list(room.nodes.values())
        room.give_back(running[5])
        relieved, fewer = list(room.nodes.values()), running[:5] + running[6:]

        least = median_ms(partial(floor, rest), given.rounds)
        same = median_ms(partial(decide, rest, full, running, rules, 1001.0, capacity), given.rounds)
        ended = median_ms(partial(decide, rest, relieved, fewer, rules, 1001.0, capacity), given.rounds)
        print(
            f"{policy:10}{first:14.0f}{len(running):9}{same:10.1f} ({same / least:.1f}){ended:10.1f} ({ended / least:.1f})"
            f"{least:8.1f}"
        )


if __name__ == "__main__":
    main()
