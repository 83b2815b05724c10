"""The generated ``ssh``, ``scp`` and ``sftp``: which call goes to the job's instances, how, and what OpenSSH makes of the configuration."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from raycontrol.backends import ssh
from raycontrol.plan import Facts
from raycontrol.spec import JobSpec, Mode, members

GANG = members(JobSpec(name="job", mode=Mode.MPI, command="true", nodes=3))
ODD_FOLDERS = [
    "plain",
    "with  spaces",
    "with'quote",
    'with"quote',
    "with$dollar",
    "with%h",
    "back\\slash",
    "`tick`",
]
real_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="no OpenSSH client on this machine")


@dataclass(frozen=True)
class Launcher:
    """The files of launcher-0 and, on PATH behind them, programs that print the words they are given."""

    private: Path
    path: str

    def run(self, program: str, *words: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PATH": self.path if path is None else path}
        return subprocess.run(
            [str(self.private / "bin" / program), *words],
            capture_output=True,
            text=True,
            timeout=20,
            env=environ,
        )

    def words(self, program: str, *words: str, path: str | None = None) -> list[str]:
        """What the program behind the stand-in is given."""
        done = self.run(program, *words, path=path)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    def job(self, port: str | None) -> list[str]:
        """The options by which the job's own configuration rules."""
        options = ["-F", f"{self.private}/ssh/config", "-o", "StrictHostKeyChecking=yes"]
        folder = str(self.private).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
        keys = ["-o", f'IdentityFile="{folder}/ssh/login_key"']
        hosts = ["-o", f'UserKnownHostsFile="{folder}/ssh/known_hosts"']
        return [*options, *keys, *hosts, *(("-o", f"Port={port}") if port else ())]


def launcher(top: Path, folder: str = "private", python: str = sys.executable) -> Launcher:
    private = top / folder / "launcher-0"
    facts = (
        fact("launcher-0", "10.0.0.1", "VM-0-1-ubuntu", "2201", private_dir=str(private), python=python),
        fact("worker-0", "10.0.0.2", "VM-0-2-ubuntu", "2202"),
        fact("worker-1", "fd00::3", "node3", "2203"),
    )
    for name, text in ssh.files(GANG, facts)["launcher-0"].items():
        file = private / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    real = top / "real"
    real.mkdir(exist_ok=True)
    for program in ("ssh", "scp", "sftp"):
        (real / program).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        (real / program).chmod(0o755)
    return Launcher(private, f"{private}/bin:{real}:/usr/bin:/bin")


def fact(
    instance: str, ip: str, node: str, port: str, private_dir: str = "/other", python: str = ""
) -> Facts:
    return Facts(
        *(instance, ip, node, {"ssh": port}),
        private_dir=private_dir,
        python=python,
        login_key=f"ssh-ed25519 LOGIN-{instance}",
        host_key=f"ssh-ed25519 HOST-{instance}",
    )


@pytest.fixture
def own(tmp_path: Path) -> Launcher:
    return launcher(tmp_path)


# Whose call it is.


@pytest.mark.parametrize(
    ("line", "port"),
    [
        ("worker-0 true", "2202"),
        ("10.0.0.2 true", "2202"),
        ("VM-0-2-ubuntu true", "2202"),
        ("root@worker-0 true", "2202"),
        ("root@10.0.0.2", "2202"),
        ("fd00::3 true", "2203"),
        ("root@fd00::3 true", "2203"),
        ("launcher-0 ssh worker-0 true", "2201"),
        ("-x -p 22 10.0.0.2 prted", "2202"),
        ("-xp22 10.0.0.2 prted", "2202"),
        ("-o BatchMode=yes -oPort=22 -l worker-1 -i key worker-0 true", "2202"),
        ("-nT -- worker-0 true", "2202"),
    ],
)
def test_ssh_to_an_instance_by_any_of_its_names(own: Launcher, line: str, port: str) -> None:
    assert own.words("ssh", *line.split()) == [*own.job(port), *line.split()]


@pytest.mark.parametrize(
    "line",
    [
        "-o SendEnv=GIT_PROTOCOL git@github.com git-upload-pack",
        "other.example true",
        "other.example rsync --server . worker-0",
        "other.example echo root@worker-0",
        "-l worker-0 other.example",
        "-J worker-0 other.example",
        "-oProxyJump=x -NL worker-0 other.example",
        "worker-01 true",
        "worker true",
        "10.0.0.20",
        "-V",
        "",
    ],
)
def test_ssh_to_any_other_host_is_the_nodes_own(own: Launcher, line: str) -> None:
    assert own.words("ssh", *line.split()) == (line.split() or [""])


def test_words_reach_the_program_as_they_are(own: Launcher) -> None:
    words = ["worker-0", "echo", "", "a  b", "*", "$HOME", "`id`", "'q'", '"', "\\", "größe ☃"]
    assert own.words("ssh", *words) == [*own.job("2202"), *words]
    assert own.words("ssh", "other", *words[1:]) == ["other", *words[1:]]


def test_git_over_ssh_to_another_host(own: Launcher, tmp_path: Path) -> None:
    real = tmp_path / "real" / "ssh"
    real.write_text(real.read_text() + f'echo "$0 $*" > {tmp_path}/called\nexit 1\n')
    subprocess.run(
        ["git", "ls-remote", "git@git.example:worker-0"],
        env={"PATH": own.path, "HOME": str(tmp_path)},
        capture_output=True,
        timeout=20,
    )
    called = (tmp_path / "called").read_text()
    assert called.startswith(f"{real} ") and "git@git.example git-upload-pack 'worker-0'" in called
    assert str(own.private) not in called


