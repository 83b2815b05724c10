"""Two instances of an MPI job, in one process and on one address, with real plans, endpoints and ssh clients."""

from __future__ import annotations

import asyncio
import shutil
import socket
import stat
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raycontrol.backends import leases, make_plan
from raycontrol.execution import Command
from raycontrol.plan import Brief, Orders, Plan, SshAnswers, orders
from raycontrol.process import marked
from raycontrol.spec import JobSpec, Mode, RunOn, members
from raycontrol.status import Reason
from tests.machine.instances import Gang, play, until

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="no OpenSSH client on this machine")

SERVE, PROVE, START = 0, 1, 2
GRACE_S = 15.0
ODD = {
    "SPACES": " a  b ",
    "LINES": "one\ntwo\n",
    "QUOTES": "'\"`$(x) \\",
    "UNICODE": "Grüße 训练",
    "EMPTY": "",
    "EQUALS": "a=b=c",
    "STARS": "*?[a-z]",
}


class Job:
    """The launcher and a worker of one attempt, each in folders of its own, and the plan for both."""

    def __init__(self, top: Path) -> None:
        job_id = f"test-{uuid.uuid4().hex}"
        self.launcher = Gang(
            top / "launcher", instance="launcher-0", mode=Mode.MPI, job_id=job_id, node_name="host-a"
        )
        self.worker = Gang(top / "worker", instance="worker-0", mode=Mode.MPI, job_id=job_id)
        self.both = (self.launcher, self.worker)
        self.plan: Plan | None = None
        self.flags = top / "flags"
        self.flags.mkdir()
        for gang in self.both:
            gang.code.parent.mkdir()
            gang.links.peers = {peer.name: peer.instance for peer in self.both}

    async def prepare(
        self, command: str, run_on: RunOn = RunOn.LAUNCHER, env: Mapping[str, str | None] | None = None
    ) -> Plan:
        """Prepare both and make the plan of their facts; the command sees ``$FLAGS``."""
        variables = {"FLAGS": str(self.flags), **(env or {})}
        spec = JobSpec(
            name="job", mode=Mode.MPI, command=command, nodes=2, run_on=run_on, env=variables, pipefail=False
        )
        facts = [
            await gang.prepared(leases=leases(Mode.MPI, member), ssh=True)
            for gang, member in zip(self.both, members(spec), strict=True)
        ]
        brief = Brief(self.launcher.job_id, "job", 0, self.launcher.attempt_id)
        self.plan = make_plan(spec, brief, tuple(facts))
        return self.plan

    def orders(self, gang: Gang, stage: int) -> Orders:
        """With the files of the first stage, so that a story may leave that out."""
        assert self.plan is not None
        return replace(orders(self.plan, stage, gang.name), files=self.plan.files[gang.name])

    def ssh_port(self, gang: Gang) -> str:
        port: str = gang.told("InstancePrepared")[0].facts.ports["ssh"]
        return port

    async def passed(self, *stages: int) -> None:
        """Both have carried out these stages."""
        for stage in stages:
            await asyncio.gather(*(gang.instance.carry_out(self.orders(gang, stage)) for gang in self.both))
            for gang in self.both:
                await gang.heard("StagePassed", stage + 1)

    async def started(self, command: str, **options: Any) -> None:
        """Everything up to the start command."""
        await self.prepare(command, **options)
        await self.passed(SERVE, PROVE, START)

    async def flagged(self, name: str) -> None:
        await until((self.flags / name).exists, f"the flag {name}")

    async def output(self) -> str:
        """What the launcher's start command wrote, once it has ended and all is shipped."""
        await self.launcher.heard("RunExited")
        await self.closed()
        return self.launcher.links.log.decode()

    async def closed(self, grace_s: float = 0) -> None:
        """Stop both; nothing of them is left then."""
        for gang in self.both:
            await gang.instance.stop(grace_s, "the test is over")
        for gang in self.both:
            await gang.heard("InstanceClosed")
        assert await asyncio.to_thread(marked, self.launcher.attempt_id) == []


@asynccontextmanager
async def open_job(top: Path) -> AsyncIterator[Job]:
    job = Job(top)
    try:
        yield job
    finally:
        await job.closed()


def modes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode)
        for path in sorted(folder.rglob("*"))
        if path.is_file() or path.is_dir()
    }


# What an instance has, before anything runs.


