"""``exec`` on a client without a cluster: what it asks for, how it shows what comes, what it remembers."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from raycontrol.cli import invoke
from raycontrol.cli.execview import LONGEST_LINE_BYTES, Lines
from raycontrol.cli.output import Output
from raycontrol.cli.services import Services
from raycontrol.execution import Began, Command, News, Over, Target, Wrote
from tests.fake_client import FakeClient, FakeExecution

THREE = ("node1", "node2", "node10")


@dataclass
class Shell:
    """Runs command lines; the commands across nodes that they begin have these news to tell."""

    home: Path
    client: FakeClient = field(default_factory=FakeClient)
    stdout: str = ""
    stderr: str = ""

    def __call__(self, *arguments: str, news: tuple[News, ...] = (), places: tuple[str, ...] = THREE) -> int:
        out, err = io.StringIO(), io.StringIO()
        self.client.home = self.home
        self.client.execution = FakeExecution(places, *news)
        services = Services(Output(out, err), self.client)  # type: ignore[arg-type]
        status = invoke(["exec", *arguments], services)
        self.stdout, self.stderr = out.getvalue(), err.getvalue()
        return status

    @property
    def asked(self) -> tuple[Target, Command, int | None]:
        found: tuple[Target, Command, int | None] = next(
            value for name, value in reversed(self.client.calls) if name == "execute"
        )
        return found


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def wrote(**outputs: bytes) -> tuple[News, ...]:
    began = [Began(name, "root") for name in THREE]
    return (*began, *(Wrote(name, data) for name, data in outputs.items()))


def all_over(**statuses: int) -> tuple[News, ...]:
    return tuple(Over(name, statuses.get(name, 0), statuses.get(name, 0)) for name in THREE)


def test_lines_come_with_the_names_of_their_nodes_and_the_user_is_told(shell: Shell) -> None:
    news = (*wrote(node1=b"one\nha", node2=b"two\n"), Wrote("node1", b"lf"), *all_over())
    assert shell("--all", "--", "hostname", news=news) == 0
    assert shell.stdout == "node1: one\nnode2: two\nnode1: half\n"
    assert shell.stderr == "exec: as root@node[1-2,10]\n"
    assert shell.asked == (Target(all=True), Command("hostname"), None)


def test_folded_what_is_the_same_is_shown_once(shell: Shell) -> None:
    news = wrote(node1=b"12.4\n", node2=b"12.2\n", node10=b"12.4\n") + all_over()
    assert shell("--nodes", "node1, node2,node10", "--fold", "--", "nvcc", "-V", news=news) == 0
    assert shell.stdout == "node[1,10]: 12.4\nnode2: 12.2\n"
    assert shell.asked[:2] == (Target(nodes=("node1", "node2", "node10")), Command(("nvcc", "-V")))


def test_what_failed_is_a_table_and_the_highest_status_is_the_commands(shell: Shell) -> None:
    silent = Over("node10", 125, why="it has not answered for 20 s; what it runs ends by itself")
    assert shell("--all", "--", "x", news=(*all_over(node2=3)[:2], silent)) == 125
    assert shell.stdout == ""
    assert shell.stderr.splitlines() == [
        "STATUS  WHERE   WHY",
        "0       node1",
        "3       node2",
        "125     node10  it has not answered for 20 s; what it runs ends by itself",
        "exec: 1 of 3 places exited 0",
    ]
    killed = Over("node2", 137, signal=9)
    assert shell("--all", "--", "x", news=(*all_over()[:1], killed, silent)) == 137
    assert "137     node2   ended by signal 9" in shell.stderr.splitlines()
    assert shell("--all", "-v", "--", "x", news=all_over()) == 0
    assert shell.stderr.splitlines()[1] == "0       node[1-2,10]"


def test_a_user_is_told_of_the_places_that_began_as_that_user(shell: Shell) -> None:
    silent = Over("node10", 125, why="it has not answered for 20 s; what it runs ends by itself")
    began = (Began("node2", "ray"), Began("node1", "root"))
    shell("--all", "--", "x", news=(*began, silent, *all_over()[:2]))
    assert shell.stderr.splitlines()[:2] == ["exec: as ray@node2", "exec: as root@node1"]
    shell("--all", "--", "x", news=(*(Began(name, "ray") for name in THREE), *all_over()))
    assert shell.stderr == "exec: as ray@node[1-2,10]\n"


def test_what_is_not_as_it_should_be_is_told(shell: Shell) -> None:
    news = (Began("node1", "root"), Began("node2", "ray", "without the environment of its shell: …"))
    shell("--all", "--", "x", news=news + all_over())
    assert shell.stderr.splitlines() == [
        "exec: node2: without the environment of its shell: …",
        "exec: as root@node1",
        "exec: as ray@node2",
    ]


def test_json_is_one_document(shell: Shell) -> None:
    news = wrote(node1=b"caf\xc3\xa9\n") + all_over(node2=2)
    assert shell("--all", "--json", "--", "x", news=news) == 2
    document = json.loads(shell.stdout)
    assert document["status"] == 2
    assert [place["name"] for place in document["places"]] == ["node1", "node2", "node10"]
    assert document["places"][0] == {
        "name": "node1",
        "user": "root",
        "status": 0,
        "code": 0,
        "signal": None,
        "why": None,
        "output": "café\n",
    }
    assert shell.stderr == ""


def test_where_it_failed_is_remembered_and_nothing_else(shell: Shell) -> None:
    shell("--all", "--", "secret", news=all_over(node2=1, node10=1))
    memory = shell.home / "exec-failed.json"
    assert json.loads(memory.read_text()) == {"job": None, "failed": ["node2", "node10"]}
    assert memory.stat().st_mode & 0o777 == 0o600
    assert shell("--rerun-failed", "--", "x", news=all_over()[1:], places=THREE[1:]) == 0
    assert shell.asked[0] == Target(nodes=("node2", "node10"), absent_too=True)
    assert shell("--rerun-failed", "--", "x") == 2
    assert "nothing has failed" in shell.stderr
    shell("--job", "digits-ab12cd", "--", "x", news=(Over("worker-0", 1, 1),), places=("worker-0",))
    shell("--rerun-failed", "--", "x")
    assert shell.asked[0] == Target(job="digits-ab12cd", instances=("worker-0",))


def test_a_script_goes_as_its_bytes(shell: Shell, tmp_path: Path) -> None:
    script = tmp_path / "a b.sh"
    script.write_bytes(b"#!/bin/sh\necho \xff\n")
    news = all_over()
    assert (
        shell(
            "--all",
            "--root",
            "--timeout",
            "9",
            "--parallel",
            "2",
            "--script",
            str(script),
            "--",
            "a b",
            news=news,
        )
        == 0
    )
    command = Command(("a b",), b"#!/bin/sh\necho \xff\n", timeout_s=9, root=True)
    assert shell.asked == (Target(all=True), command, 2)
    assert shell("--all", "--script", "/no/such") == 2
    assert "--script: /no/such: No such file or directory" in shell.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "say where: exactly one of --nodes, --group, --all, --job and --rerun-failed"),
        (("--all", "--nodes", "a"), "say where: exactly one of"),
        (("--nodes", " , "), "--nodes: must name something"),
        (("--all", "--timeout", "0"), "--timeout: must be above 0, got 0"),
        (("--all", "--parallel", "0"), "--parallel: must be at least 1, got 0"),
        (("--all", "--group", "worker"), "say where: exactly one of"),
        (("--all", "--instance", "worker-0"), "--instance is of a job: name it with --job, too"),
        (("--job", "x", "--group", "a", "--instance", "b"), "give --instance or --group, not both"),
        (("--job", "x", "--root"), "--root is for nodes: in a job everything runs as its start command does"),
        (("--rerun-failed", "--group", "worker"), "say where: exactly one of"),
        (
            ("--rerun-failed", "--instance", "worker-0"),
            "--rerun-failed says by itself where: leave --instance out",
        ),
    ],
)
def test_a_wrong_call_starts_nothing(shell: Shell, arguments: tuple[str, ...], said: str) -> None:
    assert shell(*arguments, "--", "true") == 2
    assert said in shell.stderr
    assert all(name != "execute" for name, _ in shell.client.calls)


def test_a_command_is_needed(shell: Shell) -> None:
    assert shell("--all") == 2
    assert "name a command after `--`, such as `-- nvidia-smi -L`, or a file with --script" in shell.stderr


def test_bytes_pass_as_they_are_without_names() -> None:
    lines = Lines("")
    assert (lines.feed(b"\xff\x00 no end"), lines.close()) == (b"\xff\x00 no end", b"")


def test_an_endless_line_comes_in_pieces_and_loses_nothing() -> None:
    lines = Lines("a: ")
    shown = lines.feed(b"x" * (2 * LONGEST_LINE_BYTES + 5)) + lines.close()
    assert shown.count(b"x") == 2 * LONGEST_LINE_BYTES + 5
    assert [len(line) - 3 for line in shown.splitlines()] == [LONGEST_LINE_BYTES, LONGEST_LINE_BYTES, 5]
