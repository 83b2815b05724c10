"""What following logs costs a job: one that writes 1 GiB, and 16 instances that write 20,000 lines a second each.

``python -m tests.bench.logs [--rounds N]``, as root: three hosts. The same program writes to a file of its own in one way
and to its standard output, with somebody who follows it, in the other; its CPU and wall time are its own measure. Ends in
failure if the follower misses a byte. The goals: 3 % more, and memory of controller and archive that does not grow.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from sys import executable

import psutil

from tests.bench.alone import alone
from tests.bench.peers import lasting, recommended
from tests.bench.tables import Table, measure, waiting
from tests.hosts.conftest import Cluster
from tests.hosts.network import Hosts

GIB = 1 << 30
BIG = """
import os, sys, time
out = open(sys.argv[1], "wb", buffering=0) if sys.argv[1] else open(1, "wb", buffering=0, closefd=False)
line = b"x" * 99 + b"\\n"
block = line * 655
began = time.perf_counter()
written = 0
while written < SIZE:
    written += out.write(block)
taken = time.perf_counter() - began
with open(sys.argv[2], "w") as file:
    file.write(f"{taken} {written}")
""".replace("SIZE", str(GIB))
MANY = """
import os, sys, time
where, told, lines, rate = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
out = open(where + os.environ["RAYCONTROL_INSTANCE"], "wb", buffering=0) if where else open(1, "wb", buffering=0, closefd=False)
began, cpu, behind = time.perf_counter(), time.process_time(), 0.0
block = b"".join(b"step %7d loss 0.123456 accuracy 0.654321\\n" % number for number in range(rate // 100))
for number in range(lines * 100 // rate):
    out.write(block)
    left = began + (number + 1) / 100 - time.perf_counter()
    behind = max(behind, -left)
    time.sleep(max(0.0, left))
with open(told + os.environ["RAYCONTROL_INSTANCE"], "w") as file:
    file.write(f"{time.perf_counter() - began} {time.process_time() - cpu}")
"""
SDK = """
import json, sys, time
from raycontrol import Client, JobSpec
client = Client()
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    follow = asked.pop("follow")
    job = client.submit(JobSpec.from_dict(asked))
    seen = lines = 0
    for text in job.logs(follow=True, prefix=False) if follow else ():
        seen += len(text) + 1
        lines += 1
    info = job.wait(timeout_s=900)
    assert info.state == "SUCCEEDED", info
    print(json.dumps([seen, lines]), flush=True)
"""
INSTANCES, RATE, SECONDS = 16, 20_000, 10
GOAL = "Goal: a ratio of 1.03"
FILE, FOLLOWED = "to a file of its own", "to standard output, followed by a client"


def tables(rounds: int) -> Sequence[Table]:
    with tempfile.TemporaryDirectory() as name, Hosts(3, keep=[Path(name)]) as hosts:
        hosts.start_cluster(env=recommended())
        env = {"RAYCONTROL_HOME": f"{name}/home", "RAY_ADDRESS": hosts.address, "RAY_AUTH_MODE": "disabled"}
        cluster = Cluster(hosts, Path(name) / "home")
        with waiting(hosts, 0, SDK, env) as ask:
            bench = Logs(hosts, cluster, ask)
            big = measure({FILE: lambda: bench.big(False), FOLLOWED: lambda: bench.big(True)}, rounds)
            after_big = bench.memory_note()
            ways = {FILE: lambda: bench.many(False), FOLLOWED: lambda: bench.many(True)}
            many = measure(ways, rounds, warm=False)  # they keep to a rate of their own
            after_many = bench.memory_note()
        cluster.close()
    return [
        Table("1 GiB from one instance: the program's own time", big, notes=[GOAL, after_big]),
        Table(
            f"{INSTANCES} instances, {RATE} lines/s each for {SECONDS} s: the slowest program's own time",
            many,
            notes=[GOAL, after_many],
        ),
    ]


class Logs:
    def __init__(self, hosts: Hosts, cluster: Cluster, ask: Callable[[str], str]) -> None:
        self._ask = ask
        self._hosts = hosts
        self._cluster = cluster
        self._folder = hosts.shared / "logs"
        self._folder.mkdir()
        (self._folder / "big.py").write_text(BIG)
        (self._folder / "many.py").write_text(MANY)

    def big(self, followed: bool) -> float:
        told, where = self._folder / "big", "" if followed else "/tmp/big.log"
        command = [executable, str(self._folder / "big.py"), where, str(told)]
        seen, _ = json.loads(self._ask(json.dumps({"command": command, "follow": followed})))
        taken, written = told.read_text().split()
        assert not followed or seen == int(written), f"the follower saw {seen} of {written} bytes"
        return float(taken)

    def many(self, followed: bool) -> float:
        for old in self._folder.glob("told-*"):
            old.unlink()
        where = "" if followed else "/tmp/many-"
        lines = RATE * SECONDS
        program = [executable, str(self._folder / "many.py"), where, str(self._folder / "told-")]
        spec = {
            "command": [*program, str(lines), str(RATE)],
            "nodes": INSTANCES,
            "placement": "pack",
            "resources": {"cpu": 0.25},
            "follow": followed,
        }
        _, seen = json.loads(self._ask(json.dumps(spec)))
        assert not followed or seen == INSTANCES * lines, (
            f"the follower saw {seen} of {INSTANCES * lines} lines"
        )
        return max(float(path.read_text().split()[0]) for path in self._folder.glob("told-*"))

    def memory_note(self) -> str:
        """Say how much memory the lasting actors on the head have now."""
        actors = lasting(self._hosts, self._cluster)
        told = [
            f"{name} {psutil.Process(pid).memory_full_info().uss / 2**20:.0f} MiB"
            for name, pid in sorted(actors.items())
            if "node" not in name
        ]
        return f"Memory after it (USS): {', '.join(told)}"


if __name__ == "__main__":
    alone(__doc__, tables, rounds=3)
