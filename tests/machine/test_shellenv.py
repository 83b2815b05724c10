"""The environment of a person's shell, read from a real bash whose rc files do what rc files do."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from raycontrol.shellenv import ShellEnv, ShellEnvs, merged


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def read(home: Path, *, limit_s: float = 20) -> ShellEnv:
    return asyncio.run(ShellEnvs(home.parent / "scratch", str(home), limit_s).get())


def left(home: Path) -> list[str]:
    return [path.name for path in (home.parent / "scratch").iterdir()]


def test_it_has_what_an_installer_wrote_into_an_rc_file(home: Path) -> None:
    (home / ".profile").write_text(
        "export PATH=/usr/local/cuda/bin:$PATH CUDA_HOME='/opt/cu da' LD_LIBRARY_PATH=/usr/local/cuda/lib64\n"
        "export CUDA_VISIBLE_DEVICES=3 SECRET=x\n"
    )
    variables = read(home).variables
    assert variables["PATH"].startswith("/usr/local/cuda/bin:")
    assert {name: value for name, value in variables.items() if name != "PATH"} == {
        "CUDA_HOME": "/opt/cu da",
        "LD_LIBRARY_PATH": "/usr/local/cuda/lib64",
    }
    assert left(home) == []


def test_a_part_for_interactive_shells_only_is_read(home: Path) -> None:
    (home / ".bash_profile").write_text(". ~/.bashrc\n")
    (home / ".bashrc").write_text("case $- in *i*) ;; *) return ;; esac\nexport CUDA_HOME=/opt/cuda\n")
    assert read(home).variables["CUDA_HOME"] == "/opt/cuda"


def test_what_rc_files_print_and_ask_is_dropped(home: Path) -> None:
    (home / ".profile").write_text(
        "echo Welcome; echo CUDA_HOME=/printed; echo oops >&2; read -r answer\n"
        "alias env=false; command() { false; }; set -o noclobber; export CUDA_HOME=$'/opt/a\\nb'\n"
    )
    assert read(home).variables["CUDA_HOME"] == "/opt/a\nb"


def test_rc_files_that_end_the_shell_or_replace_it_are_told_of(home: Path) -> None:
    why = "the rc files of bash end it, or replace it by another program"
    (home / ".profile").write_text("exit 1\n")
    assert read(home) == ShellEnv(trouble=why)
    (home / ".profile").write_text("exec sh\n")
    assert read(home) == ShellEnv(trouble=why)


def test_rc_files_that_hang_hold_nobody_up(home: Path) -> None:
    (home / ".profile").write_text("sleep 1000 & sleep 1000\n")
    began = time.monotonic()
    assert read(home, limit_s=1) == ShellEnv(trouble="the rc files of bash take longer than 1 s")
    assert time.monotonic() - began < 8
    assert left(home) == []


def test_what_they_start_in_the_background_is_no_reason_to_wait(home: Path) -> None:
    (home / ".profile").write_text("sleep 1000 &\nexport CUDA_HOME=/opt/cuda\n")
    began = time.monotonic()
    assert read(home).variables["CUDA_HOME"] == "/opt/cuda"
    assert time.monotonic() - began < 8


def test_it_is_read_once_and_again_when_an_rc_file_has_changed(home: Path) -> None:
    async def work() -> None:
        envs = ShellEnvs(home.parent / "scratch", str(home), 20)
        (home / ".profile").write_text("echo x >> ~/count; export CUDA_HOME=/opt/11\n")
        first, second = await asyncio.gather(envs.get(), envs.get())
        assert first is second and await envs.get() is first
        assert (home / "count").read_text() == "x\n"
        (home / ".profile").write_text("export CUDA_HOME=/opt/12 # newer\n")
        assert (await envs.get()).variables["CUDA_HOME"] == "/opt/12"

    asyncio.run(work())


def test_a_look_that_has_failed_is_repeated_after_a_while(home: Path) -> None:
    async def work() -> None:
        scratch = home.parent / "scratch"
        scratch.write_text("no folder")  # as on a disk that takes nothing for a moment
        (home / ".profile").write_text("export CUDA_HOME=/opt/cuda\n")
        patient, soon = (ShellEnvs(scratch, str(home), 20, kept_s) for kept_s in (60, 0))
        first = await patient.get()
        assert first.trouble is not None and (await soon.get()).trouble is not None
        scratch.unlink()
        assert await patient.get() is first
        assert (await soon.get()).variables["CUDA_HOME"] == "/opt/cuda"

    asyncio.run(work())


def test_a_user_without_a_name_has_an_environment_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a bare number."""
    (home / ".profile").write_text("export CUDA_HOME=/opt/cuda\n")
    monkeypatch.setattr("os.geteuid", lambda: 54_321)
    monkeypatch.setenv("HOME", str(home))
    found = asyncio.run(ShellEnvs(home.parent / "scratch", limit_s=20).get())
    assert (found.variables["CUDA_HOME"], found.trouble) == ("/opt/cuda", None)


def test_a_home_that_does_not_answer_holds_nobody_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr("raycontrol.shellenv._state_of", lambda _: answers.wait(60))
    try:
        found = read(home, limit_s=0.2)
    finally:
        answers.set()
    assert found.trouble == "the user's rc files cannot be looked at within 0.2 s"


def test_folders_of_the_shell_come_before_those_of_the_node() -> None:
    shell = {"PATH": "/cuda/bin:/usr/bin", "LD_LIBRARY_PATH": "/cuda/lib", "CUDA_HOME": "/cuda"}
    node = {"PATH": "/venv/bin:/usr/bin::", "LD_LIBRARY_PATH": "/mpi/lib", "HOME": "/root"}
    assert merged(shell, node) == {
        "PATH": "/cuda/bin:/usr/bin:/venv/bin",
        "LD_LIBRARY_PATH": "/cuda/lib:/mpi/lib",
        "CUDA_HOME": "/cuda",
    }
    assert merged({}, node) == {}
    assert os.pathsep == ":"
