"""The environment contract of the modes ps and ray, checked from outside, with two jobs at once on the same hosts.

The jobs are those of ``probe/*.yaml``: groups that differ, two instances on a host, and in mode ray a GPU that is shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checker import Job, violations
from tests.hosts import jobs
from tests.hosts.conftest import Cluster
from tests.hosts.jobs import Ran
from tests.hosts.network import ENVIRONMENT, RAY_ENVIRONMENT, HostProcess
from tests.support import wait_until

PROBE = Path(__file__).parent / "probe"
HOSTS = range(3)
PLACED_S, MEETING_S = 60, 150
MIB = 1 << 20


@pytest.fixture
def hold(cluster: Cluster) -> Iterator[None]:
    """Remove what ``--hold`` leaves in the hosts' /tmp."""
    yield
    for i in HOSTS:
        for path in held(cluster, i):
            path.unlink()
        (cluster.hosts.hosts[i].tmp / "hold").unlink(missing_ok=True)


def test_two_ps_jobs_at_once_each_get_what_the_contract_promises(cluster: Cluster, hold: None) -> None:
    running = [jobs.start(cluster, 2, PROBE / "ps.yaml")]
    go_on(running, lambda: bool(cluster.ask()["groups"]), PLACED_S, "the first job has its place")
    running.append(jobs.start(cluster, 1, PROBE / "ps-beside.yaml"))
    first, second = met(cluster, running, processes=7 + 6)
    contract = [
        job(
            first,
            slots=(1, 1, 1, 1, 2, 1),
            gpus=(0, 7, 7, 0, 7, 0),
            mode="ps",
            name="probe-ps",
            roles=("chief", "worker", "worker", "ps", "worker", "evaluator"),
        ),
        job(
            second,
            slots=(1,) * 6,
            gpus=(1, 1, 0, 0, 0, 1),
            mode="ps",
            name="probe-ps-beside",
            roles=("worker", "worker", "ps", "ps", "ps", "worker"),
        ),
    ]
    assert violations(contract) == []
    assert [per_host(ran) for ran in (first, second)] == [[2, 2, 2], [2, 2, 2]]


def test_two_ray_jobs_at_once_each_get_what_the_contract_promises(cluster: Cluster, hold: None) -> None:
    specs = (PROBE / "ray.yaml", PROBE / "ray-beside.yaml")
    running = [jobs.start(cluster, i, spec) for i, spec in enumerate(specs)]
    first, second = met(cluster, running, processes=3 + 2)
    contract = [
        job(
            first,
            slots=(1, 1, 1),
            gpus=(1, 1, 8),
            mode="ray",
            name="probe-ray",
            resources=(
                {"CPU": 2, "GPU": 0.5, "memory": 512 * MIB},
                {"CPU": 1, "GPU": 0.5, "memory": 512 * MIB},
                {"CPU": 1, "GPU": 8, "memory": 600 * MIB},
            ),
        ),
        job(
            second,
            slots=(1, 1),
            gpus=(1, 8),
            mode="ray",
            name="probe-ray-beside",
            resources=({"CPU": 1, "GPU": 0.5, "memory": 400 * MIB}, {"CPU": 1, "GPU": 8}),
        ),
    ]
    assert violations(contract) == []
    assert [per_host(ran) for ran in (first, second)] == [[1, 2], [1, 1]]
    assert first.info["instances"][0]["ip"] == second.info["instances"][0]["ip"]


def met(cluster: Cluster, running: list[HostProcess], processes: int) -> list[Ran]:
    """The jobs, which have to succeed, at their end; they are let go when all processes of all of them have met."""
    everybody = f"all {processes} processes of the jobs have met"
    go_on(running, lambda: sum(len(held(cluster, i)) for i in HOSTS) == processes, MEETING_S, everybody)
    for i in HOSTS:
        (cluster.hosts.hosts[i].tmp / "hold").touch()
    ended = [jobs.ended(process) for process in running]
    assert [ran.status for ran in ended] == [0] * len(ended), "\n".join(ran.told for ran in ended)[-6000:]
    return ended


def go_on(running: list[HostProcess], condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Wait for the condition, or for the end of a job, which nobody expects yet and ``met`` will show."""
    wait_until(lambda: condition() or any(process.poll() is not None for process in running), timeout_s, what)


def job(ran: Ran, **asked_for: Any) -> Job:
    return Job(
        ran.outputs("probe-*.json"),
        spread=False,
        env={"GREETING": "hello from the spec"},
        files=tuple(path.name for path in PROBE.iterdir() if path.is_file()),
        node_env={**ENVIRONMENT, **RAY_ENVIRONMENT},
        **asked_for,
    )


def per_host(ran: Ran) -> list[int]:
    """How many instances each host had that had any, fewest first."""
    return sorted(Counter(instance["ip"] for instance in ran.info["instances"]).values())


def held(cluster: Cluster, i: int) -> list[Path]:
    return list(cluster.hosts.hosts[i].tmp.glob("hold.*"))
