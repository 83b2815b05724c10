"""How long a job of n instances takes that does nothing, beside n plain Ray actors in the same reservation, in the same run.

``python -m tests.bench.gang [--rounds N]``, as root: three hosts, `placement: pack`, n of 8, 16, 32 and 64. The goal: what one
more instance costs is no more than one more plain actor, and does not rise with n.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tests.bench.alone import alone
from tests.bench.peers import recommended
from tests.bench.tables import Table, Way, brief, measure, waiting
from tests.hosts.network import Hosts

SIZES = (8, 16, 32, 64)
SDK = """
import sys, time
from raycontrol import Client, JobSpec
client = Client()
print("ready", flush=True)
for line in sys.stdin:
    spec = JobSpec(command="true", nodes=int(line), placement="pack", resources={"cpu": 0.05})
    began = time.perf_counter()
    assert client.submit(spec).wait(timeout_s=300).state == "SUCCEEDED"
    print(time.perf_counter() - began, flush=True)
"""
ACTORS = """
import sys, time
import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
class Plain:
    def ready(self): return True
ray.init()
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    group = placement_group([{"CPU": 0.05}] * int(line), strategy="PACK")
    assert group.wait(60)
    options = lambda i: {"num_cpus": 0.05, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, i)}
    actors = [ray.remote(Plain).options(**options(i)).remote() for i in range(int(line))]
    ray.get([actor.ready.remote() for actor in actors])
    print(time.perf_counter() - began, flush=True)
    for actor in actors:
        ray.kill(actor)
    remove_placement_group(group)
    time.sleep(1)
"""
PLAIN, OURS = "{} plain Ray actors", "a job of {} instances"


def tables(rounds: int) -> Sequence[Table]:
    with tempfile.TemporaryDirectory() as name, Hosts(3, keep=[Path(name)]) as hosts:
        hosts.start_cluster(env=recommended())
        env = {"RAYCONTROL_HOME": f"{name}/home", "RAY_ADDRESS": hosts.address, "RAY_AUTH_MODE": "disabled"}
        with waiting(hosts, 0, SDK, env) as jobs, waiting(hosts, 0, ACTORS, env) as actors:
            ways: dict[str, Way] = {}
            for size in SIZES:
                ways[PLAIN.format(size)] = partial(asked, actors, size)
                ways[OURS.format(size)] = partial(asked, jobs, size)
            found = measure(ways, rounds, warm=False)
    told = [
        f"one more {what}: {', '.join(slopes(found, form))}"
        for what, form in (("actor", PLAIN), ("instance", OURS))
    ]
    return [Table("Jobs of many instances", found, notes=told)]


def asked(ask: Callable[[str], str], size: int) -> float:
    return float(ask(str(size)))


def slopes(found: Mapping[str, Sequence[float]], form: str) -> list[str]:
    """Return what one more costs between each size and the next, in words."""
    medians = {size: statistics.median(found[form.format(size)]) for size in SIZES}
    return [
        f"{brief((medians[b] - medians[a]) / (b - a) * 1000)} ms from {a} to {b}"
        for a, b in itertools.pairwise(SIZES)
    ]


if __name__ == "__main__":
    alone(__doc__, tables, rounds=2)
