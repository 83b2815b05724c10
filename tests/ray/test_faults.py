"""Parts of raycontrol are killed while jobs run. Programs go on where they can, and nothing is orphaned where not."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import ray

from raycontrol import Client
from raycontrol.actors import Membership, NoNodeActor, gcs_client
from raycontrol.client import JobHandle
from raycontrol.cluster import RayCluster
from raycontrol.placement import Node
from raycontrol.status import JobState, Reason
from tests.ray.conftest import BIN, LocalRay
from tests.ray.jobs import WAIT_S, alive, ended, lines, log_file, python, reaches, said, spec
from tests.support import wait_until
from tests.unit import lifecycle_jobs

FAMILY = "echo pid $$; setsid sleep 600 & echo child $!; wait"
CHATTER = """
import pathlib, sys, time
for burst in range(400):
    for number in range(1000):
        print(f"{burst:03}:{number:03} " + "." * 92)
    sys.stdout.flush()
    time.sleep(0.005)
"""


def until(go: Path) -> str:
    """A program that says its pid, waits for the file ``go``, and says so."""
    return f"echo pid $$; until [ -e {go} ]; do sleep 0.05; done; echo gone on"


def actor_pid(cluster: LocalRay, name: str) -> int | None:
    found = [actor for actor in cluster.ask()["actors"] if actor["name"].startswith(name)]
    return found[0]["pid"] if found and found[0]["state"] == "ALIVE" else None


@contextmanager
def killed(cluster: LocalRay, name: str) -> Iterator[None]:
    """Kill an actor's process; after the block, see that another one has taken its place."""
    pid = actor_pid(cluster, name)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    yield
    wait_until(lambda: actor_pid(cluster, name) not in (None, pid), WAIT_S, f"{name} is there again")


def test_a_killed_submitter_leaves_its_job_running(cluster: LocalRay, client: Client, tmp_path: Path) -> None:
    go = tmp_path / "go"
    submitter = cluster.popen([BIN / "raycontrol", "run", "--cpu", "0.1", "--name", "left", "--", until(go)])
    job = wait_until(lambda: found(client, "left"), WAIT_S, "the job is submitted")
    pid = int(said(job, "pid"))
    submitter.kill()
    submitter.communicate()
    assert alive(pid) and job.info().state is JobState.RUNNING
    go.touch()
    assert ended(job).state is JobState.SUCCEEDED
    assert lines(job)[-1] == "gone on"


def found(client: Client, name: str) -> JobHandle | None:
    ids = [info.id for info in client.list() if info.name == name]
    return client.job(ids[0]) if ids else None


