"""What runs when a job calls an MPI launcher by its plain name: the stand-in for ``mpirun``, ``horovodrun`` and the like.

Scripts in PRIVATE/bin, which is first on the job's PATH, run this file as a program
(``python -I -S standin.py PRIVATE NAME ARGS…``), where PRIVATE is the instance's own folder and NAME the launcher's.
It finds the real program of that name behind itself on PATH and decides by ``RULES``: run it as it was called, refuse,
or meet the other instances first, because in a job whose start command runs on every instance these launchers are
collective: one world starts, from the launcher instance, when every instance has made the call.

As ``rsh-agent`` it is what MPI launchers call instead of ssh. It refuses on an instance where no world of ours runs:
there a launcher was reached around the stand-ins and would start a second one.

Pure standard library and few imports, because every launch waits for them: ``_json``, ``_signal``, ``_socket`` and
``_ctypes`` are the C halves of the modules of these names.
"""

# ruff: noqa: PTH103, PTH104, PTH208, PTH110, PTH113, PTH118, PTH119, PTH120
# (pathlib takes longer to import than the interpreter to start)
from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False  # the import of `typing` costs as much as the interpreter's own start
if TYPE_CHECKING:
    import signal
    import socket
    from collections.abc import Mapping, Sequence
    from typing import Any, NoReturn, TypeAlias

    Environment = Mapping[str, str]
    Program = tuple[str, list[str], Environment]
    Answer: TypeAlias = "Execute | Refuse | Meet"
else:
    import _signal as signal

AGENT = "rsh-agent"
WORLD = "RAYCONTROL_WORLD"
INSIDE = "RAYCONTROL_INSIDE"
"""Whoever has it was begun by ``exec`` or ``shell`` (its value says by which), not by the start command."""
UNKNOWN = "unknown"
"""The world of a launcher that was reached around the stand-ins."""
BROKEN = "broken"
SEND = "RAYCONTROL_SEND"
"""Names of variables that our ``ssh`` sends along, apart from the command line."""
SETTINGS_FILE = "standin.json"
ENVIRONMENT_FILE = "environment"
SOCKET_FILE = "gate.sock"
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "HOROVOD_RANK")
HYDRA_PROXY = "hydra_pmi_proxy"
GOODBYE_S = 5.0
REFUSED, NOT_RUNNABLE, NOT_FOUND, GONE = 1, 126, 127, 125
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
AGENTS_S = 10.0
"""How long the agents of a launcher that has ended may take for their own end."""

HOROVODRUN = "horovodrun"
QUESTIONS = {"version", "V", "help", "h", "info", "?"}
HOROVOD_QUESTIONS = {"version", "v", "help", "h", "check-build", "cb"}
# How many values follow the options that are most often written; of others it is not known.
ONE_VALUE = (
    "n",
    "np",
    "c",
    "H",
    "host",
    "hosts",
    "hostfile",
    "machinefile",
    "f",
    "p",
    "x",
    "map-by",
    "bind-to",
    "wdir",
)
TWO_VALUES = ("mca", "prtemca", "pmixmca", "genv", "env")
VALUES = {**dict.fromkeys(ONE_VALUE, 1), **dict.fromkeys(TWO_VALUES, 2)}

FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGCONT, signal.SIGWINCH, signal.SIGTSTP),
)
TYPED = (signal.SIGINT, signal.SIGQUIT, signal.SIGCONT, signal.SIGWINCH, signal.SIGTSTP)


def main(private: str, name: str, *args: str) -> None:
    signal.signal(signal.SIGINT, _plain(signal.getsignal(signal.SIGINT)))
    environ = own_environment()
    settings = read_settings(private)
    if name == AGENT:
        agent(private, args, environ, settings)
    real = find_program(name, environ.get("PATH", DEFAULT_PATH))
    decide(Call(private, name, args, environ, settings, real)).carry_out()


class Call:
    """One call of a launcher. ``real`` is the path of the program that was meant, None where there is none."""

    def __init__(
        self,
        private: str,
        name: str,
        args: Sequence[str],
        environ: Environment,
        settings: Mapping[str, Any],
        real: str | None,
    ) -> None:
        self.private = private
        self.name = name
        self.args = args
        self.environ = environ
        self.settings = settings
        self.real = real


def decide(call: Call) -> Answer:
    """Return what the first rule that knows an answer says."""
    return next(answer for answer in (rule(call) for rule in RULES) if answer is not None)


