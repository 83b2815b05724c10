"""What raycontrol costs a DDP training, beside torchrun started by hand on the same hosts, in the same run.

``python -m tests.bench.ddp [--rounds N]``, as root: three hosts, one process on each, gloo. Rank 0 writes down how many
steps a second it made once it was warm. The goals: a throughput of 0.99 of bare torchrun's, 0.5 s more for the whole run.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from sys import executable

from tests.bench.alone import alone
from tests.bench.peers import recommended
from tests.bench.tables import Table, brief, measure, waiting
from tests.hosts.network import BIN, Hosts

TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, labels = torch.randn(64, 256), torch.randint(0, 10, (64,))
def steps(number):
    for _ in range(number):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
steps(50)
dist.barrier()
began = time.perf_counter()
steps(STEPS)
dist.barrier()
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        file.write(str(STEPS / (time.perf_counter() - began)))
dist.destroy_process_group()
"""
STEPS = 1000
SDK = """
import sys, time
from raycontrol import Client, JobSpec
client = Client()
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    info = client.submit(JobSpec(command=line.strip(), nodes=3)).wait(timeout_s=600)
    assert info.state == "SUCCEEDED", info
    print(time.perf_counter() - began, flush=True)
"""
BARE, OURS = "torchrun by hand on each host", "raycontrol"


def tables(rounds: int) -> Sequence[Table]:
    with tempfile.TemporaryDirectory() as name, Hosts(3, keep=[Path(name)]) as hosts:
        hosts.start_cluster(env=recommended())
        program = hosts.shared / "train.py"
        program.write_text(TRAIN.replace("STEPS", str(STEPS)))
        env = {"RAYCONTROL_HOME": f"{name}/home", "RAY_ADDRESS": hosts.address, "RAY_AUTH_MODE": "disabled"}
        speeds: dict[str, list[float]] = {BARE: [], OURS: []}
        with waiting(hosts, 0, SDK, env) as submitted:
            bare = by_hand(hosts, program)
            speed = hosts.shared / "speed"

            def ours() -> float:
                line = f"{BIN}/torchrun {program} {speed}"
                taken = float(submitted(line))
                speeds[OURS].append(float(speed.read_text()))
                return taken

            def theirs() -> float:
                taken = bare(speed)
                speeds[BARE].append(float(speed.read_text()))
                return taken

            whole = measure({BARE: theirs, OURS: ours}, rounds)
    speeds = {name: values[1:] for name, values in speeds.items()}  # without the round that warms up
    more = statistics.median(a - b for a, b in zip(whole[OURS], whole[BARE], strict=True))
    return [
        Table(
            "DDP training, steps in a second when warm", speeds, "steps/s", notes=["Goal: a ratio of 0.99"]
        ),
        Table(
            f"DDP training, the whole run of {STEPS} steps",
            whole,
            notes=[f"raycontrol takes {brief(more)} s more (median of the rounds). Goal: 0.5 s"],
        ),
    ]


def by_hand(hosts: Hosts, program: Path) -> Callable[[Path], float]:
    """Start torchrun on all hosts at once, as a person at three terminals would; return how long it took."""
    ports = itertools.count(29_600)
    env = {
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin",
    }

    def run(speed: Path) -> float:
        began = time.perf_counter()
        rendezvous = [
            "--nnodes=3",
            "--nproc-per-node=1",
            f"--master-addr={hosts.ip(0)}",
            f"--master-port={next(ports)}",
        ]
        started = [
            hosts.popen(
                i, [executable, BIN / "torchrun", *rendezvous, f"--node-rank={i}", program, speed], env=env
            )
            for i in range(3)
        ]
        for process in started:
            _, said = process.communicate(timeout=600)
            assert process.returncode == 0, said
        return time.perf_counter() - began

    return run


if __name__ == "__main__":
    alone(__doc__, tables, rounds=5)
