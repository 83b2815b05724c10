"""MPI worlds that break over three hosts: the first cause is named, codes are right, and nothing is left anywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.hosts import jobs
from tests.hosts.conftest import Cluster
from tests.hosts.jobs import PROGRAMS
from tests.hosts.network import HostProcess
from tests.support import wait_until

THREE = ("--mode", "mpi", "--nodes", "3", "--working-dir", str(PROGRAMS))
LAUNCHER = ("--set", "run_on=launcher")
MPI_ERR_UNKNOWN = 14
UP_S = 120
GONE_S = 30


@pytest.mark.parametrize(("how", "status", "rank_code"), [("exit", 3, 3), ("abort", 3, 3), ("kill", 137, -9)])
def test_a_rank_that_dies_on_a_worker(cluster: Cluster, how: str, status: int, rank_code: int) -> None:
    ran = jobs.run(cluster, 0, *THREE, "--", f"mpirun python mpi_dies.py {how} 2")
    verdict = ran.info["verdict"]
    named = (verdict["rank"], verdict["rank_exit_code"])
    # Another rank may lose its connection while Open MPI ends the world, and abort: its message and its code then take the
    # place of the first one's.
    replaced = named == (None, None) and "Socket closed" in ran.told
    assert named == (2, rank_code) or replaced, ran.told
    codes = {status, MPI_ERR_UNKNOWN} if replaced else {status}
    assert ran.status in codes and ran.info["exit_code"] == ran.status, ran.told
    assert verdict["instance"] == "launcher-0"


def test_a_rank_that_hangs_in_finalize_is_ended_by_the_time_limit(cluster: Cluster) -> None:
    limit = ("--set", "timeouts.run_s=8", "--set", "timeouts.grace_s=2")
    ran = jobs.run(cluster, 0, *THREE, *limit, "--", "mpirun python mpi_dies.py sys.exit 2")
    assert (ran.status, ran.info["reason"]) == (124, "RUN_TIMEOUT")


@pytest.mark.parametrize(
    "options",
    [pytest.param((), id="every instance"), pytest.param(LAUNCHER, id="launcher", marks=pytest.mark.long)],
)
def test_a_launcher_that_is_killed(cluster: Cluster, options: tuple[str, ...]) -> None:
    process = world_under_way(cluster, *options)
    kill(cluster, 0, "prterun")
    ran = jobs.ended(process)
    assert (ran.status, ran.info["reason"]) == (137, "INSTANCE_FAILED")
    assert ran.info["verdict"]["instance"] == "launcher-0"
    assert_no_world(cluster)


@pytest.mark.parametrize(("host", "name"), [(1, "prted"), (0, "ssh")])
def test_a_part_of_the_world_that_is_killed_fails_a_job_whose_mpirun_says_nothing(
    cluster: Cluster, host: int, name: str
) -> None:
    process = world_under_way(cluster, *LAUNCHER)
    kill(cluster, host, name)
    ran = jobs.ended(process)
    assert ran.info["state"] == "FAILED"
    assert ran.status != 0
    # Both ends of a connection tell of its loss, each in its own words.
    assert re.search("MPI|prted", ran.info["verdict"]["summary"]), ran.info["verdict"]
    assert_no_world(cluster)


def test_an_instance_whose_actor_is_killed(cluster: Cluster) -> None:
    process = world_under_way(cluster)
    kill(cluster, 1, "ray::InstanceAc")
    ran = jobs.ended(process)
    assert (ran.status, ran.info["reason"]) == (125, "INSTANCE_LOST")
    assert_no_world(cluster)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mpirun --hostfile nosuch python mpi_report.py", "nosuch"),
        pytest.param("mpirun -np 99 python mpi_report.py", "not enough slots", marks=pytest.mark.long),
        ("PATH=$(dirname $(command -v mpirun)):/usr/bin:/bin mpirun true", "mpirun: not found"),
    ],
)
def test_a_launcher_that_cannot_start_says_why_in_the_verdict(
    cluster: Cluster, line: str, words: str
) -> None:
    ran = jobs.run(cluster, 0, *THREE, *LAUNCHER, "--", line)
    assert ran.info["state"] == "FAILED"
    assert any(words in text for text in ran.info["verdict"]["last_lines"]), ran.info["verdict"]


def test_a_start_command_may_go_on_after_a_launcher_that_failed(cluster: Cluster) -> None:
    """Too few slots: mpirun exits 1, and its daemons with it."""
    line = "mpirun -np 99 python mpi_report.py || mpirun python mpi_report.py"
    ran = jobs.succeeded(cluster, 0, *THREE, *LAUNCHER, "--", line)
    assert len(ran.outputs("rank-*.json")) == 3
    told = [event["message"] for event in jobs.events(cluster, ran) if event["kind"] == "WorldBroken"]
    assert any("prted" in message for message in told)


SLOW_DAEMON = """#!/bin/sh
"$PRTE_PREFIX/bin/prted" "$@"
code=$?
sleep 1
exit $code
"""


@pytest.mark.parametrize(
    "options",
    [pytest.param((), id="every instance"), pytest.param(LAUNCHER, id="launcher")],
)
@pytest.mark.long
def test_daemons_that_end_after_their_launcher_are_not_lost(
    cluster: Cluster, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """mpirun does not wait for its daemons; a busy host takes its time."""
    daemon = tmp_path / "slow-daemon"
    daemon.write_text(SLOW_DAEMON)
    daemon.chmod(0o755)
    (tmp_path / "mpi_report.py").write_text((PROGRAMS / "mpi_report.py").read_text())
    code = ("--mode", "mpi", "--nodes", "3", "--working-dir", str(tmp_path))
    line = "PRTE_MCA_prte_launch_agent=$PWD/slow-daemon mpirun python mpi_report.py"
    ran = jobs.succeeded(cluster, 0, *code, *options, "--", line)
    assert len(ran.outputs("rank-*.json")) == 3


# -- worlds


def world_under_way(cluster: Cluster, *options: str) -> HostProcess:
    """A job whose ranks are all up."""
    once = ("--set", "retry.infra_max=0")
    process = jobs.start(cluster, 0, *THREE, *options, *once, "--", "mpirun python mpi_dies.py stay 0")
    wait_until(lambda: len(ranks(cluster)) == 3, UP_S, "every host has a rank")
    return process


def ranks(cluster: Cluster) -> list[str]:
    return [pid for i in range(3) for pid in pids(cluster, i, ["pgrep", "-f", "^python mpi_dies.py"])]


def kill(cluster: Cluster, i: int, name: str) -> None:
    found = pids(cluster, i, ["pgrep", "-x", name])
    assert found, f"no {name} on host {i}"
    cluster.hosts.run(i, ["kill", "-9", *found])  # fails where one of them has ended with another
    wait_until(lambda: not {*found} & {*pids(cluster, i, ["pgrep", "-x", name])}, UP_S, "they are gone")


def assert_no_world(cluster: Cluster) -> None:
    def left() -> list[str]:
        names = "prted|prterun|mpirun|ssh"
        return ranks(cluster) + [pid for i in range(3) for pid in pids(cluster, i, ["pgrep", "-x", names])]

    wait_until(lambda: not left(), GONE_S, "no daemon, rank or ssh is left on any host")


def pids(cluster: Cluster, i: int, command: list[str]) -> list[str]:
    return cluster.hosts.run(i, command).stdout.split()
