"""`raycontrol run` is interrupted: what becomes of the job, and what the last line says."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from raycontrol import Client
from raycontrol.client import JobHandle
from raycontrol.status import JobState
from tests.ray.conftest import BIN, FOREGROUND, LocalRay
from tests.ray.jobs import WAIT_S, alive, ended, said
from tests.support import wait_until

SAVES = "trap 'echo saved; exit 0' TERM; echo pid $$; while :; do sleep 0.1; done"
DEAF = "trap '' TERM; echo pid $$; while :; do sleep 0.1; done"


class Run:
    """`raycontrol run` of a program that says its pid, until it has said it."""

    def __init__(self, cluster: LocalRay, client: Client, folder: Path, program: str) -> None:
        self._said = folder / "stderr"
        with self._said.open("w") as stderr:
            self.process = cluster.popen(
                [*FOREGROUND, BIN / "raycontrol", "run", "--cpu", "0.1", "--", program],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        self.says("submitted; ")
        self.job: JobHandle = client.job(self.stderr.split("[")[1].split("]")[0])
        self.pid = int(said(self.job, "pid"))

    @property
    def stderr(self) -> str:
        return self._said.read_text()

    def says(self, text: str) -> None:
        wait_until(lambda: text in self.stderr, WAIT_S, f"{text!r} on stderr")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def status(self) -> int:
        return self.process.wait(timeout=WAIT_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_stops_the_job(
    cluster: LocalRay, client: Client, tmp_path: Path, number: signal.Signals
) -> None:
    run = Run(cluster, client, tmp_path, SAVES)
    run.send(number)
    assert run.status() == 130
    info = run.job.info()
    assert info.state is JobState.STOPPED
    assert info.verdict is not None and info.verdict.summary == f"{number.name} sent to `raycontrol run`"
    assert list(run.job.logs(tail=1, prefix=False)) == ["saved"]
    assert "STOPPED (STOP_REQUESTED)" in run.stderr


def test_a_second_ctrl_c_leaves_the_job_to_stop_by_itself(
    cluster: LocalRay, client: Client, tmp_path: Path
) -> None:
    run = Run(cluster, client, tmp_path, DEAF)
    run.send(signal.SIGINT)
    run.says("asking the job to stop")
    wait_until(lambda: run.job.info().state is JobState.STOPPING, WAIT_S, "the job is being stopped")
    run.send(signal.SIGINT)
    assert run.status() == 130, run.stderr
    assert alive(run.pid)
    last = run.stderr.splitlines()[-1]
    assert f"the job is being stopped; follow it with `raycontrol logs -f {run.job.id}`" in last
    run.job.stop(force=True)
    assert ended(run.job).state is JobState.STOPPED


def test_a_closed_terminal_leaves_the_job_running(cluster: LocalRay, client: Client, tmp_path: Path) -> None:
    run = Run(cluster, client, tmp_path, SAVES)
    run.send(signal.SIGHUP)
    assert run.status() == 128 + signal.SIGHUP
    assert alive(run.pid) and run.job.info().state is JobState.RUNNING
    last = run.stderr.splitlines()[-1]
    assert f"the job runs on; follow it with `raycontrol logs -f {run.job.id}`" in last
    run.job.stop()
    assert ended(run.job).state is JobState.STOPPED
