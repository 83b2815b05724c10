"""`raycontrol shell` in a job of a real cluster, by a person at a terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from raycontrol import Client
from tests.ray.conftest import LocalRay
from tests.ray.jobs import ended, spec
from tests.support import wait_until
from tests.terminal import Person

RAYCONTROL = Path(sys.executable).parent / "raycontrol"


def test_a_person_sits_at_a_shell_in_a_running_job(cluster: LocalRay, client: Client) -> None:
    job = client.submit(spec("sleep 1000"))
    wait_until(lambda: job.info().state == "RUNNING", 60, "RUNNING")
    person = Person(
        [RAYCONTROL, "shell", job.id, "--address", cluster.address], env={**os.environ, **cluster.env}
    )
    person.type("PS1=; stty size; echo $RAYCONTROL_INSTANCE; sleep 1001\n")
    person.sees(r"24 80\r\nmaster-0\r\n")
    person.type("\x03")
    person.type("echo still $((40 + 2)); exit 3\n")
    person.sees("still 42")
    assert person.leaves() == 3
    job.stop(force=True)
    ended(job)


def test_a_failed_job_is_kept_for_a_look_inside(cluster: LocalRay, client: Client) -> None:
    job = client.submit(spec("echo left > trace; exit 7", timeouts={"keep_failed_s": 600}))
    info = job.wait(60)
    assert (info.state, info.exit_status, info.kept_until is not None) == ("STOPPING", 7, True)
    assert list(job.logs(follow=True)) == []
    person = Person(
        [RAYCONTROL, "shell", job.id, "--address", cluster.address], env={**os.environ, **cluster.env}
    )
    person.type("PS1=; cat trace; exit\n")
    person.sees(r"left\r\n")
    assert person.leaves() == 0
    job.stop()
    wait_until(lambda: job.info().state == "FAILED", 60, "its end")
    assert job.info().exit_status == 7
