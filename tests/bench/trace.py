"""A week of a mixed load on 16 nodes of 8 GPUs, simulated under each policy: ``python -m tests.bench.trace [--seed N] …``.

Prints, as a table in Markdown, how long jobs waited for their first start, by priority (median / 95th percentile, in
minutes), how much of the GPUs' time went into work that was not lost in that week, and how often a job had to make room.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from raycontrol.queue import Policy, Rules
from tests.simulation import WEEK_S, Load, Simulation, cluster, week


def waits_min(simulated: Simulation, loads: Sequence[Load], priority: int) -> str:
    waits = sorted(
        (simulated.started[load.job.job_id] - load.job.submitted_at) / 60
        for load in loads
        if load.job.spec.priority == priority
    )
    return f"{waits[len(waits) // 2]:.0f} / {waits[int(len(waits) * 0.95)]:.0f}"


def used(simulated: Simulation, gpus: float) -> float:
    """Which share of the GPUs' time in the week was work."""
    return sum(amount * max(0.0, min(ended, WEEK_S) - began) for began, ended, amount in simulated.worked) / (
        gpus * WEEK_S
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--jobs", type=int, default=1200)
    options.add_argument("--limited", type=float, default=0.7, help="share of the jobs that have `run_s`")
    given = options.parse_args()
    nodes, loads = cluster(16), week(given.seed, given.jobs, given.limited)
    gpus = sum(node.total["GPU"] for node in nodes)
    asked = sum(load.job.gpus * load.takes_s for load in loads) / (gpus * WEEK_S)
    print(
        f"{len(loads)} jobs, {given.limited:.0%} with `run_s`; they ask for {asked:.0%} of the week's GPU time\n"
    )
    priorities = sorted({load.job.spec.priority for load in loads})
    print(
        f"| policy | {' | '.join(f'priority {p}' for p in priorities)} | GPU time used | made room | late |"
    )
    print("|---|" + "---|" * (len(priorities) + 3))
    for policy in Policy:
        simulated = Simulation(nodes, loads, Rules(policy))
        simulated.run()
        waits = " | ".join(waits_min(simulated, loads, priority) for priority in priorities)
        print(
            f"| `{policy}` | {waits} | {used(simulated, gpus):.0%} | {simulated.preemptions.total()} | "
            f"{len(simulated.late)} |"
        )


if __name__ == "__main__":
    main()