# The rules, in their order.


def missing(call: Call) -> Answer | None:
    if call.real:
        return None
    what = "Horovod" if call.name == HOROVODRUN else "an MPI"
    folders = call.environ.get("PATH", DEFAULT_PATH).split(":")
    path = ":".join(folder for folder in folders if not _of_stand_ins(folder))
    return Refuse(
        NOT_FOUND,
        f"{call.name}: not found on the PATH of {call.settings['instance']} ({path}): "
        f"install {what} in the job's environment, or put it on PATH",
    )


def question(call: Call) -> Answer | None:
    return Execute(*as_called(call)) if asks(call.name, call.args) else None


def inside_a_world(call: Call) -> Answer | None:
    if not any(rank in call.environ for rank in RANKS):
        return None
    if call.settings["run_on"] != "ranks":
        return Execute(*as_called(call))
    return Refuse(
        REFUSED,
        f"{call.name}: the start command already is the ranks of one world; with `run_on: every_instance` or "
        "`launcher` it may call mpirun itself",
    )


def by_a_launcher(call: Call) -> Answer | None:
    """horovodrun calls mpirun itself."""
    return Execute(*of_world(call, call.environ[WORLD])) if WORLD in call.environ else None


def beside_the_start_command(call: Call) -> Answer | None:
    """Somebody at a shell, or an ``exec``: a world of its own, which meets nobody and of whose end the job hears nothing."""
    return Execute(*of_world(call, None)) if INSIDE in call.environ else None


def on_an_instance_that_only_serves(call: Call) -> Answer | None:
    """It takes no part in calls; the agent sees to it that nothing starts from there."""
    serves = (
        call.settings["run_on"] != "every_instance" and call.settings["instance"] != call.settings["launcher"]
    )
    return Execute(*as_called(call)) if serves else None


def collective(call: Call) -> Answer | None:
    """Also where the start command runs on the launcher alone: then it meets nobody, but its end is heard of."""
    return Meet(call)


RULES = (
    *(missing, question, inside_a_world, by_a_launcher, beside_the_start_command),
    *(on_an_instance_that_only_serves, collective),
)


def asks(name: str, args: Sequence[str]) -> bool:
    """Whether the call only asks the launcher something: ``--version`` and the like, before the program's name.

    An option that is not known may have a value, so what follows it ends the search: a world that starts on every
    instance does more harm than a question that waits for the others.
    """
    questions = HOROVOD_QUESTIONS if name == HOROVODRUN else QUESTIONS
    values = 0
    for arg in args:
        if values:
            values -= 1
        elif not arg.startswith("-"):
            return False
        else:
            option = arg.removeprefix("-").removeprefix("-")
            if option in questions:
                return True
            values = VALUES.get(option, 0)
    return not args


# How the real program is started: its path, arguments, environment.


def as_called(call: Call) -> Program:
    """The real program, with the name it was called by.

    MPICH's launchers look beside their own path for what they start on other hosts, and with a bare name would look
    beside us; Open MPI's take a path as the wish to change the ranks' PATH.
    """
    real = call.real or call.name
    by_path = os.path.exists(os.path.join(os.path.dirname(real), HYDRA_PROXY))
    return real, [real if by_path else call.name, *call.args], call.environ


def of_world(call: Call, number: str | None) -> Program:
    """The real program as the launcher of our world of that number; None: of one that is not the job's."""
    program, argv, called_with = as_called(call)
    environ = dict(called_with) if number is None else {**called_with, WORLD: number}
    if call.name != HOROVODRUN:
        return program, argv, environ
    supplied = read_environment(call.private)
    changed = [name for name, value in environ.items() if looks_secret(name) and supplied.get(name) != value]
    environ[SEND] = " ".join(changed)
    own = own_names(environ, supplied, call.settings["hidden"])
    # mpirun passes the values of such names on by itself, and has only the names on command lines.
    kept_back = own if "--mpi" in argv else [*own, *changed]
    return horovodrun(program, argv, environ, kept_back, call.settings["hidden"])


def own_names(environ: Environment, supplied: Environment, hidden: Sequence[str]) -> list[str]:
    """Return the names of ``environ`` that each instance supplies by itself: the hidden ones, and all that are unchanged.

    What the start command has changed has to be carried: secrets through the encrypted channel (``SEND``).
    """
    return [
        name
        for name, value in environ.items()
        if name in hidden or name == SEND or supplied.get(name) == value
    ]


