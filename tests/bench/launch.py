"""How long a job takes that does nothing, beside what else could start it on the same hosts, in the same run.

``python -m tests.bench.launch [--rounds N]``, as root: three hosts, Ray with the settings of `raycontrol ray-env` on
them, then rounds in which each way takes its turn, so that all meet the same machine. The slow ones take it in each fifth.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from sys import executable

from tests.bench.alone import alone
from tests.bench.peers import SRUN, no_slurm, recommended, slurm
from tests.bench.tables import Table, Way, brief, measure, quantile, waiting
from tests.hosts.network import BIN, Hosts

SDK = """
import sys, time
from raycontrol import Client, JobSpec
client = Client()
spec = JobSpec(command="true", nodes=3)
client.submit(spec).wait(timeout_s=300)
print("ready", flush=True)
for line in sys.stdin:
    time.sleep(float(line))
    began = time.perf_counter()
    assert client.submit(spec).wait(timeout_s=300).state == "SUCCEEDED"
    print(time.perf_counter() - began, flush=True)
"""
TRAINER = """
import os, sys, time
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
ray.init()
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    scaling = ScalingConfig(num_workers=3, placement_strategy="STRICT_SPREAD")
    TorchTrainer(lambda: None, scaling_config=scaling, run_config=RunConfig(storage_path=sys.argv[1])).fit()
    print(time.perf_counter() - began, flush=True)
"""
PAUSE_S = 8
OURS = f"Client().submit(3 x true).wait(), connected, {PAUSE_S} s after the last one"
AT_ONCE = "the same, right after another one"
SUBMIT, TRAIN = "ray job submit -- true (one process)", "TorchTrainer(3 workers).fit() of nothing, connected"
FLOOR = "floor: fork and exec of true by Python"
IMPORTS = 'floor: python -c "import typer, rich"'
RUN, HELP, LIST = "raycontrol run --nodes 3 -- true", "raycontrol --help", "raycontrol list, on the head"


def tables(rounds: int) -> Sequence[Table]:
    with (
        tempfile.TemporaryDirectory() as name,
        Hosts(3, keep=[Path(name)]) as hosts,
        ExitStack() as until_end,
    ):
        env = {"RAYCONTROL_HOME": f"{name}/home", "RAY_ADDRESS": "", "RAY_AUTH_MODE": "disabled"}
        # A host's own name is 127.0.1.1 here, as on Debian: TorchTrainer has to be told which interface to take.
        hosts.start_cluster(env={**recommended(), "GLOO_SOCKET_IFNAME": "eth0"})
        env["RAY_ADDRESS"] = hosts.address
        ours = until_end.enter_context(waiting(hosts, 0, SDK, env))
        trainer = until_end.enter_context(
            waiting(hosts, 0, TRAINER.replace("sys.argv[1]", repr(str(hosts.shared))), env)
        )
        ways: dict[str, Way] = {
            OURS: lambda: float(ours(str(PAUSE_S))),
            AT_ONCE: lambda: float(ours("0")),
        }
        if (lacking := no_slurm()) is None:
            conf = until_end.enter_context(
                slurm(hosts, Path(name), more="SchedulerParameters=batch_sched_delay=0")
            )
            srun = until_end.enter_context(waiting(hosts, 0, SRUN, conf))
            ways["srun -N3 true"] = lambda: float(srun(""))
        ray_env = {**env, "RAY_ADDRESS": f"http://{hosts.ip(0)}:8265"}
        ways |= {
            SUBMIT: command(hosts, ray_env, BIN / "ray", "job", "submit", "--", "true"),
            TRAIN: lambda: float(trainer("")),
            FLOOR: lambda: hosts.run(0, ["true"], check=True),
        }
        slow = {SUBMIT: 5, TRAIN: 5}
        jobs = measure(ways, rounds, slow)
        cli = measure(
            {
                IMPORTS: command(hosts, env, executable, "-c", "import typer, rich"),
                HELP: command(hosts, env, BIN / "raycontrol", "--help"),
                LIST: command(hosts, env, BIN / "raycontrol", "list"),
                RUN: command(hosts, env, BIN / "raycontrol", "run", "--nodes", "3", "--", "true"),
            },
            max(1, rounds // 2),
        )
    p95 = brief(quantile(jobs[OURS], 0.95))
    notes = [
        f"The first: p95 {p95} s. Goals: 0.5 s, p95 0.8 s; 1/15 of `ray job submit`, 1/30 of TorchTrainer",
        "A node whose spare worker was used makes another one once it has been quiet for 2 s, which takes about one; a job that "
        "comes before that waits for a new worker process on each of its nodes",
    ]
    notes += [] if lacking is None else [f"not compared with {lacking}"]
    return [
        Table("A job of three instances that does nothing", jobs, notes=notes),
        Table(
            "The command line, whole processes",
            cli,
            notes=["Goals: run 1.5 s, --help 0.3 s, list 0.5 s"],
        ),
    ]


def command(hosts: Hosts, env: Mapping[str, str], *argv: str | Path) -> Callable[[], object]:
    return lambda: hosts.run(0, argv, env=env, check=True, timeout_s=300)


if __name__ == "__main__":
    alone(__doc__, tables, rounds=20)
