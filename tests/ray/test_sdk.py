"""The Python door, as a user's program goes through it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from raycontrol import Client, JobSpec
from raycontrol.client import new_job_id
from raycontrol.errors import (
    JobNotFound,
    SpecError,
    UsageError,
    WaitTimeout,
)
from raycontrol.settings import Settings
from raycontrol.status import JobState, Reason
from tests.ray.conftest import LocalRay
from tests.ray.jobs import SAY_AND_SLEEP, WAIT_S, ended, kinds, said, spec
from tests.support import wait_until

OTHER_VERSION = """
import sys
import raycontrol.version
raycontrol.version.__version__ = "0.0.1"
from raycontrol import Client, JobSpec
from raycontrol.errors import VersionMismatch
try:
    Client().submit(JobSpec(command="true"))
except VersionMismatch as error:
    print(error.client, error.controller)
    print(error)
"""


def test_the_four_lines_of_the_readme(client: Client, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "command: echo $INDEX of $NODE_NUM; cat note\nnodes: 2\nplacement: pack\n"
        "resources: {cpu: 0.1}\nworking_dir: code\nlabels: {team: vision}\n"
    )
    (tmp_path / "code").mkdir()
    (tmp_path / "code/note").write_text("from the working directory\n")
    job = client.submit(JobSpec.from_yaml(tmp_path / "job.yaml"))
    lines = list(job.logs(follow=True))
    info = job.wait(timeout_s=600)
    assert sorted(lines) == [
        "master-0 | 0 of 2",
        "master-0 | from the working directory",
        "worker-0 | 1 of 2",
        "worker-0 | from the working directory",
    ]
    assert (info.state, info.name, info.labels) == (JobState.SUCCEEDED, "job", {"team": "vision"})
    assert job.info() == info
    assert [event.state for event in job.events()][-1] is JobState.SUCCEEDED


def test_lines_come_while_the_job_runs(client: Client) -> None:
    job = client.submit(spec(SAY_AND_SLEEP))
    following = job.logs(follow=True)
    assert next(following).startswith("master-0 | pid ")
    # A line and a state take different ways: the line may be the first.
    wait_until(lambda: job.info().state is JobState.RUNNING, WAIT_S, "the job runs")
    job.stop(force=True)
    assert list(following) == []
    assert ended(job).reason is Reason.STOP_REQUESTED


def test_events_are_watched_to_the_end(client: Client) -> None:
    job = client.submit(spec("true"))
    watched = list(job.watch())
    assert watched == job.events()
    assert [event.seq for event in watched] == sorted({event.seq for event in watched})
    assert watched[0].message.startswith("submitted by ")
    assert [event.state for event in watched if event.kind == "NodesChosen"] == [JobState.PLACING]


def test_waiting_has_a_limit_and_the_job_runs_on(client: Client) -> None:
    job = client.submit(spec(SAY_AND_SLEEP))
    said(job, "pid")
    with pytest.raises(WaitTimeout, match="it runs on"):
        job.wait(timeout_s=0.5)
    assert job.info().state is JobState.RUNNING
    job.stop(force=True)
    ended(job)


def test_a_job_is_found_by_the_beginning_of_its_id(client: Client) -> None:
    first, second = (client.submit(spec("true"), job_id=new_job_id(f"twin-{number}")) for number in "ab")
    assert client.job("twin-a").id == first.id
    assert client.job(second.id).id == second.id
    with pytest.raises(JobNotFound, match="is not unique") as ambiguous:
        client.job("twin-")
    assert set(ambiguous.value.candidates) == {first.id, second.id}
    with pytest.raises(JobNotFound, match="no job 'unheard-of'"):
        client.job("unheard-of")
    assert [ended(first).state, ended(second).state] == [JobState.SUCCEEDED, JobState.SUCCEEDED]


def test_the_name_of_a_job_goes_before_the_beginning_of_another(client: Client) -> None:
    short, long = (client.submit(spec("true", name=name)) for name in ("nick", "nickel"))
    assert client.job("nick").id == short.id
    assert client.job("nickel").id == client.job("nicke").id == long.id
    assert [ended(short).state, ended(long).state] == [JobState.SUCCEEDED, JobState.SUCCEEDED]


def test_the_same_job_id_submits_once(client: Client) -> None:
    job_id = new_job_id("once")
    jobs = [client.submit(spec("echo once"), job_id=job_id) for _ in range(3)]
    info = ended(jobs[0])
    again = client.submit(spec("echo twice"), job_id=job_id)
    assert again.info() == info
    assert list(again.logs(prefix=False)) == ["once"]
    assert kinds(again).count("Submitted") == 1


def test_jobs_from_many_threads(client: Client) -> None:
    jobs = []

    def submit(number: int) -> None:
        jobs.append(client.submit(spec(f"echo {number}", name=f"thread-{number}")))

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {ended(job).state for job in jobs} == {JobState.SUCCEEDED}
    assert sorted(line for job in jobs for line in job.logs(prefix=False)) == ["0", "1", "2", "3"]


def test_a_stop_of_a_job_that_has_ended_changes_nothing(client: Client) -> None:
    job = client.submit(spec("exit 3"))
    info = ended(job)
    assert job.stop() == info
    assert job.stop(force=True).state is JobState.FAILED


def test_jobs_are_listed_newest_first(client: Client) -> None:
    jobs = [client.submit(spec("true", name=name)) for name in ("older", "newer")]
    for job in jobs:
        ended(job)
    assert [info.name for info in client.list(limit=2)] == ["newer", "older"]
    assert all(info.state is JobState.SUCCEEDED for info in client.list(states=[JobState.SUCCEEDED]))
    assert client.list(user="nobody-we-know") == []


def test_a_bad_spec_is_refused_in_python_too(client: Client) -> None:
    before = client.list(all=True)
    with pytest.raises(SpecError) as refused:
        JobSpec(command="true", nodes=0, priority=11, env={"RANK": "1"})
    assert [fault.field for fault in refused.value.faults] == ["nodes", "env.RANK", "priority"]
    assert client.list(all=True) == before


def test_an_instance_that_the_job_does_not_have(client: Client) -> None:
    job = client.submit(spec("true"))
    ended(job)
    with pytest.raises(UsageError, match="has no instance 'worker-7'; it has master-0"):
        list(job.logs(instance="worker-7"))


def test_a_second_cluster_in_one_process_is_refused(cluster: LocalRay, client: Client) -> None:
    ended(client.submit(spec("true")))
    other = Client("192.0.2.7:6379", settings=Settings(home=str(cluster.home)))
    with pytest.raises(UsageError, match=f"connected to the Ray cluster at {cluster.address} already"):
        other.submit(spec("true"))


def test_a_client_of_another_version_is_told_so(cluster: LocalRay, client: Client) -> None:
    ended(client.submit(spec("true")))
    program = cluster.popen([sys.executable, "-c", OTHER_VERSION], stderr=subprocess.DEVNULL, cwd="/")
    told = program.communicate(timeout=120)[0].splitlines()
    from raycontrol import __version__

    assert told[0] == f"0.0.1 {__version__}"
    assert f"install raycontrol {__version__} here" in told[1]


def test_a_job_that_the_cluster_could_never_run_is_warned_of_and_waits(client: Client) -> None:
    told: list[str] = []
    job = client.submit(spec("true", nodes=2, placement="strict"), progress=told.append)
    warnings = [line for line in told if line.startswith("warning:")]
    assert len(warnings) == 1 and "infeasible now" in warnings[0] and "placement: pack" in warnings[0]
    assert job.info().state is JobState.QUEUED
    job.stop()
    assert ended(job).state is JobState.STOPPED
