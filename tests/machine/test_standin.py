"""The stand-ins for MPI launchers: real processes, shell scripts for the launchers, a few lines for the instance."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raycontrol import standin
from raycontrol.standin import Call, Execute, Meet, Refuse, asks, decide
from tests.support import wait_until

ODD = {"QUOTES": "a'b\"c $HOME `id`", "LINES": "one\ntwo\n", "SIGNS": "größe ☃", "EMPTY": ""}

# horovodrun as far as its environment goes: what would be on command lines, and what its own children inherit.
HOROVODRUN = """#!{python}
import json, os, sys
from horovod.runner.common.util.env import is_exportable
lines = {{name: value for name, value in os.environ.items() if is_exportable(name)}}
json.dump({{"lines": lines, "inherited": dict(os.environ), "argv": sys.argv, "path": sys.path[0]}}, sys.stdout)
"""
HOROVOD_ENV = """
import re
IGNORE_REGEXES = {'BASH_FUNC_.*', 'OLDPWD'}
def is_exportable(v):
    return not any(re.match(r, v) for r in IGNORE_REGEXES)
"""


class Instance:
    """An instance's folder with its stand-ins, an MPI behind them on PATH, and the instance's end of the gate."""

    def __init__(self, folder: Path, run_on: str = "every_instance", name: str = "launcher-0") -> None:
        self.private = folder / ("long" * 30) / name
        self.mpi = folder / "mpi" / "bin"
        self.mpi.mkdir(parents=True, exist_ok=True)
        self.bin = self.private / "bin"
        self.bin.mkdir(parents=True)
        self.environ = {"PATH": f"{self.bin}:{self.mpi}:/usr/bin:/bin", "OUT": str(folder)}
        self.settings = {
            "instance": name,
            "launcher": "launcher-0",
            "run_on": run_on,
            "hidden": ["INDEX", "RAYCONTROL_INSTANCE"],
        }
        (self.private / "standin.json").write_text(json.dumps(self.settings, indent=1))
        for program in ("mpirun", "horovodrun"):
            write_script(self.bin / program, self.line(program))
        self.processes: list[subprocess.Popen[bytes]] = []

    def line(self, program: str) -> str:
        return f'exec {sys.executable} -I -S {standin.__file__} {self.private} {program} "$@"'

    def start(self, *argv: str, **options: Any) -> subprocess.Popen[bytes]:
        options = {"stdin": subprocess.DEVNULL, "env": self.environ, **options}
        process = subprocess.Popen(
            [str(self.bin / argv[0]), *argv[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            **options,
        )
        self.processes.append(process)
        return process

    def end_of(self, *argv: str, **options: Any) -> tuple[int, str, str]:
        """Exit code (or negative signal), standard output and errors of one call."""
        process = self.start(*argv, **options)
        out, errors = process.communicate(timeout=20)
        return process.returncode, out.decode(), errors.decode()

    def call(self, name: str = "mpirun", *args: str, **environ: str) -> Call:
        real = standin.find_program(name, self.environ["PATH"])
        return Call(str(self.private), name, args, {**self.environ, **environ}, self.settings, real)


class Gate:
    """The instance's end of one call: says what it is told to say, and notes what it hears."""

    def __init__(self, instance: Instance) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        folder = os.open(instance.private, os.O_PATH)
        self.listener.bind(f"/proc/self/fd/{folder}/gate.sock")
        os.close(folder)
        self.listener.listen()
        self.heard: list[Any] = []

    def serve(self, *answers: dict[str, Any], receipt: bool = True) -> None:
        """Answer the next call in a thread; close its connection when nothing more comes."""

        def converse() -> None:
            connection, _ = self.listener.accept()
            with connection, connection.makefile("rwb") as lines:
                self.heard.append(json.loads(lines.readline()))
                for answer in answers:
                    lines.write(json.dumps(answer).encode() + b"\n")
                lines.flush()
                if answers and "go" in answers[-1]:
                    status = json.loads(lines.readline() or "null")
                    self.heard.append(status)
                    if status and receipt:
                        lines.write(b'{"ok": true}\n')
                        lines.flush()
                        lines.readline()

        threading.Thread(target=converse, daemon=True).start()


def write_script(path: Path, text: str) -> None:
    path.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    made = Instance(tmp_path)
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture
def gate(instance: Instance) -> Gate:
    return Gate(instance)


