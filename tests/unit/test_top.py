"""``raycontrol top``, and usage in ``get``, on a client without a cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from raycontrol.cli import topview
from raycontrol.cli.top import look_at, looks_after
from raycontrol.errors import StoreError
from raycontrol.hardware import GpuSample, InstanceUsage
from raycontrol.status import JobState, Reason
from tests.fake_client import SUBMITTED_AT, FakeClient, FakeJob, instance, job_info, running_job
from tests.support import wait_until
from tests.unit.test_cli import Shell

GIB = 2**30
GPU = GpuSample(
    index=3,
    uuid="GPU-3",
    utilisation_percent=98,
    memory_bytes=61 * GIB,
    memory_total_bytes=80 * GIB,
    power_w=412.4,
    temperature_c=66,
    throttled=("power cap",),
)


def sample(age_s: float, **changes: Any) -> InstanceUsage:
    facts = {
        "cpu_percent": 187.4,
        "memory_bytes": 3 * GIB,
        "read_bytes": 0,
        "written_bytes": 0,
        "processes": 4,
    }
    return InstanceUsage(**{"at": time.time() - age_s, **facts, **changes})


def busy_job() -> FakeJob:
    """Two instances; master-0 has two samples and two GPUs, worker-0 has none yet."""
    job = running_job()
    job.uses("master-0", sample(5), sample(0, read_bytes=5 * 2**20, gpus=(GPU, GPU)))
    return job


def test_top_shows_each_instance_with_its_gpus_below_each_other() -> None:
    shell = Shell(FakeClient(busy_job()))
    assert shell("top", "--once") == 0
    header, master, second_gpu, worker = shell.stdout.splitlines()
    assert header.split("  ")[0] == "JOB"
    for text in ("digits-ab12cd  master-0  host-a  187", "3.0 GiB", "1.0 MiB", "0 B", " s"):
        assert text in master
    assert "3: 98 % 61.0 GiB of 80.0 GiB 412 W 66 °C throttled: power cap" in master
    assert second_gpu.strip() == "3: 98 % 61.0 GiB of 80.0 GiB 412 W 66 °C throttled: power cap"
    assert worker.split() == ["digits-ab12cd", "worker-0", "host-b"]


def test_top_shows_all_running_jobs_the_newest_first() -> None:
    jobs = [FakeJob(job_info(name)) for name in ("old-1", "new-1", "done-1", "waits-1")]
    for number, job in enumerate(jobs[:3]):
        job.becomes(
            JobState.RUNNING,
            Reason.STARTED,
            instances=(instance(),),
            submitted_at=SUBMITTED_AT + number,
        )
    jobs[2].becomes(JobState.SUCCEEDED, Reason.COMPLETED)
    shell = Shell(FakeClient(*jobs))
    assert shell("top", "--once") == 0
    assert [line.split()[0] for line in shell.stdout.splitlines()] == ["JOB", "new-1", "old-1"]


def test_top_as_json_has_the_samples_and_their_rates() -> None:
    job = busy_job()
    found = Shell(FakeClient(job)).json("top", job.id, "--once")
    [shown] = found["jobs"]
    assert (shown["id"], shown["state"], shown["attempt"]) == (job.id, "RUNNING", 0)
    master, worker = shown["instances"]
    assert (master["name"], master["node"], master["state"]) == ("master-0", "host-a", "RUNNING")
    assert master["usage"] == job.usage()["master-0"][0].model_dump(mode="json")
    assert master["read_bytes_per_s"] == pytest.approx(2**20, rel=0.01)
    assert (worker["usage"], worker["read_bytes_per_s"]) == (None, None)


def test_top_ends_with_its_job() -> None:
    job = busy_job()
    client = FakeClient(job)

    def pause() -> None:
        job.becomes(JobState.SUCCEEDED, Reason.COMPLETED)

    looks = looks_after(look_at(client, job), client, job, pause)  # type: ignore[arg-type]
    assert [look.jobs[0][0].state for look in looks] == [JobState.SUCCEEDED]


@pytest.mark.parametrize("terminal", [False, True])
def test_top_of_a_job_that_has_ended_shows_its_last_samples_and_ends(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    job = busy_job()
    job.becomes(JobState.SUCCEEDED, Reason.COMPLETED)
    shell = Shell(FakeClient(job), terminal=terminal)
    assert shell("top", job.id) == 0
    assert "61.0 GiB of 80.0 GiB" in shell.stdout
    assert ("\x1b" in shell.stdout) is terminal


def test_top_goes_on_below_itself_until_ctrl_c_which_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fake_client", "endless", "top", "--interval", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if "worker-0" in line:
            break
    process.send_signal(signal.SIGINT)
    wait_until(lambda: process.poll() is not None, what="the end of top")
    _, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert [line.split()[0] for line in lines[1:]] == ["JOB", "digits-ab12cd", "digits-ab12cd"]


def test_an_interval_below_a_second_is_refused() -> None:
    shell = Shell(FakeClient(busy_job()))
    assert shell("top", "--interval", "0.5") == 2


def test_get_shows_in_a_line_what_a_running_job_uses() -> None:
    job = busy_job()
    job.uses("worker-0", sample(1, gpus=(GPU.model_copy(update={"utilisation_percent": 50}),)))
    shell = Shell(FakeClient(job))
    assert shell("get", job.id) == 0
    assert "usage        375 % CPU, 6.0 GiB, 3 GPUs at 82 %\n" in shell.stdout


def test_get_as_json_has_the_last_sample_of_each_instance() -> None:
    job = busy_job()
    document = Shell(FakeClient(job)).json("get", job.id)
    assert document.pop("usage") == {"master-0": job.usage()["master-0"][0].model_dump(mode="json")}
    assert document == job.info().model_dump(mode="json")


def test_get_shows_the_job_also_when_its_usage_cannot_be_read() -> None:
    class Unreadable(FakeJob):
        def usage(self, last: int = 1, *, attempt: int | None = None) -> dict[str, tuple[InstanceUsage, ...]]:
            raise StoreError("archive /data: no such disk")

    job = Unreadable(job_info())
    shell = Shell(FakeClient(job))
    assert json.loads(json.dumps(shell.json("get", job.id))) == job.info().model_dump(mode="json")
    assert shell.stderr == "note: what the job uses is not known: archive /data: no such disk\n"


def test_what_is_not_known_of_a_gpu_is_left_out() -> None:
    assert topview.gpu_cell(GpuSample(index=0, uuid="a", utilisation_percent=7)) == "0: 7 %"
    assert topview.gpu_cell(GpuSample(index=1, uuid="b", fault="GPU is lost")) == "1: GPU is lost"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1.5 * 2**30, "1.5 GiB"), (2**60, "1048576.0 TiB")],
)
def test_sizes_are_shown_in_the_largest_fitting_unit(count: float, text: str) -> None:
    assert topview.in_bytes(count) == text
