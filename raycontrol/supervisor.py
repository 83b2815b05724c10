"""The supervisor of one run: starts its main process, keeps its outcome, and leaves nothing of its tree alive.

``process.start`` runs this file as a program (``python -I -S supervisor.py CONTROL OWNER [STDIN STDOUT STDERR]``) for
every run. It detaches from its owner by a second fork and ``setsid`` and becomes the tree's *subreaper*: whatever in
the tree daemonises itself is handed to it by the kernel, so "no children left" means "nothing of the tree is left".

CONTROL is one end of a socket pair: the configuration and the commands come in on it, the news go out. Its end of
file, or the end of the process OWNER, means that the owner is dead: then everything is killed at once. STDIN, STDOUT
and STDERR are descriptors for the main process and nobody else: whoever reads or writes their other ends sees the end.

A commanded stop sends SIGTERM to the main process's *group*, as Slurm does for a step and a terminal for Ctrl-C,
and not to every process: ``bash -c`` does not pass signals on, so its children must get theirs from us, whereas
torchrun, mpirun and the like put their ranks into sessions of their own and pass the signal on in their own way; a
second delivery from us would break into that. Processes that lost their parent have nobody to pass it on, so they
get it from us, once. When the grace is over, everything that is left is killed, wherever it has hidden itself.

Where the second version of cgroups lets us, the tree has a cgroup, one for all runs of its attempt on this machine: what
has cleared its environment, left its session and lost its supervisor is still known by it (``process.sweep``).

Pure standard library and few imports, because every run waits for them: ``_signal`` and ``_ctypes`` are the C
halves of ``signal`` and ``ctypes`` and save 10 ms of 25.
"""

# ruff: noqa: PTH103, PTH104, PTH110, PTH118, PTH208
# (pathlib takes longer to import than the interpreter to start)
from __future__ import annotations

import errno
import marshal
import os
import resource
import select
import sys
import time

TYPE_CHECKING = False  # the import of `typing` costs as much as the interpreter's own start
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn
else:
    import _signal as signal

MARK = "RAYCONTROL_ATTEMPT_ID"
SUPERVISOR_MARK = "RAYCONTROL_SUPERVISOR"
STATUS_FILE = "status.json"
LOG_FILE = "output.log"
LEFTOVERS_GRACE_S = 2.0
LONGEST_SLEEP_S = 3600.0  # far below 2**31 ms, where poll's timeout overflows
OWN_STOP_GRACE_S = 10.0
OPEN_FILES = 65536
GROUP = "raycontrol-"
GROUP_ROOTS = ("/sys/fs/cgroup/unified", "/sys/fs/cgroup")
GROUP_TRIES = 3
DEFAULT_PATH = b"/usr/local/bin:/usr/bin:/bin"
LONGEST_STRING = 32 * 4096  # the kernel's MAX_ARG_STRLEN, the closing zero included
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TIOCSCTTY = 0x540E