def mpirun(instance: Instance, text: str) -> None:
    write_script(instance.mpi / "mpirun", text)


# The rules.


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mpirun", True),
        ("mpirun --version", True),
        ("mpirun -V", True),
        ("mpirun -?", True),
        ("mpirun -h", True),
        ("mpirun --help bind-to", True),
        ("mpirun --oversubscribe -n 2 --mca btl tcp,self --help", True),
        ("mpiexec.hydra -info", True),
        ("mpirun -H a:1,b:1 train.py", False),
        ("mpirun -v train.py", False),
        ("mpirun -n 2 python train.py --help", False),
        ("mpirun python train.py --version", False),
        ("mpirun --mca coll ^han python -h", False),
        ("mpirun --some-flag python --help", False),
        ("mpirun -n 2 -- python", False),
        ("horovodrun", True),
        ("horovodrun --check-build", True),
        ("horovodrun -cb", True),
        ("horovodrun -v", True),
        ("horovodrun --verbose -np 2 --version", True),
        ("horovodrun -np 2 -H a:1,b:1 python3 train.py -h", False),
        ("horovodrun --network-interface eth0 -np 2 python3 train.py", False),
    ],
)
def test_a_question_is_one_before_the_programs_name(line: str, expected: bool):
    name, *args = line.split()
    assert asks(name, args) is expected


def test_the_rules_in_their_order(tmp_path: Path):
    every = Instance(tmp_path / "every")
    assert isinstance(decide(every.call("mpirun", "x")), Refuse)
    mpirun(every, "true")
    assert isinstance(decide(every.call("mpirun", "x")), Meet)
    assert isinstance(decide(every.call("mpirun", "--version")), Execute)
    for rank in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "HOROVOD_RANK"):
        assert isinstance(decide(every.call("mpirun", "x", **{rank: "0"})), Execute)
    assert isinstance(decide(every.call("mpirun", "x", RAYCONTROL_WORLD="2")), Execute)


@pytest.mark.parametrize("run_on", ["every_instance", "launcher", "ranks"])
@pytest.mark.parametrize("name", ["launcher-0", "worker-0"])
def test_a_call_by_exec_or_in_a_shell_meets_nobody_and_its_world_is_not_the_jobs(
    tmp_path: Path, run_on: str, name: str
):
    here = Instance(tmp_path, run_on, name)
    mpirun(here, "true")
    answer = decide(here.call("mpirun", "x", RAYCONTROL_INSIDE="shell"))
    assert isinstance(answer, Execute)
    assert (answer.program, answer.argv) == (str(here.mpi / "mpirun"), ["mpirun", "x"])
    assert "RAYCONTROL_WORLD" not in answer.environ


@pytest.mark.parametrize("run_on", ["launcher", "ranks"])
def test_where_the_launcher_alone_runs_the_command_it_meets_itself_and_a_server_nobody(
    tmp_path: Path, run_on: str
):
    lead, server = Instance(tmp_path / "a", run_on), Instance(tmp_path / "b", run_on, name="worker-0")
    for instance in (lead, server):
        mpirun(instance, "true")
    assert isinstance(decide(lead.call("mpirun", "x")), Meet)
    answer = decide(server.call("mpirun", "x"))
    assert isinstance(answer, Execute)
    assert "RAYCONTROL_WORLD" not in answer.environ


def test_inside_a_rank_of_run_on_ranks_a_launcher_fails_with_advice(tmp_path: Path):
    ranks = Instance(tmp_path, run_on="ranks")
    mpirun(ranks, "true")
    answer = decide(ranks.call("mpirun", "x", PMIX_RANK="0"))
    assert isinstance(answer, Refuse)
    assert answer.code == 1
    assert answer.text == (
        "mpirun: the start command already is the ranks of one world; with `run_on: every_instance` or `launcher` it "
        "may call mpirun itself"
    )
    assert isinstance(decide(ranks.call("mpirun", "x")), Meet)


def test_mpichs_launchers_get_their_path_because_they_look_beside_it(tmp_path: Path):
    alone = Instance(tmp_path)
    mpirun(alone, "true")
    write_script(alone.mpi / "hydra_pmi_proxy", "true")
    answer = decide(alone.call("mpirun", "x", RAYCONTROL_WORLD="0"))
    assert isinstance(answer, Execute)
    assert answer.argv == [str(alone.mpi / "mpirun"), "x"]


