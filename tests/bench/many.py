"""How many jobs that do nothing get through the queue in a second, beside Slurm and `ray job submit`, in the same run.

``python -m tests.bench.many [--rounds N]``, as root: three hosts of four CPUs, 200 jobs of one instance, from the first
submission until the last has ended. Slurm is as Debian configures it. `ray job submit`, at seconds a job, has ten.
The goals: more than Slurm, and five times `ray job submit`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.bench.alone import alone
from tests.bench.peers import no_slurm, recommended, slurm
from tests.bench.tables import Table, Way, measure, waiting
from tests.hosts.network import Hosts

JOBS, FEW = 200, 10
SDK = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from raycontrol import Client, JobSpec
client = Client()
spec = JobSpec(command="true")
client.submit(spec).wait(timeout_s=300)
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    with ThreadPoolExecutor(8) as threads:
        jobs = list(threads.map(lambda _: client.submit(spec), range(JOBS)))
    assert all(job.wait(timeout_s=600).state == "SUCCEEDED" for job in jobs)
    print(JOBS / (time.perf_counter() - began), flush=True)
""".replace("JOBS", str(JOBS))
SBATCH = """
import subprocess, sys, time
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    for _ in range(JOBS):
        subprocess.run(["sbatch", "--quiet", "-N1", "-n1", "-o/dev/null", "--wrap", "true"], check=True, cwd="/tmp")
    while subprocess.run(["squeue", "-h"], capture_output=True, check=True).stdout:
        time.sleep(0.1)
    print(JOBS / (time.perf_counter() - began), flush=True)
""".replace("JOBS", str(JOBS))
RAY_JOBS = """
import sys, time
from ray.job_submission import JobSubmissionClient
client = JobSubmissionClient(sys.stdin.readline().strip())
first = client.submit_job(entrypoint="true")
while not client.get_job_status(first).is_terminal():
    time.sleep(0.1)
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    jobs = [client.submit_job(entrypoint="true") for _ in range(FEW)]
    while not all(client.get_job_status(job).is_terminal() for job in jobs):
        time.sleep(0.1)
    print(FEW / (time.perf_counter() - began), flush=True)
""".replace("FEW", str(FEW))
OURS = "raycontrol, 200 jobs from 8 threads of a connected client"


def tables(rounds: int) -> Sequence[Table]:
    with (
        tempfile.TemporaryDirectory() as name,
        Hosts(3, keep=[Path(name)]) as hosts,
        ExitStack() as until_end,
    ):
        hosts.start_cluster(env=recommended())
        env = {"RAYCONTROL_HOME": f"{name}/home", "RAY_ADDRESS": hosts.address, "RAY_AUTH_MODE": "disabled"}
        ours = until_end.enter_context(waiting(hosts, 0, SDK, env))
        ways: dict[str, Way] = {OURS: lambda: float(ours(""))}
        if (lacking := no_slurm()) is None:
            conf = until_end.enter_context(slurm(hosts, Path(name)))
            sbatch = until_end.enter_context(waiting(hosts, 0, SBATCH, conf))
            ways["Slurm, 200 x sbatch --wrap true"] = lambda: float(sbatch(""))
        program = RAY_JOBS.replace("sys.stdin.readline().strip()", repr(f"http://{hosts.ip(0)}:8265"))
        ray_jobs = until_end.enter_context(waiting(hosts, 0, program, env))
        ways["ray job submission, 10 jobs from a connected client"] = lambda: float(ray_jobs(""))
        found = measure(ways, rounds, warm=False)  # each client has had its first job
    notes = ["Higher is better. Goals: more than Slurm, 5 times Ray's jobs"]
    notes += [] if lacking is None else [f"not compared with {lacking}"]
    return [Table("Jobs of one instance in a second, through the queue", found, "jobs/s", notes)]


if __name__ == "__main__":
    alone(__doc__, tables, rounds=2)
