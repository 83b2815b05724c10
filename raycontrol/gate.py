"""When the instances of an MPI job have all called their launcher, so that one world starts for them. Pure.

An MPI launcher that the start command calls on every instance is *collective*: its k-th call starts one world, from
the launcher instance, when each instance has made its k-th call or has ended; on the others the call waits for how
that world ends. The gate lives where the launcher instance is, hears of calls and ends, and says who is missing and
what came of a call.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Finished:
    """The world of the call is over. ``status`` is the launcher program's exit code, or a signal's negative number."""

    status: int


@dataclass(frozen=True)
class Abandoned:
    """The call will never have a world, or nobody will know how it ended; ``advice`` is for a person."""

    advice: str


Outcome = Finished | Abandoned


class Gate:
    """Which call of which instance has arrived.

    Calls count from 0 on each instance. News may come twice and late: what an instance says of calls after its end,
    and a second end of a call, change nothing.
    """

    def __init__(self, launcher: str, instances: Collection[str]) -> None:
        if launcher not in instances:
            raise ValueError(f"the launcher {launcher} is not among the instances {', '.join(instances)}")
        self._launcher = launcher
        self._arrived: dict[str, set[int]] = {instance: set() for instance in instances}
        self._ended: set[str] = set()
        self._finished: dict[int, int] = {}

    def arrive(self, instance: str, call: int) -> bool:
        """``instance`` has made its call of that number and waits; return whether that is news."""
        if instance in self._ended or call in self._arrived[instance]:
            return False
        self._arrived[instance].add(call)
        return True

    def end(self, instance: str) -> None:
        """The start command of ``instance`` has ended: nobody waits for its calls any more."""
        if instance in self._arrived:
            self._ended.add(instance)

    def missing(self, call: int) -> tuple[str, ...]:
        """Return who keeps the call from starting, in the order of the instances."""
        return tuple(
            instance
            for instance, calls in self._arrived.items()
            if call not in calls and instance not in self._ended
        )

    def finish(self, call: int, status: int) -> None:
        """The launcher's world of that call is over; ``status`` is its exit code, or a signal's negative number."""
        if self.outcome(call) is None:
            self._finished[call] = status

    def outcome(self, call: int) -> Outcome | None:
        """Return what came of the call, None while that is open."""
        if call in self._finished:
            return Finished(self._finished[call])
        if self._launcher not in self._ended:
            return None
        if call in self._arrived[self._launcher]:
            return Abandoned(self._unfinished(call))
        return Abandoned(self._uncalled(call))

    def _uncalled(self, call: int) -> str:
        callers = [instance for instance, calls in self._arrived.items() if call in calls]
        others = f" while {_listed(callers)} did" if callers else ""
        return (
            f"the launcher instance {self._launcher} ended without calling mpirun for the {_ordinal(call + 1)} "
            f"time{others}. Let every instance call it equally often, or set `run_on: launcher` so that the command "
            "runs once, on the launcher."
        )

    def _unfinished(self, call: int) -> str:
        return (
            f"the start command of the launcher instance {self._launcher} ended before the mpirun of its "
            f"{_ordinal(call + 1)} call did. Let it wait for mpirun instead of leaving it in the background."
        )


def _listed(names: list[str]) -> str:
    if len(names) > 3:
        names = [*names[:2], f"{len(names) - 2} more"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{({1: 'st', 2: 'nd', 3: 'rd'}).get(number % 10, 'th')}"
