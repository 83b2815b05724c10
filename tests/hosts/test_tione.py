"""Start commands of TI-ONE as they stand, over three hosts: their paths exist for the job only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.conftest import Cluster
from tests.hosts.jobs import Ran, run, succeeded
from tests.hosts.network import REPOSITORY

TI_ONE = REPOSITORY / "configs" / "tione"
PROCESS = "process {} of {} in /opt/ml/code: {} of 12 samples"
long = pytest.mark.long


def said(ran: Ran, *instances: str) -> list[str]:
    return sorted(line for name in instances for line in ran.lines(name) if line.startswith("process "))


def test_an_mpi_task_finds_code_data_and_hostfile_on_every_host(cluster: Cluster) -> None:
    ran = succeeded(cluster, 0, TI_ONE / "mpi.yaml", "--set", "nodes=3")
    hostfile = "".join(f"{host.ip} slots=1\n" for host in cluster.hosts.hosts[:3])
    for instance in ("launcher-0", "worker-0", "worker-1"):
        lines = [line for line in ran.lines(instance) if " slots=" in line]
        assert "".join(f"{line}\n" for line in lines) == hostfile
    found = said(ran, "launcher-0", "worker-0", "worker-1")
    assert found == [PROCESS.format(rank, 3, 4) for rank in range(3)]
    assert not Path("/opt/ml").exists()


@long
def test_tasks_of_the_other_modes(cluster: Cluster) -> None:
    ddp = succeeded(cluster, 0, TI_ONE / "ddp.yaml")
    assert said(ddp, "master-0", "worker-0") == [PROCESS.format(rank, 2, 6) for rank in range(2)]
    horovod = succeeded(cluster, 0, TI_ONE / "horovod.yaml")
    told = [line.partition(":")[2] for line in horovod.lines("launcher-0") if "process " in line]
    assert sorted(told) == [PROCESS.format(rank, 2, 6) for rank in range(2)]
    ps = succeeded(cluster, 0, TI_ONE / "ps.yaml")
    assert said(ps, "worker-0", "worker-1") == [PROCESS.format(rank, 2, 6) for rank in range(2)]
    ray = succeeded(cluster, 0, TI_ONE / "ray.yaml")
    assert said(ray, "head-0") == [PROCESS.format(0, 1, 12)]


def test_a_source_that_one_host_lacks_fails_the_job_by_node_and_path(cluster: Cluster) -> None:
    host = cluster.hosts.hosts[0]
    (host.tmp / "only-here é").mkdir()
    try:
        ran = run(
            cluster,
            0,
            "--nodes",
            "3",
            "--set",
            'mounts={"/opt/data": "/tmp/only-here é"}',
            "--",
            "ls /opt/data",
        )
    finally:
        (host.tmp / "only-here é").rmdir()
    assert (ran.info["state"], ran.info["reason"]) == ("FAILED", "STAGE_FAILED")
    assert "/tmp/only-here é, to be mounted at /opt/data: No such file or directory" in str(
        ran.info["verdict"]
    )