def looks_secret(name: str) -> bool:
    """The same words as in ``specfaults``."""
    return any(word in name.lower() for word in ("token", "key", "secret", "passw", "credential"))


# horovodrun writes its whole environment on the command lines of its ranks, except what this set of its own names.
# Ranks on its own host inherit its environment as processes do, so that nothing is missing there; ranks on other hosts
# inherit their instance's.
# For other hosts it looks for a network of its own, and takes any by which they reach some machine of that address: a
# docker bridge has the same address on every host. So it is told the interface, unless the user has named one.
HOROVODRUN_PROGRAM = """
import os, re, runpy, sys
names, dropped, sys.argv = sys.argv[1].split(), sys.argv[2].split(), sys.argv[3:]
if sys.path[0] == "":
    sys.path[0] = os.path.dirname(sys.argv[0])
try:
    from horovod.runner.common.util import env
    env.IGNORE_REGEXES.update(re.escape(name) + r"\\Z" for name in names)
except (ImportError, AttributeError):
    for name in dropped:
        os.environ.pop(name, None)
try:
    from horovod.runner.driver import driver_service
    search, ours = driver_service.get_common_interfaces, os.environ.get("HOROVOD_GLOO_IFACE")
    def chosen(settings, all_hosts, remote_hosts=None, *rest, **named):
        known = ours and remote_hosts and not settings.nics
        return {ours} if known else search(settings, all_hosts, remote_hosts, *rest, **named)
    driver_service.get_common_interfaces = chosen
except (ImportError, AttributeError):
    pass
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def horovodrun(
    program: str, argv: list[str], environ: Environment, own: Sequence[str], hidden: Sequence[str]
) -> Program:
    """horovodrun, made to keep the ``own`` names off command lines.

    Where it has no such set of names, or is no Python script, it goes without those of them that it needs least.
    """
    dropped = [name for name in own if name in hidden or looks_secret(name)]
    python = interpreter(program)
    if not python:
        return program, argv, {name: value for name, value in environ.items() if name not in dropped}
    return (
        python[0],
        [*python, "-c", HOROVODRUN_PROGRAM, " ".join(own), " ".join(dropped), program, *argv[1:]],
        environ,
    )


def interpreter(script: str) -> list[str]:
    """Return the Python that runs a script by its first line, as words; empty where it is none.

    Where that line would be too long, or has blanks, installers write one for ``sh`` and the Python into the second.
    """
    try:
        with open(script, "rb") as file:
            first, second = os.fsdecode(file.readline(4096)), os.fsdecode(file.readline(4096))
    except OSError:
        return []
    words = first[2:].split(None, 1) if first.startswith("#!") else []
    if words == ["/bin/sh"] and second.startswith("'''exec' "):
        path = second.removeprefix("'''exec' ").removesuffix(' "$0" "$@"\n')
        words = [path.strip("\"'")]
    words = [word.strip() for word in words]
    return words if any("python" in os.path.basename(word) for word in words) else []


# What an answer does.


class Execute:
    """Become the real program."""

    def __init__(self, program: str, argv: list[str], environ: Environment) -> None:
        self.program = program
        self.argv = argv
        self.environ = environ

    def carry_out(self) -> NoReturn:
        execute(self.program, self.argv, self.environ)


class Refuse:
    """Say why not, and exit with that code."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        self.text = text

    def carry_out(self) -> NoReturn:
        say(self.text)
        os._exit(self.code)


