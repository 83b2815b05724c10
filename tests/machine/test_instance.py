from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycontrol.errors import PackageError
from raycontrol.plan import TcpReachable
from raycontrol.preparing import Preparation
from raycontrol.status import Reason
from tests.machine.instances import Gang, play, until

OWN_BIN = str(Path(sys.executable).parent)


NOTHING = Preparation(package=None, leases=())


@pytest.fixture
def gang(tmp_path: Path) -> Gang:
    return Gang(tmp_path)


# Preparing.


def test_preparing_reports_what_the_plan_needs(tmp_path: Path) -> None:
    gang = Gang(tmp_path, gpus=("0", "3"))

    async def story() -> None:
        facts = await gang.prepared("digest", ("master",))
        assert (facts.instance, facts.ip, facts.node_name) == ("worker-0", "127.0.0.1", "host-b")
        assert (facts.gpus, facts.interface) == (("0", "3"), "lo")
        assert facts.ports["master"] == "29000"
        assert facts.code_dir == str(tmp_path / "code")
        assert Path(facts.output_dir).is_dir()
        socket.create_connection(("127.0.0.1", int(facts.ports["probe"])), 5).close()
        await gang.closed()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(facts.ports["probe"])), 5)

    play(story())


def test_preparing_again_does_nothing_twice_and_reports_the_same_facts(gang: Gang) -> None:
    async def story() -> None:
        order = ("digest", ("master",))
        first, second = await asyncio.gather(gang.prepared(*order), gang.prepared(*order))
        await gang.prepared(*order)
        again = (await gang.heard("InstancePrepared", 2)).facts
        assert first == second == again
        assert gang.links.calls == ["lease_port master", "code_dir digest"]
        await gang.closed()

    play(story())


def test_a_package_that_cannot_be_had_fails_the_instance_in_its_own_words(gang: Gang) -> None:
    async def story() -> None:
        gang.links.package_error = PackageError("the package is damaged: digest differs")
        await gang.instance.prepare(NOTHING)
        failed = await gang.heard("InstanceFailed")
        assert failed.reason is Reason.PREPARE_FAILED
        assert failed.message == "could not prepare: the package is damaged: digest differs"
        await gang.closed()

    play(story())


# Stages.


def test_a_stage_that_has_passed_is_reported_again_and_not_done_again(gang: Gang) -> None:
    async def story() -> None:
        await gang.prepared()
        orders = gang.orders("echo once >> counted; sleep 600")
        await gang.instance.carry_out(orders)
        await gang.instance.carry_out(orders)
        assert (await gang.heard("StagePassed")).stage == 0
        await gang.instance.carry_out(orders)
        assert await gang.heard("StagePassed", 2) == gang.told("StagePassed")[1]
        counted = gang.code / "counted"
        await until(counted.exists, "the program runs")
        await gang.closed()
        assert counted.read_text() == "once\n"

    play(story())


def test_a_master_that_cannot_be_reached_fails_the_stage_and_names_both_ends(gang: Gang) -> None:
    async def story() -> None:
        await gang.prepared()
        port = closed_port()
        target = TcpReachable("worker-0", "master-0", "127.0.0.1", str(port))
        await gang.instance.carry_out(gang.orders(None, until=(target,), limit_s=0.1))
        failed = await gang.heard("InstanceFailed")
        assert failed.reason is Reason.STAGE_FAILED
        assert failed.message.startswith(
            f"worker-0 on host-b (127.0.0.1) cannot connect to master-0 at 127.0.0.1:{port} ("
        )
        assert "Connection refused" in failed.message
        assert failed.message.endswith(
            "Only the way to the node of master-0 was tried; check firewalls and routes between the two nodes"
        )
        assert gang.told("StagePassed") == []
        await gang.closed()

    play(story())


