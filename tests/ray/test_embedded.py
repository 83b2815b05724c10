"""`raycontrol run` where no cluster is to be found: it brings its own Ray, and leaves nothing of it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycontrol import Client
from raycontrol.status import JobState
from tests.ray.alone import Alone, alone, users_of
from tests.ray.conftest import LocalRay, end
from tests.ray.jobs import alive, ended, said, spec
from tests.support import wait_until

STARTING = "no Ray cluster found: starting one in this process for this run"
SAVES = "trap 'echo saved; exit 0' TERM; echo pid $$; while :; do sleep 0.1; done"
MEET = """
echo "$INDEX of $NODE_NUM"
touch $MEETING/$INDEX; until [ -e $MEETING/0 -a -e $MEETING/1 ]; do sleep 0.05; done
exit $INDEX
"""
DEAF = "trap '' TERM; echo pid $$; while :; do sleep 0.1; done"


@pytest.fixture
def shell() -> Iterator[Alone]:
    with alone(Alone) as shell:
        yield shell


def test_a_run_brings_its_own_ray_and_what_it_did_can_be_read_afterwards(
    shell: Alone, tmp_path: Path
) -> None:
    answer = shell.run(
        *("--env", f"MEETING={tmp_path}"),
        *("--nodes", "2", "--placement", "pack", "--cpu", "0.1", "--name", "pair"),
        *("--", MEET),
    )
    assert answer.returncode == 1
    assert sorted(answer.stdout.splitlines()) == ["master-0 | 0 of 2", "worker-0 | 1 of 2"]
    assert answer.stderr.splitlines()[0] == STARTING
    assert answer.stderr.count("starting one in this process") == 1

    (info,) = shell.json("list")
    assert (info["state"], info["exit_code"]) == ("FAILED", 1)
    assert info["cluster"].startswith("embedded-")
    assert shell.json("get", "pair")["verdict"]["instance"] == "worker-0"
    assert shell.json("events", "pair")[-1]["state"] == "FAILED"
    logs = shell.raycontrol("logs", "pair", "--instance", "worker-0", check=True)
    assert logs.stdout == "1 of 2\n"
    assert shell.raycontrol("wait", "pair").returncode == 1
    assert shell.raycontrol("stop", "pair", check=True).stdout.split()[1] == "FAILED"


def test_a_job_that_can_never_fit_is_refused_at_once(shell: Alone) -> None:
    answer = shell.run("--nodes", "2", "--", "true")
    assert answer.returncode == 2
    message = answer.stderr.splitlines()[-1]
    assert message.startswith("raycontrol: the Ray of this run is this machine alone")
    assert "needs 2 instances with cpu 1, each on a node of its own" in message
    assert "`placement: pack` (or `--set placement=pack`) lets instances share a node" in message
    assert shell.json("list") == []


@pytest.mark.parametrize("arguments", [("submit",), ("run", "--detach")])
def test_what_would_end_with_the_command_is_refused(shell: Alone, arguments: tuple[str, ...]) -> None:
    answer = shell.raycontrol(*arguments, "--", "true")
    assert answer.returncode == 2
    assert "no Ray cluster found: start one with `ray start --head`" in answer.stderr
    assert answer.stdout == ""


def test_ctrl_c_stops_the_job_and_then_ray(shell: Alone) -> None:
    command = shell.start("--cpu", "0.1", "--", SAVES)
    shell.says("pid ")
    command.send_signal(signal.SIGINT)
    assert shell.status(command) == 130
    shell.says("saved")
    shell.says("SIGINT: asking the job to stop", "stderr")
    assert [info["state"] for info in shell.json("list")] == ["STOPPED"]


def test_a_sigterm_to_the_whole_group_lets_the_job_save(shell: Alone) -> None:
    """As from `timeout 3600 raycontrol run …`."""
    command = shell.start("--cpu", "0.1", "--", SAVES, start_new_session=True)
    shell.says("pid ")
    os.killpg(command.pid, signal.SIGTERM)
    assert shell.status(command) == 130
    shell.says("saved")
    assert [info["state"] for info in shell.json("list")] == ["STOPPED"]


def test_a_second_ctrl_c_ends_everything_at_once(shell: Alone) -> None:
    command = shell.start("--cpu", "0.1", "--name", "deaf", "--", DEAF)
    shell.says("pid ")
    command.send_signal(signal.SIGINT)
    shell.says("asking the job to stop", "stderr")
    command.send_signal(signal.SIGINT)
    assert shell.status(command) == 130
    shell.says("ending the job and the Ray that was started for it", "stderr")


def test_the_program_of_a_killed_run_dies_with_it(shell: Alone) -> None:
    command = shell.start("--cpu", "0.1", "--", "setsid sleep 600 & echo child $!; wait")
    shell.says("child ")
    child = int((shell.folder / "stdout").read_text().split("child ")[1].split()[0])
    assert alive(child)
    command.kill()
    command.wait()
    wait_until(lambda: not alive(child), 60, "the program is dead")
    wait_until(lambda: shell.json("list")[0]["abandoned"], 60, "the job is known to be abandoned")
    end(users_of(shell.folder))  # Ray's agents see that their Ray is gone after a minute
    for left in shell.folder.glob("rc-*"):  # nobody was there to remove it
        shutil.rmtree(left)


def test_beside_a_live_cluster_it_touches_none_of_its_jobs_and_not_its_tables(
    cluster: LocalRay, client: Client, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    theirs = client.submit(spec(f"echo pid $$; until [ -e {go} ]; do sleep 0.05; done", name="theirs"))
    pid = int(said(theirs, "pid"))
    tables = tmp_path / "gcs"
    of_the_head = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tables)}
    with alone(Alone, cluster.home) as shell:
        ours = shell.run("--cpu", "0.1", "--name", "ours", "--", "echo here", env=of_the_head)
        assert ours.returncode == 0 and not tables.exists()
        listed = {info["name"]: info["state"] for info in shell.json("list")}
    assert (listed["ours"], listed["theirs"]) == ("SUCCEEDED", "RUNNING")
    assert {"ours", "theirs"} <= {info.name for info in client.list()}
    assert alive(pid) and theirs.info().state is JobState.RUNNING
    go.touch()
    assert ended(theirs).state is JobState.SUCCEEDED
