"""What MPI launchers call instead of ssh: ours, for worlds of ours only, and it does not forget a lost connection."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raycontrol import standin

SSH = """#!/bin/sh
printf '%s|' "$@"
[ -z "$STAY" ] || exec sleep 100
[ -z "$DIE" ] || kill -9 $$
exit ${CODE:-0}
"""


class Agent:
    """The agent of one instance, with an ssh that prints its arguments."""

    def __init__(self, folder: Path, instance: str) -> None:
        self.private = folder / "a private folder" / instance
        ssh = self.private / "bin" / "ssh"
        ssh.parent.mkdir(parents=True)
        ssh.write_text(SSH)
        ssh.chmod(0o700)
        settings = {"instance": instance, "launcher": "launcher-0", "run_on": "launcher", "hidden": []}
        (self.private / "standin.json").write_text(json.dumps(settings))

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        program = [sys.executable, "-I", "-S", standin.__file__, str(self.private), "rsh-agent"]
        env = {"PATH": os.defpath, **environment}
        return subprocess.Popen(
            [*program, *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def end(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        with self.start(*arguments, **environment) as process:
            out, errors = process.communicate(timeout=20)
        return process.returncode, out, errors

    def broken(self) -> list[str]:
        return [path.read_text() for path in (self.private / standin.BROKEN).glob("7.*")]


@pytest.mark.parametrize(
    ("instance", "environment", "number"),
    [
        ("launcher-0", {}, "unknown"),
        ("launcher-0", {"RAYCONTROL_WORLD": "3"}, "3"),
        ("worker-0", {"RAYCONTROL_WORLD": "3"}, "3"),
    ],
)
def test_it_is_our_ssh_and_tells_the_world(
    tmp_path: Path, instance: str, environment: dict[str, str], number: str
) -> None:
    agent = Agent(tmp_path, instance)
    said = f"-o|SetEnv=RAYCONTROL_WORLD={number}|-x|10.0.0.2|prted a 'b c'|"
    assert agent.end("-x", "10.0.0.2", "prted a 'b c'", **environment) == (0, said, "")
    assert agent.broken() == []


@pytest.mark.parametrize("instance", ["launcher-0", "worker-0"])
def test_a_world_that_somebody_inside_began_has_no_number_and_its_losses_are_nobodys(
    tmp_path: Path, instance: str
) -> None:
    agent = Agent(tmp_path, instance)
    code, out, errors = agent.end("-x", "10.0.0.2", "prted", RAYCONTROL_INSIDE="exec", CODE="255")
    assert (code, out, errors) == (255, "-x|10.0.0.2|prted|", "")
    assert not (agent.private / standin.BROKEN).exists()


def test_it_refuses_where_no_world_of_ours_runs(tmp_path: Path) -> None:
    code, out, errors = Agent(tmp_path, "worker-0").end("10.0.0.2", "prted")
    assert (code, out) == (1, "")
    assert errors == (
        "raycontrol: an MPI launcher was reached around raycontrol's own on worker-0 (by an absolute path, or from an "
        "environment that comes first on PATH) and would start a second world: call plain `mpirun`, found on PATH, or "
        "set `run_on: launcher`\n"
    )


@pytest.mark.parametrize(
    ("environment", "code", "how"), [({"CODE": "255"}, 255, "exit code 255"), ({"DIE": "1"}, -9, "signal 9")]
)
def test_a_connection_that_is_lost_is_put_down(
    tmp_path: Path, environment: dict[str, str], code: int, how: str
) -> None:
    agent = Agent(tmp_path, "launcher-0")
    assert agent.end("-x", "10.0.0.2", "prted", RAYCONTROL_WORLD="7", **environment)[0] == code
    assert agent.broken() == [
        f"the ssh connection to 10.0.0.2 for a part of the MPI world ended with {how}\n"
    ]


def test_one_that_its_launcher_ends_is_not(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "launcher-0")
    with agent.start("10.0.0.2", "prted", STAY="1", RAYCONTROL_WORLD="7") as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == "-"  # ssh is up, and so are the handlers of signals
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == -signal.SIGTERM
    assert agent.broken() == []
