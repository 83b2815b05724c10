"""The wheel as a user gets it: built from the sources, installed where the checkout is not."""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def install_on_laptop(wheel: Path, venv: Path) -> Path:
    """Return the folder of commands of a new environment with the wheel and what its base installation asks for.

    Those libraries are linked from this environment, one by one: what the wheel does not ask for is not there.
    """
    packages = install(wheel, venv)
    (packages / "dependencies.pth").unlink()
    (venv / "bin/ray").unlink()
    (installed,) = distributions(path=[str(packages)], name="raycontrol")
    for library in needed_by(installed, frozenset()).values():
        for name in {file.parts[0] for file in library.files or () if ".." not in file.parts}:
            link = packages / name
            if not link.exists():
                link.symlink_to(Path(library.locate_file(name)))
    return venv / "bin"


def needed_by(library: Distribution, extras: frozenset[str]) -> dict[str, Distribution]:
    """Return what an installation of this library with these extras brings along, by name."""
    found: dict[str, Distribution] = {}
    open_ones = [(library, extras)]
    while open_ones:
        asking, wanted = open_ones.pop()
        for line in asking.requires or ():
            required = Requirement(line)
            if not any(applies(required, extra) for extra in (wanted or {""})):
                continue
            name = canonicalize_name(required.name)
            if name not in found:
                found[name] = distribution(name)
                open_ones.append((found[name], frozenset(required.extras)))
    return found


def applies(required: Requirement, extra: str) -> bool:
    return required.marker is None or required.marker.evaluate({"extra": extra})


def run(command: list[str | Path]) -> None:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=BUILD_S, cwd="/", check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