# Programs that are not ours, found and started.


def test_a_missing_program_is_named_with_the_path_and_what_to_do(tmp_path: Path):
    instance = Instance(tmp_path, name="worker-0")
    assert instance.end_of("mpirun", "-n", "2", "x") == (
        127,
        "",
        f"raycontrol: mpirun: not found on the PATH of worker-0 ({instance.mpi}:/usr/bin:/bin): install an MPI in the "
        "job's environment, or put it on PATH\n",
    )
    assert "install Horovod in the job's" in instance.end_of("horovodrun", "x")[2]


def test_stand_ins_of_other_instances_are_not_taken_for_the_program(tmp_path: Path):
    instance, other = Instance(tmp_path / "a"), Instance(tmp_path / "b")
    link = tmp_path / "link"
    link.symlink_to(other.bin)
    mpirun(instance, "echo real")
    instance.environ |= {"PATH": f"{link}:{other.bin}:{instance.environ['PATH']}", "RAYCONTROL_WORLD": "0"}
    assert instance.end_of("mpirun", "x") == (0, "real\n", "")


def test_a_question_goes_to_the_program_with_everything_unchanged(instance: Instance):
    mpirun(instance, 'echo "$0 $*"; env -0 > $OUT/environment; exec 1>&-; cat >&2')
    instance.environ.update(ODD)
    with subprocess.Popen(["echo", "piped"], stdout=subprocess.PIPE) as pipe:
        code, out, errors = instance.end_of("mpirun", "--help", "a b", stdin=pipe.stdout)
    assert (code, out, errors) == (0, f"{instance.mpi}/mpirun --help a b\n", "piped\n")
    got = (Path(instance.environ["OUT"]) / "environment").read_bytes()
    assert standin.split_environment(got).items() >= instance.environ.items()
    assert set(standin.split_environment(got)) <= {*instance.environ, "PWD", "SHLVL", "_", "OLDPWD"}


def test_a_program_that_cannot_run_is_126(instance: Instance, gate: Gate):
    mpirun(instance, "#!/no/such/interpreter\n")
    path = instance.mpi / "mpirun"
    text = f"raycontrol: {path}: No such file or directory\n"
    assert instance.end_of("mpirun", "--version") == (126, "", text)
    gate.serve({"go": 0})
    assert instance.end_of("mpirun", "x") == (126, "", text)
    assert gate.heard == [{"program": "mpirun"}, {"status": 126}]


def test_signals_that_the_interpreter_ignores_are_the_programs_again(instance: Instance, gate: Gate):
    mpirun(instance, "grep SigIgn /proc/self/status")
    plain = subprocess.run(["grep", "SigIgn", "/proc/self/status"], capture_output=True, restore_signals=True)
    assert instance.end_of("mpirun", "--version")[1] == plain.stdout.decode()
    gate.serve({"go": 0})
    assert instance.end_of("mpirun", "x")[1] == plain.stdout.decode()


# The gate.


def test_the_launcher_runs_the_program_and_tells_how_it_ended(instance: Instance, gate: Gate):
    mpirun(instance, 'echo "$RAYCONTROL_WORLD: $*"; exit 3')
    gate.serve({"waiting": ["worker-1"]}, {"waiting": ["worker-1"]}, {"go": 2})
    assert instance.end_of("mpirun", "-n", "4", "python", "a b.py") == (
        3,
        "2: -n 4 python a b.py\n",
        "raycontrol: mpirun waits for worker-1 to call it too\n",
    )
    assert gate.heard == [{"program": "mpirun"}, {"status": 3}]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_death_by_a_signal_is_passed_on(instance: Instance, gate: Gate, number: signal.Signals):
    mpirun(instance, f"ulimit -c 0; kill -{number.value} $$")
    gate.serve({"go": 0}, receipt=False)
    assert instance.end_of("mpirun", "x") == (-number, "", "")
    assert gate.heard[1] == {"status": -number}


@pytest.mark.parametrize(("status", "code"), [(0, 0), (3, 3), (-9, 137), (-15, 143)])
def test_a_worker_ends_as_the_launchers_program_did(instance: Instance, gate: Gate, status: int, code: int):
    mpirun(instance, "echo never")
    gate.serve({"waiting": [f"worker-{i}" for i in range(1, 6)]}, {"status": status})
    assert instance.end_of("mpirun", "x") == (
        code,
        "",
        "raycontrol: mpirun waits for worker-1, worker-2 and 3 more instances to call it too\n",
    )


