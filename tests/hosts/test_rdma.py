"""RDMA over three hosts with 8 logical GPUs each and generated devices at their /sys/class/infiniband."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.hosts.conftest import Cluster
from tests.hosts.jobs import Ran, events, run, succeeded
from tests.hosts.network import Hosts
from tests.unit.test_rdma import HCC
from tests.unit.trees import infiniband, verbs

DEVICES = Path("/sys/class")
LIBRARIES = Path("/usr/local/lib")
SHOW = 'env | grep -E "^(NCCL|GLOO|TP|TCCL)_" | sort'
GDRDMA = "h:1:2 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [send] via NET/IB/0/GDRDMA"
SOCKET = "h:1:2 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [send] via NET/Socket/0"
INTERFACES = {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
FULL_NODES = ("--nodes", "3", "--gpu", "8", "--cpu", "1")


@contextmanager
def laid_over(hosts: Hosts, i: int, folder: Path) -> Iterator[None]:
    """Lay a tmpfs over a folder of the host, with the old entries in it as they were; others can be added to it."""
    old = f"/tmp/under{str(folder).replace('/', '-')}"
    script = f"""
        mkdir {old} && mount --bind {folder} {old} && mount -t tmpfs tmpfs {folder} || exit
        for entry in {old}/*; do
          [ -e "$entry" ] || continue
          if [ -d "$entry" ]; then mkdir {folder}/"${{entry##*/}}"; else touch {folder}/"${{entry##*/}}"; fi
          mount --bind "$entry" {folder}/"${{entry##*/}}" || exit
        done"""
    hosts.run(i, ["bash", "-c", script], check=True)
    try:
        yield
    finally:
        # Lazily: somebody may be reading there.
        hosts.run(i, ["bash", "-c", f"umount -R -l {folder} && umount -l {old} && rmdir {old}"], check=True)


class Fabric:
    """The RDMA devices of the hosts."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts

    def device(self, i: int, name: str, state: str = "ACTIVE", link_layer: str = "Ethernet") -> None:
        """Give a host this device and no other."""
        folder = self._hosts.shared / f"devices-{i}"
        self._hosts.run(i, ["rm", "-rf", folder, DEVICES / "infiniband"], check=True)
        ip = self._hosts.ip(i) if link_layer == "Ethernet" else None
        infiniband(folder, name, ip=ip, state=state, link_layer=link_layer)
        self._hosts.run(i, ["cp", "-rP", folder, DEVICES / "infiniband"], check=True)


@pytest.fixture
def fabric(covered: Fabric) -> Fabric:
    """Every host has a device ``mlx5_bond_0`` with an active RoCE port, and its user-space driver."""
    for i in range(3):
        covered.device(i, "mlx5_bond_0")
    return covered


@pytest.fixture(scope="module")
def covered(cluster: Cluster) -> Iterator[Fabric]:
    """Hosts that can have other devices and libraries than the machine they are made of."""
    hosts = cluster.hosts
    libraries = hosts.shared / "verbs"
    verbs(libraries, "mlx5", folder="lib")
    with ExitStack() as stack:
        fabric = Fabric(hosts)
        for i in range(3):
            for folder in (DEVICES, LIBRARIES):
                stack.enter_context(laid_over(hosts, i, folder))
            hosts.run(i, ["cp", "-rP", f"{libraries}/lib/.", LIBRARIES], check=True)
        yield fabric


def network(ran: Ran, instance: str) -> dict[str, str]:
    """What the instance itself has printed of its environment."""
    return dict(line.split("=", 1) for line in ran.lines(instance) if "=" in line)


def each(ran: Ran) -> list[dict[str, str]]:
    return [network(ran, item["name"]) for item in ran.info["instances"]]


def line_of(ran: Ran, cluster: Cluster, part: str) -> str:
    """The event in which these words are."""
    return next(event["message"] for event in events(cluster, ran) if part in event["message"])


def test_hcc_sets_exactly_what_ti_one_publishes_and_is_seen_to_be_used(
    cluster: Cluster, fabric: Fabric
) -> None:
    ran = succeeded(cluster, 0, *FULL_NODES, "--set", "rdma.preset=hcc", "--", f"{SHOW}; echo '{GDRDMA}'")
    assert each(ran) == [{**HCC, "TP_SOCKET_IFNAME": "eth0"}] * 3
    shown = cluster.json(0, "get", ran.info["id"])
    assert shown["rdma"] == "in use (GDRDMA)"
    assert shown["instances"][2]["variables"]["NCCL_IB_TC"] == {"value": "160", "origin": "preset hcc"}
    assert "NCCL_IB_TC=160  # preset hcc" in cluster.raycontrol(0, "get", ran.info["id"], check=True).stdout


def test_auto_takes_its_values_from_each_node_and_warns_when_they_are_not_used(
    cluster: Cluster, fabric: Fabric
) -> None:
    fabric.device(2, "mlx5_7")
    ran = succeeded(cluster, 0, *FULL_NODES, "--", f"{SHOW}; echo '{SOCKET}'")
    values = {**INTERFACES, "NCCL_DEBUG": "INFO", "NCCL_IB_GID_INDEX": "3"}
    devices = {cluster.hosts.name(i): f"=mlx5_{'7' if i == 2 else 'bond_0'}:1" for i in range(3)}
    assert each(ran) == [{**values, "NCCL_IB_HCA": devices[item["node"]]} for item in ran.info["instances"]]
    assert cluster.json(0, "get", ran.info["id"])["rdma"] == "not in use: NET/Socket"
    assert "although RDMA is on" in line_of(ran, cluster, "NET/Socket")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--nodes", "3", "--gpu", "7"), "holds 7 of its 8 GPUs"),
        (("--nodes", "1", "--gpu", "8"), None),
    ],
)
def test_part_of_a_node_and_a_single_node_get_their_interfaces_only(
    cluster: Cluster, fabric: Fabric, options: tuple[str, ...], why: str | None
) -> None:
    ran = succeeded(cluster, 0, *options, "--", SHOW)
    assert each(ran) == [INTERFACES] * len(ran.info["instances"])
    told = [event["message"] for event in events(cluster, ran) if "RDMA" in event["message"]]
    assert [why is not None and why in message for message in told] == ([True] if why else [])


