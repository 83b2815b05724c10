"""The command line on a client without a cluster: what it prints, asks for, and exits with."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from raycontrol.cli import invoke
from raycontrol.cli.output import Output
from raycontrol.cli.render import event_line
from raycontrol.cli.services import Services
from raycontrol.errors import ControllerUnavailable, VersionMismatch
from raycontrol.spec import JobSpec
from raycontrol.status import (
    AttemptInfo,
    Event,
    InstanceState,
    JobState,
    Outcome,
    QueueEntry,
    Reason,
    Verdict,
)
from tests.fake_client import SUBMITTED_AT, FakeClient, FakeJob, instance, job_info, running_job

ADDRESS = "10.0.0.1:6379"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@dataclass
class Shell:
    """Runs command lines on a fake client and keeps what they printed."""

    client: FakeClient = field(default_factory=FakeClient)
    address: str | None = ADDRESS
    terminal: bool = False
    stdout: str = ""
    stderr: str = ""

    def __call__(self, *arguments: str) -> int:
        out, err = (Terminal(), Terminal()) if self.terminal else (io.StringIO(), io.StringIO())
        services = Services(Output(out, err), self.client, lambda explicit: explicit or self.address)  # type: ignore[arg-type]
        status = invoke(arguments, services)
        self.stdout, self.stderr = out.getvalue(), err.getvalue()
        return status

    def json(self, *arguments: str) -> Any:
        assert self(*arguments, "--json") == 0, self.stderr
        return json.loads(self.stdout)


def finished(
    job_id: str, state: JobState = JobState.SUCCEEDED, at: float = SUBMITTED_AT, **changes: Any
) -> FakeJob:
    times = {"submitted_at": at, "started_at": at + 1, "ended_at": at + 63}
    reason = Reason.COMPLETED if state is JobState.SUCCEEDED else Reason.INSTANCE_FAILED
    return FakeJob(job_info(job_id, state=state, **{"reason": reason, **times, **changes}))


def failed_job() -> FakeJob:
    verdict = Verdict(
        reason=Reason.INSTANCE_FAILED,
        summary="worker-0 exited with code 1",
        instance="worker-0",
        exit_code=1,
        last_lines=("Traceback", "ValueError: [no] markup"),
        hint="look at dmesg",
    )
    ended = instance(state=InstanceState.EXITED, exit_code=1, note="the first to fail")
    return finished(
        "digits-ab12cd",
        JobState.FAILED,
        exit_code=1,
        verdict=verdict,
        instances=(ended,),
        outputs="/data/out",
        labels={"a": "b"},
    )


# Reading jobs


def test_get_tells_everything_about_a_failed_job() -> None:
    shell = Shell(FakeClient(failed_job()))
    assert shell("get", "digits") == 0
    for text in (
        "FAILED (INSTANCE_FAILED)",
        "took         1:02",
        "exit status  1",
        "labels       a=b",
        "outputs      /data/out",
        "worker-0  worker  worker  host-a  10.0.0.1  EXITED  code 1      the first to fail",
        "worker-0 exited with code 1\nlast lines of worker-0:\n  | Traceback\n  | ValueError: [no] markup\nhint: look at dmesg\n",
    ):
        assert text in shell.stdout
    assert "\x1b" not in shell.stdout


def test_get_tells_what_a_job_asked_for_and_masks_what_may_be_secret() -> None:
    spec = JobSpec.from_dict(
        {
            "command": "torchrun train.py\nsync",
            "nodes": "2-4",
            "resources": {"gpu": 8},
            "where": {"rack": "r1"},
            "env": {"LR": "0.1", "API_TOKEN": "hush"},
            "secret_env": {"KEY": "hush"},
            "priority": 2,
        }
    )
    shell = Shell(FakeClient(finished("digits-ab12cd", spec=spec.shown())))
    assert shell("get", "digits") == 0
    asked = shell.stdout.partition("asked for:\n")[2].splitlines()[:6]
    assert asked == [
        "  command     torchrun train.py sync",
        "  nodes       2-4",
        '  where       {"rack": "r1"}',
        '  resources   {"gpu": 8}',
        '  env         {"LR": "0.1", "API_TOKEN": "(masked)"}',
        '  secret_env  {"KEY": null}',
    ]
    assert shell.json("get", "digits")["spec"]["nodes"] == "2-4"


def test_a_job_that_failed_and_keeps_its_nodes_is_told_of_with_what_to_do() -> None:
    kept = (
        failed_job()
        .info()
        .model_copy(update={"state": JobState.STOPPING, "ended_at": None, "kept_until": SUBMITTED_AT + 600})
    )
    shell = Shell(FakeClient(FakeJob(kept)))
    assert shell("wait", "digits") == 1
    assert shell.stdout == "digits-ab12cd STOPPING (INSTANCE_FAILED)\n"
    assert shell.stderr.splitlines()[0] == "worker-0 exited with code 1"
    assert shell.stderr.splitlines()[-2].endswith(": raycontrol shell digits-ab12cd")
    assert shell.stderr.splitlines()[-1] == "to let them go: raycontrol stop digits-ab12cd"


def test_get_as_json_is_the_job() -> None:
    job = failed_job()
    assert Shell(FakeClient(job)).json("get", job.id) == job.info().model_dump(mode="json")


def test_tables_on_a_terminal_are_coloured_unless_NO_COLOR_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shell = Shell(FakeClient(failed_job()), terminal=True)
    assert shell("list") == 0
    assert "\x1b[31mFAILED" in shell.stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert shell("list") == 0
    assert "FAILED" in shell.stdout and "\x1b[31m" not in shell.stdout


@pytest.mark.parametrize("known", [("digits-ab12cd", "digits-ab99xy"), ()])
def test_an_id_that_names_no_single_job_is_a_usage_error(known: Sequence[str]) -> None:
    shell = Shell(FakeClient(*(finished(job_id) for job_id in known)))
    assert shell("get", "digits") == 2
    assert shell.stdout == ""
    assert shell.stderr.startswith("raycontrol: ")
    assert all(job_id in shell.stderr for job_id in known)
    assert "Traceback" not in shell.stderr


def test_list_shows_all_unfinished_jobs_and_the_last_twenty_that_ended() -> None:
    ended = [finished(f"old-{number:04}", at=SUBMITTED_AT + number) for number in range(25)]
    waiting = [
        FakeJob(job_info("new-0001", submitted_at=SUBMITTED_AT - 100, pending="needs 8 GPUs, 2 are free"))
    ]
    shell = Shell(FakeClient(*ended, *waiting))
    ids = [job["id"] for job in shell.json("list")]
    assert ids == [f"old-{number:04}" for number in range(24, 4, -1)] + ["new-0001"]
    assert len(shell.json("list", "--all")) == 26
    assert len(shell.json("list", "--limit", "3")) == 3
    assert [job["id"] for job in shell.json("list", "--state", "queued")] == ["new-0001"]
    assert shell.json("list", "--user", "bob") == []
    assert shell("list") == 0
    assert "needs 8 GPUs, 2 are free" in shell.stdout


def test_list_is_narrowed_to_labels_and_text() -> None:
    jobs = [
        FakeJob(job_info("digits-0001", labels={"team": "vision"})),
        FakeJob(job_info("digits-0002", labels={"team": "speech"})),
        FakeJob(job_info("words-0001", labels={"team": "vision"})),
    ]
    shell = Shell(FakeClient(*jobs))
    found = [job["id"] for job in shell.json("list", "--label", "team=vision", "--text", "digits")]
    assert found == ["digits-0001"]
    assert shell("list", "--label", "vision") == 2
    assert "--label: must be NAME=VALUE, got vision" in shell.stderr


def test_a_job_tells_its_reason_only_where_the_state_does_not() -> None:
    running = FakeJob(job_info("runs-000001", state=JobState.RUNNING, reason=Reason.STARTED))
    waiting = FakeJob(job_info("waits-000001", reason=Reason.WAITING, pending="needs 8 GPUs"))
    stopping = FakeJob(job_info("stops-000001", state=JobState.STOPPING, reason=Reason.STOP_REQUESTED))
    shell = Shell(FakeClient(running, waiting, stopping))
    for job_id, state in (
        ("runs", "RUNNING"),
        ("waits", "QUEUED (WAITING)"),
        ("stops", "STOPPING (STOP_REQUESTED)"),
    ):
        assert shell("get", job_id) == 0
        assert f"state        {state}\n" in shell.stdout
    running.becomes(JobState.RUNNING, Reason.STARTED, "two\nlines")
    assert shell("events", "runs") == 0
    assert shell.stdout.endswith("  RUNNING                     two lines\n")


def test_list_says_why_a_job_was_stopped_on_one_line() -> None:
    verdict = Verdict(reason=Reason.STOP_REQUESTED, summary="SIGTERM sent\nto `raycontrol run`")
    job = finished("digits-ab12cd", JobState.STOPPED, reason=Reason.STOP_REQUESTED, verdict=verdict)
    shell = Shell(FakeClient(job))
    assert shell("list") == 0
    assert shell.stdout.splitlines()[1].endswith("  SIGTERM sent to `raycontrol run`")


def test_an_abandoned_job_is_shown_as_such_and_does_not_go_on_taking_time() -> None:
    gone = job_info(
        state=JobState.RUNNING,
        reason=Reason.STARTED,
        started_at=SUBMITTED_AT,
        abandoned=True,
        pending="it is gone",
    )
    shell = Shell(FakeClient(FakeJob(gone)))
    assert shell("get", "digits") == 0
    assert "abandoned    it is gone\n" in shell.stdout
    assert "took" not in shell.stdout
    assert shell("list") == 0
    assert shell.stdout.splitlines()[1].endswith("ago        abandoned: it is gone")


@pytest.mark.parametrize(
    "arguments", ["list", "get digits", "logs digits", "events digits", "wait digits", "prune"]
)
def test_what_is_read_without_the_cluster_that_was_named_is_noted_once(arguments: str) -> None:
    client = FakeClient(finished("digits-ab12cd"))
    client.offline = "no Ray cluster answers at 10.0.0.1:6379; reading the store in ~/.raycontrol"
    shell = Shell(client)
    assert shell(*arguments.split()) == 0
    assert shell.stderr.count(f"note: {client.offline}\n") == 1
    assert "note: " not in shell.stdout


def test_a_job_that_is_not_found_without_its_cluster_is_noted_too() -> None:
    client = FakeClient()
    client.offline = "no Ray cluster answers at 10.0.0.1:6379"
    shell = Shell(client)
    assert shell("get", "digits") == 2
    assert shell.stderr.startswith(
        "note: no Ray cluster answers at 10.0.0.1:6379\nraycontrol: no job 'digits'"
    )


def test_a_state_that_does_not_exist_is_a_usage_error_that_names_all_states() -> None:
    shell = Shell()
    assert shell("list", "--state", "DONE") == 2
    assert shell.stderr.startswith("raycontrol: --state: must be one of QUEUED, PLACING,")


def test_logs_carry_prefixes_unless_one_instance_is_asked_for() -> None:
    shell = Shell(FakeClient(running_job()))
    assert shell("logs", "digits") == 0
    assert shell.stdout == "master-0 | step 1\nworker-0 | step 1\n"
    assert shell("logs", "digits", "--instance", "worker-0") == 0
    assert shell.stdout == "step 1\n"
    assert shell("logs", "digits", "--no-prefix", "--tail", "1") == 0
    assert shell.stdout == "step 1\n"


def test_logs_as_json_are_one_object_a_line() -> None:
    job = finished("digits-ab12cd")
    job.prints("worker-0", "[3] loss=0.1")
    shell = Shell(FakeClient(job))
    assert shell("logs", "-f", "digits", "--json") == 0
    assert shell.stdout == '{"instance": "worker-0", "line": "[3] loss=0.1"}\n'


def test_events_are_a_list_and_followed_events_are_lines() -> None:
    job = running_job()
    job.becomes(JobState.SUCCEEDED, Reason.COMPLETED, "all exited 0")
    shell = Shell(FakeClient(job))
    assert [event["seq"] for event in shell.json("events", "digits", "--after", "1")] == [2, 3]
    assert shell("events", "-f", "digits", "--json") == 0
    assert [json.loads(line)["state"] for line in shell.stdout.splitlines()] == [
        "QUEUED",
        "RUNNING",
        "SUCCEEDED",
    ]
    assert shell("events", "digits") == 0
    assert shell.stdout.splitlines()[2].endswith("  SUCCEEDED (COMPLETED)       all exited 0")


# Waiting, stopping, removing


@pytest.mark.parametrize(
    ("job", "status"),
    [
        (finished("digits-ab12cd"), 0),
        (failed_job(), 1),
        (finished("digits-ab12cd", JobState.STOPPED, reason=Reason.STOP_REQUESTED), 130),
        (finished("digits-ab12cd", JobState.FAILED, reason=Reason.RUN_TIMEOUT), 124),
        (finished("digits-ab12cd", JobState.FAILED, reason=Reason.INSTANCE_LOST), 125),
    ],
)
def test_wait_exits_with_the_status_of_the_job(job: FakeJob, status: int) -> None:
    shell = Shell(FakeClient(job))
    assert shell("wait", "digits") == status
    assert shell.stdout == f"{job.id} {job.info().state} ({job.info().reason})\n"
    assert shell("wait", "digits", "--json") == status
    assert json.loads(shell.stdout)["id"] == job.id


def test_a_wait_that_takes_too_long_exits_124() -> None:
    shell = Shell(FakeClient(running_job()))
    assert shell("wait", "digits", "--timeout", "0.01") == 124
    assert shell.stderr == "raycontrol: job digits-ab12cd had not ended after 0.01 s; it runs on\n"


def test_stop_asks_each_job_once_and_nothing_when_an_id_is_wrong() -> None:
    job, other = running_job(), FakeJob(job_info("other-000001"))
    shell = Shell(FakeClient(job, other))
    assert shell("stop", "digits", "nonsense") == 2
    assert job.stops == []
    assert shell("stop", "--force", "digits", "other") == 0
    assert (job.stops, other.stops) == ([(True, None)], [(True, None)])
    assert shell.stdout.splitlines()[0] == "digits-ab12cd STOPPED (STOP_REQUESTED)"


def test_the_queue_is_shown_in_its_order_with_what_each_job_waits_for() -> None:
    client = FakeClient()
    shell = Shell(client)
    assert shell("queue") == 0
    assert shell.stderr == "no job waits\n"
    client.waiting = [
        QueueEntry(
            position=number,
            id=f"digits-{number}",
            name="digits",
            user="ada",
            priority=5,
            submitted_at=time.time() - 90,
            why=why,
            held=number == 2,
        )
        for number, why in ((1, "needs 8 GPUs"), (2, "held by ada"))
    ]
    assert shell("queue") == 0
    assert [line.split()[:4] for line in shell.stdout.splitlines()] == [
        ["PLACE", "ID", "PRIORITY", "USER"],
        ["1", "digits-1", "5", "ada"],
        ["2", "digits-2", "5", "ada"],
    ]
    assert "needs 8 GPUs" in shell.stdout
    assert shell("queue", "--json") == 0
    assert [entry["held"] for entry in json.loads(shell.stdout)] == [False, True]


def test_wishes_are_passed_on_job_by_job_and_the_refused_ones_told() -> None:
    job, ended = running_job(), failed_job()
    other = FakeJob(job_info("other-000001"))
    shell = Shell(FakeClient(job, other))
    for wish in ("hold", "release", "suspend", "resume"):
        assert shell(wish, "digits", "other") == 0
        assert shell.stdout.splitlines()[0].startswith("digits-ab12cd ")
    assert shell("priority", "digits", "2") == 0
    assert job.wishes == ["hold", "release", "suspend", "resume", "priority 2"]
    assert shell("hold", "digits", "nonsense") == 2
    assert shell("priority", "digits", "10") == 2
    assert job.wishes[-1] == "priority 2"
    shell = Shell(FakeClient(ended, other))
    assert shell("hold", ended.id, "other") == 2
    assert other.wishes[-1] == "hold"
    assert "has ended (FAILED)" in shell.stderr


def test_attempts_that_have_ended_are_told_where_there_were_several() -> None:
    lost = AttemptInfo(
        number=0,
        outcome=Outcome.LOST,
        reason=Reason.INSTANCE_LOST,
        summary="worker-0 on host-b was lost",
        nodes=("host-a", "host-b"),
        ended_at=0.0,
    )
    job = FakeJob(job_info("digits-ab12cd", state=JobState.RUNNING, attempt=1, attempts=(lost,)))
    shell = Shell(FakeClient(job))
    assert shell("get", "digits") == 0
    (told,) = [line for line in shell.stdout.splitlines() if line.startswith("attempt 0: ")]
    assert told.startswith("attempt 0: LOST, ")
    assert told.endswith("on host-a, host-b: worker-0 on host-b was lost")


def test_prune_says_what_it_would_remove() -> None:
    client = FakeClient(failed_job(), FakeJob(job_info("new-000001")))
    shell = Shell(client)
    assert shell("prune", "--older-than", "7", "--keep-gib", "2", "--dry-run") == 0
    assert client.calls[1] == ("prune", (7.0, 2.0, True))
    assert "digits-ab12cd" in shell.stdout and "new-000001" not in shell.stdout
    assert shell.stderr == "1 job would be removed\n"


def test_the_controller_is_described() -> None:
    shell = Shell()
    assert shell("controller", "status") == 0
    assert shell.stdout == (
        "running          yes\n"
        "version          0.1.0\n"
        "unfinished jobs  2\n"
        "pid              7\n"
        "ray address      10.0.0.1:6379\n"
    )
    assert shell.json("controller", "restart")["pid"] == 8


# Submitting and running


def test_submit_prints_the_id_alone_on_stdout(tmp_path: Path) -> None:
    client = FakeClient(next_job=running_job())
    shell = Shell(client)
    assert (
        shell(
            "submit",
            "--nodes",
            "2",
            "--gpu",
            "1",
            "--set",
            "timeouts.run_s=60",
            "--env",
            "LR=0.1",
            "--",
            "true",
        )
        == 0
    )
    assert shell.stdout == "digits-ab12cd\n"
    assert "raycontrol logs -f digits-ab12cd" in shell.stderr
    spec = client.calls[1][1]
    assert (spec.command, spec.nodes, spec.resources.gpu, spec.timeouts.run_s) == ("true", 2, 1, 60)
    assert spec.env == {"LR": "0.1"}
    assert spec.working_dir is None


def test_options_and_words_after_the_dashes_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text('command: python a.py\nnodes: 3\nname: first\nworking_dir: "."\n')
    client = FakeClient(next_job=running_job())
    shell = Shell(client)
    assert (
        shell("run", "-d", str(file), "--name", "0123", "--set", "nodes=4", "--", "python", "b $x.py") == 0
    ), shell.stderr
    spec = client.calls[1][1]
    assert (spec.command, spec.nodes, spec.name) == (("python", "b $x.py"), 4, "0123")
    assert spec.working_dir == str(tmp_path)


@pytest.mark.parametrize("words", [("torchrun", "train.py"), ("torchrun train.py | tee log",)])
def test_a_command_that_names_a_file_here_takes_this_folder_along(
    words: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    client = FakeClient(next_job=running_job())
    assert Shell(client)("submit", "--", *words) == 0
    assert client.calls[1][1].working_dir == str(tmp_path)


def test_a_bad_spec_is_one_message_with_every_fault_and_nothing_is_started() -> None:
    client = FakeClient()
    shell = Shell(client)
    assert shell("run", "--nodes", "0", "--set", "nodez=1", "--", "true") == 2
    assert shell.stderr.startswith("raycontrol: 2 faults in the job's spec:\n")
    assert client.calls == []


def test_without_a_spec_or_a_command_run_says_what_to_give() -> None:
    shell = Shell()
    assert shell("run") == 2
    assert shell.stderr.startswith("raycontrol: no job: give a spec")


@pytest.mark.parametrize("arguments", [("submit",), ("run", "--detach")])
def test_detached_jobs_need_a_cluster(arguments: Sequence[str]) -> None:
    shell = Shell(address=None)
    assert shell(*arguments, "--", "true") == 2
    assert shell.stderr.startswith("raycontrol: no Ray cluster found: start one with `ray start --head`")
    assert shell.client.calls == []


def test_run_follows_a_job_to_its_end() -> None:
    job = running_job()
    job.becomes(
        JobState.SUCCEEDED,
        Reason.COMPLETED,
        "all exited 0",
        after_s=65,
        ended_at=SUBMITTED_AT + 65,
        outputs="/data/out",
    )
    shell = Shell(FakeClient(next_job=job))
    assert shell("run", "--", "true") == 0
    assert shell.stdout == "master-0 | step 1\nworker-0 | step 1\n"
    assert shell.stderr.splitlines() == [
        "[digits-ab12cd] submitted; if this command goes away, follow it with `raycontrol logs -f digits-ab12cd` "
        "or `raycontrol wait digits-ab12cd`",
        "[digits-ab12cd]   0.2 s  QUEUED  waits for 2 nodes with 1 CPU",
        "[digits-ab12cd]   3.4 s  RUNNING  2 instances on host-a, host-b",
        "[digits-ab12cd] SUCCEEDED (COMPLETED) after 1:05",
        "[digits-ab12cd] outputs: /data/out",
        "[digits-ab12cd] logs: raycontrol logs digits-ab12cd",
    ]


def test_over_http_the_outputs_are_on_another_machine() -> None:
    job = failed_job()
    client = FakeClient(job, next_job=job)
    client.url = "https://head:8642"
    shell = Shell(client)
    said = "/data/out (on the head); fetch: GET /api/v1/jobs/digits-ab12cd/outputs.tar"
    shell("run", "--", "true")
    assert f"[digits-ab12cd] outputs: {said}" in shell.stderr.splitlines()
    assert shell("get", "digits") == 0
    assert f"outputs      {said}" in shell.stdout.splitlines()
    assert shell.json("get", "digits")["outputs"] == "/data/out"


def test_a_run_that_failed_ends_with_the_verdict_and_its_status() -> None:
    shell = Shell(FakeClient(next_job=failed_job()))
    assert shell("run", "--", "true") == 1
    assert shell.stderr.splitlines()[1:] == [
        "[digits-ab12cd] FAILED (INSTANCE_FAILED) after 1:03, exit status 1",
        "[digits-ab12cd]   worker-0 exited with code 1",
        "[digits-ab12cd]   last lines of worker-0:",
        "[digits-ab12cd]     | Traceback",
        "[digits-ab12cd]     | ValueError: [no] markup",
        "[digits-ab12cd]   hint: look at dmesg",
        "[digits-ab12cd] outputs: /data/out",
        "[digits-ab12cd] logs: raycontrol logs digits-ab12cd",
    ]


def test_run_as_json_prints_one_document_and_its_logs_beside_it() -> None:
    job = failed_job()
    job.prints("worker-0", "step 1")
    shell = Shell(FakeClient(next_job=job))
    assert shell("run", "--json", "--", "true") == 1
    assert json.loads(shell.stdout) == job.info().model_dump(mode="json")
    assert "worker-0 | step 1\n" in shell.stderr


def test_a_run_without_a_cluster_starts_one() -> None:
    client = FakeClient(next_job=finished("digits-ab12cd"))
    shell = Shell(client, address=None)
    assert shell("run", "--", "true") == 0
    assert client.calls[0] == ("client", (None, True))
    assert client.calls[-1] == ("close", None)


def test_a_cluster_that_goes_away_during_a_run_is_125_and_says_how_to_look_later() -> None:
    job = running_job()
    job.breaks(ControllerUnavailable("the controller does not answer"))
    shell = Shell(FakeClient(next_job=job))
    assert shell("run", "--", "true") == 125
    assert "raycontrol: the controller does not answer\n" in shell.stderr
    assert shell.stderr.splitlines()[-1] == (
        "[digits-ab12cd] the job may run on; look later with `raycontrol get digits-ab12cd` or `raycontrol logs digits-ab12cd`"
    )


def test_progress_leaves_out_what_concerns_one_instance_only() -> None:
    job = running_job()
    job.becomes(JobState.RUNNING, Reason.PLACED, "master-0 exited 0", instance="master-0")
    job.becomes(JobState.RUNNING, Reason.PLACED, "slow name look-ups on host-b")
    job.becomes(JobState.STOPPING, Reason.COMPLETED, "all exited 0", instance="worker-0")
    job.becomes(JobState.SUCCEEDED, Reason.COMPLETED, ended_at=SUBMITTED_AT + 5)
    shell = Shell(FakeClient(next_job=job))
    assert shell("run", "--", "true") == 0
    assert "master-0 exited 0" not in shell.stderr
    assert "RUNNING  slow name look-ups on host-b\n" in shell.stderr
    assert "STOPPING  all exited 0\n" in shell.stderr


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_leaving_in_the_middle_of_a_submission_is_130(interruption: type[BaseException]) -> None:
    client = FakeClient(next_job=running_job())

    def interrupt() -> None:
        raise interruption

    client.on_submit = interrupt
    shell = Shell(client)
    assert shell("run", "--", "true") == 130
    assert (
        shell.stderr == "raycontrol: left while submitting; `raycontrol list` shows if the job was accepted\n"
    )
    assert client.calls[-1] == ("close", None)


def test_a_signal_during_the_submission_stops_the_job_once_it_is_submitted() -> None:
    job = running_job()
    client = FakeClient(next_job=job)
    client.on_submit = lambda: signal.raise_signal(signal.SIGTERM)
    shell = Shell(client)
    assert shell("run", "--", "true") == 130
    assert job.stops == [(False, "SIGTERM sent to `raycontrol run`")]
    assert shell.stderr.startswith("interrupted: the job will be stopped once it is submitted")


def test_an_error_that_nobody_expected_is_125_with_its_traceback() -> None:
    client = FakeClient(next_job=running_job())

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    client.on_submit = fail
    shell = Shell(client)
    assert shell("submit", "--", "true") == 125
    assert "ZeroDivisionError: a bug" in shell.stderr
    assert shell.stderr.endswith("please report it\n")


# Without a cluster


def test_plan_prints_the_plan_and_needs_no_cluster() -> None:
    shell = Shell(address=None)
    assert shell("plan", "--nodes", "2", "--", "torchrun", "train.py") == 0
    assert "RANK=0" in shell.stdout and "torchrun train.py" in shell.stdout
    assert shell("plan", "--nodes", "2", "--json", "--", "true") == 0
    assert set(json.loads(shell.stdout)["environment"]) == {"master-0", "worker-0"}
    assert shell.client.calls == []


def test_env_prints_lines_that_a_shell_can_evaluate() -> None:
    shell = Shell()
    assert shell("env", "--mode", "ddp") == 0
    assert "export WORLD_SIZE=1\n" in shell.stdout
    assert shell.json("env")["MASTER_ADDR"] == "127.0.0.1"
    assert shell("env", "--mode", "dpp") == 2
    assert shell.stderr == "raycontrol: --mode: must be one of ddp, mpi, horovod, ps, ray, got dpp\n"
    assert shell.json("env", "--mode", "ps")["WORKER_HOSTS"] == "127.0.0.1:2222"
    assert "RAY_ADDRESS" not in shell.json("env", "--mode", "ray")


def test_ray_env_prints_what_ray_start_should_be_given() -> None:
    shell = Shell()
    assert shell("ray-env") == 0
    node = ["RAY_grpc_client_keepalive_timeout_ms", "RAY_preload_python_modules", "RAY_worker_niceness"]
    assert [line.split("=")[0] for line in shell.stdout.splitlines()] == [f"export {name}" for name in node]
    assert list(shell.json("ray-env")) == node
    head = shell.json("ray-env", "--head")
    assert set(head) - set(node) == {
        "RAY_health_check_period_ms",
        "RAY_health_check_timeout_ms",
        "RAY_health_check_failure_threshold",
    }
    assert shell.client.calls == []


@pytest.mark.parametrize("folder", ["gcs", "a'; echo foo", "two\nlines", "$HOME `id`"])
def test_the_folder_of_rays_tables_reaches_a_shell_whole(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shell = Shell()
    assert shell("ray-env", "--head", "--storage", folder) == 0
    line = ["bash", "-c", f'{shell.stdout}\nprintf %s "$RAY_gcs_storage $RAY_gcs_storage_path"']
    evaluated = subprocess.run(line, capture_output=True, text=True, check=True)
    assert evaluated.stdout == f"rocksdb {tmp_path}/{folder}"


@pytest.mark.parametrize("arguments", ["--storage gcs", "--head --storage="])
def test_only_the_head_has_a_folder_for_rays_tables(arguments: str) -> None:
    shell = Shell()
    assert shell("ray-env", *arguments.split()) == 2
    assert (shell.stdout, shell.stderr) == (
        "",
        "raycontrol: --storage: goes with --head and names a folder: only the head keeps Ray's tables\n",
    )


def test_schema_is_json() -> None:
    shell = Shell()
    assert shell("schema") == 0
    assert "groups" in json.loads(shell.stdout)["properties"]


def test_version_in_three_spellings() -> None:
    shell = Shell()
    assert (shell("version"), shell.stdout) == (0, "raycontrol 0.1.0\n")
    assert (shell("--version"), shell.stdout) == (0, "raycontrol 0.1.0\n")
    assert shell.json("version") == {"raycontrol": "0.1.0"}


@pytest.mark.parametrize(
    ("client", "controller", "advice"),
    [
        ("0.9.1", "0.10.0", "; install raycontrol 0.10.0 here"),
        (
            "0.10.0",
            "0.9.1",
            "; install raycontrol 0.10.0 on every node, then `raycontrol controller restart` (running jobs go on), or "
            "raycontrol 0.9.1 here",
        ),
        (
            "0.1.0rc2",
            "0.1.0",
            "; install raycontrol 0.1.0rc2 on every node, then `raycontrol controller restart` (running jobs go on), or "
            "raycontrol 0.1.0 here",
        ),
    ],
)
def test_other_versions_are_told_which_side_to_change(client: str, controller: str, advice: str) -> None:
    said = str(VersionMismatch(client, controller))
    assert said == f"this client is raycontrol {client}, the cluster's controller is {controller}{advice}"


@pytest.mark.parametrize(
    "arguments",
    [
        "list --limit 0",
        "logs digits --tail -1",
        "wait digits --timeout -1",
        "prune --older-than -1",
        "prune --keep-gib nan",
    ],
)
def test_a_number_below_its_least_is_a_usage_error(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    client = FakeClient(finished("digits-ab12cd"))
    assert Shell(client)(*arguments.split()) == 2
    assert "must be at least" in capsys.readouterr().err
    assert client.calls == []


def test_wrong_usage_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    shell = Shell()
    assert shell("logs") == 2
    assert shell("list", "--nonsense") == 2
    assert shell("nonsense") == 2
    assert "No such command" in capsys.readouterr().err


COMMANDS = [
    "run",
    "submit",
    "list",
    "get",
    "logs",
    "events",
    "wait",
    "stop",
    "plan",
    "env",
    "ray-env",
    "schema",
    "prune",
    "version",
]


@pytest.mark.parametrize("command", [*COMMANDS, "controller status", "controller restart"])
def test_the_help_of_each_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert Shell()(*command.split(), "--help") == 0
    text = capsys.readouterr().out
    assert f"  raycontrol {command}" in text
    assert "x>=" not in text
    assert ("[SPEC] [-- COMMAND...]" in text) == (command in ("run", "submit", "plan"))
    assert "--json" in text


def imported_by(*lines: str) -> set[str]:
    """Return which expensive modules these command lines load, run one after the other in one new process."""
    code = (
        "import json, sys; from raycontrol.cli import invoke; "
        f"assert all([invoke(line.split()) == 0 for line in {lines!r}]); "
        "heavy = {'ray', 'torch', 'fastapi', 'sqlalchemy', 'pydantic', 'rich', 'asyncio'} & set(sys.modules); "
        "print(json.dumps(sorted(heavy)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(json.loads(done.stderr))


def test_help_and_version_import_nothing_heavy() -> None:
    assert imported_by("--help", "run --help", "version", "version --json") <= {
        "pydantic"
    }  # typer's own wish


def test_commands_without_a_cluster_do_not_import_ray() -> None:
    assert imported_by("plan -- true", "env", "ray-env --head", "schema") <= {"pydantic", "rich", "asyncio"}


def test_what_another_user_wrote_cannot_command_the_terminal() -> None:
    event = Event(
        at=0.0,
        kind="StopRequested",
        state=JobState.STOPPING,
        reason=Reason.STOP_REQUESTED,
        attempt=0,
        message="stop\x1b]0;mine\x07 ü",
        seq=1,
        job_id="digits-1",
    )
    assert event_line(event).endswith("stop\\x1b]0;mine\\x07 ü")


def test_shell_ends_with_the_status_of_the_shell() -> None:
    job = FakeJob(job_info())
    assert Shell(FakeClient(job))("shell", job.id, "worker-1") == 3
    assert job.sat_at == "worker-1"


def test_outputs_get_says_what_was_fetched_and_where_to() -> None:
    job = FakeJob(job_info())
    shell = Shell(FakeClient(job))
    assert (shell("outputs", "get", job.id), shell.stdout) == (0, f"2 files, 3 MiB, in outputs-{job.id}\n")
    assert shell.json("outputs", "get", job.id, "a\nb") == {"folder": "a\nb", "files": 2, "size": 3145728}
    assert (shell("outputs", "get", job.id, "a\nb"), shell.stdout) == (0, "2 files, 3 MiB, in 'a\\nb'\n")


@pytest.mark.parametrize(
    ("stdout", "status", "said"),
    [
        (">/dev/full", 125, "raycontrol: stdout cannot be written: No space left on device\n"),
        (">&-", 0, ""),
    ],
)
def test_a_stdout_that_takes_nothing_is_told_in_a_line(stdout: str, status: int, said: str) -> None:
    line = f"{sys.executable} -m raycontrol schema {stdout}"
    ran = subprocess.run(["bash", "-c", line], stderr=subprocess.PIPE, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (status, said)
