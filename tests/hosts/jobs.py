"""Jobs of the tests: submit one from a host, follow it to its end, read what it left."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hosts.conftest import Cluster
from tests.hosts.network import HostProcess

PROGRAMS = Path(__file__).parent / "programs"

# Generous: the machine may be busy with other things.
JOB_S = 270


@dataclass(frozen=True)
class Ran:
    """A job that ended: its JobInfo as JSON, what `raycontrol run` exited with, and what it told (log lines included)."""

    info: dict[str, Any]
    status: int
    told: str

    def lines(self, instance: str) -> list[str]:
        """What one instance wrote."""
        prefix = f"{instance} | "
        return [line.removeprefix(prefix) for line in self.told.splitlines() if line.startswith(prefix)]

    def outputs(self, pattern: str) -> list[Any]:
        """The JSON documents among the job's outputs whose path matches, in the order of their paths."""
        return [
            json.loads(path.read_text()) for path in sorted(Path(self.info["outputs"]).glob(f"*/{pattern}"))
        ]


def start(cluster: Cluster, i: int, *arguments: str | Path) -> HostProcess:
    """`raycontrol run … --json` on host ``i``, under way; ``ended`` waits for it."""
    options, words = _split(arguments)
    return cluster.popen(i, "run", *options, "--json", *words)


def ended(process: HostProcess, timeout_s: float = JOB_S) -> Ran:
    """Wait for what ``start`` has started."""
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except BaseException:
        process.end()
        raise
    assert stdout.startswith("{"), f"exit {process.returncode}, no JobInfo:\n{stdout[:500]}\n{stderr[-4000:]}"
    return Ran(json.loads(stdout), process.returncode, stderr)


def run(cluster: Cluster, i: int, *arguments: str | Path) -> Ran:
    """`raycontrol run …` on host ``i`` to the job's end."""
    return ended(start(cluster, i, *arguments))


def succeeded(cluster: Cluster, i: int, *arguments: str | Path) -> Ran:
    """The same for a job that has to succeed."""
    ran = run(cluster, i, *arguments)
    assert (ran.info["state"], ran.status) == ("SUCCEEDED", 0), ran.told[-6000:]
    return ran


def events(cluster: Cluster, ran: Ran) -> list[dict[str, Any]]:
    """Everything that happened to the job, oldest first."""
    found: list[dict[str, Any]] = cluster.json(0, "events", ran.info["id"])
    return found


def accuracy(told: str) -> float:
    """What configs/ddp/train.py said at its end."""
    (found,) = re.findall(r"test accuracy ([\d.]+)", told)
    return float(found)


def _split(arguments: tuple[str | Path, ...]) -> tuple[tuple[str | Path, ...], tuple[str | Path, ...]]:
    """Options, and the command with its ``--`` if it is given there."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:place], arguments[place:]
