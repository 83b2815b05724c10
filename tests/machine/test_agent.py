"""What MPI launchers call instead of ssh: ours, for worlds of ours only, and it does not forget a lost connection."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from raycontrol.backends import world
from raycontrol.plan import Facts

SSH = """#!/bin/sh
printf '%s|' "$@"
exit ${CODE:-0}
"""


class Agent:
    """The agent of one instance, with an ssh that prints its arguments."""

    def __init__(self, folder: Path, instance: str) -> None:
        self.private = folder / "a private folder" / instance
        programs = self.private / "bin"
        programs.mkdir(parents=True)
        facts = Facts(instance, "10.0.0.1", "host", private_dir=str(self.private))
        text = world.agent(facts, launcher="launcher-0")
        for name, script in {"ssh": SSH, world.AGENT: text}.items():
            (programs / name).write_text(script)
            (programs / name).chmod(0o700)

    def __call__(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        program = self.private / "bin" / world.AGENT
        env = {"PATH": os.defpath, **environment}
        return subprocess.run([program, *arguments], env=env, capture_output=True, text=True, timeout=20)

    def broken(self) -> list[str]:
        return [path.read_text() for path in (self.private / world.BROKEN).glob("*")]


@pytest.mark.parametrize(
    ("instance", "environment", "number"),
    [
        ("launcher-0", {}, "0"),
        ("launcher-0", {"RAYCONTROL_WORLD": "3"}, "3"),
        ("worker-0", {"RAYCONTROL_WORLD": "3"}, "3"),
    ],
)
def test_it_is_our_ssh_and_tells_the_world(
    tmp_path: Path, instance: str, environment: dict[str, str], number: str
) -> None:
    agent = Agent(tmp_path, instance)
    done = agent("-x", "10.0.0.2", "prted a 'b c'", **environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"-o|SetEnv=RAYCONTROL_WORLD={number}|-x|10.0.0.2|prted a 'b c'|"
    assert agent.broken() == []


def test_it_refuses_where_no_world_of_ours_runs(tmp_path: Path) -> None:
    done = Agent(tmp_path, "worker-0")("10.0.0.2", "prted")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "raycontrol: an MPI launcher was reached around raycontrol's own on worker-0 (by an absolute path, or from an "
        "environment that comes first on PATH) and would start a second world: call plain `mpirun`, found on PATH, or "
        "set `run_on: launcher`\n"
    )


def test_a_connection_that_is_lost_is_put_down(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "launcher-0")
    assert agent("-x", "10.0.0.2", "prted --secret", CODE="255").returncode == 255
    assert agent.broken() == [
        "the ssh connection to 10.0.0.2 for a part of the MPI world ended with exit code 255\n"
    ]