def test_files_are_in_place_for_their_owner_alone(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            plan = await job.prepare("true", env=ODD)
            await job.passed(SERVE)
            for gang in job.both:
                found = modes(gang.private)
                assert set(plan.files[gang.name]) <= set(found)
                assert {"environment", "ssh/login_key", "ssh/host_key"} <= set(found)
                for path, mode in found.items():
                    program = path.startswith("bin") or path == "ssh"
                    if not path.endswith("gate.sock"):
                        assert mode == (0o700 if program else 0o600), path
                for path, text in plan.files[gang.name].items():
                    assert (gang.private / path).read_text() == text
                entries = (gang.private / "environment").read_bytes().decode().split("\0")
                environment = dict(entry.split("=", 1) for entry in entries if entry)
                assert environment.items() >= {**ODD, "RAYCONTROL_INSTANCE": gang.name}.items()
                assert stat.S_IMODE(gang.private.stat().st_mode) == 0o700

    play(story())


def test_stand_ins_come_first_on_path_whoever_set_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            await job.started("echo $PATH; ssh worker-0 'echo $PATH'", env={"PATH": "/mine:/usr/bin:/bin"})
            assert (await job.output()).splitlines() == [
                f"{gang.private}/bin:/mine:/usr/bin:/bin" for gang in job.both
            ]

    play(story())


# What runs through ssh.


def test_a_command_has_the_environment_of_the_instance_where_it_runs(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            await job.started("ssh worker-0 'env -0'", env=ODD)
            entries = (await job.output()).rstrip("\0").split("\0")
            environment = dict(entry.split("=", 1) for entry in entries)
            own = {"INDEX": "1", "RAYCONTROL_INSTANCE": "worker-0", "RAYCONTROL_ROLE": "worker"}
            assert environment.items() >= {**ODD, **own}.items()
            assert "RAYCONTROL_WORLD" not in environment
            given = job.orders(job.worker, START).environment
            assert (
                environment.items() >= {name: text for name, text in given.items() if name != "PATH"}.items()
            )

    play(story())


def test_a_command_runs_in_the_jobs_folder_with_its_input_and_exit_code(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            await job.started(
                "ssh worker-0 pwd; echo some input | ssh 'anybody@worker-0' 'cat; exit 3'; echo $?;"
                "ssh host-b hostname > /dev/null && ssh -p 22 127.0.0.1 'echo $RAYCONTROL_INSTANCE'"
            )
            assert await job.output() == f"{job.worker.code}\nsome input\n3\nlauncher-0\n"

    play(story())


def test_scp_both_ways(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            await job.started("echo there > a; scp -q a worker-0:b && scp -q worker-0:b c && cat c")
            assert await job.output() == "there\n"
            assert (job.worker.code / "b").read_text() == "there\n"

    play(story())


# What somebody inside the job runs.


async def inside(gang: Gang, command: str) -> str:
    """Run a command by ``exec`` in an instance; return what it wrote."""
    execs = gang.instance.execs
    await execs.start(command, gang.name, Command(command))
    data = b""
    while (chunk := await execs.read(command, len(data), 10)).over is None:
        data += chunk.data
    return (data + chunk.data).decode()


def test_launchers_of_exec_meet_nobody_and_break_no_world_of_the_job(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            broken = "[ -n \"$RAYCONTROL_WORLD\" ] || raycontrol-rsh $1 'kill -9 $$' 2> /dev/null"
            path = mpi(tmp_path, f'echo "$RAYCONTROL_INSTANCE -$RAYCONTROL_WORLD- $*"; {broken}')
            command = "while [ ! -e $FLAGS/go ]; do sleep 0.05; done; mpirun worker-0"
            await job.started(command, run_on=RunOn.EVERY_INSTANCE, env={"PATH": path})
            for gang, other in ((job.launcher, "worker-0"), (job.worker, "launcher-0")):
                assert await inside(gang, f"mpirun {other}") == f"{gang.name} -- {other}\n"
            assert await inside(job.launcher, "ssh worker-0 mpirun launcher-0") == "worker-0 -- launcher-0\n"
            assert [gang.told(kind) for gang in job.both for kind in ("WorldBroken", "WorldFailed")] == [
                []
            ] * 4
            (job.flags / "go").touch()
            assert await job.output() == "launcher-0 -0- worker-0\n"

    play(story())


# What an MPI launcher's agent runs.


def test_a_launchers_command_that_ends_badly_breaks_the_world_and_others_do_not(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            lines = (
                *("ssh worker-0 'kill -9 $$'", "ssh worker-0 'exit 3'", "raycontrol-rsh worker-0 true"),
                "raycontrol-rsh worker-0 'echo world $RAYCONTROL_WORLD'",
                "raycontrol-rsh worker-0 'prted; kill -9 $$'",
                "raycontrol-rsh worker-0 'exit 4'",
            )
            await job.started("; ".join(f"{line} 2> /dev/null; echo $?" for line in lines))
            assert (await job.output()).splitlines() == ["255", "3", "0", "world unknown", "0", "255", "4"]
            assert [report.message for report in job.worker.told("WorldBroken")] == [
                "an MPI daemon (prted …) was ended by SIGKILL while its world ran",
                "an MPI daemon (exit …) ended with exit code 4",
            ]
            lost = "the ssh connection to worker-0 for a part of the MPI world ended with exit code"
            told = sorted(report.message for report in job.launcher.told("WorldBroken"))
            assert told == [f"{lost} 255", f"{lost} 4"]

    play(story())


def test_how_a_command_ended_is_told_whatever_lies_among_the_lost_connections(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            await job.started(
                'lost="$(dirname "$(command -v ssh)")/../broken"; mkdir -p "$lost/folder"; '
                "printf '\\377\\n' > \"$lost/1\"; exit 3"
            )
            assert (await job.launcher.heard("RunExited")).ended.code == 3

    play(story())


def test_a_launcher_that_is_killed_breaks_the_world_of_its_daemons(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            await job.started(
                "raycontrol-rsh worker-0 'touch $FLAGS/up; exec sleep 100' & "
                "while [ ! -e $FLAGS/up ]; do sleep 0.02; done; kill -9 $!; wait"
            )
            broken = await job.worker.heard("WorldBroken")
            assert broken.message == "the ssh connection from 127.0.0.1 was lost while `touch …` ran"
            await job.launcher.heard("RunExited")

    play(story())


def test_an_agent_that_is_killed_takes_its_connection_along(tmp_path: Path) -> None:
    """As mpirun does with those that are left, when it ends abnormally."""

    async def story() -> None:
        async with open_job(tmp_path) as job:
            await job.started(
                "raycontrol-rsh worker-0 'touch $FLAGS/up; exec sleep 100' & "
                "while [ ! -e $FLAGS/up ]; do sleep 0.02; done; kill -9 $!; sleep 100"
            )
            await job.worker.heard("WorldBroken")
            assert job.launcher.told("RunExited") == []

    play(story())


def test_on_a_worker_the_agent_refuses_a_second_world(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            await job.started("ssh worker-0 'raycontrol-rsh launcher-0 true'; echo $?")
            first, second = (await job.output()).splitlines()
            assert first.startswith(
                "raycontrol: an MPI launcher was reached around raycontrol's own on worker-0 ("
            )
            assert second == "1"

    play(story())


# Collective calls.


def mpi(tmp_path: Path, text: str) -> str:
    """A PATH with an mpirun on it."""
    folder = tmp_path / "mpi"
    folder.mkdir()
    (folder / "mpirun").write_text(f"#!/bin/bash\n{text}\n")
    (folder / "mpirun").chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_two_instances_that_call_mpirun_start_one_world(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            path = mpi(tmp_path, 'echo "$RAYCONTROL_INSTANCE $RAYCONTROL_WORLD $*"; exit 3')
            await job.started("mpirun x", run_on=RunOn.EVERY_INSTANCE, env={"PATH": path})
            ends = [(await gang.heard("RunExited")).ended for gang in job.both]
            assert [end.code for end in ends] == [3, 3]
            await job.closed()
            assert [gang.links.log for gang in job.both] == [b"launcher-0 0 x\n", b""]

    play(story())


def test_an_instance_that_has_ended_counts_as_there(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            command = '[ $INDEX = 0 ] || exit 0; while [ ! -e "$FLAGS/ended" ]; do sleep 0.02; done; mpirun x'
            path = mpi(tmp_path, "exit 0")
            await job.started(command, run_on=RunOn.EVERY_INSTANCE, env={"PATH": path})
            await job.worker.heard("RunExited")
            (job.flags / "ended").touch()
            assert (await job.launcher.heard("RunExited")).ended.code == 0

    play(story())


def test_a_launcher_that_ends_without_the_call_leaves_advice_with_the_worker(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            path = mpi(tmp_path, "exit 0")
            await job.started("[ $INDEX = 0 ] || mpirun x", run_on=RunOn.EVERY_INSTANCE, env={"PATH": path})
            ended = (await job.worker.heard("RunExited")).ended
            assert ended.code == 1
            assert ended.cause.advice.startswith(
                "the launcher instance launcher-0 ended without calling mpirun"
            )

    play(story())


# The end.


def test_a_session_may_finish_within_the_grace(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            await job.started(
                "ssh worker-0 'touch $FLAGS/up; while [ ! -e $FLAGS/go ]; do sleep 0.02; done; exit 7'; code=$?;"
                "ssh worker-0 true; echo $code $?"
            )
            await job.flagged("up")
            await job.worker.instance.stop(GRACE_S, "worker-0 is to end")
            (job.flags / "go").touch()
            await job.worker.heard("InstanceClosed")
            last = (await job.output()).splitlines()[-1]
            assert last == "7 255"

    play(story())


def test_a_session_ends_when_its_client_goes_long_before_the_grace_does(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            await job.started("ssh worker-0 'touch $FLAGS/up; exec sleep 100'")
            await job.flagged("up")
            began = time.monotonic()
            await job.closed(GRACE_S)
            assert time.monotonic() - began < GRACE_S

    play(story())


def test_what_outlives_the_grace_is_killed(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            await job.started(
                "ssh worker-0 'trap \"\" TERM HUP; setsid sleep 100 & touch $FLAGS/up; sleep 100'; echo $?"
            )
            await job.flagged("up")
            await job.worker.instance.stop(0.3, "worker-0 is to end")
            await job.worker.heard("InstanceClosed")
            last = (await job.output()).splitlines()[-1]
            assert last == "255"

    play(story())


def test_a_world_that_ends_with_its_job_is_not_broken(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            await job.started("raycontrol-rsh worker-0 'touch $FLAGS/up; exec sleep 100'")
            await job.flagged("up")
            await job.closed(0.2)
            assert job.launcher.told("WorldBroken") == job.worker.told("WorldBroken") == []

    play(story())


# Proving that ssh works.


def test_an_instance_that_lets_nobody_in_fails_the_stage_in_sshs_words(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            await job.prepare("true")
            await job.launcher.instance.carry_out(job.orders(job.launcher, SERVE))
            await job.launcher.instance.carry_out(replace(job.orders(job.launcher, PROVE), limit_s=0.5))
            failed = await job.launcher.heard("InstanceFailed")
            assert failed.reason is Reason.STAGE_FAILED
            assert failed.message.startswith(
                "launcher-0 on host-a (127.0.0.1) cannot run a command on worker-0 through ssh: "
            )
            assert "Permission denied (publickey)." in failed.message
            assert failed.message.endswith("Check firewalls and routes between the two nodes")

    play(story())


def test_an_instance_that_never_answers_fails_the_stage_in_words(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            await job.prepare("true")
            with socket.create_server(("127.0.0.1", 0)) as silent:
                work = job.orders(job.launcher, PROVE)
                port = f"Port {silent.getsockname()[1]}"
                config = work.files["ssh/config"].replace(f"Port {job.ssh_port(job.worker)}", port)
                ports = work.files["ssh/ports"].replace(
                    f"={job.ssh_port(job.worker)} ", f"={silent.getsockname()[1]} "
                )
                files = {**work.files, "ssh/config": config, "ssh/ports": ports}
                await job.launcher.instance.carry_out(replace(work, files=files, limit_s=0.5))
                failed = await job.launcher.heard("InstanceFailed")
            assert failed.message == (
                "launcher-0 on host-a (127.0.0.1) cannot run a command on worker-0 through ssh: no answer. "
                "Check firewalls and routes between the two nodes"
            )

    play(story())


def test_an_instance_that_is_gone_fails_the_stage_in_sshs_words(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            await job.prepare("true")
            await job.worker.instance.stop(0, "it is to be gone")
            await job.worker.heard("InstanceClosed")
            await job.launcher.instance.carry_out(replace(job.orders(job.launcher, PROVE), limit_s=0.5))
            assert "Connection refused" in (await job.launcher.heard("InstanceFailed")).message

    play(story())


def test_an_instance_that_serves_late_is_reached(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            await job.prepare("true")
            work = job.orders(job.launcher, PROVE)
            assert work.until == (SshAnswers("launcher-0", "worker-0"),)
            await job.launcher.instance.carry_out(work)
            await until((job.launcher.private / "proofs").exists, "a first try")
            await job.worker.instance.carry_out(job.orders(job.worker, SERVE))
            await job.launcher.heard("StagePassed")

    play(story())


def test_a_stop_while_ssh_is_being_proved(tmp_path: Path) -> None:
    async def story() -> None:
        async with open_job(tmp_path) as job:
            await job.prepare("true")
            await job.launcher.instance.carry_out(job.orders(job.launcher, PROVE))
            await until((job.launcher.private / "proofs").exists, "a first try")
            began = time.monotonic()
            await job.closed(GRACE_S)
            assert time.monotonic() - began < GRACE_S
            assert job.launcher.told("StagePassed") == job.launcher.told("InstanceFailed") == []

    play(story())
