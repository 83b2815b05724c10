"""A machine that has neither Ray nor what else only nodes need: the command and the SDK over HTTP, and what they say without."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from raycontrol.access import Role
from raycontrol.status import JobState
from tests.api.fakes import FakeDoor, adas_job
from tests.api.test_server import running

NOT_HERE = "ray sqlalchemy fastapi starlette uvicorn prometheus_client pynvml asyncssh psutil"
HIDES_THEM = f"""
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {NOT_HERE.split()!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
"""
SAYS = "Ray is not installed here: set RAYCONTROL_URL to a server's address, or install raycontrol[cluster]"


@dataclass(frozen=True)
class Laptop:
    folder: Path
    env: Mapping[str, str]

    def python(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env={**self.env, **env},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def raycontrol(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "raycontrol", *arguments, **env)


@pytest.fixture
def laptop(tmp_path: Path) -> Laptop:
    (tmp_path / "hides").mkdir()
    (tmp_path / "hides/sitecustomize.py").write_text(HIDES_THEM)
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(tmp_path / "hides"),
        "RAYCONTROL_HOME": str(tmp_path / "home"),
        "RAY_TMPDIR": str(tmp_path),
        "HOME": str(tmp_path),
    }
    return Laptop(tmp_path, env)


def test_there_is_no_ray_on_a_laptop(laptop: Laptop) -> None:
    for module in NOT_HERE.split():
        assert "ModuleNotFoundError" in laptop.python("-c", f"import {module}").stderr


def test_the_command_and_the_sdk_work_over_http_without_ray(laptop: Laptop) -> None:
    door = FakeDoor()
    door.put(adas_job(JobState.SUCCEEDED))
    token = door.let_in("root", "root", Role.ADMIN)
    program = "import sys, raycontrol; print([job.id for job in raycontrol.Client(url=sys.argv[1], token=sys.argv[2]).list()])"
    with running(laptop.folder, door) as url:
        server = {"RAYCONTROL_URL": url, "RAYCONTROL_TOKEN": token}
        listed = laptop.raycontrol("list", **server)
        assert (listed.returncode, listed.stderr) == (0, "")
        assert "digits-ab12cd" in listed.stdout
        submitted = laptop.raycontrol("submit", "--nodes", "2", "--", "torchrun train.py", **server)
        assert submitted.returncode == 0, submitted.stderr
        job_id = submitted.stdout.strip()
        assert door.submissions[job_id].spec.command == "torchrun train.py"
        asked = laptop.python("-c", program, url, token)
        assert (asked.stdout, asked.stderr) == (f"['{job_id}', 'digits-ab12cd']\n", "")


@pytest.mark.parametrize("command", ["--help", "version", "plan -- true", "schema", "env"])
def test_what_asks_nobody_needs_no_ray(laptop: Laptop, command: str) -> None:
    done = laptop.raycontrol(*command.split())
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "command",
    [
        "run -- true",
        "submit -- true",
        "run --address 10.0.0.1:6379 -- true",
        "list",
        "list --address 10.0.0.1:6379",
        "get digits",
        "doctor",
        "doctor --address 10.0.0.1:6379",
        "nodes",
        "top",
        "serve",
        "token list",
        "controller status",
    ],
)
def test_what_needs_ray_says_so_in_one_line(laptop: Laptop, command: str) -> None:
    done = laptop.raycontrol(*command.split())
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"raycontrol: {SAYS}\n")


@pytest.mark.parametrize(
    "verb", ["list()", "nodes()", "submit(JobSpec(command='true'))", "controller_status()"]
)
def test_the_sdk_says_it_by_a_usage_error(laptop: Laptop, verb: str) -> None:
    program = f"""
from raycontrol import Client, JobSpec
from raycontrol.errors import UsageError
try:
    Client().{verb}
except UsageError as error:
    print(error)
"""
    done = laptop.python("-c", program)
    assert (done.stdout, done.stderr) == (f"{SAYS}\n", "")