def test_a_master_that_listens_late_is_reached(gang: Gang) -> None:
    async def story() -> None:
        await gang.prepared()
        port = closed_port()
        target = TcpReachable("worker-0", "master-0", "127.0.0.1", str(port))
        await gang.instance.carry_out(gang.orders(None, until=(target,)))
        await asyncio.sleep(0)
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", port)
        assert (await gang.heard("StagePassed")).stage == 0
        server.close()
        await gang.closed()

    play(story())


# Runs and how they end.


def test_a_failure_is_reported_with_its_last_lines_and_what_the_launcher_said(gang: Gang) -> None:
    async def story() -> None:
        await gang.prepared()
        report = (
            "Root Cause (first observed failure):\n  rank      : 5 (local_rank: 1)\n  exitcode  : 3 (pid: 7)"
        )
        line = f"seq 1 50; printf '%s\\n' '{report}'; exit 1"
        await gang.instance.carry_out(gang.orders(line))
        ended = (await gang.heard("RunExited")).ended
        assert (ended.code, ended.signal, ended.sender, ended.error) == (1, None, None, None)
        assert (ended.cause.rank, ended.cause.exit_code) == (5, 3)
        assert ended.last_lines == (*map(str, range(34, 51)), *report.splitlines())
        await gang.closed()
        assert gang.links.log.decode().splitlines()[:50] == [str(number) for number in range(1, 51)]

    play(story())


def test_a_success_has_no_last_lines_and_its_outputs_are_collected(gang: Gang) -> None:
    async def story() -> None:
        facts = await gang.prepared()
        line = "mkdir -p $OUT/a && echo kept > $OUT/a/model && ln -s model $OUT/a/link"
        await gang.instance.carry_out(gang.orders(line, environment={"OUT": facts.output_dir}))
        ended = (await gang.heard("RunExited")).ended
        assert (ended.code, ended.last_lines, ended.cause) == (0, (), None)
        await gang.closed()
        assert gang.links.outputs == {"a/model": b"kept\n"}
        assert gang.told("InstanceNoted")[0].message == "output a/link was not collected: is a link"

    play(story())


def test_a_missing_cwd_is_an_exit_with_a_reason(gang: Gang) -> None:
    async def story() -> None:
        await gang.prepared()
        await gang.instance.carry_out(gang.orders("true", cwd="no/such/folder"))
        ended = (await gang.heard("RunExited")).ended
        assert ended.code is None
        assert "no/such/folder" in ended.error
        await gang.closed()

    play(story())


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_the_exit_is_always_reported_before_the_close(gang: Gang, size: int) -> None:
    async def story() -> None:
        await gang.prepared()
        await gang.instance.carry_out(gang.orders(f"head -c {size} /dev/zero | tr '\\0' '\\r'; sleep 600"))
        await gang.heard("StagePassed")
        await until(lambda: len(gang.links.log) == size, "the log is shipped")
        await gang.closed(why="a peer failed")
        ended = [type(report).__name__ for report in gang.links.reports[-3:]]
        assert ended == ["RunExited", "RunsGone", "InstanceClosed"]
        assert gang.told("RunExited")[0].ended.sender == "raycontrol: a peer failed"

    play(story())


# Stopping.


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 50, 400, 1600, 3200])
def test_a_stop_at_any_moment_of_a_start_leaves_nothing(gang: Gang, turns: int) -> None:
    async def story() -> None:
        await gang.prepared()
        await gang.instance.carry_out(gang.orders("sleep 600"))
        for _ in range(turns):
            await asyncio.sleep(0)
        await gang.closed()
        assert len(gang.told("InstanceClosed")) == 1

    play(story())


def test_a_stop_while_preparing_ends_it(gang: Gang) -> None:
    async def story() -> None:
        await gang.instance.prepare(NOTHING)
        await gang.closed()
        assert gang.told("InstancePrepared") == gang.told("InstanceFailed") == []

    play(story())


def test_an_instance_that_has_closed_says_so_again(gang: Gang) -> None:
    async def story() -> None:
        first = await gang.closed()
        await gang.instance.stop(40, "again")
        assert await gang.heard("InstanceClosed", 2) == first

    play(story())


