"""Every way a job can end: its state, its exit status, what its user is told, and nothing left on the node."""

from __future__ import annotations

import hashlib
import random
import time
from pathlib import Path

import pytest

from raycontrol import Client
from raycontrol.errors import PackageError
from raycontrol.status import JobState, Reason
from tests.ray.conftest import LocalRay
from tests.ray.jobs import (
    SAY_AND_SLEEP,
    alive,
    ended,
    kinds,
    lines,
    log_file,
    python,
    reaches,
    said,
    spec,
)

DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print("daemon", os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
os.wait()
sys.stdin.read()
while "daemon" not in open("/proc/self/fd/1").read():
    time.sleep(0.01)
"""
DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("pid", os.getpid(), flush=True)
time.sleep(600)
"""
BINARY = """
import random, sys
source = random.Random(7)
for _ in range(64):
    sys.stdout.buffer.write(source.randbytes(1 << 20))
"""


def test_a_program_that_exits_0_at_once(client: Client) -> None:
    job = client.submit(spec("true"))
    info = ended(job)
    assert (info.state, info.reason, info.exit_code, info.exit_status) == (
        JobState.SUCCEEDED,
        Reason.COMPLETED,
        0,
        0,
    )
    assert kinds(job)[0] == "Submitted" and kinds(job)[-1] == "NodesReleased"
    assert lines(job) == []


def test_the_programs_own_code_and_last_lines(client: Client) -> None:
    info = ended(client.submit(spec("seq 30; exit 42")))
    assert (info.state, info.reason, info.exit_code, info.exit_status) == (
        JobState.FAILED,
        Reason.INSTANCE_FAILED,
        42,
        42,
    )
    assert info.verdict is not None
    assert info.verdict.summary == f"master-0 on {info.instances[0].node} exited 42"
    assert info.verdict.last_lines == tuple(str(number) for number in range(11, 31))


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("no-such-program --flag", "no-such-program: command not found"),
        (("no-such-program", "--flag"), "no-such-program"),
    ],
    ids=["in bash", "without a shell"],
)
def test_a_command_that_is_not_there(client: Client, command: str | tuple[str, ...], told: str) -> None:
    info = ended(client.submit(spec(command)))
    assert (info.state, info.exit_code, info.exit_status) == (JobState.FAILED, 127, 127)
    assert info.verdict is not None and info.verdict.hint is not None
    assert told in " ".join([info.verdict.summary, *info.verdict.last_lines])
    assert "is it installed" in info.verdict.hint


def test_a_file_that_is_not_executable(client: Client, tmp_path: Path) -> None:
    (tmp_path / "start.sh").write_text("#!/bin/sh\necho never\n")
    info = ended(client.submit(spec(("./start.sh",), working_dir=str(tmp_path))))
    assert (info.state, info.exit_code, info.exit_status) == (JobState.FAILED, 126, 126)
    assert info.verdict is not None and info.verdict.hint is not None
    assert "./start.sh" in info.verdict.summary
    assert "chmod +x" in info.verdict.hint


def test_a_working_dir_that_is_missing_submits_nothing(client: Client, tmp_path: Path) -> None:
    before = client.list(all=True)
    with pytest.raises(PackageError, match="gone"):
        client.submit(spec("true", working_dir=str(tmp_path / "gone")))
    assert client.list(all=True) == before


def test_a_cwd_that_does_not_exist(client: Client) -> None:
    info = ended(client.submit(spec("true", cwd="no/such/folder")))
    assert (info.state, info.exit_code, info.exit_status) == (JobState.FAILED, None, 125)
    assert info.verdict is not None
    assert "no/such/folder" in info.verdict.summary


def test_a_program_ended_by_a_signal(client: Client) -> None:
    info = ended(client.submit(spec("kill -SEGV $$")))
    assert (info.state, info.exit_code, info.exit_status) == (JobState.FAILED, None, 128 + 11)
    assert info.verdict is not None
    assert info.verdict.summary.endswith("was ended by signal 11 (not sent by raycontrol)")


def test_a_daemon_ends_with_its_job(client: Client) -> None:
    job = client.submit(python(DAEMON))
    assert ended(job).state is JobState.SUCCEEDED
    assert not alive(int(said(job, "daemon")))


