"""What a person's shell on a node sets: the PATH that an installer wrote into some rc file, libraries, CUDA's variables.

A login shell that is interactive, too, reads all of them; and so anything may happen: they print, they wait, they replace
the shell by another one. It runs under a supervisor, in a session of its own without a terminal, and writes its
environment into a file, past everything that is printed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import shutil
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from raycontrol import process
from raycontrol.disk import private_folder, remove_tree

log = logging.getLogger(__name__)

LIMIT_S = 5.0
LOOKS_AT_ONCE = 4
"""Threads for looks at the home, which may be on a dead file server and keep them for ever."""
TROUBLE_KEPT_S = 60.0
"""For so long a look that has failed is not repeated: it takes its time, and a busy node may do better later."""
PATHS = ("PATH", "LD_LIBRARY_PATH")
"""Lists of folders: what the node has beside comes after."""
PREFIX = "CUDA_"
NOT_OURS = frozenset({"CUDA_VISIBLE_DEVICES"})
"""Which GPUs a job has is not for an rc file to say."""
LOGIN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RC_FILES = ("/etc/profile", "/etc/bash.bashrc", "/etc/bashrc", "/etc/profile.d")
OWN_RC_FILES = (".bash_profile", ".bash_login", ".profile", ".bashrc")


@dataclass(frozen=True)
class ShellEnv:
    """Variables as the shell sets them; without any, ``trouble`` may say why there are none."""

    variables: Mapping[str, str] = field(default_factory=dict)
    trouble: str | None = None


def merged(shell: Mapping[str, str], node: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a shell adds to a node's: lists of folders begin with the shell's, and none is twice."""
    lists = {name: joined(shell[name], node.get(name, "")) for name in PATHS if shell.get(name)}
    return {**lists, **{name: value for name, value in shell.items() if name not in PATHS}}


def joined(*paths: str) -> str:
    folders = (folder for path in paths for folder in path.split(os.pathsep) if folder)
    return os.pathsep.join(dict.fromkeys(folders))


class ShellEnvs:
    """Reads the shell environment of this process's user, once; and again when an rc file that bash knows has changed.

    ``folder`` is for what lies there meanwhile, ``home`` where the user's rc files are (default: his home). What went wrong is told for
    ``trouble_kept_s`` before it is tried anew.
    """

    def __init__(
        self,
        folder: Path,
        home: str | None = None,
        limit_s: float = LIMIT_S,
        trouble_kept_s: float = TROUBLE_KEPT_S,
    ) -> None:
        self._folder = folder
        self._home = home
        self._limit_s = limit_s
        self._trouble_kept_s = trouble_kept_s
        self._state: object = None
        self._failed_at: float | None = None
        self._reading: asyncio.Future[ShellEnv] | None = None
        self._looks = ThreadPoolExecutor(LOOKS_AT_ONCE, thread_name_prefix="shell-env")

    async def get(self) -> ShellEnv:
        """Return it; who asks while it is being read gets what comes of that."""
        looking = asyncio.get_running_loop().run_in_executor(self._looks, _look, self._home)
        try:
            self._user, state = await asyncio.wait_for(looking, self._limit_s)
        except asyncio.TimeoutError:  # the home of a file server that is dead, say
            return ShellEnv(trouble=f"the user's rc files cannot be looked at within {self._limit_s:g} s")
        if self._reading is None or state != self._state or self._may_do_better():
            self._state, self._failed_at = state, None
            self._reading = asyncio.ensure_future(self._read())
        return await asyncio.shield(self._reading)

    def _may_do_better(self) -> bool:
        return self._failed_at is not None and time.monotonic() - self._failed_at >= self._trouble_kept_s

    async def _read(self) -> ShellEnv:
        try:
            found = await self._ask_shell()
        except Exception as error:  # commands are to run without it
            log.warning("the shell's environment", exc_info=True)
            found = ShellEnv(trouble=f"{type(error).__name__}: {error}")
        if found.trouble is not None:
            log.warning("the shell's environment is not known: %s", found.trouble)
            self._failed_at = time.monotonic()
        return found

    async def _ask_shell(self) -> ShellEnv:
        private_folder(self._folder)
        folder = Path(tempfile.mkdtemp(prefix="shell-", dir=self._folder))
        file = folder / "environment"
        try:
            shell = await process.start(_shell(folder, file, self._user))
            try:
                await asyncio.wait_for(shell.wait(), self._limit_s)
                trouble = "the rc files of bash end it, or replace it by another program"
            except asyncio.TimeoutError:
                trouble = f"the rc files of bash take longer than {self._limit_s:g} s"
            await shell.kill("it has served")
            text = await asyncio.to_thread(_contents, file)
        finally:
            await asyncio.to_thread(remove_tree, folder)
        return ShellEnv(trouble=trouble) if text is None else ShellEnv(_wanted(text))


@dataclass(frozen=True)
class _User:
    """Who this process runs as; ``cwd`` is the home if there is one."""

    name: str
    home: str
    cwd: str


def _look(home: str | None) -> tuple[_User, object]:
    """Return the user, and what changes with any rc file."""
    try:
        user = pwd.getpwuid(os.geteuid())
        name, own_home = user.pw_name, user.pw_dir
    except KeyError:  # a number without a name, as in containers
        name, own_home = str(os.geteuid()), _home_of_no_name()
    home = home or own_home
    return _User(name, home, home if Path(home).is_dir() else "/"), _state_of(Path(home))


def _home_of_no_name() -> str:
    """Return what $HOME says, which is all that can be known."""
    try:
        return str(Path.home())
    except RuntimeError:
        return "/"


def _shell(folder: Path, file: Path, user: _User) -> process.Run:
    environment = {
        "HOME": user.home,
        "USER": user.name,
        "LOGNAME": user.name,
        "SHELL": "/bin/bash",
        "PATH": LOGIN_PATH,
        "TERM": "dumb",
        "HISTFILE": "/dev/null",
        "RAYCONTROL_ENV": shutil.which("env", path=LOGIN_PATH) or "env",  # past aliases and functions
        "RAYCONTROL_SHELL_ENV": str(file),
    }
    return process.Run(
        name="shell environment",
        argv=("bash", "-lic", '"$RAYCONTROL_ENV" -0 >| "$RAYCONTROL_SHELL_ENV"'),
        env=environment,
        cwd=user.cwd,
        folder=str(folder / "run"),
        mark=folder.name,
    )


def _contents(file: Path) -> bytes | None:
    """Return what the shell has written; None where that is not all of it."""
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return None
    return text if text.endswith(b"\0") else None


def _wanted(text: bytes) -> dict[str, str]:
    pairs = (entry.partition(b"=") for entry in text.split(b"\0"))
    variables = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    return {name: value for name, value in variables.items() if _is_wanted(name)}


def _is_wanted(name: str) -> bool:
    return name in PATHS or (name.startswith(PREFIX) and name not in NOT_OURS)


def _state_of(home: Path) -> object:
    """Return what changes with any rc file: when each was written, and its size."""
    files = [Path(path) for path in RC_FILES] + [home / name for name in OWN_RC_FILES]
    files += sorted(Path("/etc/profile.d").glob("*"))
    return tuple(_written(file) for file in files)


def _written(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
