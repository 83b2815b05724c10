"""A job's instances are one gang: they start together, and when one fails the others are stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import jobs
from tests.hosts.conftest import Cluster
from tests.hosts.jobs import PROGRAMS, Ran
from tests.hosts.network import ip
from tests.support import wait_until

FAILING_HOST = 2

# The host named fails once all have begun; the others wait for what will never come.
FAIL_TOGETHER = """
touch {folder}/$(hostname)
[ $(hostname) != {failing} ] && exec sleep 600
until [ $(ls {folder} | wc -l) = 3 ]; do sleep 0.05; done
echo 'out of luck on this host'
exit 7
"""


def test_a_failing_instance_stops_the_others_within_2_s(cluster: Cluster, tmp_path: Path) -> None:
    ran = fail_together(cluster, tmp_path)
    assert ran.status == 7
    failed, *peers = instances(cluster, ran)
    verdict = ran.info["verdict"]
    assert (ran.info["state"], verdict["reason"]) == ("FAILED", "INSTANCE_FAILED")
    assert (verdict["instance"], verdict["exit_code"], verdict["signal"]) == (failed["name"], 7, None)
    assert verdict["summary"] == f"{failed['name']} on {cluster.hosts.name(FAILING_HOST)} exited 7"
    assert verdict["last_lines"] == ["out of luck on this host"]
    assert failed["note"] is None
    for peer in peers:
        assert (peer["signal"], peer["note"]) == (15, f"stopped: {failed['name']} failed")
        assert ended_after(cluster, ran, failed, peer) <= 2


def test_one_that_ignores_sigterm_is_killed_after_its_grace(cluster: Cluster, tmp_path: Path) -> None:
    ran = fail_together(cluster, tmp_path, "trap '' TERM", "--set", "timeouts.grace_s=2")
    failed, *peers = instances(cluster, ran)
    assert (ran.status, ran.info["verdict"]["instance"]) == (7, failed["name"])
    for peer in peers:
        assert (peer["signal"], peer["note"]) == (9, f"stopped: {failed['name']} failed")
        assert 2 <= ended_after(cluster, ran, failed, peer) <= 2 + 2


def test_the_verdict_names_the_rank_that_torchrun_names(cluster: Cluster) -> None:
    line = "torchrun one_rank_fails.py 5"
    ran = jobs.run(cluster, 0, "--nodes", "3", "--gpu", "2", "--working-dir", PROGRAMS, "--", line)
    verdict = ran.info["verdict"]
    assert (ran.status, verdict["instance"], verdict["exit_code"]) == (1, "worker-1", 1)
    assert (verdict["rank"], verdict["rank_exit_code"]) == (5, 3)
    assert "rank 5, exit code 3" in verdict["summary"]
    assert any("one_rank_fails.py FAILED" in text for text in verdict["last_lines"])
    assert "rank 5 has had enough" in ran.lines("worker-1")
    notes = {one["name"]: one["note"] for one in ran.info["instances"]}
    stopped = "stopped: worker-1 failed"
    assert notes == {"master-0": stopped, "worker-0": stopped, "worker-1": None}


@pytest.fixture
def busy_head(cluster: Cluster) -> Iterator[None]:
    """A job holds the head's GPUs, so that those who want as many run on the other two hosts."""
    job_id = cluster.raycontrol(0, "submit", "--gpu", "8", "--", "sleep 600", check=True).stdout.strip()
    wait_until(lambda: job(cluster, job_id)["state"] == "RUNNING", 60, "the job holds the GPUs")
    assert job(cluster, job_id)["instances"][0]["node"] == cluster.hosts.name(0)
    yield
    cluster.raycontrol(0, "stop", "--force", job_id, check=True)
    assert cluster.raycontrol(0, "wait", job_id).returncode == 130


@pytest.fixture
def broken_route(cluster: Cluster) -> Iterator[None]:
    """From host 2 there is no way to host 1. Both reach the head, so that Ray sees nothing of it."""
    route = ["unreachable", f"{cluster.hosts.ip(1)}/32"]
    ip("-n", cluster.hosts.name(2), "route", "add", *route)
    yield
    ip("-n", cluster.hosts.name(2), "route", "del", *route)