class Meet:
    """Wait at the instance's gate until it says what this call has to do."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def carry_out(self) -> NoReturn:
        instance = Instance()
        kind, value = self.await_word(instance)
        match kind:
            case "go":
                become_subreaper()  # before there are agents that could lose their parent
                status = run(*of_world(self.call, str(value)))
                await_agents()
                instance.say_goodbye(f'{{"status": {status}}}')
                end_as(status)
            case "status":
                end_as(value if value >= 0 else 128 - value)
            case "error":
                Refuse(REFUSED, value).carry_out()
        Refuse(GONE, "the instance is gone").carry_out()

    def await_word(self, instance: Instance) -> tuple[str, Any]:
        """Return the message that ends the waiting; the first of those that tell for whom we wait is passed on."""
        told = False
        try:
            instance.connect(self.call.private)
            instance.send(f'{{"program": "{self.call.name}"}}')
            while message := instance.receive():
                kind, value = next(iter(message.items()))
                if kind != "waiting":
                    return kind, value
                if not told:
                    say(f"{self.call.name} waits for {listed(value)} to call it too")
                told = True
        except OSError:
            pass
        return "gone", None


def listed(names: Sequence[str]) -> str:
    if len(names) > 3:
        names = [*names[:2], f"{len(names) - 2} more instances"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# The agent.


def agent(private: str, args: Sequence[str], environ: Environment, settings: Mapping[str, Any]) -> NoReturn:
    """Run our ssh, telling the other end of which world the command is; end with it, and it with us.

    What becomes of the connection is put down, because mpirun itself may take its loss for a success. A world that is not
    the job's (``INSIDE``) has no number, and its losses are nobody's.
    """
    ssh = os.path.join(private, "bin", "ssh")
    if INSIDE in environ and WORLD not in environ:
        end_as(run(ssh, [ssh, *args], environ))
    instance = settings["instance"]
    world = environ.get(WORLD, UNKNOWN if instance == settings["launcher"] else None)
    if world is None:
        Refuse(
            REFUSED,
            f"an MPI launcher was reached around raycontrol's own on {instance} (by an absolute path, or from an "
            "environment that comes first on PATH) and would start a second world: call plain `mpirun`, found on "
            "PATH, or set `run_on: launcher`",
        ).carry_out()
    status = run(ssh, [ssh, "-o", f"SetEnv={WORLD}={world}", *args], environ)
    if status != 0 and not passed_on:
        host = next((arg for arg in args if not arg.startswith("-")), "a host")
        how = f"exit code {status}" if status > 0 else f"signal {-status}"
        put_down(
            private, world, f"the ssh connection to {host} for a part of the MPI world ended with {how}\n"
        )
    end_as(status)


def put_down(private: str, world: str, text: str) -> None:
    """Keep a text where the instance looks for it, whole or not at all, under the number of the world."""
    folder = os.path.join(private, BROKEN)
    new = os.path.join(private, f".{BROKEN}.{os.getpid()}")
    try:
        os.makedirs(folder, exist_ok=True)
        with open(new, "w") as file:
            file.write(text)
        os.rename(new, os.path.join(folder, f"{world}.{os.getpid()}"))
    except OSError as error:
        say(f"{folder}: {error.strerror}")


class Instance:
    """The connection to the instance, which keeps the gate: one JSON object a line, both ways."""

    def __init__(self) -> None:
        import _socket

        self.connection: socket.socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)  # type: ignore[assignment]
        self.incoming = b""

    def connect(self, private: str) -> None:
        """By way of an open folder: the kernel refuses paths of sockets that are longer than 107 bytes."""
        folder = os.open(private, os.O_PATH | os.O_DIRECTORY)
        self.connection.connect(f"/proc/self/fd/{folder}/{SOCKET_FILE}")
        os.close(folder)

    def send(self, line: str) -> None:
        self.connection.sendall(line.encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, None when the other end is gone."""
        while b"\n" not in self.incoming:
            data = self.connection.recv(65536)
            if not data:
                return None
            self.incoming += data
        line, _, self.incoming = self.incoming.partition(b"\n")
        return parse(line.decode())

    def say_goodbye(self, line: str) -> None:
        """Send the last message, and wait a little for its receipt."""
        try:
            self.connection.settimeout(GOODBYE_S)
            self.send(line)
            self.receive()
        except OSError:
            pass


# Processes.


passed_on: list[int] = []
"""The signals that ``run`` has passed on."""