def test_a_port_that_is_down_keeps_auto_off_and_is_an_error_with_on(cluster: Cluster, fabric: Fabric) -> None:
    fabric.device(1, "mlx5_bond_0", state="DOWN")
    cause = f"{cluster.hosts.name(1)} has no active RDMA port: mlx5_bond_0:1"
    ran = succeeded(cluster, 0, *FULL_NODES, "--", SHOW)
    assert each(ran) == [INTERFACES] * 3
    assert cause in line_of(ran, cluster, "RDMA stays off")
    assert cluster.json(0, "get", ran.info["id"])["rdma"] == f"off: {cause}"
    failed = run(cluster, 0, *FULL_NODES, "--set", "rdma=on", "--", SHOW)
    assert (failed.info["state"], failed.info["reason"], failed.status) == ("FAILED", "PLAN_FAILED", 125)
    assert failed.info["verdict"]["summary"].startswith(f"rdma is on, but {cause} (`raycontrol doctor`")
    assert each(failed) == [{}, {}, {}]


def test_the_nodes_show_their_devices(cluster: Cluster, fabric: Fabric) -> None:
    (node,) = [node for node in cluster.json(0, "nodes") if node["name"] == cluster.hosts.name(1)]
    (port,) = node["facts"]["rdma"]
    assert (port["device"], port["state"], port["link_layer"]) == ("mlx5_bond_0", "ACTIVE", "Ethernet")
    assert [interface["name"] for interface in node["facts"]["interfaces"] if interface["owns_ray_ip"]] == [
        "eth0"
    ]
