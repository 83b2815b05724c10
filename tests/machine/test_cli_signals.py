"""``raycontrol run`` as a process: signals, closed pipes and what it says when it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import wait_until

ROOT = Path(__file__).parents[2]
FOLLOW = "follow it with `raycontrol logs -f digits-ab12cd` or `raycontrol wait digits-ab12cd`"


class Command:
    """A command line on the fake client, in a process of its own; its streams go to files."""

    def __init__(self, folder: Path, scene: str, *arguments: str, ignored: tuple[int, ...] = ()) -> None:
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.fake_client", scene, *arguments],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN) for number in ignored] and None,
            )

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def says(self, text: str) -> None:
        wait_until(lambda: text in self.stdout + self.stderr, timeout_s=30, what=f"{text!r} in the output")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def status(self) -> int:
        return self.process.wait(timeout=60)


@contextmanager
def running(folder: Path, scene: str, *arguments: str, ignored: tuple[int, ...] = ()) -> Iterator[Command]:
    command = Command(folder, scene, *arguments, ignored=ignored)
    try:
        yield command
    finally:
        command.process.kill()
        command.process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_the_job_to_stop_and_the_run_ends_with_it(
    number: signal.Signals, tmp_path: Path
) -> None:
    with running(tmp_path, "endless", "run", "--", "true") as command:
        command.says("RUNNING  2 instances on host-a, host-b")
        command.says("worker-0 | step 1")
        command.send(number)
        assert command.status() == 130
    assert (
        f"[digits-ab12cd] {number.name}: asking the job to stop; Ctrl-C again leaves it to stop by itself\n"
        in command.stderr
    )
    assert f"STOPPING  {number.name} sent to `raycontrol run`" in command.stderr
    assert "STOPPED (STOP_REQUESTED) after 2.0 s, exit status 130" in command.stderr


def test_a_second_interrupt_leaves_and_says_how_to_follow(tmp_path: Path) -> None:
    with running(tmp_path, "stubborn", "run", "--", "true") as command:
        command.says("RUNNING")
        command.send(signal.SIGINT)
        command.says("STOPPING")
        command.send(signal.SIGTERM)
        command.send(signal.SIGINT)
        assert command.status() == 130
    assert command.stderr.splitlines()[-1] == f"[digits-ab12cd] leaving: the job is being stopped; {FOLLOW}"


def test_a_closed_terminal_leaves_the_job_running(tmp_path: Path) -> None:
    with running(tmp_path, "endless", "run", "--", "true") as command:
        command.says("RUNNING")
        command.send(signal.SIGHUP)
        assert command.status() == 129
    assert (
        command.stderr.splitlines()[-1] == f"[digits-ab12cd] the terminal is gone: the job runs on; {FOLLOW}"
    )
    assert "STOPPING" not in command.stderr


def test_under_nohup_a_closed_terminal_changes_nothing(tmp_path: Path) -> None:
    with running(tmp_path, "endless", "run", "--", "true", ignored=(signal.SIGHUP,)) as command:
        command.says("RUNNING")
        command.send(signal.SIGHUP)
        command.send(signal.SIGTERM)
        assert command.status() == 130
    assert "the terminal is gone" not in command.stderr


@pytest.mark.parametrize(
    ("signals", "status"), [((signal.SIGINT, signal.SIGINT), 130), ((signal.SIGHUP,), 129)]
)
def test_leaving_an_embedded_run_ends_everything_and_says_so(
    signals: tuple[signal.Signals, ...], status: int, tmp_path: Path
) -> None:
    with running(tmp_path, "embedded", "run", "--", "true") as command:
        command.says("RUNNING")
        for number in signals[:-1]:
            command.send(number)
            command.says("Ctrl-C again ends it at once, with its Ray")
        command.send(signals[-1])
        assert command.status() == status
    assert command.stderr.splitlines()[-1].endswith("ending the job and the Ray that was started for it")
    assert "raycontrol wait" not in command.stderr


def test_a_lost_cluster_ends_the_run_with_125(tmp_path: Path) -> None:
    with running(tmp_path, "lost", "run", "--", "true") as command:
        assert command.status() == 125
    assert "raycontrol: no Ray cluster answers at 10.0.0.1:6379 (connection refused)" in command.stderr
    assert "Traceback" not in command.stderr


def test_an_interrupt_of_wait_ends_it_quietly(tmp_path: Path) -> None:
    with running(tmp_path, "endless", "logs", "-f", "digits") as command:
        command.says("worker-0 | step 1")
        command.send(signal.SIGINT)
        assert command.status() == -signal.SIGINT
    assert command.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "status"), [("logs digits", 141), ("logs -f digits", 141), ("run -- true", 0)]
)
def test_a_reader_that_has_seen_enough_is_no_error(arguments: str, status: int, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with (tmp_path / "stderr").open("w+") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fake_client", "chatty", *arguments.split()],
            cwd=ROOT,
            stdout=writing,
            stderr=stderr,
        )
        os.close(writing)
        os.read(reading, 10)
        os.close(reading)
        assert process.wait(timeout=60) == status
        stderr.seek(0)
        said = stderr.read()
    assert "Traceback" not in said and "Broken" not in said
    assert ("SUCCEEDED (COMPLETED)" in said) == (status == 0)
