"""The command line on a real cluster: what each command prints, in words and in JSON, and its exit status."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from raycontrol import Client
from raycontrol.status import JobState
from tests.ray.conftest import BIN, LocalRay
from tests.ray.jobs import SAY_AND_SLEEP, WAIT_S, alive, ended, said, spec

SMALL = ("--cpu", "0.1")


def test_run_prints_logs_on_stdout_and_exits_with_the_jobs_code(cluster: LocalRay, tmp_path: Path) -> None:
    (tmp_path / "hello.sh").write_text('echo "hello from $RAYCONTROL_INSTANCE"; exit 5\n')
    answer = cluster.raycontrol("run", *SMALL, "--", "bash", "hello.sh", cwd=tmp_path)
    assert answer.returncode == 5
    assert answer.stdout == "master-0 | hello from master-0\n"
    said = answer.stderr.splitlines()
    assert said[0] == f"packed {tmp_path}: 1 files, 0.0 MiB"
    assert any("FAILED (INSTANCE_FAILED) after" in line and "exit status 5" in line for line in said)
    assert "  | hello from master-0" in answer.stderr
    assert said[-1].split("] ")[1].startswith("logs: raycontrol logs bash-")


def test_run_with_json_prints_one_document(cluster: LocalRay) -> None:
    answer = cluster.raycontrol("run", *SMALL, "--json", "--", "echo words")
    info = json.loads(answer.stdout)
    assert (answer.returncode, info["state"], info["exit_code"]) == (0, "SUCCEEDED", 0)
    assert "master-0 | words" in answer.stderr


def test_submit_then_follow_then_wait(cluster: LocalRay) -> None:
    submitted = cluster.raycontrol("submit", *SMALL, "--name", "three", "--", "seq 3; exit 4", check=True)
    job = submitted.stdout.strip()
    assert job.startswith("three-") and f"raycontrol logs -f {job}" in submitted.stderr
    assert cluster.raycontrol("logs", "-f", job, check=True).stdout == "".join(
        f"master-0 | {number}\n" for number in (1, 2, 3)
    )
    waited = cluster.raycontrol("wait", job)
    assert (waited.returncode, waited.stdout) == (4, f"{job} FAILED (INSTANCE_FAILED)\n")
    assert "exited 4" in waited.stderr


def test_everything_about_a_job_can_be_read(cluster: LocalRay, client: Client) -> None:
    program = 'seq 5; echo "me: $INDEX"'
    job = client.submit(spec(program, nodes=2, placement="pack", name="readable", labels={"team": "vision"}))
    info = ended(job)

    assert cluster.json("get", job.id) == info.model_dump(mode="json")
    details = cluster.raycontrol("get", "readable", check=True).stdout
    assert f"id           {job.id}" in details and "team=vision" in details
    assert "worker-0" in details and "code 0" in details

    (listed,) = [item for item in cluster.json("list") if item["id"] == job.id]
    in_short = [{**item, "variables": {}} for item in info.model_dump(mode="json")["instances"]]
    assert listed == {**info.model_dump(mode="json"), "instances": in_short, "spec": None}
    assert info.spec is not None and info.spec["command"] == program
    events = cluster.json("events", job.id)
    assert events == [event.model_dump(mode="json") for event in job.events()]

    tail = cluster.raycontrol("logs", job.id, "--tail", "2", "--instance", "worker-0", check=True)
    assert tail.stdout == "5\nme: 1\n"
    logs = cluster.raycontrol("logs", job.id, "--json", check=True).stdout.splitlines()
    assert {"instance": "worker-0", "line": "me: 1"} in map(json.loads, logs)
    assert len(logs) == 12


def test_waiting_and_stopping(cluster: LocalRay, client: Client) -> None:
    jobs = [client.submit(spec(SAY_AND_SLEEP, name=f"sleeper-{number}")) for number in (1, 2)]
    for job in jobs:
        said(job, "pid")
    waited = cluster.raycontrol("wait", jobs[0].id, "--timeout", "0.2")
    assert waited.returncode == 124
    assert "had not ended after 0.2 s; it runs on" in waited.stderr

    wrong = cluster.raycontrol("stop", jobs[0].id, "no-such-job")
    assert (wrong.returncode, jobs[0].info().state) == (2, JobState.RUNNING)
    stopped = cluster.json("stop", *(job.id for job in jobs))
    assert [document["id"] for document in stopped] == [job.id for job in jobs]
    assert cluster.raycontrol("wait", jobs[1].id).returncode == 130
    assert ended(jobs[0]).state is JobState.STOPPED


def test_prune_removes_what_has_ended_and_nothing_else(cluster: LocalRay, client: Client) -> None:
    old = client.submit(spec("echo old"))
    ended(old)
    running = client.submit(spec(SAY_AND_SLEEP))
    said(running, "pid")
    would = cluster.json("prune", "--older-than", "0", "--dry-run")
    assert old.id in [info["id"] for info in would]
    assert running.id not in [info["id"] for info in would]
    assert (cluster.home / "jobs" / old.id).exists()

    removed = cluster.raycontrol("prune", "--older-than", "0", check=True)
    assert removed.stderr == f"{len(would)} job{'' if len(would) == 1 else 's'} removed\n"
    assert [info.id for info in client.list(all=True)] == [running.id]
    assert [path.name for path in (cluster.home / "jobs").iterdir()] == [running.id]
    running.stop(force=True)
    ended(running)


def test_the_controller_is_shown_and_replaced_while_a_job_runs(cluster: LocalRay, client: Client) -> None:
    job = client.submit(spec(SAY_AND_SLEEP))
    pid = int(said(job, "pid"))
    before = cluster.json("controller", "status")
    assert before["running"] is True
    assert (before["home"], before["ray"], before["unfinished_jobs"]) == (
        str(cluster.home),
        cluster.address,
        1,
    )
    after = cluster.json("controller", "restart", timeout_s=WAIT_S)
    assert after["pid"] != before["pid"] and after["unfinished_jobs"] == 1
    assert alive(pid) and job.info().state is JobState.RUNNING
    job.stop(force=True)
    assert ended(job).state is JobState.STOPPED


def test_what_needs_no_cluster(cluster: LocalRay) -> None:
    nowhere = {"RAY_ADDRESS": "192.0.2.7:6379"}
    assert cluster.raycontrol("version", env=nowhere).stdout.startswith("raycontrol ")
    plan = cluster.raycontrol("plan", "--nodes", "2", "--", "torchrun train.py", env=nowhere, check=True)
    assert "<ip of master-0>" in plan.stdout and "torchrun train.py" in plan.stdout
    assert json.loads(cluster.raycontrol("schema", env=nowhere).stdout)["title"] == "A raycontrol job"
    line = f'eval "$({BIN}/raycontrol env --mode ddp)" && echo "$RANK of $WORLD_SIZE at $MASTER_ADDR"'
    shell = cluster.popen(["bash", "-c", line], env=nowhere)
    assert shell.communicate(timeout=60)[0] == "0 of 1 at 127.0.0.1\n"


def test_a_reader_that_has_seen_enough_is_not_complained_about(cluster: LocalRay) -> None:
    line = f"{BIN}/raycontrol run --cpu 0.1 -- seq 200000 | head -1; echo ${{PIPESTATUS[0]}}"
    shell = cluster.popen(["bash", "-c", line], stderr=subprocess.PIPE)
    stdout, stderr = shell.communicate(timeout=WAIT_S)
    assert stdout.splitlines() == ["master-0 | 1", "0"]
    assert "SUCCEEDED" in stderr
    assert "Traceback" not in stderr and "Broken pipe" not in stderr
