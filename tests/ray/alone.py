"""A shell on a machine where no Ray is to be found: `raycontrol run` then starts one of its own."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.ray.conftest import BIN, Shell, end
from tests.support import wait_until

RUN_S = 240.0
"""A deadline for a whole embedded run, with the start of its Ray, on a busy machine."""


class Alone(Shell):
    """RAY_TMPDIR is empty and RAY_ADDRESS is not set; temporary files go to a folder of its own."""

    @property
    def env(self) -> dict[str, str]:
        return {"RAYCONTROL_HOME": str(self.home), "TMPDIR": str(self.folder)}

    def run(
        self, *arguments: str | Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self.raycontrol("run", *arguments, env=env, timeout_s=RUN_S)

    def start(self, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
        """`raycontrol run` in the background, its streams in ``stdout`` and ``stderr`` of the folder."""
        with (self.folder / "stdout").open("w") as out, (self.folder / "stderr").open("w") as err:
            return self.popen([BIN / "raycontrol", "run", *arguments], stdout=out, stderr=err, **options)

    def says(self, text: str, stream: str = "stdout") -> None:
        path = self.folder / stream
        wait_until(lambda: text in path.read_text(), RUN_S, f"{text!r} in {stream}")


@contextmanager
def alone(home: Path) -> Iterator[Alone]:
    """Nothing of what ran in the block may be left after it: no process, no temporary folder."""
    shell = Alone(Path(tempfile.mkdtemp(prefix="rc-no-")), home)  # short, for Ray's sockets
    try:
        yield shell
        wait_until(lambda: not users_of(shell.folder), 20, f"no process uses {shell.folder}")
        assert not [path.name for path in shell.folder.iterdir() if path.name not in ("stdout", "stderr")]
    finally:
        end(users_of(shell.folder))
        shutil.rmtree(shell.folder)


def users_of(folder: Path) -> list[int]:
    """Processes that have the folder in their environment, command line or open files (Ray's hide the first two)."""
    return [pid for pid in psutil.pids() if uses(pid, str(folder))]


def uses(pid: int, folder: str) -> bool:
    try:
        return any(folder in text for text in traces(Path(f"/proc/{pid}")))
    except OSError:  # it has just ended, or is somebody else's
        return False


def traces(process: Path) -> Iterator[str]:
    yield (process / "environ").read_text(errors="replace")
    yield (process / "cmdline").read_text(errors="replace")
    for descriptor in (process / "fd").iterdir():
        try:
            yield str(descriptor.readlink())
        except FileNotFoundError:
            continue
