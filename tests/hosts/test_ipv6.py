"""Jobs over hosts whose network has no IPv4 at all. (They have IPv4 addresses that lead nowhere, as all test hosts do.)"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.hosts.conftest import Cluster
from tests.hosts.jobs import accuracy, succeeded
from tests.hosts.network import REPOSITORY, Hosts

pytestmark = pytest.mark.long

TWO = ("--nodes", "2")
SUM = "python -m mpi4py -c 'from mpi4py import MPI; print(\"sum\", MPI.COMM_WORLD.allreduce(1))'"
MEET = "import ray; ray.init(); print('nodes', len(ray.nodes()))"


@pytest.fixture(scope="module")
def ipv6(needs_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Hosts(2, keep=[tmp_path_factory.getbasetemp()], ipv6=True) as hosts:
        hosts.start_cluster()
        yield Cluster(hosts, tmp_path_factory.mktemp("home"))


def test_the_contract_has_brackets_where_a_port_follows(ipv6: Cluster) -> None:
    show = "env | grep -E '^(NODE_LIST|MASTER_ADDR|TF_CONFIG|GLOO_SOCKET_IFNAME)='"
    groups = ("--set", "groups.ps.count=1", "--set", "groups.worker.count=1")
    ran = succeeded(ipv6, 0, "--mode", "ps", *groups, "--", show)
    found = dict(line.split("=", 1) for line in ran.lines("worker-0"))
    worker, server = (item["ip"] for item in ran.info["instances"])
    assert (found["NODE_LIST"], found["MASTER_ADDR"]) == (f"[{worker}]:0,[{server}]:0", worker)
    assert found["GLOO_SOCKET_IFNAME"] == "eth0"
    cluster = json.loads(found["TF_CONFIG"])["cluster"]
    assert cluster["ps"][0].startswith(f"[{server}]:") and cluster["worker"][0].startswith(f"[{worker}]:")


def test_torchrun_trains(ipv6: Cluster) -> None:
    folder = REPOSITORY / "configs" / "ddp"
    ran = succeeded(ipv6, 0, *TWO, "--working-dir", folder, "--", "torchrun train.py")
    assert accuracy(ran.told) >= 0.9


def test_mpirun_makes_one_world(ipv6: Cluster) -> None:
    options = ("--mode", "mpi", *TWO, "--slots", "2", "--set", "run_on=launcher")
    ran = succeeded(ipv6, 1, *options, "--", f"mpirun -np $RAYCONTROL_NP {SUM}")
    assert ran.lines("launcher-0") == ["sum 4"] * 4


def test_horovodrun_makes_one_world(ipv6: Cluster) -> None:
    program = "python -c 'import horovod.torch as hvd; hvd.init(); print(\"size\", hvd.size())'"
    ran = succeeded(ipv6, 0, "--mode", "horovod", *TWO, "--", f"horovodrun --gloo -np 2 {program}")
    assert [line.partition(">:")[2] for line in ran.lines("launcher-0")].count("size 2") == 2


def test_a_ray_job_has_all_its_nodes(ipv6: Cluster) -> None:
    ran = succeeded(ipv6, 0, "--mode", "ray", *TWO, "--", f'python -c "{MEET}"')
    assert "nodes 2" in ran.lines("head-0")