def test_a_second_stop_shortens_the_grace(gang: Gang) -> None:
    async def story() -> None:
        await gang.prepared()
        await gang.instance.carry_out(gang.orders("trap '' TERM; touch deaf; while :; do sleep 600; done"))
        await until((gang.code / "deaf").exists, "the program ignores TERM")
        await gang.instance.stop(600, "a peer failed")
        await gang.closed(grace_s=0, why="the user insists")
        assert gang.told("RunExited")[0].ended.signal == 9

    play(story())


# Reports.


def test_reports_are_kept_in_order_until_the_controller_has_them(gang: Gang) -> None:
    async def story() -> None:
        gang.links.controller_down = True
        await gang.instance.prepare(NOTHING)
        await until(lambda: gang.links.refused >= 2, "two tries")
        assert gang.links.reports == []
        await gang.instance.carry_out(gang.orders("exit 4"))
        tries = gang.links.refused
        await until(lambda: gang.links.refused > tries, "another try")
        gang.links.controller_down = False
        await gang.heard("RunExited")
        await gang.closed()
        kinds = [type(report).__name__ for report in gang.links.reports]
        assert kinds[0] == "InstancePrepared" and kinds[-2:] == ["RunsGone", "InstanceClosed"]
        assert sorted(kinds[1:-2]) == ["RunExited", "StagePassed"]

    play(story())


# The environment.


@pytest.fixture
def raylet() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the raylet, with the environment that the operator and Ray gave it."""
    environment = {
        "PATH": "/opt/site/bin:/usr/bin:/bin",
        "HTTPS_PROXY": "http://proxy:3128",
        "ODD": "two\nlines = and 'quotes'",
        "EMPTY": "",
        "RAY_JOB_ID": "01000000",
        "RAYCONTROL_HOME": "/somewhere",
        "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace",
        # As from `srun ray start`: MPI launchers and stand-ins would take every call for one inside of that step.
        **{"SLURM_JOB_ID": "7", "PMI_RANK": "0", "PMIX_NAMESPACE": "x", "OMPI_COMM_WORLD_RANK": "0"},
        "PBS_JOBID": "7",
    }
    process = subprocess.Popen(["/bin/sleep", "600"], env=environment)
    yield process
    process.kill()
    process.wait()


def test_a_job_gets_the_nodes_environment_without_ray_and_the_jobs_own(
    tmp_path: Path, raylet: subprocess.Popen[bytes]
) -> None:
    changes = {"HTTPS_PROXY": None, "EMPTY": None, "LR": "0.1", "RANK": "1"}
    assert environment_of_a_job(Gang(tmp_path, raylet_pid=raylet.pid), changes) == {
        "PATH": f"{OWN_BIN}:/opt/site/bin:/usr/bin:/bin",
        "ODD": "two\nlines = and 'quotes'",
        "LR": "0.1",
        "RANK": "1",
    }


def test_a_path_of_the_jobs_own_is_taken_as_it_is(tmp_path: Path, raylet: subprocess.Popen[bytes]) -> None:
    changes: dict[str, str | None] = {"PATH": "/my/bin:/usr/bin", "ODD": None}
    assert environment_of_a_job(Gang(tmp_path, raylet_pid=raylet.pid), changes) == {
        "PATH": "/my/bin:/usr/bin",
        "HTTPS_PROXY": "http://proxy:3128",
        "EMPTY": "",
    }


def environment_of_a_job(gang: Gang, changes: dict[str, str | None]) -> dict[str, str]:
    """What the program of a job sees, without the mark."""

    async def story() -> None:
        await gang.prepared()
        await gang.instance.carry_out(gang.orders(("/usr/bin/env", "-0"), environment=changes))
        assert (await gang.heard("RunExited")).ended.code == 0
        await gang.closed()

    play(story())
    pairs = (entry.partition("=") for entry in gang.links.log.decode().rstrip("\0").split("\0"))
    environment = {name: value for name, _, value in pairs}
    assert environment.pop("RAYCONTROL_ATTEMPT_ID") == gang.attempt_id
    return environment


def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
