"""What raycontrol takes where nothing happens: the controller, the archive and the nodes' actors of an idle cluster, and a
controller with 1,000 simulated instances that run.

``python -m tests.bench.idle [--rounds N]``, as root: three hosts, a minute a round. Beside it stands what Ray's own processes
on these hosts take in the same minute. The goals: 1 % of a core; 300 MB and 20 % of a core with 1,000 instances.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from raycontrol.status import JobState
from tests.bench.alone import alone
from tests.bench.peers import lasting, recommended
from tests.bench.tables import Table
from tests.hosts.conftest import Cluster
from tests.hosts.network import Hosts
from tests.machine.fake_cluster import FakeCluster, Site
from tests.unit.fake_gangs import Program, nodes

WINDOW_S = 60.0
JOBS, EACH = 250, 4
OURS, RAYS = "raycontrol's actors: controller, archive, three nodes", "Ray's own processes on these hosts"


def tables(rounds: int) -> Sequence[Table]:
    with tempfile.TemporaryDirectory() as name, Hosts(3, keep=[Path(name)]) as hosts:
        hosts.start_cluster(env=recommended())
        env = {"RAYCONTROL_HOME": f"{name}/home", "RAY_ADDRESS": hosts.address, "RAY_AUTH_MODE": "disabled"}
        cluster = Cluster(hosts, Path(name) / "home")
        hosts.run(
            0,
            [sys.executable, "-m", "raycontrol", "run", "--", "true"],
            env=env,
            check=True,
            timeout_s=120,
        )
        found: dict[str, list[float]] = {RAYS: [], OURS: []}
        for _ in range(rounds):
            ours, theirs = shares(hosts, cluster)
            found[OURS].append(ours)
            found[RAYS].append(theirs)
        cluster.close()
    runs = [busy() for _ in range(rounds)]
    return [
        Table(
            "An idle cluster of three nodes, CPU", found, "% of a core", notes=["Goal: 1 % for raycontrol"]
        ),
        Table(
            f"A controller with {JOBS * EACH} simulated instances that run, CPU",
            {"controller": [share for share, _ in runs]},
            "% of a core",
            notes=[f"memory: {max(memory for _, memory in runs):.0f} MiB. Goals: 20 %, 300 MB"],
        ),
    ]


def shares(hosts: Hosts, cluster: Cluster) -> tuple[float, float]:
    """Return what our actors and all else of Ray take within a minute, in percent of a core."""
    ours = set(lasting(hosts, cluster).values())
    assert len(ours) == hosts.count + 2, "a controller, an archive, and an actor on each node"
    before = {pid: cpu for pid in hosts.pids() if (cpu := cpu_of(pid)) is not None}
    time.sleep(WINDOW_S)
    taken = {pid: now - then for pid, then in before.items() if (now := cpu_of(pid)) is not None}
    share = 100 * sum(seconds for pid, seconds in taken.items() if pid in ours) / WINDOW_S
    return share, 100 * sum(taken.values()) / WINDOW_S - share


def cpu_of(pid: int) -> float | None:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return None
    return times.user + times.system


def busy() -> tuple[float, float]:
    """Return percent of a core and MiB of a controller in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.bench.idle", "--simulated"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    share, memory = run.stdout.split()
    return float(share), float(memory)


async def simulated() -> None:
    """Let 1,000 instances run, and print what their controller takes."""
    with tempfile.TemporaryDirectory() as name:
        names = [f"{group}-{i}" for group in ("master", "worker") for i in range(EACH)]
        hosts = nodes(*[f"h{i}" for i in range(JOBS * EACH)], cpu=1)
        site = Site(Path(name), FakeCluster(hosts, {one: Program(seconds=None) for one in names}))
        for number in range(JOBS):
            await site.submit(f"job-{number}", nodes=EACH)
        for number in range(JOBS):
            await site.reaches(f"job-{number}", JobState.RUNNING, timeout_s=300)
        began, cpu = time.monotonic(), time.process_time()
        await asyncio.sleep(WINDOW_S)
        share = 100 * (time.process_time() - cpu) / (time.monotonic() - began)
        print(share, psutil.Process(os.getpid()).memory_full_info().uss / 2**20)
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    if "--simulated" in sys.argv:
        asyncio.run(simulated())
    else:
        alone(__doc__, tables, rounds=2)
