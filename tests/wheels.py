"""The wheel as a user gets it: built from the sources, installed where the checkout is not."""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD_S = 240.0
SOURCES = ("raycontrol", "backends", "api", "configs", "pyproject.toml", "README.md", "LICENSE")
RAY = """#!{python}
from ray.scripts.scripts import main
main()
"""


def build(folder: Path) -> Path:
    """Return the wheel, built from a copy of the sources in ``folder``, links kept: a build writes into its folder."""
    folder.mkdir(exist_ok=True)
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
        elif source.exists():
            shutil.copy(source, folder / name)
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", folder])
    (built,) = (folder / "dist").glob("raycontrol-*.whl")
    return built


def install(wheel: Path, venv: Path) -> Path:
    """Return the site-packages of a new environment with raycontrol from the wheel and a ``ray`` command of its own.

    The dependencies are those of this environment, so that nothing is downloaded. A folder that is named in a .pth is
    only searched: the .pth of the checkout's editable installation in it has no effect.
    """
    run([sys.executable, "-m", "venv", "--without-pip", venv])
    python = venv / "bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run([*pip, "install", "--no-deps", "--no-index", wheel])
    (packages,) = (venv / "lib").glob("python3*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    ray = venv / "bin/ray"
    ray.write_text(RAY.format(python=python))
    ray.chmod(0o755)
    return packages


def run(command: list[str | Path]) -> None:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=BUILD_S, cwd="/", check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
