"""The wheel, installed outside the checkout: everything is in it, and a job runs from it."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from raycontrol.access import Role
from raycontrol.status import JobState
from tests import wheels
from tests.api.fakes import FakeDoor, adas_job
from tests.api.test_server import running
from tests.ray.alone import ROOT, RUN_S, Alone, alone


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheels.build(tmp_path_factory.mktemp("sources"))


def test_the_wheel_holds_every_module_and_the_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = {
        "raycontrol": ROOT / "raycontrol",
        "raycontrol/cli": ROOT / "raycontrol/cli",
        "raycontrol/backends": ROOT / "backends",
        "raycontrol/api": ROOT / "api",
    }
    modules = {f"{name}/{path.name}" for name, folder in folders.items() for path in folder.glob("*.py")}
    presets = {f"raycontrol/presets/{path.name}" for path in (ROOT / "configs/presets").glob("*.yaml")}
    assert modules | presets | {"raycontrol/py.typed"} <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"raycontrol"}


def test_the_wheel_alone_is_all_that_a_laptop_needs(wheel: Path, tmp_path: Path) -> None:
    bin_folder = wheels.install_on_laptop(wheel, tmp_path / "venv")
    door = FakeDoor()
    door.put(adas_job(JobState.SUCCEEDED))
    token = door.let_in("root", "root", Role.ADMIN)
    plain = {"RAYCONTROL_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "RAY_TMPDIR": str(tmp_path)}

    def raycontrol(*arguments: str, **env: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [bin_folder / "raycontrol", *arguments],
            env={**plain, **env},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    said = (
        "Ray is not installed here: set RAYCONTROL_URL to a server's address, or install raycontrol[cluster]"
    )
    assert raycontrol("list") == (2, "", f"raycontrol: {said}\n")
    assert raycontrol("plan", "--", "true")[0] == 0
    with running(tmp_path, door) as url:
        status, stdout, stderr = raycontrol("list", RAYCONTROL_URL=url, RAYCONTROL_TOKEN=token)
    assert (status, stderr) == (0, "")
    assert "digits-ab12cd" in stdout


def test_a_job_runs_from_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    packages = wheels.install(wheel, venv)
    with alone(Alone) as shell:
        answer = shell.popen(
            [
                venv / "bin/raycontrol",
                *("run", "--nodes", "2", "--placement", "pack", "--cpu", "0.1", "--"),
                *("python", "-c", "import raycontrol.backends.ddp_mode as m; print(m.__file__)"),
            ],
            cwd=tmp_path,
        )
        stdout, stderr = answer.communicate(timeout=RUN_S)
    assert answer.returncode == 0, stderr
    module = packages / "raycontrol/backends/ddp_mode.py"
    assert sorted(stdout.splitlines()) == [f"master-0 | {module}", f"worker-0 | {module}"]
    assert str(ROOT) not in stdout + os.fspath(module)