def test_a_killed_controller_finds_running_and_waiting_jobs_again(
    cluster: LocalRay, client: Client, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    running = client.submit(spec(until(go), resources={"cpu": 0.1, "gpu": 4}, name="first"))
    pid = int(said(running, "pid"))
    waiting = client.submit(spec("echo second", resources={"cpu": 0.1, "gpu": 1}, name="second"))
    wait_until(lambda: waiting.info().pending, WAIT_S, "the second job says why it waits")
    with killed(cluster, "rc-controller"):
        pass
    assert [running.info().state, waiting.info().state] == [JobState.RUNNING, JobState.QUEUED]
    assert alive(pid)
    go.touch()
    assert [ended(running).state, ended(waiting).state] == [JobState.SUCCEEDED, JobState.SUCCEEDED]
    assert lines(running) == [f"pid {pid}", "gone on"]
    assert [event.kind for event in running.events()].count("NodesReserved") == 1


def test_a_job_ends_while_its_controller_is_dead(cluster: LocalRay, client: Client, tmp_path: Path) -> None:
    go = tmp_path / "go"
    job = client.submit(spec(until(go) + "; exit 9"))
    said(job, "pid")
    with killed(cluster, "rc-controller"):
        go.touch()
    assert (ended(job).state, job.info().exit_status) == (JobState.FAILED, 9)


def test_a_killed_archive_loses_and_repeats_nothing(cluster: LocalRay, client: Client) -> None:
    job = client.submit(python(CHATTER))
    path = log_file(cluster, job)
    for megabytes in (1, 5, 10):
        wait_until(lambda: path.exists() and path.stat().st_size > megabytes * 1_000_000, WAIT_S)  # noqa: B023
        with killed(cluster, "rc-archive"):
            pass
    assert ended(job).state is JobState.SUCCEEDED
    expected = "".join(
        f"{burst:03}:{number:03} {'.' * 92}\n" for burst in range(400) for number in range(1000)
    )
    assert path.read_bytes() == expected.encode()


def test_after_a_killed_node_actor_the_next_job_runs(cluster: LocalRay, client: Client) -> None:
    assert ended(client.submit(spec("true"))).state is JobState.SUCCEEDED
    with killed(cluster, "rc-node"):
        job = client.submit(spec("echo fine"))
        assert ended(job).state is JobState.SUCCEEDED
    assert lines(job) == ["fine"]


@pytest.mark.parametrize("victim", ["instance", "supervisor"])
def test_the_tree_dies_with_what_watches_over_it(cluster: LocalRay, client: Client, victim: str) -> None:
    job = client.submit(spec(FAMILY, nodes=2, placement="pack", retry={"infra_max": 0}))
    reaches(job, JobState.RUNNING)
    master = log_of(job, "master-0")
    pid, child = int(master["pid"]), int(master["child"])
    if victim == "instance":
        name = next(
            actor["name"]
            for actor in cluster.ask()["actors"]
            if actor["name"].endswith(f"{job.id}.0:master-0")
        )
        watcher = actor_pid(cluster, name)
    else:
        watcher = psutil.Process(pid).ppid()
    assert watcher is not None
    os.kill(watcher, signal.SIGKILL)
    wait_until(lambda: not alive(pid) and not alive(child), WAIT_S, "the tree is dead")
    info = ended(job)
    assert info.state is JobState.FAILED
    assert info.verdict is not None and info.verdict.instance == "master-0"
    assert (info.reason, info.exit_status) == (Reason.INSTANCE_LOST, 125)
    if victim == "instance":
        assert "master-0 on" in info.verdict.summary and "was lost: its actor died" in info.verdict.summary
    else:
        assert "its supervisor was killed" in info.verdict.summary
    assert info.instances[1].note == f"stopped: master-0 {'was lost' if victim == 'instance' else 'failed'}"


def test_what_no_job_is_at_is_removed_when_a_controller_starts(
    cluster: LocalRay, client: Client, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    job = client.submit(spec(until(go)))
    pid = int(said(job, "pid"))
    ours, foreign = f"rc:{cluster.address}:left-1.0", "rc:elsewhere:left-1.0"
    for name in (ours, foreign):
        ray.util.placement_group([{"GPU": 1}], name=name, lifetime="detached")
        options = {
            "name": f"{name}:worker-0",
            "namespace": "raycontrol",
            "lifetime": "detached",
            "num_cpus": 0,
        }
        ray.remote(Stranger).options(**options).remote()
    with killed(cluster, "rc-controller"):
        pass
    wait_until(
        lambda: names(cluster, "left-1.0") == [foreign, f"{foreign}:worker-0"], WAIT_S, "ours are gone"
    )
    ray.kill(ray.get_actor(f"{foreign}:worker-0", namespace="raycontrol"))
    ray.util.remove_placement_group(ray.util.get_placement_group(foreign))
    assert alive(pid) and job.info().state is JobState.RUNNING
    go.touch()
    assert ended(job).state is JobState.SUCCEEDED


def test_a_node_is_given_up_by_a_ray_that_does_not_know_it_and_by_none_that_says_nothing(
    cluster: LocalRay,
) -> None:
    (node,) = cluster.ask()["nodes"]
    assert not Membership(cluster.address, node["id"], gcs_client).is_given_up()
    assert Membership(cluster.address, "0" * len(node["id"]), gcs_client).is_given_up()


def test_a_living_node_without_its_actor_is_not_taken_for_clean(client: Client) -> None:
    unserved = Unserved("elsewhere", "/nowhere")
    job = lifecycle_jobs.running()
    with pytest.raises(NoNodeActor):
        asyncio.run(unserved.release(job, last=False, keep=False))
    unserved.living = ()
    asyncio.run(unserved.release(job, last=False, keep=False))


class Unserved(RayCluster):
    """A cluster of a node whose actor is not there."""

    living: tuple[Node, ...] = (Node("node-a", "host-a", "10.0.0.1", {}, {}),)

    async def nodes(self) -> tuple[Node, ...]:
        return self.living


class Stranger:
    """An actor that no job has."""


def names(cluster: LocalRay, part: str) -> list[str]:
    seen = cluster.ask()
    return sorted(one["name"] for one in [*seen["actors"], *seen["groups"]] if part in one["name"])


def log_of(job: JobHandle, instance: str) -> dict[str, str]:
    def found() -> dict[str, str] | None:
        words = dict(line.split(" ", 1) for line in job.logs(instance=instance, prefix=False))
        return words if len(words) == 2 else None

    words = wait_until(found, WAIT_S, f"{instance} has said its two words")
    assert words is not None
    return words
