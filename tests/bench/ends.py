"""How soon a gang is gone after one of its ranks has failed, and an instance's tree after its actor was killed.

``python -m tests.bench.ends [--rounds N]``, as root: four hosts. The same as ``tests.bench.faults --only rank,actor``. The floor is how
long this machine takes to end a process that does nothing and to see that it is gone. The goals: 0.3 s and 0.5 s.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench.alone import alone
from tests.bench.faults import actor_killed, rank_failed
from tests.bench.stage import stage
from tests.bench.tables import Table, measure


def tables(rounds: int) -> Sequence[Table]:
    with tempfile.TemporaryDirectory() as home, stage(Path(home)) as hosts:
        ways = {
            "floor: kill -9 of a process, until it is gone": one_process,
            "a rank of two exits 1, until the gang is gone": lambda: rank_failed(hosts)[0],
            "kill -9 of an instance's actor, until its tree is gone": lambda: actor_killed(hosts)[0],
        }
        return [Table("Endings", measure(ways, rounds), notes=["Goals: 0.3 s after the grace ends, 0.5 s"])]


def one_process() -> float:
    process = subprocess.Popen(["sleep", "600"])
    began = time.perf_counter()
    process.kill()
    process.wait()
    return time.perf_counter() - began


if __name__ == "__main__":
    alone(__doc__, tables, rounds=10)