def test_hosts_that_cannot_reach_each_other_are_named_before_anything_starts(
    cluster: Cluster, busy_head: None, broken_route: None
) -> None:
    once = ("--set", "retry.infra_max=0")
    ran = jobs.run(cluster, 0, "--nodes", "2", "--gpu", "8", *once, "--", "echo never")
    assert (ran.info["state"], ran.info["reason"], ran.status) == ("FAILED", "STAGE_FAILED", 125)
    source, target = (f"{cluster.hosts.name(i)} ({cluster.hosts.ip(i)})" for i in (2, 1))
    verdict = ran.info["verdict"]
    assert verdict["instance"] == "worker-0"
    assert verdict["summary"].startswith(f"worker-0: worker-0 on {source} cannot connect to master-0 at")
    assert f"{cluster.hosts.ip(1)}:" in verdict["summary"] and target.startswith(cluster.hosts.name(1))
    assert "No route to host" in verdict["summary"]
    assert "never" not in ran.lines("master-0")


@pytest.fixture
def fourth_host(cluster: Cluster) -> Iterator[int]:
    """A host without Ray; at the end it is gone, and Ray knows it."""
    i = cluster.hosts.add()
    yield i
    cluster.hosts.kill(i)
    wait_until(lambda: len(cluster.ask()["nodes"]) == 3, 60, "Ray has seen the fourth host go")


def test_a_job_that_needs_one_host_more_waits_for_it(cluster: Cluster, fourth_host: int) -> None:
    job_id = cluster.raycontrol(0, "submit", "--nodes", "4", "--", "hostname", check=True).stdout.strip()
    reason = (
        "infeasible now: needs 4 instances with cpu 1, each on a node of its own; 3 of 3 nodes can take one"
    )
    wait_until(lambda: job(cluster, job_id)["pending"], 30, "the job has a reason to wait")
    waiting = job(cluster, job_id)
    assert (waiting["state"], waiting["reason"], waiting["instances"]) == ("QUEUED", "WAITING", [])
    assert waiting["pending"].startswith(reason)
    assert reason in cluster.raycontrol(0, "list", check=True).stdout
    behind = jobs.succeeded(cluster, 0, "--nodes", "3", "--", "true")  # it holds up nobody who can run
    assert job(cluster, job_id)["state"] == "QUEUED"
    cluster.hosts.start_ray(fourth_host)
    ended = cluster.json(0, "wait", job_id, timeout_s=120)
    assert (ended["state"], ended["pending"]) == ("SUCCEEDED", None)
    hosts = [cluster.hosts.name(i) for i in range(4)]
    assert sorted(instance["node"] for instance in ended["instances"]) == hosts
    assert sorted(cluster.raycontrol(0, "logs", job_id, "--no-prefix", check=True).stdout.split()) == hosts
    assert behind.info["ended_at"] < ended["started_at"]


def fail_together(cluster: Cluster, folder: Path, before: str = ":", *options: str) -> Ran:
    line = FAIL_TOGETHER.format(folder=folder, failing=cluster.hosts.name(FAILING_HOST))
    return jobs.run(cluster, 0, "--nodes", "3", *options, "--", f"{before}\n{line}")


def instances(cluster: Cluster, ran: Ran) -> list[dict[str, Any]]:
    """The job's instances, the one on the failing host first."""
    failing = cluster.hosts.name(FAILING_HOST)
    return sorted(
        ran.info["instances"], key=lambda instance: (instance["node"] != failing, instance["index"])
    )


def ended_after(cluster: Cluster, ran: Ran, failed: dict[str, Any], peer: dict[str, Any]) -> float:
    """Seconds from the failure to the end of a peer's program."""
    told = [event for event in jobs.events(cluster, ran) if event["kind"] == "RunExited"]
    exits = {event["instance"]: event["at"] for event in told}
    return float(exits[peer["name"]] - exits[failed["name"]])


def job(cluster: Cluster, job_id: str) -> dict[str, Any]:
    info: dict[str, Any] = cluster.json(0, "get", job_id)
    return info
