"""``shell_env: true``: what the nodes' shells set is in the job's environment, below what the job itself sets."""

from __future__ import annotations

from typing import Any

from raycontrol.backends import make_plan
from raycontrol.hardware import Essentials
from raycontrol.plan import Brief, Facts, Plan
from raycontrol.spec import JobSpec, members

BRIEF = Brief("digits-1", "digits", attempt=0, attempt_id="digits-1.0")
SHELL = {"PATH": "/venv/bin:/cuda/bin:/usr/bin", "CUDA_HOME": "/cuda"}


def planned(**facts: Any) -> Plan:
    spec = JobSpec(command="torchrun train.py", shell_env=True, env={"CUDA_HOME": "/mine"})
    (member,) = members(spec)
    ports = {"probe": "40001", "master": "40002"}
    known = Essentials(gpus=0, interfaces=("eth0",))
    return make_plan(spec, BRIEF, (Facts(member.name, "10.0.0.1", "host-a", ports, hardware=known, **facts),))


def test_the_jobs_own_variables_go_before() -> None:
    plan = planned(shell_env=SHELL)
    (environment,) = plan.environment.values()
    (origins,) = plan.origins.values()
    assert (environment["PATH"], environment["CUDA_HOME"]) == ("/venv/bin:/cuda/bin:/usr/bin", "/mine")
    assert (origins["PATH"], origins["CUDA_HOME"]) == ("the shell of host-a", "the job's env")


def test_a_shell_that_tells_nothing_is_told_of() -> None:
    plan = planned(shell_trouble="the rc files of bash take longer than 5 s")
    (environment,) = plan.environment.values()
    assert "PATH" not in environment
    assert plan.notes == (
        "master-0 is without the environment of the shell of host-a: the rc files of bash take longer than 5 s",
    )
