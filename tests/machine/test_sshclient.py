"""Our own client against a real endpoint."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raycontrol import sshd
from raycontrol.sshclient import Refused, parse
from tests.machine.ssh_sites import IP, Site, open_site
from tests.support import wait_until

EVERY_BYTE = bytes(range(256)) * 300


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with open_site(tmp_path) as opened:
        yield opened.serve()


def argv(site: Site, *arguments: str) -> list[str]:
    return [sys.executable, "-I", "-m", "raycontrol.sshclient", str(site.folder), *arguments]


def ssh(site: Site, *arguments: str, input: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(argv(site, *arguments), input=input, capture_output=True, timeout=60, check=False)


def popen(site: Site, *arguments: str, **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv(site, *arguments), **more)


# The command line.


@pytest.mark.parametrize(
    ("words", "host", "user", "command"),
    [
        (["10.0.0.1", "prted", "-mca", "a b"], "10.0.0.1", None, "prted -mca a b"),
        (["-x", "-T", "-n", "-q", "-vvv", "-4", "-A", "-a", "-t", "host", "true"], "host", None, "true"),
        (["-xTq", "-p", "2222", "-p22", "me@host", "--", "-odd"], "host", "me", "-odd"),
        (["-l", "me", "host", "-p", "22", "--", "ls", "-l"], "host", "me", "ls -l"),
        (["-o", "StrictHostKeyChecking=no", "-oBatchMode yes", "host", "ls", "-l"], "host", None, "ls -l"),
        (["-F", "/etc/x", "-i", "key", "host", "rsync", "--server"], "host", None, "rsync --server"),
        (["user@domain@host"], "host", "user@domain", None),
    ],
)
def test_command_lines_of_launchers(words: list[str], host: str, user: str | None, command: str | None):
    call = parse(words)
    assert (call.host, call.user, call.command) == (host, user, command)


def test_what_it_takes_from_options():
    assert parse(["-n", "h"]).no_input
    assert not parse(["h"]).no_input
    assert parse(["-o", "SetEnv=RAYCONTROL_WORLD=2", "h"]).environment == {"RAYCONTROL_WORLD": "2"}
    assert parse(["-o", "setenv A='x y' B=1", "h"]).environment == {"A": "x y", "B": "1"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "usage: ssh [OPTION...] [USER@]HOST [COMMAND [ARGUMENT...]]"),
        (["-l"], "option -l needs a value"),
        (["-L", "1:a:2", "h"], "option -L is not known to raycontrol's own client; install OpenSSH's for it"),
        (["-s", "h", "sftp"], "option -s is not known to raycontrol's own client; install OpenSSH's for it"),
        (["-o", "SetEnv=A='x", "h"], "option SetEnv cannot be read: No closing quotation"),
    ],
)
def test_what_it_cannot_do_it_says(words: list[str], text: str):
    with pytest.raises(Refused) as refused:
        parse(words)
    assert str(refused.value) == text


# Commands.


@pytest.mark.parametrize("code", [0, 3, 255])
def test_streams_and_exit_codes_pass(site: Site, code: int):
    ran = ssh(site, "-x", "root@worker-0", f"cat; echo problem >&2; exit {code}", input=EVERY_BYTE)
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, EVERY_BYTE, b"problem\n")


def test_a_signal_is_255(site: Site):
    ran = ssh(site, IP, "kill -9 $$")
    assert (ran.returncode, ran.stderr) == (255, b"")


def test_words_are_joined_with_spaces(site: Site):
    assert ssh(site, IP, "echo", "a  b", "'c  d'").stdout == b"a b c  d\n"


def test_without_a_command_there_is_advice(site: Site):
    ran = ssh(site, IP)
    assert (ran.returncode, b"runs commands only" in ran.stderr) == (1, True)


def test_the_world_is_passed(site: Site):
    ran = ssh(site, "-o", "SetEnv=RAYCONTROL_WORLD=4", IP, "echo $RAYCONTROL_WORLD")
    assert ran.stdout == b"4\n"


def test_that_somebody_inside_began_it_is_passed(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAYCONTROL_INSIDE", "shell")
    assert ssh(site, IP, "echo $RAYCONTROL_INSIDE").stdout == b"shell\n"


def test_30_mb_pass_both_ways_unchanged(site: Site):
    data = os.urandom(1_000_003) * 30
    ran = ssh(site, IP, "tee /dev/stderr", input=data)
    assert ran.returncode == 0
    here = hashlib.sha256(data).digest()
    assert [hashlib.sha256(output).digest() for output in (ran.stdout, ran.stderr)] == [here, here]


def test_the_end_of_the_input_is_seen_while_output_goes_on(site: Site):
    ran = ssh(site, IP, "cat > /dev/null; head -c 3000000 /dev/zero", input=EVERY_BYTE)
    assert (ran.returncode, len(ran.stdout)) == (0, 3_000_000)


def test_it_ends_with_the_command_though_its_own_input_goes_on(site: Site):
    with popen(
        site, IP, "read line; echo got $line; exit 6", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as client:
        assert client.stdin is not None and client.stdout is not None
        client.stdin.write(b"one\n")
        client.stdin.flush()
        assert client.stdout.read() == b"got one\n"
        assert client.wait(20) == 6


def test_no_input_is_taken_with_n(site: Site):
    assert ssh(site, "-n", IP, "cat; echo end", input=EVERY_BYTE).stdout == b"end\n"


def test_streams_that_do_not_block_are_waited_for(site: Site):
    data = os.urandom(3_000_000)
    stdin, ours = os.pipe()
    theirs, stdout = os.pipe()
    for descriptor in (stdin, stdout):
        os.set_blocking(descriptor, False)
    client = popen(site, IP, "cat", stdin=stdin, stdout=stdout)
    os.close(stdin)
    os.close(stdout)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=ours) as slow:
        os.close(ours)
        assert slow.stdin is not None
        reader = subprocess.Popen(["sha256sum"], stdin=theirs, stdout=subprocess.PIPE)
        os.close(theirs)
        slow.stdin.write(data)
        slow.stdin.close()
        assert reader.communicate(timeout=30)[0].split()[0].decode() == hashlib.sha256(data).hexdigest()
    assert client.wait(20) == 0


# What goes wrong.


def test_a_host_that_is_not_of_the_job(site: Site):
    ran = ssh(site, "example.org", "true")
    assert ran.returncode == 255
    assert ran.stderr == (
        b"ssh: example.org is not a host of this job (they are worker-0), and there is no ssh client here for others\n"
    )


def test_another_host_key_is_not_trusted(site: Site, tmp_path: Path):
    site.write_files(sshd.make_keys(tmp_path / "other").host)
    ran = ssh(site, IP, "touch $FLAGS/came-in")
    assert (ran.returncode, b"Host key is not trusted" in ran.stderr) == (255, True)
    assert not (site.flags / "came-in").exists()


def test_nobody_answers(site: Site):
    site.play(site.endpoint.close())
    ran = ssh(site, IP, "true")
    assert (ran.returncode, ran.stderr.startswith(b"ssh: no connection to worker-0 (127.0.0.1 port ")) == (
        255,
        True,
    )


def test_a_connection_that_is_lost(site: Site):
    with popen(site, IP, "touch $FLAGS/on; sleep 1000", stderr=subprocess.PIPE) as client:
        site.flagged("on")
        for connection in tuple(site.endpoint._connections):
            site._loop.call_soon_threadsafe(connection.abort)
        _, stderr = client.communicate(timeout=20)
        assert (client.returncode, stderr.startswith(b"ssh: the connection to worker-0")) == (255, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_that_ends_it_ends_the_command(site: Site, number: int):
    with popen(site, IP, "touch $FLAGS/on; sleep 1000", stdin=subprocess.PIPE) as client:
        site.flagged("on")
        client.send_signal(number)
        assert client.wait(20) == (255 if number != signal.SIGKILL else -9)
        site.idle()
        assert site.left() == []


def test_an_output_that_nobody_reads_ends_it(site: Site):
    with popen(site, IP, "yes", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as client:
        assert client.stdout is not None and client.stderr is not None
        client.stdout.read(10)
        client.stdout.close()
        assert client.wait(20) == 255
        assert client.stderr.read() == b"ssh: output cannot be written: Broken pipe\n"
    site.idle()
    wait_until(lambda: site.left() == [], 10, "the end of the command")
