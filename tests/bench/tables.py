"""What benches share: ways that take turns, a process that waits on a host to be asked, and the tables of what they took."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.hosts.network import HostProcess, Hosts

Way = Callable[[], object]
"""Does its work once; one that returns a float has measured itself."""


@dataclass(frozen=True)
class Table:
    """What the rounds of a bench have given: values of each way, in ``unit``; ratios are to the first.

    ``notes`` say what the figures mean and how far they are from their goals.
    """

    title: str
    values: Mapping[str, Sequence[float]]
    unit: str = "s"
    notes: Sequence[str] = field(default_factory=tuple)

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Return way, rounds, median, spread and ratio to the first way."""
        first = statistics.median(next(iter(self.values.values())))
        return [
            (
                name,
                str(len(values)),
                f"{brief(statistics.median(values))} {self.unit}",
                f"{brief(min(values))} … {brief(max(values))}",
                f"{brief(statistics.median(values) / first)} ({brief(min(values) / first)} … {brief(max(values) / first)})",
            )
            for name, values in self.values.items()
        ]


HEAD = ("way", "rounds", "median", "spread", "ratio to the first")


def text(table: Table) -> str:
    rows = [HEAD, *table.rows()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([table.title, *(line.rstrip() for line in lines), *table.notes])


def markdown(table: Table) -> str:
    rows = [HEAD, ("---",) * len(HEAD), *table.rows()]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    notes = [f"- {note}" for note in table.notes]
    return "\n".join([f"**{table.title}**", "", *lines, *(["", *notes] if notes else [])])


def brief(value: float) -> str:
    """Return three digits of a figure: 0.000123, 1.23, 123, 1234."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that so large a share of the others does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(
    ways: Mapping[str, Way], rounds: int, every: Mapping[str, int] | None = None, *, warm: bool = True
) -> dict[str, list[float]]:
    """Return the seconds that each way took in each round, in which all take their turns.

    A way that is in ``every`` does so in each so-manieth round only. ``warm``: each is done once before, for the first time pays
    for what the rest finds ready.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values() if warm else ():
        way()
    for number in range(rounds):
        for name, way in ways.items():
            if number % (every or {}).get(name, 1):
                continue
            began = time.perf_counter()
            measured = way()
            taken = time.perf_counter() - began
            times[name].append(measured if isinstance(measured, float) else taken)
            print(f"{name}: {times[name][-1]:.3f}", file=sys.stderr, flush=True)
    return times


ANSWERS = """
import builtins, sys
answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print something, too
def print(*words, **options): builtins.print(*words, **{**options, "file": answers, "flush": True})
"""


@contextmanager
def waiting(hosts: Hosts, i: int, program: str, env: Mapping[str, str]) -> Iterator[Callable[[str], str]]:
    """Let a Python program wait on a host once it has said ``ready``; gives what sends it a line, and returns its answer.

    What connects once and is then asked again and again is measured without its start.
    """
    with hosts.popen(
        i, [sys.executable, "-c", ANSWERS + program], env=dict(env), stdin=subprocess.PIPE, stderr=None
    ) as process:
        expect(process, "ready")

        def ask(line: str = "") -> str:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, "the program on the host has ended"
            return answer.strip()

        try:
            yield ask
        finally:
            process.end()


def expect(process: HostProcess, word: str) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.strip() == word, f"the process said {line!r}"


def machine() -> str:
    """Return what everything was measured on."""
    with open("/proc/cpuinfo") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    kernel = os.uname()
    return (
        f"{os.cpu_count()} cores ({models[0] if models else 'unknown'}), {memory:.0f} GiB, "
        f"{kernel.sysname} {kernel.release.partition('-')[0]}, Python {sys.version.split()[0]}"
    )