def run(program: str, argv: list[str], environ: Environment) -> int:
    """Run the program as a child and return its exit code, or the negative number of the signal that ended it.

    It is in a process group of its own and gets each signal that reaches us, from whoever sends it, once. On a
    terminal it stays in ours: what is typed there goes to the whole group, and is not passed on.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    typing = os.isatty(0)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            if not typing:
                os.setpgid(0, 0)
            die_with(parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            execute(program, argv, environ)
        finally:
            os._exit(NOT_RUNNABLE)

    def pass_on(number: int, _: object) -> None:
        passed_on.append(number)
        os.kill(child, number)

    for number in FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, (lambda *_: None) if typing and number in TYPED else pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    # It stays a zombie while we are, so that its number cannot become another process's.
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) is not None and ended.si_pid != child:
        os.waitpid(ended.si_pid, 0)  # it had lost its parent
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def await_agents() -> None:
    """Let the agents of a launcher that has ended come to their end: it does not wait for its daemons on other hosts.

    Ended by us, their connections would look like lost ones.
    """
    deadline = time.monotonic() + AGENTS_S
    while time.monotonic() < deadline and any(is_agent(pid) for pid in children()):
        time.sleep(0.005)


def children() -> list[int]:
    """Return our children, those included that have lost their parent and were handed to us."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read(4096).rpartition(b")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid() and fields[0] != b"Z":
                found.append(int(name))
    return found


def is_agent(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return AGENT.encode() in file.read(65536).split(b"\0")
    except OSError:
        return False


def execute(program: str, argv: list[str], environ: Environment) -> NoReturn:
    """Become the program; signals are as they were when we began."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # what the interpreter ignores
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(program, argv, environ)
    except OSError as error:
        say(f"{program}: {error.strerror}")
    os._exit(NOT_RUNNABLE)


def end_as(status: int) -> NoReturn:
    """End as a process of that status did, by the same signal if it was one; without a second core file."""
    if status < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (-status,))
        os.kill(os.getpid(), -status)
    os._exit(status if status >= 0 else 128 - status)


def die_with(parent: int) -> None:
    """Be killed when ``parent`` dies, which may have happened before."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(GONE)


def become_subreaper() -> None:
    """What loses its parent below us becomes our child."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int) -> None:
    import _ctypes

    class Long(_ctypes._SimpleCData):  # type: ignore[type-arg]
        _type_ = "l"

    class Function(_ctypes.CFuncPtr):
        _flags_ = _ctypes.FUNCFLAG_CDECL
        _restype_ = Long

    function = Function(_ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl"))  # type: ignore[arg-type]
    function(Long(option), Long(value), Long(0), Long(0), Long(0))


def _plain(handler: Any) -> Any:
    """The interpreter turns an interrupt into an exception; where it was not ignored, it just ends us."""
    return signal.SIG_IGN if handler == signal.SIG_IGN else signal.SIG_DFL


# Small parts.


def own_environment() -> dict[str, str]:
    """Return the environment as we got it: the interpreter itself may have added to ``os.environ``."""
    with open("/proc/self/environ", "rb") as file:
        return split_environment(file.read())


def read_environment(private: str) -> dict[str, str]:
    """Return what the instance supplies to what runs in it, empty where that is not known."""
    try:
        with open(os.path.join(private, ENVIRONMENT_FILE), "rb") as file:
            return split_environment(file.read())
    except OSError:
        return {}


def split_environment(data: bytes) -> dict[str, str]:
    entries = (entry.partition("=") for entry in os.fsdecode(data).split("\0"))
    return {name: value for name, equals, value in entries if name and equals}


def read_settings(private: str) -> dict[str, Any]:
    with open(os.path.join(private, SETTINGS_FILE), "rb") as file:
        return parse(file.read().decode())


def parse(text: str) -> dict[str, Any]:
    """Return a JSON object; ``json`` around the C scanner costs as much as the interpreter's start."""
    import _json

    class Context:
        strict = True
        object_hook = object_pairs_hook = None
        parse_float, parse_int = float, int
        parse_constant = None
        memo: dict[str, str] = {}  # noqa: RUF012

    value, _ = _json.make_scanner(Context)(text.strip(), 0)  # type: ignore[arg-type]
    assert isinstance(value, dict)
    return value


def find_program(name: str, path: str) -> str | None:
    """Return the first program of that name on ``path`` that is not a stand-in, ours or another instance's."""
    for folder in path.split(":"):
        candidate = os.path.join(folder or ".", name)
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK) and not _of_stand_ins(folder):
            return candidate
    return None


def _of_stand_ins(folder: str) -> bool:
    """Whether it is the bin of an instance's folder. ``..`` is the real parent, wherever a link has led."""
    return os.path.exists(os.path.join(folder or ".", "..", SETTINGS_FILE))


def say(text: str) -> None:
    """One line for a person; the verdict of a job looks for lines that begin so."""
    try:
        os.write(2, f"raycontrol: {text}\n".encode("utf-8", "backslashreplace"))
    except OSError:
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
