"""The wheel, installed outside the checkout: everything is in it, and a job runs from it."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.ray.alone import ROOT, RUN_S, Alone, alone

BUILD_S = 240.0
SOURCES = ("raycontrol", "backends", "api", "configs", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, links kept: a build writes into its folder."""
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        elif source.exists():
            shutil.copy(source, copy / name)
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", copy])
    (built,) = (copy / "dist").glob("raycontrol-*.whl")
    return built


def run(command: list[str | Path]) -> None:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=BUILD_S, cwd="/", check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


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
    run([sys.executable, "-m", "venv", "--without-pip", venv])
    python = venv / "bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run([*pip, "install", "--no-deps", "--no-index", wheel])
    # The dependencies are those of this environment, so that nothing is downloaded. A folder that is named in a .pth
    # is only searched: the .pth of the checkout's editable installation in it has no effect.
    (packages,) = (venv / "lib").glob("python3*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")

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