def test_advice_is_printed_and_the_call_fails(instance: Instance, gate: Gate):
    mpirun(instance, "echo never")
    gate.serve({"error": "the launcher ended “early”"})
    assert instance.end_of("mpirun", "x") == (1, "", "raycontrol: the launcher ended “early”\n")


def test_without_an_answer_the_instance_is_gone(instance: Instance):
    mpirun(instance, "echo never")
    assert instance.end_of("mpirun", "x") == (125, "", "raycontrol: the instance is gone\n")
    Gate(instance).serve()
    assert instance.end_of("mpirun", "x") == (125, "", "raycontrol: the instance is gone\n")


def test_stdin_reaches_the_program_as_it_is(instance: Instance, gate: Gate):
    mpirun(instance, "exec cat")
    gate.serve({"go": 0})
    data = os.urandom(3_000_000)
    process = instance.start("mpirun", "x", stdin=subprocess.PIPE)
    assert process.communicate(data, timeout=20) == (data, b"")


# Signals.

COUNTING = """
trap 'echo TERM' TERM; trap 'echo INT' INT; trap 'echo HUP' HUP; trap 'echo USR1' USR1; trap 'echo USR2' USR2
echo $$ > $OUT/child.new; mv $OUT/child.new $OUT/child
while [ ! -e $OUT/done ]; do sleep 0.02; done
exit 0  # and not the 130 of a sleep that got a ^C
"""


def child_of(instance: Instance) -> int:
    file = Path(instance.environ["OUT"]) / "child"
    return int(wait_until(lambda: file.exists() and file.read_text(), what="the program's pid"))


def test_each_signal_to_us_or_our_group_reaches_the_program_once(instance: Instance, gate: Gate):
    mpirun(instance, COUNTING)
    gate.serve({"go": 0})
    process = instance.start("mpirun", "x")
    child = child_of(instance)
    assert os.getpgid(child) == child
    assert process.stdout is not None
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.killpg(process.pid, number)
        assert process.stdout.readline().decode() == f"{number.name.removeprefix('SIG')}\n"
    for number in (signal.SIGHUP, signal.SIGUSR2):
        os.kill(process.pid, number)
        assert process.stdout.readline().decode() == f"{number.name.removeprefix('SIG')}\n"
    (Path(instance.environ["OUT"]) / "done").touch()
    assert process.communicate(timeout=20) == (b"", b"")
    assert process.returncode == 0


def test_a_signal_that_was_ignored_stays_so(instance: Instance, gate: Gate):
    mpirun(instance, COUNTING)
    write_script(instance.bin / "mpirun", f"trap '' HUP\n{instance.line('mpirun')}")
    gate.serve({"go": 0})
    process = instance.start("mpirun", "x")
    child_of(instance)
    os.kill(process.pid, signal.SIGHUP)
    os.kill(process.pid, signal.SIGUSR1)
    (Path(instance.environ["OUT"]) / "done").touch()
    assert process.communicate(timeout=20) == (b"USR1\n", b"")


def test_while_waiting_a_signal_just_ends_us(instance: Instance, gate: Gate):
    mpirun(instance, "echo never")
    for number in (signal.SIGTERM, signal.SIGINT):
        process = instance.start("mpirun", "x")
        connection, _ = gate.listener.accept()
        assert connection.recv(100) == b'{"program": "mpirun"}\n'
        process.send_signal(number)
        assert process.communicate(timeout=20) == (b"", b"")
        assert process.returncode == -number


def test_the_program_dies_with_us(instance: Instance, gate: Gate):
    mpirun(instance, "echo $$ > $OUT/child; exec sleep 100")
    gate.serve({"go": 0})
    process = instance.start("mpirun", "x")
    child = child_of(instance)
    process.kill()
    wait_until(lambda: not Path(f"/proc/{child}").exists(), what="the program's end")


