"""Hosts and raylets that are lost while a job runs: the gang ends, the first cause is named, logs are kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster_state import look
from tests.hosts.conftest import Cluster
from tests.hosts.network import Hosts
from tests.support import wait_until

SPEAKS = "echo on $INDEX is $RAYCONTROL_INSTANCE; exec sleep 600"
STAYS_ONCE = (
    "echo attempt $RAYCONTROL_ATTEMPT of $RAYCONTROL_INSTANCE; [ $RAYCONTROL_ATTEMPT != 0 ] || exec sleep 600"
)
NOTICED_S = 90
FENCED_S = 60


@pytest.fixture
def doomed(needs_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three hosts for one test, which may break them."""
    with Hosts(3, keep=[tmp_path_factory.getbasetemp()]) as hosts:
        hosts.start_cluster()
        cluster = Cluster(hosts, tmp_path_factory.mktemp("home"))
        yield cluster
        wait_until(lambda: not left(cluster), 30, "no process, actor or reservation of a job is left")
        cluster.close()


def left(cluster: Cluster) -> list[str]:
    """What jobs have left on the hosts that are up. Folders of a host without Ray stay: nobody is there to remove them."""
    now = look(cluster)
    return [
        thing for thing in now.things if not thing.startswith("file ") and " of attempt None" not in thing
    ]


def test_a_job_whose_host_loses_power_goes_on_elsewhere_and_its_logs_are_kept(doomed: Cluster) -> None:
    job = doomed.raycontrol(0, "submit", "--nodes", "2", "--", STAYS_ONCE, check=True).stdout.strip()
    spoken = wait_until(lambda: lines(doomed, job, 2), 90, "every instance's line is in the archive")
    instances = doomed.json(0, "get", job)["instances"]
    head, others = doomed.hosts.name(0), [doomed.hosts.name(1), doomed.hosts.name(2)]
    victim = next(item for item in instances if item["node"] != head)
    number = 1 + others.index(victim["node"])
    doomed.hosts.cut(number)
    doomed.hosts.kill(number)
    waited = doomed.raycontrol(0, "wait", job, timeout_s=NOTICED_S + FENCED_S)
    info = doomed.json(0, "get", job)
    assert (waited.returncode, info["state"], info["attempt"]) == (0, "SUCCEEDED", 1)
    lost, again = info["attempts"]
    assert (lost["outcome"], lost["reason"]) == ("LOST", "INSTANCE_LOST")
    assert lost["summary"].startswith(f"{victim['name']} on {victim['node']} was lost")
    assert again["outcome"] == "SUCCEEDED"
    assert set(again["nodes"]) == {head, *others} - {victim["node"]}
    assert sorted(doomed.raycontrol(0, "logs", "--attempt", "0", job).stdout.splitlines()) == spoken
    assert f"{victim['name']} | attempt 0 of {victim['name']}" in spoken
    assert lines(doomed, job, 2) == [line.replace("attempt 0", "attempt 1") for line in spoken]
    assert [sleepers(doomed, i) for i in {0, 1, 2} - {number}] == [[], []]


@pytest.mark.long
def test_a_raylet_that_is_killed_takes_its_processes_along(doomed: Cluster) -> None:
    once = ("--set", "retry.infra_max=0")
    job = doomed.raycontrol(0, "submit", "--nodes", "3", *once, "--", SPEAKS, check=True).stdout.strip()
    wait_until(lambda: lines(doomed, job, 3), 90, "every instance's line is in the archive")
    raylet = doomed.hosts.run(1, ["pgrep", "-f", "-o", "raylet/raylet"], check=True).stdout.strip()
    doomed.hosts.run(1, ["kill", "-9", raylet], check=True)
    wait_until(lambda: not sleepers(doomed, 1), 30, "the start command on the host is dead")
    waited = doomed.raycontrol(0, "wait", job, timeout_s=NOTICED_S)
    info = doomed.json(0, "get", job)
    assert (waited.returncode, info["reason"]) == (125, "INSTANCE_LOST")
    assert [item["node"] for item in info["instances"] if item["state"] == "LOST"] == [doomed.hosts.name(1)]


def lines(cluster: Cluster, job: str, count: int) -> list[str]:
    """The lines that the archive holds of the job, once there are so many."""
    found = sorted(cluster.raycontrol(0, "logs", job).stdout.splitlines())
    return found if len(found) == count else []


def sleepers(cluster: Cluster, i: int) -> list[str]:
    return cluster.hosts.run(i, ["pgrep", "-x", "sleep"]).stdout.split()
