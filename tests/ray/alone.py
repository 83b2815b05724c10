"""A shell on a machine where no Ray is to be found: `raycontrol run` then starts one of its own."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.ray.conftest import BIN, FOREGROUND, Shell, end
from tests.support import wait_until

ROOT = Path(__file__).parents[2]
NOBODY = 65534
RUN_S = 240.0
"""A deadline for a whole embedded run, with the start of its Ray, on a busy machine."""

AnyShell = TypeVar("AnyShell", bound="Alone")


class Alone(Shell):
    """RAY_TMPDIR is empty and RAY_ADDRESS is not set; temporary files go to a folder of its own."""

    @property
    def env(self) -> dict[str, str]:
        return {"RAYCONTROL_HOME": str(self.home), "TMPDIR": str(self.folder), "PYTHONFAULTHANDLER": "1"}

    def run(
        self, *arguments: str | Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self.raycontrol("run", *arguments, env=env, timeout_s=RUN_S)

    def start(self, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
        """`raycontrol run` in the background, its streams in ``stdout`` and ``stderr`` of the folder."""
        with (self.folder / "stdout").open("w") as out, (self.folder / "stderr").open("w") as err:
            command = [*FOREGROUND, BIN / "raycontrol", "run", *arguments]
            return self.popen(command, stdout=out, stderr=err, **options)

    def status(self, command: subprocess.Popen[str]) -> int:
        """Wait for the end of what ``start`` started."""
        try:
            return command.wait(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            command.send_signal(signal.SIGABRT)  # Python then says where each of its threads is
            command.wait()
            said = (self.folder / "stderr").read_text()
            raise AssertionError(f"it has not ended in {RUN_S:g} s; it said:\n{said}") from None

    def says(self, text: str, stream: str = "stdout") -> None:
        path = self.folder / stream
        wait_until(lambda: text in path.read_text(), RUN_S, f"{text!r} in {stream}")


class Nobody(Alone):
    """The same for a user with no rights on this machine but to read it. Needs root, to become that user."""

    def popen(
        self, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        os.chown(self.folder, NOBODY, NOBODY)
        become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
        opened = ["unshare", "--mount", "sh", "-ec", self._open_folders(), "sh"]
        own = {"HOME": str(self.folder), "USER": "", **(env or {})}
        return super().popen([*opened, *become, *argv], env=own, **{"cwd": self.folder, **options})

    def _open_folders(self) -> str:
        """A script that makes Python, its packages and this checkout reachable, in a mount namespace of its own.

        They may lie below a folder that only its owner may enter, as `/root` is.
        """
        closed: dict[Path, set[Path]] = {}
        for needed in {Path(sys.base_prefix), Path(sys.prefix), ROOT}:
            for folder in reversed(needed.parents):
                if not folder.stat().st_mode & stat.S_IXOTH:
                    closed.setdefault(folder, set()).add(needed)
                    break
        lines = []
        for folder, needed_paths in closed.items():
            held = {needed: self.folder / f"held-{needed.name}" for needed in needed_paths}
            lines += [f"mkdir -p {hold}; mount --bind {needed} {hold}" for needed, hold in held.items()]
            lines.append(f"mount -t tmpfs -o mode=755 tmpfs {folder}")
            lines += [f"mkdir -p {needed}; mount --move {hold} {needed}" for needed, hold in held.items()]
            lines += [f"rmdir {hold}" for hold in held.values()]
        return "\n".join([*lines, 'exec "$@"'])


@contextmanager
def alone(kind: type[AnyShell], home: Path | None = None) -> Iterator[AnyShell]:
    """Nothing of what ran in the block may be left after it: no process, no temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="rc-no-"))  # short, for Ray's sockets
    shell = kind(folder, home or folder / "home")
    try:
        yield shell
        wait_until(lambda: not users_of(folder), 20, f"no process uses {folder}")
        left = {path.name for path in folder.iterdir()} - {"home", "stdout", "stderr", ".ray", ".cache"}
        assert not left, f"left in {folder}: {left}"
    finally:
        end(users_of(folder))
        shutil.rmtree(folder)


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
