"""How soon raycontrol is over a fault: figures beside their goals, on four hosts.

``python -m tests.bench.faults [--rounds N] [--only NAME,…] [--json | --markdown]``, as root. One set of hosts serves all
rounds; a host that a round has broken is started anew before the next. Times are those of the job's stored events and
of what its processes write; all hosts share one clock. Prints the median and the worst of each figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raycontrol.settings import Settings
from tests.bench.stage import HOSTS, Asker, Gang, Stage, stage
from tests.hosts.network import why_no_hosts

FENCE_S = Settings.fence_s  # as it is where no setting says otherwise
SILENT_S = FENCE_S + 10
QUEUED = ("QUEUED", "PLACING")


@dataclass(frozen=True)
class Figure:
    """Seconds from a fault until something holds; without a goal it only explains the others."""

    until: str
    goal_s: float | None = None

    def misses(self, seconds: float) -> bool:
        return self.goal_s is not None and seconds > self.goal_s


@dataclass(frozen=True)
class Fault:
    """``measure`` brings one about and returns the seconds of each figure."""

    what: str
    figures: tuple[Figure, ...]
    measure: Callable[[Stage], tuple[float, ...]]


@dataclass(frozen=True)
class Measured:
    """What the rounds have given for one figure."""

    fault: str
    figure: Figure
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def worst_s(self) -> float:
        return max(self.seconds)

    @property
    def verdict(self) -> str:
        if self.figure.goal_s is None:
            return ""
        return "not reached" if self.figure.misses(self.worst_s) else "reached"


def main() -> None:
    options = arguments()
    reason = why_no_hosts()
    if reason:
        sys.exit(f"bench: {reason}")
    taken: dict[str, list[Sequence[float]]] = {name: [] for name in options.only}
    with tempfile.TemporaryDirectory() as home, stage(Path(home)) as hosts:
        try:
            for name in options.only:
                rounds(hosts, name, options.rounds, taken[name])
        finally:  # what was measured before something went wrong, too
            found = [one for name in options.only for one in measured(name, taken[name])]
            print(REPORTS[options.form](found, options.rounds), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="how often each fault happens (default 10)")
    parser.add_argument(
        "--only", type=names, default=list(FAULTS), metavar="NAME,…", help=f"of {', '.join(FAULTS)}"
    )
    parser.add_argument("--json", dest="form", action="store_const", const="json", default="text")
    parser.add_argument("--markdown", dest="form", action="store_const", const="markdown")
    return parser.parse_args()


def names(text: str) -> list[str]:
    wanted = text.split(",")
    unknown = [name for name in wanted if name not in FAULTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
    return wanted


def rounds(hosts: Stage, name: str, count: int, taken: list[Sequence[float]]) -> None:
    fault = FAULTS[name]
    for number in range(count):
        hosts.past.clear()
        taken.append(fault.measure(hosts))
        tell(hosts, fault, f"{name} {number + 1}/{count}", taken[-1])


def measured(name: str, taken: Sequence[Sequence[float]]) -> list[Measured]:
    figures = FAULTS[name].figures if taken else ()
    return [
        Measured(name, figure, seconds)
        for figure, seconds in zip(figures, zip(*taken, strict=True), strict=True)
    ]


def tell(hosts: Stage, fault: Fault, round: str, taken: Sequence[float]) -> None:
    """Say on stderr what a round took, and, if it missed a goal, what happened to its jobs and when."""
    print(f"{round}: {', '.join(f'{seconds:.2f}' for seconds in taken)} s", file=sys.stderr, flush=True)
    if any(figure.misses(seconds) for figure, seconds in zip(fault.figures, taken, strict=True)):
        for job in hosts.past:
            print(hosts.story(job), file=sys.stderr, flush=True)


# The faults.


def controller_killed(hosts: Stage) -> tuple[float, ...]:
    gang = Gang(hosts)
    usual_s, _ = connects(hosts, gang, time.time)
    taken_s, runs_s = connects(hosts, gang, lambda: hosts.kill_actor("rc-controller"))
    info = hosts.client.ask("info", gang.id)
    assert (info["state"], info["attempt"]) == ("RUNNING", 0), hosts.story(gang.id)
    hosts.clear()
    return taken_s, usual_s, runs_s


def connects(hosts: Stage, gang: Gang, begin: Callable[[], float]) -> tuple[float, float]:
    """Begin, then have a client connect, ask for the gang and submit a job; return how long that took, and until the job ran."""
    client = Asker(hosts.cluster)
    began = begin()
    assert client.ask("info", gang.id)["state"] == "RUNNING"
    job = client.ask("submit", {"command": "sleep 600"})
    taken_s = time.time() - began
    client.close()
    hosts.take_on(job, began)
    return taken_s, hosts.entered(job, "RUNNING") - began


def rank_failed(hosts: Stage) -> tuple[float, ...]:
    gang = Gang(hosts)
    pids = gang.processes(gang.places)
    gang.fail()
    gone = hosts.gone(gang.id, gang.places, pids)
    taken_s = gone - gang.failed_at()
    hosts.clear()
    return (taken_s,)


def actor_killed(hosts: Stage) -> tuple[float, ...]:
    gang = Gang(hosts)
    pids = gang.processes([gang.victim])
    began = hosts.kill_actor(f"{gang.id}.0:worker-0")
    taken_s = hosts.gone(gang.id, [gang.victim], pids) - began
    hosts.clear()
    return (taken_s,)


def power_lost(hosts: Stage) -> tuple[float, ...]:
    gang = Gang(hosts, retries=1)
    began = time.time()
    hosts.hosts.kill(gang.victim)
    return tried_again(hosts, gang, began)


def host_silent(hosts: Stage) -> tuple[float, ...]:
    gang = Gang(hosts, retries=1)
    began = time.time()
    hosts.hosts.cut(gang.victim)
    taken = tried_again(hosts, gang, began)
    return *taken, max(gang.beats(0)["0.worker-0"]) - began


def tried_again(hosts: Stage, gang: Gang, began: float) -> tuple[float, ...]:
    """Return when the job was in the queue again, and when it had other nodes; the attempts must not have run at once."""
    lost = hosts.entered(gang.id, "STOPPING") - began
    queued = hosts.entered(gang.id, *QUEUED, attempt=1) - began
    placed = hosts.entered(gang.id, "PLACING", attempt=1) - began
    hosts.entered(gang.id, "RUNNING", attempt=1)
    gang.beat(1)
    hosts.clear(broken=gang.victim)
    last = max(max(times) for times in gang.beats(0).values())
    first = min(min(times) for times in gang.beats(1).values())
    assert last < first, f"attempt 1 began {last - first:.2f} s before attempt 0 had ended"
    return queued, placed, lost


def others_placed(hosts: Stage) -> tuple[float, ...]:
    """One host has a used GPU and a free one, so that it is where the next job goes; then that host is silent, or another."""
    used = one_gpu(hosts)
    hosts.entered(used, "RUNNING")
    chosen = hosts.host_of(used, 0)
    usual_s = since_submitted(hosts, one_gpu(hosts), "RUNNING")
    hosts.clear()
    elsewhere = next(i for i in range(1, HOSTS) if i != chosen)
    (apart_s,), _ = while_silent(hosts, elsewhere, jobs=1)
    (there_s, behind_s), runs_s = while_silent(hosts, chosen, jobs=2)
    return behind_s, there_s, apart_s, runs_s, usual_s


def while_silent(hosts: Stage, silent: int, jobs: int) -> tuple[tuple[float, ...], float]:
    """Submit so many jobs right after the cut; return how soon each had its nodes, and how soon the last of them ran."""
    hosts.entered(one_gpu(hosts), "RUNNING")
    hosts.hosts.cut(silent)
    submitted = [one_gpu(hosts) for _ in range(jobs)]
    runs_s = max(since_submitted(hosts, job, "RUNNING") for job in submitted)
    placed_s = tuple(since_submitted(hosts, job, "PREPARING") for job in submitted)
    hosts.clear(broken=silent)
    return placed_s, runs_s


def one_gpu(hosts: Stage) -> str:
    return hosts.submit(command="sleep 600", resources={"gpu": 1})


def since_submitted(hosts: Stage, job: str, state: str) -> float:
    return hosts.entered(job, state) - hosts.begun[job]


FAULTS = {
    "controller": Fault(
        "kill -9 of the controller",
        (
            Figure("a client that connects then knows the running job and has a job accepted", 5),
            Figure("the same when nothing was killed"),
            Figure("the job that it submitted runs"),
        ),
        controller_killed,
    ),
    "rank": Fault(
        "a rank of two exits 1 (both end at SIGTERM)",
        (Figure("no process of the gang is left on its two hosts", 2),),
        rank_failed,
    ),
    "actor": Fault(
        "kill -9 of an instance's actor",
        (Figure("no process of its tree is left, daemons included", 1),),
        actor_killed,
    ),
    "power": Fault(
        "a host crashes, and its address refuses connections",
        (
            Figure("the job is back in the queue", 20),
            Figure("its next attempt has nodes", 20),
            Figure("its instance is known to be lost"),
        ),
        power_lost,
    ),
    "silent": Fault(
        f"a host is cut off for good and goes on by itself (`fence_s` {FENCE_S:g})",
        (
            Figure("the job is back in the queue", SILENT_S),
            Figure("its next attempt has nodes", SILENT_S),
            Figure("its instance is known to be lost"),
            Figure("the last sign of what ran on the host"),
        ),
        host_silent,
    ),
    "others": Fault(
        "a host is cut off; a job of one GPU is submitted right then",
        (
            Figure("it has a node elsewhere, behind a job for which the silent host was chosen", 20),
            Figure("it has a node, though the silent host was the first choice", 20),
            Figure("it has a node, and the silent host was no choice", 20),
            Figure("the last of them runs"),
            Figure("one runs, before the cut"),
        ),
        others_placed,
    ),
}


# What is printed.


def as_text(found: Sequence[Measured], rounds: int) -> str:
    lines = [f"{rounds} rounds, {machine()}"]
    for name in dict.fromkeys(one.fault for one in found):
        lines += ["", f"{name}: {FAULTS[name].what}", f"  {'':<84} {'median':>8} {'worst':>8} {'goal':>7}"]
        lines += [f"  {text_row(one)}" for one in found if one.fault == name]
    return "\n".join(lines)


def text_row(one: Measured) -> str:
    goal = "" if one.figure.goal_s is None else f"{one.figure.goal_s:g} s"
    return (
        f"{one.figure.until:<84} {one.median_s:6.2f} s {one.worst_s:6.2f} s {goal:>7} {one.verdict}".rstrip()
    )


def as_markdown(found: Sequence[Measured], rounds: int) -> str:
    head = ["| fault | until | median | worst | goal | |", "|---|---|---|---|---|---|"]
    rows = [
        f"| {FAULTS[one.fault].what} | {one.figure.until} | {short(one.median_s)} | {short(one.worst_s)} "
        f"| {'' if one.figure.goal_s is None else f'{one.figure.goal_s:g} s'} | {one.verdict} |"
        for one in found
    ]
    return "\n".join([*head, *rows, "", f"{rounds} rounds, {machine()}."])


def short(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"


def as_json(found: Sequence[Measured], rounds: int) -> str:
    figures = [
        {
            "fault": one.fault,
            "until": one.figure.until,
            "goal_s": one.figure.goal_s,
            "median_s": round(one.median_s, 3),
            "worst_s": round(one.worst_s, 3),
            "verdict": one.verdict or None,
            "seconds": [round(seconds, 3) for seconds in one.seconds],
        }
        for one in found
    ]
    return json.dumps({"machine": machine(), "rounds": rounds, "figures": figures}, indent=1)


def machine() -> str:
    return f"{os.cpu_count()} cores, {HOSTS} hosts as network namespaces on one machine"


REPORTS: Mapping[str, Callable[[Sequence[Measured], int], str]] = {
    "text": as_text,
    "markdown": as_markdown,
    "json": as_json,
}

if __name__ == "__main__":
    main()
