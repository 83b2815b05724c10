"""Jobs that choose their nodes, and nodes that take no new job, over three hosts on two shelves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.hosts.conftest import Cluster
from tests.hosts.jobs import Ran, succeeded
from tests.support import wait_until

SAYS_WHERE = "echo $INDEX of $NODE_NUM on $(hostname)"


@pytest.fixture
def by_shelf(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, while its site says that neighbours are on one shelf."""
    settings = cluster.home / "settings.yaml"
    settings.write_text("topology_labels: [shelf]\n")
    yield cluster
    settings.unlink()


def submit(cluster: Cluster, *arguments: str) -> str:
    return cluster.raycontrol(0, "submit", *arguments, check=True).stdout.strip()


def has_nodes(cluster: Cluster, job_id: str) -> None:
    wait_until(lambda: cluster.json(0, "get", job_id)["instances"], 60, f"{job_id} has its nodes")


def stop(cluster: Cluster, job_id: str) -> None:
    cluster.raycontrol(0, "stop", "--force", job_id, check=True)
    assert cluster.raycontrol(0, "wait", job_id).returncode == 130


def hosts_of(cluster: Cluster, ran: Ran) -> list[int]:
    """On which hosts the job was, in the order of INDEX."""
    names = [host.name for host in cluster.hosts.hosts]
    return [names.index(item["node"]) for item in ran.info["instances"]]


def states(cluster: Cluster) -> list[Any]:
    found = {node["name"]: node["state"] for node in cluster.json(0, "nodes")}
    return [found[host.name] for host in cluster.hosts.hosts]


def test_ranks_follow_the_shelves_and_a_range_takes_what_an_exclusive_job_leaves(by_shelf: Cluster) -> None:
    assert hosts_of(by_shelf, succeeded(by_shelf, 0, "--nodes", "3", "--", "true")) == [1, 0, 2]
    middle = by_shelf.hosts.name(1)
    alone = submit(by_shelf, "--set", "exclusive=true", "--set", f"node_names=[{middle}]", "--", "sleep 600")
    has_nodes(by_shelf, alone)
    rest = succeeded(by_shelf, 0, "--nodes", "1-3", "--", SAYS_WHERE)
    assert hosts_of(by_shelf, rest) == [0, 2]
    assert rest.lines("worker-0") == [f"1 of 2 on {by_shelf.hosts.name(2)}"]
    stop(by_shelf, alone)
    chosen = succeeded(by_shelf, 0, "--nodes", "1-3", "--set", "where.shelf=s1", "--", "true")
    assert hosts_of(by_shelf, chosen) == [1]
    unknown = by_shelf.raycontrol(0, "submit", "--set", "node_group=none", "--", "true")
    assert unknown.returncode == 2 and "there is no group 'none' of nodes" in unknown.stderr


@pytest.mark.long
def test_a_drained_node_of_a_group_gets_nothing_new_whatever_becomes_of_the_controller(
    cluster: Cluster,
) -> None:
    names = [host.name for host in cluster.hosts.hosts]
    cluster.raycontrol(0, "node", "group", "add", "train", names[1], names[2], check=True)
    said = cluster.raycontrol(0, "exec", "--group", "train", "--", "hostname", check=True).stdout
    assert sorted(said.splitlines()) == sorted(f"{name}: {name}" for name in names[1:])
    in_group = ("--set", "node_group=train", "--nodes", "2")
    running = submit(cluster, *in_group, "--", "sleep 600")
    has_nodes(cluster, running)
    cluster.raycontrol(1, "node", "offline", names[2], "--reason", "fan 2", check=True)
    cluster.raycontrol(0, "controller", "restart", check=True, timeout_s=120)
    assert states(cluster) == ["online", "online", "draining"]
    waiting = submit(cluster, *in_group, "--", "true")
    excluded = "2 of 3 nodes are excluded: 1 not in node_group train, 1 offline"
    wait_until(
        lambda: excluded in str(cluster.json(0, "get", waiting)["pending"]), 60, "it says what is offline"
    )
    told = [event["message"] for event in cluster.json(0, "events", running)]
    assert any(f"{names[2]} is offline: fan 2" in message for message in told)
    stop(cluster, running)
    assert states(cluster) == ["online", "online", "offline"]
    cluster.raycontrol(0, "node", "online", names[2], check=True)
    assert cluster.raycontrol(0, "wait", waiting, timeout_s=120).returncode == 0
    cluster.raycontrol(0, "node", "group", "remove", "train", check=True)
    assert cluster.json(0, "node", "group", "list") == []