def test_on_a_terminal_what_is_typed_reaches_the_program_once(instance: Instance, gate: Gate):
    mpirun(instance, COUNTING)
    gate.serve({"go": 0})
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(instance.bin / "mpirun", ["mpirun", "x"], instance.environ)
    child_of(instance)
    os.write(terminal, b"\x03")
    shown = b""
    while b"INT" not in shown:
        shown += os.read(terminal, 1000)
    os.kill(pid, signal.SIGTERM)
    while b"TERM" not in shown:
        shown += os.read(terminal, 1000)
    (Path(instance.environ["OUT"]) / "done").touch()
    assert os.waitpid(pid, 0)[1] == 0
    assert shown.split() == [b"^CINT", b"TERM"]
    os.close(terminal)


# horovodrun.


@pytest.fixture
def horovod(instance: Instance) -> Instance:
    """An instance that supplies odd values, with a horovodrun that shows what it would do with its environment."""
    package = instance.mpi / "horovod" / "runner" / "common" / "util"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:3]):
        (
            folder / "__init__.py"
        ).touch()  # a real Horovod that is installed would come before a package without it
    (package / "env.py").write_text(HOROVOD_ENV)
    write_script(instance.mpi / "horovodrun", HOROVODRUN.format(python=sys.executable))
    instance.environ |= {"INDEX": "0", "RAYCONTROL_INSTANCE": "launcher-0", "API_TOKEN": "s3cret", **ODD}
    instance.environ |= {f"{name}_KEY": value for name, value in ODD.items()}
    supplied = "".join(f"{name}={value}\0" for name, value in instance.environ.items())
    (instance.private / "environment").write_bytes(supplied.encode())
    return instance


def shown(horovod: Instance, *args: str) -> dict[str, Any]:
    code, out, errors = horovod.end_of("horovodrun", *args)
    assert (code, errors) == (0, "")
    document: dict[str, Any] = json.loads(out)
    return document


def test_what_each_instance_supplies_is_not_on_horovodruns_command_lines(horovod: Instance):
    Gate(horovod).serve({"go": 1})
    horovod.environ |= {"HF_TOKEN": "exported by the script", "EMPTY_KEY": "changed by the script"}
    made = {f"MADE_{name}": value for name, value in ODD.items()}
    horovod.environ |= made
    document = shown(horovod, "-np", "2", "python", "a b.py")
    lines = document["lines"]
    assert lines.items() >= {**made, "RAYCONTROL_WORLD": "1"}.items()
    assert not {*ODD, "OUT"} & set(lines)  # as each instance supplies them
    assert not {
        "INDEX",
        "RAYCONTROL_INSTANCE",
        "API_TOKEN",
        "PATH",
        "LINES_KEY",
        "HF_TOKEN",
        "EMPTY_KEY",
    } & set(lines)
    inherited = document["inherited"]
    assert inherited.items() >= {**horovod.environ, "RAYCONTROL_WORLD": "1"}.items()
    assert sorted(inherited["RAYCONTROL_SEND"].split()) == ["EMPTY_KEY", "HF_TOKEN"]  # by our ssh
    assert document["argv"] == [str(horovod.mpi / "horovodrun"), "-np", "2", "python", "a b.py"]
    assert document["path"] == str(horovod.mpi)


@pytest.mark.parametrize(
    ("interface", "named", "remote", "chosen"),
    [
        ("eth0", None, ["10.0.0.2"], ["eth0"]),
        ("eth0", ["ib0"], ["10.0.0.2"], ["searched"]),
        ("eth0", None, [], ["searched"]),
        ("", None, ["10.0.0.2"], ["searched"]),
    ],
)
def test_horovodrun_is_told_the_network_for_other_hosts_unless_the_user_has_named_one(
    horovod: Instance, interface: str, named: list[str] | None, remote: list[str], chosen: list[str]
):
    Gate(horovod).serve({"go": 1})
    driver = horovod.mpi / "horovod" / "runner" / "driver"
    driver.mkdir()
    (driver / "__init__.py").touch()
    (driver / "driver_service.py").write_text(
        "def get_common_interfaces(settings, all_hosts, remote_hosts=None, fn_cache=None):\n    return {'searched'}\n"
    )
    program = (
        f"#!{sys.executable}\nimport json, types\nfrom horovod.runner.driver import driver_service\n"
        f"settings = types.SimpleNamespace(nics={named!r})\n"
        f"print(json.dumps(sorted(driver_service.get_common_interfaces(settings, ['a'], {remote!r}, None))))\n"
    )
    write_script(horovod.mpi / "horovodrun", program)
    horovod.environ["HOROVOD_GLOO_IFACE"] = interface
    code, out, errors = horovod.end_of("horovodrun", "-np", "2", "python", "train.py")
    assert (code, json.loads(out)) == (0, chosen), errors