def main_through_sudo() -> None:
    """As ``main``, where sudo has let us keep the standard descriptors only, and stands between us and the owner.

    The control socket is stdin; stdout becomes the main process's stdout and stderr.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # sudo may end its terminal before we have left it
    control, output, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for place in (0, 1, 2):
        os.dup2(nothing, place)
    main(control, 0, nothing, output, output)


def main(control: int, owner: int, *stdio: int) -> None:
    """``owner`` 0: nobody whom we could watch; his end of the control socket tells of his end, too."""
    for fd in (control, *stdio):
        os.set_inheritable(fd, False)
    _try(os.setpriority, os.PRIO_PROCESS, 0, 0)
    owner_fd = _open_pidfd(owner) if owner else None
    if owner and os.getppid() != owner:
        return
    launcher = os.getpid()
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    _write_text("/proc/self/oom_score_adj", "0")
    _write_text("/proc/self/oom_score_adj", "-900")  # needs a privilege; 0 does not
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisor = Supervisor(control, owner_fd, launcher, stdio)
    try:
        supervisor.run()
    except BaseException as error:
        supervisor.report("broken", _describe(error))
        supervisor.destroy()


class Supervisor:
    """The state of one run.

    ``deadline`` is the time (monotonic) from which everything is killed, None while nothing has asked for an end.
    ``childless`` is true when the main process has ended and nothing of the tree is left; then it stays true.
    """

    def __init__(self, control: int, owner_fd: int | None, launcher: int, stdio: tuple[int, ...]) -> None:
        self.control = control
        self.owner_fd = owner_fd
        self.launcher = launcher
        self.stdio = stdio
        self.incoming = b""
        self.config: dict[str, Any] = {}
        self.sources: dict[int, Callable[[], None]] = {}
        self.poll = select.poll()
        self.main = 0
        self.launching: int | None = None
        self.started_at = 0.0
        self.outcome: dict[str, Any] | None = None
        self.failure: tuple[int | None, str] | None = None
        self.writer: int | None = None
        self.unsaved: str | None = None
        self.oom_before: int | None = None
        self.deadline: float | None = None
        self.stop_reason: str | None = None
        self.kill_reason: str | None = None
        self.killed = False
        self.signals: set[int] = set()
        self.group_told = False
        self.told: set[tuple[int, int]] = set()
        self.pause_s = 0.0
        self.childless = False

    def run(self) -> None:
        self._catch_signals()
        while not self.config:
            if not self._read():
                return
        _move(os.open(os.devnull, os.O_RDWR), 2)
        self._watch(self.control, self._on_control)
        if self.owner_fd is not None:
            self._watch(self.owner_fd, self._on_owner_gone)
        self._launch()
        while not self._over():
            for fd, _ in self.poll.poll(self._timeout_ms()):
                if fd in self.sources:
                    self.sources[fd]()
            self._reap()
            if self.outcome is not None and self.writer is None:
                self._save()
            self._press()
        remove_group(GROUP + self.config["mark"])
        self.report("gone", self.unsaved)

    def report(self, *message: object) -> None:
        """Tell the owner. The few short messages of a run always fit into the socket's buffer."""
        try:
            os.write(self.control, frame(message))
        except OSError:
            pass  # it is dead; the end of file on the same socket says so

    def stop(self, grace_s: float, reason: str) -> None:
        """Ask the tree to end, and kill it when ``grace_s`` is over; the earliest deadline of all holds."""
        deadline = time.monotonic() + grace_s
        if self.deadline is None or deadline < self.deadline:
            self.deadline = deadline
            self.kill_reason = reason
        if self.stop_reason is None:
            self.stop_reason = reason
        self.pause_s = 0.0
        if grace_s > 0:
            self._terminate()

    def destroy(self) -> None:
        """Kill the whole tree with nothing but the process table: what is left to do after an error of our own."""
        while True:
            self._kill_all()
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.02)

    def _catch_signals(self) -> None:
        """SIGCHLD wakes the loop, SIGTERM (of whoever sends it to us) stops the run, the rest leaves us alone."""
        waker, wake = os.pipe()
        os.set_blocking(waker, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (
            signal.SIGINT,
            signal.SIGHUP,
            signal.SIGQUIT,
            signal.SIGUSR1,
            signal.SIGUSR2,
            signal.SIGPIPE,
        ):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, stack: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._watch(waker, lambda: _drain(waker))

    def _watch(self, fd: int, act: Callable[[], None]) -> None:
        self.sources[fd] = act
        self.poll.register(fd, select.POLLIN)

    def _unwatch(self, fd: int) -> None:
        if self.sources.pop(fd, None) is not None:
            self.poll.unregister(fd)

    def _launch(self) -> None:
        """Fork the main process. Signals wait until it is ready for them, so that none is lost on the way."""
        failure, failure_out = os.pipe()
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        self.started_at = time.time()
        try:
            self.main = os.fork()
        except OSError as error:
            self.failure = (None, f"no process could be started: {error.strerror}")
        if self.main == 0 and self.failure is None:
            os.close(self.control)
            _become_main(self.config, self.stdio, failure_out)
        for fd in {failure_out, *self.stdio}:
            os.close(fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self.oom_before = oom_kills()
        if self.failure is None:
            self.launching = failure
            self._watch(failure, self._on_launched)
        else:
            self.report("started", 0, 0)
            self._end(None, None)

    def _on_launched(self) -> None:
        """The pipe closes when the program is executed; it carries the reason when it cannot be.

        Our launcher has exited before the owner hears of us, so that the owner can reap it at once.
        """
        if self.launching is None:
            return
        self._unwatch(self.launching)
        text = os.read(self.launching, 65536)
        os.close(self.launching)
        self.launching = None
        if text:
            self.failure = marshal.loads(text)
        first = entry(self.main)
        while os.getppid() == self.launcher:
            time.sleep(0.0005)
        self.report("started", self.main, first.start_time if first else 0)

    def _on_control(self) -> None:
        if not self._read():
            self._on_owner_gone()

    def _read(self) -> bool:
        """Take what has come in on the control socket; False at its end."""
        try:
            data = os.read(self.control, 1 << 20)
        except ConnectionError:
            data = b""
        self.incoming += data
        while len(self.incoming) >= 4 and len(self.incoming) - 4 >= (
            size := int.from_bytes(self.incoming[:4], "big")
        ):
            message, self.incoming = marshal.loads(self.incoming[4 : 4 + size]), self.incoming[4 + size :]
            self._obey(message)
        return bool(data)

    def _obey(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("run", config):
                self.config = config
            case ("stop", grace_s, reason):
                self.stop(grace_s, reason)
            case ("signal", number):
                self.signals.add(number)
                self._signal_group(number)

    def _on_owner_gone(self) -> None:
        self._unwatch(self.control)
        if self.owner_fd is not None:
            self._unwatch(self.owner_fd)
        self.stop(0, "the process that owned this run is gone")

    def _on_sigterm(self, number: int, stack: object) -> None:
        self.stop(OWN_STOP_GRACE_S, "the run's supervisor got SIGTERM")

    def _over(self) -> bool:
        return self.childless and self.writer == 0

    def _timeout_ms(self) -> float | None:
        """How long to sleep when nothing happens: for ever in a normal run.

        In a tree that must end, processes can come to us without a signal (their parent died, not they), so we look
        again after pauses that grow to a quarter of a second.
        """
        if self.deadline is None:
            return None
        left_s = min(LONGEST_SLEEP_S, max(0.0, self.deadline - time.monotonic()))
        if self.outcome is None and left_s > 0:
            return left_s * 1000 + 1
        self.pause_s = min(0.25, self.pause_s * 1.5 + 0.005)
        return 1000 * (min(left_s, self.pause_s) if left_s > 0 else self.pause_s) + 1

    def _reap(self) -> None:
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.main and self.outcome is None:
                    self._end(*_decode(status))
                elif pid == self.writer:
                    self.writer = 0
                    self._saved(os.WEXITSTATUS(status) if os.WIFEXITED(status) else errno.EINTR)
        except ChildProcessError:
            self.childless = self.outcome is not None

    def _press(self) -> None:
        """Move a tree that must end on towards its end."""
        if self.deadline is None or self.childless:
            return
        if time.monotonic() >= self.deadline:
            self._kill_all()
        elif self.outcome is not None:
            self._terminate()

    def _terminate(self) -> None:
        """SIGTERM, once each, to the main process's group and to whatever has no parent but us."""
        if self.main and self.outcome is None and not self.group_told:
            self.group_told = True
            self._signal_group(signal.SIGTERM)
            self._signal_group(signal.SIGCONT)
        for process in self._tree():
            if process.parent != os.getpid() or process.pid == self.main:
                continue
            if self.group_told and process.group == self.main:
                continue
            if (process.pid, process.start_time) not in self.told:
                self.told.add((process.pid, process.start_time))
                send(process, signal.SIGTERM)
                send(process, signal.SIGCONT)

    def _kill_all(self) -> None:
        if self.main and self.outcome is None:
            self.killed = True
            self._signal_group(signal.SIGKILL)
        for process in self._tree():
            send(process, signal.SIGKILL)

    def _tree(self) -> list[Entry]:
        return [process for process in descendants(table(), os.getpid()) if process.pid != self.writer]

    def _signal_group(self, number: int) -> None:
        """Signal the main process's group, which is ours to name as long as the main process is not reaped."""
        if not self.main or self.outcome is not None:
            return
        try:
            os.killpg(self.main, number)
        except OSError:  # it has not come to its setsid yet
            _try(os.kill, self.main, number)

    def _end(self, code: int | None, number: int | None) -> None:
        """The main process has ended: keep the outcome, then see to what it left behind."""
        self._on_launched()
        error = None
        if self.failure is not None:
            code, error = self.failure
            number = None
        oom = oom_kills()
        self.outcome = {
            "code": code,
            "signal": number,
            "at": time.time(),
            "sender": self._sender(number),
            "oom": oom is not None and self.oom_before is not None and oom > self.oom_before,
            "error": error,
            "lost": False,
        }
        self.report("ended", self.outcome)
        if self.deadline is None:
            self.deadline = time.monotonic() + LEFTOVERS_GRACE_S
        self.pause_s = 0.0

    def _sender(self, number: int | None) -> str | None:
        """Who of raycontrol asked for this end, if anybody did."""
        reason = self.stop_reason
        if self.killed and number == signal.SIGKILL:
            reason = self.kill_reason
        elif reason is None and number in self.signals:
            reason = f"signal {number}"
        return f"raycontrol: {reason}" if reason is not None else None

    def _save(self) -> None:
        """Write the outcome in a child, so that a disk that hangs cannot keep us from killing."""
        status = {
            "run": self.config["name"],
            "mark": self.config["mark"],
            "pid": self.main,
            "started_at": self.started_at,
            **(self.outcome or {}),
        }
        try:
            self.writer = os.fork()
        except OSError:  # the tree has taken every process there may be
            self.writer = 0
            self._saved(save_status(self.config["folder"], status))
            return
        if self.writer == 0:
            os.close(self.control)
            result = errno.EIO
            try:
                result = save_status(self.config["folder"], status)
            finally:
                os._exit(result)

    def _saved(self, error_number: int) -> None:
        if error_number:
            self.unsaved = f"{STATUS_FILE} could not be written: {os.strerror(error_number)}"


def save_status(folder: bytes, status: dict[str, Any]) -> int:
    """Put ``status`` into the folder's status file so that it is whole and on disk, or absent; return an errno."""
    path = os.path.join(folder, STATUS_FILE.encode())
    new = path + b".new"
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            text = to_json(status).encode()
            while text:
                text = text[os.write(fd, text) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(new, path)
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        _try(os.unlink, new)
        return error.errno or errno.EIO
    return 0


def to_json(value: object) -> str:
    """JSON of flat dictionaries in plain ASCII; the ``json`` module costs more than the interpreter's start."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{to_json(key)}: {to_json(item)}" for key, item in value.items()) + "}\n"
    if isinstance(value, str):
        return '"' + "".join(_escaped(value)) + '"'
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _escaped(text: str) -> Iterator[str]:
    units = text.encode("utf-16-be", "surrogatepass")
    for high, low in zip(units[::2], units[1::2]):  # noqa: B905 (strict= is not needed: always pairs)
        character = chr(high << 8 | low)
        yield character if " " <= character <= "~" and character not in '"\\' else f"\\u{high:02x}{low:02x}"


def frame(message: tuple[Any, ...]) -> bytes:
    """One message on the control socket; ``marshal`` is safe here because both ends are the same Python."""
    data = marshal.dumps(message)
    return len(data).to_bytes(4, "big") + data


# The main process, between fork and exec.


def _become_main(config: dict[str, Any], stdio: tuple[int, ...], failure_out: int) -> NoReturn:
    """Shed what a Ray worker's child inherits, then become the program; or say on ``failure_out`` why not."""
    try:
        os.setsid()
        supervisor = os.getppid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(0)
        os.umask(0o022)
        _write_text("/proc/self/oom_score_adj", "0")
        enter_group(GROUP + config["mark"])
        _raise_limit(resource.RLIMIT_MEMLOCK, None)
        _raise_limit(resource.RLIMIT_NOFILE, OPEN_FILES)
        _set_streams(_streams(config["folder"], stdio))
        if config["terminal"]:
            _take_terminal()
        _make_mounts(config["package"], config["mounts"])
        _enter(config["cwd"])
        for number in signal.valid_signals():
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                _try(signal.signal, number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _execute(config["argv"], config["env"])
    except _CannotStart as error:
        _report_failure(failure_out, error.code, error.text)
    except BaseException as error:
        _report_failure(failure_out, None, f"could not be started: {error!r}")
    os._exit(127)


class _CannotStart(Exception):
    def __init__(self, code: int | None, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


def _streams(folder: bytes, stdio: tuple[int, ...]) -> tuple[int, ...]:
    """What becomes stdin, stdout and stderr: what was passed, or /dev/null and the log of the run's folder."""
    path = os.path.join(folder, LOG_FILE.encode())
    try:
        os.makedirs(folder, exist_ok=True)
        _try(os.unlink, os.path.join(folder, STATUS_FILE.encode()))
        if stdio:
            return stdio
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        fault = f"folder {_shown(folder)} cannot be made" if stdio else f"log {_shown(path)} cannot be opened"
        raise _CannotStart(None, f"its {fault}: {error.strerror}") from error
    return os.open(os.devnull, os.O_RDONLY), log, log


def _set_streams(stdio: tuple[int, ...]) -> None:
    """Put them in their places. All of them are 3 or more, and the originals close at exec."""
    for place, fd in enumerate(stdio):
        os.dup2(fd, place)


def _take_terminal() -> None:
    """Make stdin the terminal that this session is controlled by: Ctrl-C there is for us then."""
    import fcntl

    fcntl.ioctl(0, TIOCSCTTY, 0)


def _make_mounts(package: bytes, mounts: list[tuple[bytes, bytes, bool]]) -> None:
    """Loaded only where there are any, because every run waits for what is imported."""
    if not mounts:
        return
    sys.path.append(os.fsdecode(package))
    maker = __import__("mounts")
    try:
        maker.make(mounts)
    except maker.MountError as error:
        raise _CannotStart(None, f"its mounts cannot be made: {error}") from error
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # new capabilities may have cleared it


def _enter(cwd: bytes) -> None:
    try:
        os.chdir(cwd)
    except OSError as error:
        raise _CannotStart(
            None, f"its working directory {_shown(cwd)} cannot be entered: {error.strerror}"
        ) from error


def _execute(argv: list[bytes], env: dict[bytes, bytes]) -> None:
    """Execute ``argv``, found as a shell would find it: by the run's own PATH. 127 and 126 are the shell's codes."""
    program = argv[0]
    denied: OSError | None = None
    for path in [program] if b"/" in program else _candidates(program, env):
        try:
            os.execve(path, argv, env)
        except (FileNotFoundError, NotADirectoryError):
            if os.path.exists(path):
                raise _CannotStart(
                    127, f"{_shown(path)}: the interpreter in its first line does not exist"
                ) from None
        except OSError as error:
            if error.errno == errno.EACCES and b"/" not in program:
                denied = error
                continue
            raise _CannotStart(126, f"{_shown(path)}: {_exec_problem(error, argv, env)}") from error
        except ValueError as error:
            raise _CannotStart(None, f"could not be started: {_odd_name(argv, env) or error}") from error
    if denied is not None:
        raise _CannotStart(126, f"{_shown(program)}: {denied.strerror}")
    where = (
        "no such file"
        if b"/" in program
        else f"command not found in PATH {_shown(env.get(b'PATH', DEFAULT_PATH))}"
    )
    raise _CannotStart(127, f"{_shown(program)}: {where}")


def _candidates(program: bytes, env: dict[bytes, bytes]) -> list[bytes]:
    if not program:
        return []
    return [os.path.join(folder or b".", program) for folder in env.get(b"PATH", DEFAULT_PATH).split(b":")]


def _exec_problem(error: OSError, argv: list[bytes], env: dict[bytes, bytes]) -> str:
    if error.errno == errno.ENOEXEC:
        return "not a program; a script needs a first line such as #!/bin/bash"
    if error.errno != errno.E2BIG:
        return error.strerror or repr(error)
    limit = f"the kernel takes {LONGEST_STRING - 1} in one string"
    for name, value in env.items():
        if len(name) + len(value) + 2 > LONGEST_STRING:
            return f"the environment variable {_shown(name)} is {len(value)} bytes long; {limit}"
    for position, argument in enumerate(argv):
        if len(argument) + 1 > LONGEST_STRING:
            return f"argument {position} is {len(argument)} bytes long; {limit}"
    total = sum(map(len, argv)) + sum(len(name) + len(value) for name, value in env.items())
    return f"its arguments and environment are {total} bytes together, more than the kernel takes"


def _odd_name(argv: list[bytes], env: dict[bytes, bytes]) -> str | None:
    for name, value in env.items():
        if not name or b"=" in name or b"\0" in name + value:
            return f"the environment variable {_shown(name)} has an empty name, or a '=' or zero byte in it"
    return "an argument has a zero byte in it" if any(b"\0" in argument for argument in argv) else None


def _report_failure(failure_out: int, code: int | None, text: str) -> None:
    _try(os.write, failure_out, marshal.dumps((code, text[:60_000])))


def _raise_limit(which: int, target: int | None) -> None:
    """Raise a soft limit to the hard one, or as far as ``target``; never lower it."""
    soft, hard = resource.getrlimit(which)
    if target is not None and soft != resource.RLIM_INFINITY and soft < target:
        hard_or_target = target if hard == resource.RLIM_INFINITY else min(hard, target)
        _try(resource.setrlimit, which, (hard_or_target, hard))
    elif target is None and soft != hard:
        _try(resource.setrlimit, which, (hard, hard))


# The process table.


class Entry:
    """One row of the process table. ``start_time`` (ticks since boot) tells a process from a later one of its pid."""

    __slots__ = ("group", "parent", "pid", "session", "start_time", "state")

    def __init__(self, pid: int, fields: list[bytes]) -> None:
        self.pid = pid
        self.state = fields[0]
        self.parent = int(fields[1])
        self.group = int(fields[2])
        self.session = int(fields[3])
        self.start_time = int(fields[19])

    @property
    def alive(self) -> bool:
        return self.state not in (b"Z", b"X")


def entry(pid: int) -> Entry | None:
    """The row of ``pid``, or None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb", 0) as file:
            text = file.read(4096)
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()  # the name before it may hold anything
    return Entry(pid, fields) if len(fields) > 19 else None


def table() -> dict[int, Entry]:
    """All processes by pid. Not one moment's picture: processes come and go while it is read."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return {}  # the system is out of file handles; whoever needs the table looks again
    rows = (entry(int(name)) for name in names if name.isdigit())
    return {row.pid: row for row in rows if row is not None}


def descendants(processes: dict[int, Entry], root: int) -> list[Entry]:
    """The living ones below ``root``, parents before children."""
    children: dict[int, list[Entry]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    found: list[Entry] = []
    queue = [root]
    for pid in queue:
        for child in children.get(pid, ()):
            queue.append(child.pid)
            found.append(child)
    return [process for process in found if process.alive]


def send(process: Entry, number: int) -> bool:
    """Signal this very process, and no later one that got its pid; False when it is gone or not ours."""
    fd = _open_pidfd(process.pid)
    try:
        now = entry(process.pid)
        if now is None or now.start_time != process.start_time:
            return False
        if fd is None or not hasattr(signal, "pidfd_send_signal"):
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(fd, number)
    except OSError:
        return False
    finally:
        if fd is not None:
            os.close(fd)
    return True


def _open_pidfd(pid: int) -> int | None:
    """A handle that names this process for good; None where kernel or Python are too old to have them."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        return None


# Cgroups.


def enter_group(name: str) -> None:
    """Move this process, and so all that comes of it, into a cgroup below its own; where that cannot be, nothing happens."""
    above = own_group()
    if above is None:
        return
    for _ in range(GROUP_TRIES):  # another run of this attempt may just have removed it
        _try(os.mkdir, f"{above}/{name}")
        try:
            with open(f"{above}/{name}/cgroup.procs", "w") as file:
                file.write("0")
            return
        except OSError:
            _try(os.rmdir, f"{above}/{name}")


def own_group() -> str | None:
    """The folder of this process's cgroup; None where there is none, or those below it would get shares of its resources."""
    try:
        with open("/proc/self/cgroup") as file:
            paths = [line[3:].rstrip("\n") for line in file if line.startswith("0::")]
    except OSError:
        return None
    for folder in [root + path.rstrip("/") for path in paths for root in GROUP_ROOTS]:
        try:
            with open(f"{folder}/cgroup.subtree_control") as file:
                return None if file.read().strip() else folder
        except OSError:
            continue
    return None


def remove_group(name: str) -> None:
    """Remove a cgroup below this process's own, with what a job has made below it; one that has processes stays."""
    above = own_group()
    if above is not None:
        _remove_below(f"{above}/{name}")


def _remove_below(folder: str) -> None:
    try:
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                _remove_below(entry.path)
        _try(os.rmdir, folder)
    except OSError:
        pass  # it is gone


# Small parts.


def oom_kills() -> int | None:
    """How many processes of this cgroup (of this machine, where cgroups do not count) ran out of memory so far."""
    for path in [*_oom_files(), "/proc/vmstat"]:
        try:
            with open(path) as file:
                for line in file:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        except OSError:
            continue
    return None


def _oom_files() -> Iterator[str]:
    """Where the count may be: by the path the kernel names and, in a container that does not see it, at the top."""
    try:
        with open("/proc/self/cgroup") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from (f"/sys/fs/cgroup{place}/memory.events" for place in (path, ""))
        elif "memory" in controllers.split(","):
            yield from (f"/sys/fs/cgroup/memory{place}/memory.oom_control" for place in (path, ""))


def _decode(status: int) -> tuple[int | None, int | None]:
    """Exit code and signal of a wait status."""
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


def _prctl(option: int, value: int) -> None:
    import _ctypes

    class Long(_ctypes._SimpleCData):  # type: ignore[type-arg]
        _type_ = "l"

    class Function(_ctypes.CFuncPtr):
        _flags_ = _ctypes.FUNCFLAG_CDECL
        _restype_ = Long

    prctl = Function(_ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl"))  # type: ignore[arg-type]
    prctl(Long(option), Long(value), Long(0), Long(0), Long(0))


def _try(call: Callable[..., object], *arguments: object) -> None:
    """Call something that may be refused; then things stay as they are."""
    try:
        call(*arguments)
    except (OSError, ValueError):
        pass


def _write_text(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError:
        pass


def _move(fd: int, target: int) -> None:
    if fd != target:
        os.dup2(fd, target)
        os.close(fd)


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass


def _shown(text: bytes) -> str:
    return text.decode("utf-8", "backslashreplace")


def _describe(error: BaseException) -> str:
    try:
        import traceback

        return "".join(traceback.format_exception(error))[-8000:]
    except Exception:
        return repr(error)


if __name__ == "__main__":
    if sys.argv[1:] == ["sudo"]:
        main_through_sudo()
    else:
        main(*map(int, sys.argv[1:]))