def test_a_program_that_ignores_sigterm_is_killed_after_its_grace(client: Client) -> None:
    job = client.submit(python(DEAF, timeouts={"grace_s": 2}))
    pid = int(said(job, "pid"))
    asked = time.time()
    job.stop()
    info = ended(job)
    assert (info.state, info.exit_status) == (JobState.STOPPED, 130)
    assert info.instances[0].signal == 9
    assert info.ended_at is not None and info.ended_at >= asked + 2
    assert not alive(pid)


def test_a_forced_stop_does_not_wait_for_the_grace(client: Client) -> None:
    job = client.submit(python(DEAF, timeouts={"grace_s": 3600}))
    pid = int(said(job, "pid"))
    assert job.stop().state is JobState.STOPPING
    assert alive(pid)
    job.stop(force=True)
    assert ended(job).state is JobState.STOPPED
    assert not alive(pid)


def test_a_stop_lets_the_program_save(client: Client) -> None:
    program = "trap 'echo saved; exit 3' TERM; echo pid $$; while :; do sleep 0.1; done"
    job = client.submit(spec(program))
    said(job, "pid")
    job.stop(why="enough")
    info = ended(job)
    assert (info.state, info.reason, info.exit_status) == (
        JobState.STOPPED,
        Reason.STOP_REQUESTED,
        130,
    )
    assert lines(job)[-1] == "saved"
    assert info.verdict is not None and info.verdict.summary == "enough"
    assert info.instances[0].exit_code == 3


def test_a_job_that_runs_too_long(client: Client) -> None:
    job = client.submit(spec(SAY_AND_SLEEP, timeouts={"run_s": 1}))
    info = ended(job)
    assert (info.state, info.reason, info.exit_status) == (JobState.FAILED, Reason.RUN_TIMEOUT, 124)
    assert info.verdict is not None and info.verdict.summary == "ran longer than run_s = 1 s"
    assert not alive(int(said(job, "pid")))


def test_a_job_that_waits_too_long_says_what_it_waited_for(client: Client) -> None:
    info = ended(client.submit(spec("true", resources={"gpu": 8}, timeouts={"queue_s": 1})))
    assert (info.state, info.reason, info.exit_status) == (
        JobState.FAILED,
        Reason.QUEUE_TIMEOUT,
        124,
    )
    assert info.verdict is not None
    assert "not started within queue_s = 1 s (infeasible now" in info.verdict.summary


def test_a_job_that_is_stopped_while_it_waits(client: Client) -> None:
    job = client.submit(spec("true", resources={"gpu": 8}))
    job.stop()
    info = ended(job)
    assert (info.state, info.exit_status, info.instances) == (JobState.STOPPED, 130, ())


def test_five_megabytes_without_a_newline(client: Client, cluster: LocalRay) -> None:
    job = client.submit(python("import sys; sys.stdout.write('x' * 5_000_000)"))
    assert ended(job).state is JobState.SUCCEEDED
    assert log_file(cluster, job).read_bytes() == b"x" * 5_000_000
    (line,) = lines(job)
    assert line == "x" * 65536 + f"… [{5_000_000 - 65536} bytes more]"


def test_sixty_four_mebibytes_of_anything_are_kept_bit_by_bit(client: Client, cluster: LocalRay) -> None:
    job = client.submit(python(BINARY))
    assert ended(job).state is JobState.SUCCEEDED
    source = random.Random(7)
    written = hashlib.sha256()
    for _ in range(64):
        written.update(source.randbytes(1 << 20))
    assert hashlib.sha256(log_file(cluster, job).read_bytes()).hexdigest() == written.hexdigest()


def test_two_instances_on_one_node_and_the_peer_is_not_blamed(client: Client, tmp_path: Path) -> None:
    up = tmp_path / "up"
    program = (
        f'[ "$INDEX" = 0 ] && touch {up} && exec sleep 600; until [ -e {up} ]; do sleep 0.05; done; exit 7'
    )
    info = ended(client.submit(spec(program, nodes=2, placement="pack")))
    assert (info.state, info.exit_status) == (JobState.FAILED, 7)
    master, worker = info.instances
    assert (worker.name, worker.exit_code) == ("worker-0", 7)
    assert (master.signal, master.note) == (15, "stopped: worker-0 failed")


def test_the_job_is_seen_running_before_it_is_stopped(client: Client) -> None:
    job = client.submit(spec(SAY_AND_SLEEP))
    reaches(job, JobState.RUNNING)
    info = job.info()
    assert info.started_at is not None and info.exit_code is None
    assert info.instances[0].state == "RUNNING"
    job.stop(force=True)
    assert ended(job).exit_status == 130