def test_mpirun_carries_secrets_that_the_start_command_changed_by_itself(horovod: Instance):
    Gate(horovod).serve({"go": 1})
    horovod.environ["HF_TOKEN"] = "exported by the script"
    lines = shown(horovod, "--mpi", "-np", "2", "x")["lines"]
    assert lines["HF_TOKEN"] == "exported by the script"
    assert "API_TOKEN" not in lines


def test_a_path_that_the_start_command_changed_reaches_the_ranks(horovod: Instance):
    Gate(horovod).serve({"go": 0})
    horovod.environ["PATH"] += ":/opt/more"
    assert shown(horovod, "x")["lines"]["PATH"] == horovod.environ["PATH"]


@pytest.mark.parametrize("quote", ["", '"'])
def test_a_horovodrun_with_a_long_first_line_is_the_same(horovod: Instance, quote: str):
    text = HOROVODRUN.format(python=f"/bin/sh\n'''exec' {quote}{sys.executable}{quote} \"$0\" \"$@\"\n' '''")
    write_script(horovod.mpi / "horovodrun", text)
    Gate(horovod).serve({"go": 0})
    document = shown(horovod, "x")
    assert "API_TOKEN" not in document["lines"]
    assert document["inherited"]["API_TOKEN"] == "s3cret"


def test_a_horovodrun_that_is_another_kind_of_program_is_started_without_them(horovod: Instance):
    write_script(horovod.mpi / "horovodrun", "env -0")
    Gate(horovod).serve({"go": 0})
    got = standin.split_environment(horovod.end_of("horovodrun", "x")[1].encode())
    assert got.items() >= {**ODD, "RAYCONTROL_WORLD": "0", "PATH": horovod.environ["PATH"]}.items()
    assert not {"INDEX", "RAYCONTROL_INSTANCE", "API_TOKEN", "LINES_KEY"} & set(got)


def test_another_horovod_without_the_set_of_names_is_started_without_them(horovod: Instance):
    env = horovod.mpi / "horovod" / "runner" / "common" / "util" / "env.py"
    env.write_text("is_exportable = bool")
    Gate(horovod).serve({"go": 0})
    document = shown(horovod, "x")
    assert "API_TOKEN" not in document["inherited"]
    assert document["inherited"].items() >= {**ODD, "PATH": horovod.environ["PATH"]}.items()


def test_horovodruns_own_questions_get_its_whole_environment(horovod: Instance):
    assert shown(horovod, "--check-build")["lines"].items() >= horovod.environ.items()


def test_the_agents_of_a_launcher_that_has_ended_come_to_their_end(instance: Instance):
    """mpirun returns before its daemons; a supervisor that ends their connections would make them look lost."""
    late = f'{sys.executable} -c \'import os, time; time.sleep(0.5); open(os.environ["OUT"] + "/late", "w")\' rsh-agent'
    mpirun(instance, f"setsid {late} & exit 3")
    Gate(instance).serve({"go": 0})
    out = Path(instance.environ["OUT"])
    assert instance.end_of("mpirun", "x")[0] == 3
    assert (out / "late").exists()


def test_what_else_a_launcher_leaves_behind_is_not_waited_for(instance: Instance):
    mpirun(instance, "setsid sleep 60 >/dev/null 2>&1 & echo $! > $OUT/pid; exit 0")
    Gate(instance).serve({"go": 0})
    began = time.monotonic()
    assert instance.end_of("mpirun", "x")[0] == 0
    assert time.monotonic() - began < standin.AGENTS_S
    os.kill(int((Path(instance.environ["OUT"]) / "pid").read_text()), 9)


def test_no_zombies_gather_under_it(instance: Instance):
    mpirun(
        instance,
        "for i in 1 2 3; do (setsid true &); done\n"
        "until [ $(ps -o stat= --ppid $PPID | wc -l) = 1 ]; do :; done; echo none",
    )
    Gate(instance).serve({"go": 0})
    assert instance.end_of("mpirun", "x") == (0, "none\n", "")
