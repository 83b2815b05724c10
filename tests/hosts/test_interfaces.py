"""Jobs over hosts whose network is as misleading as that of real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts import jobs
from tests.hosts.conftest import Cluster
from tests.hosts.jobs import events, succeeded

SHOW = "hostname -i; env | grep -E '^(NODE_LIST|MASTER_ADDR|.*_IFNAME)=' | sort"


def test_a_dead_network_a_docker_bridge_and_a_name_that_means_loopback_mislead_nobody(
    cluster: Cluster,
) -> None:
    ran = succeeded(cluster, 1, "--nodes", "3", "--", SHOW)
    ips = [item["ip"] for item in ran.info["instances"]]
    for name in ("master-0", "worker-0", "worker-1"):
        assert ran.lines(name) == [
            "127.0.1.1",  # what a program finds that asks for its own name
            "GLOO_SOCKET_IFNAME=eth0",
            f"MASTER_ADDR={ips[0]}",
            "NCCL_SOCKET_IFNAME==eth0",
            f"NODE_LIST={','.join(f'{ip}:0' for ip in ips)}",
            "TP_SOCKET_IFNAME=eth0",
        ]
    assert set(ips) == {cluster.hosts.ip(i) for i in range(3)}


@pytest.fixture
def deaf_names(cluster: Cluster) -> Iterator[str]:
    """Host 2 asks a name server that never answers, and knows no other host by itself."""
    folder = cluster.hosts.hosts[2].folder
    switch, names = folder / "nsswitch.conf", folder / "hosts"
    before = switch.read_text(), names.read_text()
    resolver = cluster.hosts.shared / "resolv.conf"
    resolver.write_text("nameserver 10.79.0.200\noptions timeout:5 attempts:2\n")
    cluster.hosts.run(2, ["mount", "--bind", resolver, "/etc/resolv.conf"], check=True)
    switch.write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    names.write_text("127.0.0.1 localhost\n")
    yield cluster.hosts.name(2)
    switch.write_text(before[0])
    names.write_text(before[1])
    cluster.hosts.run(2, ["umount", "/etc/resolv.conf"], check=True)


@pytest.mark.long
def test_slow_name_look_ups_are_told_while_the_job_runs_and_by_the_doctor(
    cluster: Cluster, deaf_names: str
) -> None:
    running = jobs.start(cluster, 0, "--nodes", "3", "--", "sleep 15")
    ran = jobs.ended(running)
    (told,) = {event["message"] for event in events(cluster, ran) if "to find the name" in event["message"]}
    assert f"{deaf_names} needs 5.0 s to find the name of " in told
    checks = cluster.json(0, "doctor", "--nodes", deaf_names)
    (look_ups,) = [check for check in checks if check["name"] == "name look-ups"]
    assert (look_ups["verdict"], look_ups["found"][:34]) == ("warn", "name look-ups on this node take 5 ")
