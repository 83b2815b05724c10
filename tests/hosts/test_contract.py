"""The environment contract, checked from outside, with two jobs at once on the same hosts; and folders of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checker import Job, violations
from tests.hosts import jobs
from tests.hosts.conftest import Cluster
from tests.hosts.jobs import PROGRAMS, Ran
from tests.hosts.network import ENVIRONMENT, RAY_ENVIRONMENT
from tests.support import wait_until

PROBE = Path(__file__).parent / "probe"
HOSTS = range(3)
INSTANCES = ("master-0", "worker-0", "worker-1")
MEETING_S = 240

WORKER_ENVIRONMENT = """
import json, os, ray
ray.init(address={address!r}, log_to_driver=False)
print("ENV", json.dumps(ray.get(ray.remote(num_cpus=1)(lambda: dict(os.environ)).remote())))
"""


@pytest.fixture
def hold(cluster: Cluster) -> Iterator[None]:
    """Remove what ``--hold`` leaves in the hosts' /tmp."""
    yield
    for i in HOSTS:
        for path in held(cluster, i):
            path.unlink()
        (cluster.hosts.hosts[i].tmp / "hold").unlink(missing_ok=True)


def test_two_jobs_at_once_each_get_what_the_contract_promises(cluster: Cluster, hold: None) -> None:
    submitter = 2  # neither the head nor the host of INDEX 0, as is checked below
    running = [jobs.start(cluster, submitter, PROBE / "job.yaml") for _ in range(2)]
    wait_until(
        lambda: everybody_waits(cluster) or any(process.poll() is not None for process in running),
        MEETING_S,
        "all processes of both jobs have met",
    )
    for i in HOSTS:
        (cluster.hosts.hosts[i].tmp / "hold").touch()
    both = [jobs.ended(process) for process in running]
    assert [ran.status for ran in both] == [0, 0], "\n".join(ran.told for ran in both)[-6000:]
    for ran in both:
        assert ran.info["instances"][0]["ip"] != cluster.hosts.ip(submitter)
    worker_env = environment_of_a_ray_worker(cluster)
    contract = [
        Job(
            ran.outputs("probe-*.json"),
            slots=(2, 2, 2),
            gpus=(2, 2, 2),
            name="probe",
            env={"GREETING": "hello from the spec"},
            files=("probe.py", "job.yaml"),
            node_env={**ENVIRONMENT, **RAY_ENVIRONMENT},
            worker_env=worker_env,
        )
        for ran in both
    ]
    assert violations(contract) == []


def test_what_the_outputs_keep_is_what_the_log_says(cluster: Cluster) -> None:
    ran = jobs.succeeded(cluster, 1, PROBE / "job.yaml", "--", "python3 probe.py")
    assert documents(ran) == ran.outputs("probe-*.json")
    folders = sorted(path.name for path in Path(ran.info["outputs"]).iterdir())
    assert folders == list(INSTANCES)


def test_jobs_of_one_working_dir_never_see_each_others_files(cluster: Cluster) -> None:
    folder = cluster.hosts.shared / "checkpoints"
    folder.mkdir()
    options = ("--nodes", "3", "--working-dir", PROGRAMS, "--")
    running = [jobs.start(cluster, i, *options, f"python3 checkpoint.py {folder} 2") for i in (0, 1)]
    first, second = (jobs.ended(process) for process in running)
    third = jobs.run(cluster, 0, *options, f"python3 checkpoint.py {folder} 3")
    for ran in (first, second, third):
        assert ran.status == 0, ran.told[-6000:]
        for index, instance in enumerate(INSTANCES):
            assert ran.lines(instance) == ["found none", f"read {ran.info['id']} {index}"]


def everybody_waits(cluster: Cluster) -> bool:
    return all(len(held(cluster, i)) == 4 for i in HOSTS)


def held(cluster: Cluster, i: int) -> list[Path]:
    return list(cluster.hosts.hosts[i].tmp.glob("hold.*"))


def documents(ran: Ran) -> list[dict[str, object]]:
    """The probe's documents among what the job printed."""
    lines = [line for instance in INSTANCES for line in ran.lines(instance)]
    found = [json.loads(line.removeprefix("PROBE ")) for line in lines]
    return sorted(found, key=lambda document: (document["index"], document["local"]))


def environment_of_a_ray_worker(cluster: Cluster) -> dict[str, str]:
    program = WORKER_ENVIRONMENT.format(address=cluster.address)
    text = cluster.hosts.run(1, [sys.executable, "-c", program], env=cluster.env, check=True).stdout
    (line,) = [line for line in text.splitlines() if line.startswith("ENV ")]
    environment: dict[str, str] = json.loads(line.removeprefix("ENV "))
    return environment
