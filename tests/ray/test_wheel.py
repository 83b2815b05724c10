"""The wheel, installed outside the checkout: everything is in it, and a job runs from it."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from tests import wheels
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