@pytest.mark.parametrize(
    ("line", "port"),
    [
        ("model.pt worker-0:", "2202"),
        ("-r -P 22 root@10.0.0.2:/data/out .", "2202"),
        ("worker-0:/a/b@c /tmp", "2202"),
        ("root@[fd00::3]:/data .", "2203"),
        ("[fd00::3]:/data .", "2203"),
        ("-3 worker-0:a worker-0:b", "2202"),
        ("worker-0:a VM-0-2-ubuntu:b", "2202"),
        ("-3 worker-0:a worker-1:b", None),
    ],
)
def test_scp_from_and_to_instances(own: Launcher, line: str, port: str | None) -> None:
    assert own.words("scp", *line.split()) == [*own.job(port), *line.split()]


@pytest.mark.parametrize(
    "line", ["worker-0 other.example:", "-i worker-0 other.example:x .", "./worker-0 worker-1"]
)
def test_scp_elsewhere_is_the_nodes_own(own: Launcher, line: str) -> None:
    assert own.words("scp", *line.split()) == line.split()


@pytest.mark.parametrize(
    "where", ["worker-1", "root@worker-1", "worker-1:/data", "[fd00::3]", "root@[fd00::3]:/data"]
)
def test_sftp(own: Launcher, where: str) -> None:
    assert own.words("sftp", "-b", "worker-0", where) == [*own.job("2203"), "-b", "worker-0", where]
    assert own.words("sftp", "other.example") == ["other.example"]


# Where the programs are.


@pytest.mark.parametrize("folder", ODD_FOLDERS)
def test_the_instances_folder_may_have_any_name(tmp_path: Path, folder: str) -> None:
    own = launcher(tmp_path, folder)
    assert own.words("ssh", "worker-0", "true") == [*own.job("2202"), "worker-0", "true"]
    assert own.words("scp", "a", "worker-0:") == [*own.job("2202"), "a", "worker-0:"]


def test_stand_ins_are_not_taken_for_the_program(own: Launcher, tmp_path: Path) -> None:
    other = launcher(tmp_path, "another job's")
    link = tmp_path / "link"
    link.symlink_to(other.private / "bin")
    (tmp_path / "odd" / "ssh").mkdir(parents=True)
    ahead = f"{own.private}/bin/:{own.private}/../launcher-0/bin:{other.private}/bin:{link}:{tmp_path}/odd:/no*such"
    assert own.words("ssh", "other", path=f"{ahead}:{own.path}") == ["other"]


def test_without_a_client_on_the_node_ours_is_executed(tmp_path: Path) -> None:
    python = tmp_path / "my python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    own = launcher(tmp_path, "it's", python=str(python))
    for host in ("worker-0", "other.example"):
        words = own.words("ssh", host, "echo a  b", path=f"{own.private}/bin")
        assert words == ["-I", "-m", "raycontrol.sshclient", str(own.private), host, "echo a  b"]
    done = own.run("scp", "a", "worker-0:", path=f"{own.private}/bin")
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr == "raycontrol: scp is not installed on this node; only ssh works without it\n"


def test_our_client_knows_the_jobs_hosts_only(own: Launcher) -> None:
    done = own.run("ssh", "other.example", "true", path=f"{own.private}/bin")
    assert done.returncode == 255
    assert done.stderr == (
        "ssh: other.example is not a host of this job (they are launcher-0, worker-0, worker-1), and there is no ssh "
        "client here for others\n"
    )


# What OpenSSH makes of it.


def settled(own: Launcher, *words: str) -> dict[str, str]:
    """The configuration that the node's own OpenSSH arrives at."""
    done = own.run("ssh", "-G", *words, path="/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


@real_ssh
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("worker-0", ("10.0.0.2", "2202", "worker-0")),
        ("10.0.0.2", ("10.0.0.2", "2202", "worker-0")),
        ("VM-0-2-ubuntu", ("10.0.0.2", "2202", "worker-0")),
        ("fd00::3", ("fd00::3", "2203", "worker-1")),
        ("node3", ("fd00::3", "2203", "worker-1")),
        ("launcher-0", ("10.0.0.1", "2201", "launcher-0")),
    ],
)
def test_every_name_leads_to_the_instance_and_its_host_key(
    own: Launcher, name: str, expected: tuple[str, ...]
) -> None:
    for words in (
        (name,),
        ("-p", "22", f"root@{name}"),
        ("-o", "StrictHostKeyChecking=no", "-o", "Port=22", name),
    ):
        found = settled(own, *words, "true")
        assert (found["hostname"], found["port"], found["hostkeyalias"]) == expected
        assert found["stricthostkeychecking"] == "true"
        assert found["userknownhostsfile"] == f"{own.private}/ssh/known_hosts"
        assert found["identityfile"] == f"{own.private}/ssh/login_key"
        assert (found["identitiesonly"], found["batchmode"], found["forwardagent"]) == ("yes", "yes", "no")


@real_ssh
@pytest.mark.parametrize("folder", ODD_FOLDERS)
def test_keys_are_found_in_a_folder_of_any_name(tmp_path: Path, folder: str) -> None:
    own = launcher(tmp_path, folder)
    found = settled(own, "worker-0", "true")
    assert [Path(found[name].replace("%%", "%")) for name in ("identityfile", "userknownhostsfile")] == [
        own.private / "ssh" / "login_key",
        own.private / "ssh" / "known_hosts",
    ]


@real_ssh
def test_another_hosts_configuration_is_untouched(own: Launcher) -> None:
    found = settled(own, "git@github.com")
    assert (found["hostname"], found["port"]) == ("github.com", "22")
    assert str(own.private) not in str(found)
