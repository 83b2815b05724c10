"""The endpoint, used with the real clients of OpenSSH and rsync over this machine's own network."""

from __future__ import annotations

import asyncio
import hashlib
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from raycontrol import sshd, sshsession
from tests.machine.ssh_sites import IP, Site, open_site
from tests.support import wait_until

EVERY_BYTE = bytes(range(256)) * 300
BIG = 200_000_000
# Blocks of which no number fits into a packet, a window or a pipe: what is lost or comes twice shows in the hash.
MAKE_BIG = (
    f"{sys.executable} -I -c 'import random, sys; block = random.Random(1).randbytes(1_000_000); "
    "[sys.stdout.buffer.write(block) for _ in range(200)]'"
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with open_site(tmp_path) as opened:
        yield opened.serve()


# Keys.


def test_keys_are_made_once_and_nobody_else_can_read_them(tmp_path: Path):
    keys = sshd.make_keys(tmp_path / "ssh")
    assert sshd.make_keys(tmp_path / "ssh") == keys
    assert keys.login.startswith("ssh-ed25519 AAAA") and keys.host.startswith("ssh-ed25519 AAAA")
    assert keys.login.split()[1] != keys.host.split()[1]
    assert "\n" not in keys.login + keys.host
    assert stat.S_IMODE((tmp_path / "ssh").stat().st_mode) == 0o700
    files = sorted((tmp_path / "ssh").iterdir())
    assert [file.name for file in files] == ["host_key", "login_key"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    shown = subprocess.run(["ssh-keygen", "-y", "-f", files[1]], capture_output=True, text=True, check=True)
    assert shown.stdout.split()[:2] == keys.login.split()[:2]


# Who may come in, and for what.


def test_nobody_is_let_in_before_it_serves(tmp_path: Path):
    with open_site(tmp_path) as site:
        ran = site.ssh("true")
        assert (ran.returncode, b"Permission denied (publickey)" in ran.stderr) == (255, True)
        site.serve()
        assert site.ssh("true").returncode == 0


def test_another_key_is_refused(site: Site, tmp_path: Path):
    sshd.make_keys(tmp_path / "other")
    ran = site.ssh("true", input=b"")
    assert ran.returncode == 0
    (site.folder / "ssh" / "login_key").write_bytes((tmp_path / "other" / "login_key").read_bytes())
    ran = site.ssh("touch $FLAGS/came-in")
    assert (ran.returncode, b"Permission denied (publickey)" in ran.stderr) == (255, True)
    assert not (site.flags / "came-in").exists()


def test_a_client_does_not_trust_another_host_key(site: Site, tmp_path: Path):
    site.write_files(sshd.make_keys(tmp_path / "other").host)
    ran = site.ssh("touch $FLAGS/came-in")
    assert (ran.returncode, b"Host key verification failed" in ran.stderr) == (255, True)
    assert not (site.flags / "came-in").exists()


@pytest.mark.parametrize("user", ["root", "nobody", "żółć"])
def test_any_user_name_is_the_same_user(site: Site, user: str):
    assert site.ssh("-l", user, "id -u").stdout == b"%d\n" % os.geteuid()


def test_a_shell_without_a_command_is_answered_with_advice(site: Site):
    ran = site.ssh()
    assert (ran.returncode, ran.stdout) == (1, b"")
    assert ran.stderr.decode().splitlines()[-1] == (
        "raycontrol ssh: this endpoint runs commands only, without a terminal; give one: ssh HOST COMMAND [ARGUMENT...]"
    )


def test_there_is_no_terminal_no_agent_and_no_display(site: Site):
    environment = {**os.environ, "DISPLAY": ":7", "SSH_AUTH_SOCK": "/nowhere"}
    ran = site.ssh("-A", "-X", "tty; echo agent=$SSH_AUTH_SOCK display=$DISPLAY", env=environment)
    assert ran.stdout == b"not a tty\nagent= display=\n"
    ran = site.ssh("-tt", "touch $FLAGS/came-in")
    assert (ran.returncode, b"PTY allocation request failed" in ran.stderr) == (255, True)


def test_nothing_is_forwarded(site: Site):
    listener = socket.create_server((IP, 0))
    port = listener.getsockname()[1]
    with listener:
        ran = subprocess.run(site.argv("-W", f"{IP}:{port}", "host"), capture_output=True, timeout=30)
        assert (ran.returncode, b"forwarding failed" in ran.stderr) == (255, True)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    for remote in (f"0:{IP}:{port}", f"{site.folder}/remote.sock:{IP}:{port}"):
        ran = site.ssh("-o", "ExitOnForwardFailure=yes", "-R", remote, "touch $FLAGS/came-in")
        assert (ran.returncode, b"remote port forwarding failed" in ran.stderr) == (255, True)
    assert not (site.flags / "came-in").exists()


# Bytes.


def test_outputs_are_apart_and_input_is_unchanged(site: Site):
    ran = site.ssh("cat; echo problem >&2; pwd", input=EVERY_BYTE)
    assert ran.stdout == EVERY_BYTE + f"{site.code}\n".encode()
    assert (ran.returncode, ran.stderr) == (0, b"problem\n")


def test_200_mb_of_output_arrive_unchanged(site: Site):
    here = hashed(["bash", "-c", MAKE_BIG])
    before, cpu = time.monotonic(), time.process_time()
    assert hashed(site.argv("host", MAKE_BIG)) == here
    seconds, cpu = time.monotonic() - before, time.process_time() - cpu
    print(
        f"200 MB of output: {BIG / 1e6 / seconds:.0f} MB/s, {cpu:.2f} CPU seconds of the endpoint and the hash"
    )


def test_200_mb_of_input_arrive_unchanged(site: Site):
    here = hashed(["bash", "-c", MAKE_BIG])
    ran = subprocess.run(
        ["bash", "-c", f'{MAKE_BIG} | "$@"', "bash", *site.argv("host", "sha256sum")],
        capture_output=True,
        timeout=60,
    )
    assert ran.stdout.split()[0].decode() == here


def hashed(argv: list[str]) -> str:
    """The SHA-256 of a command's output."""
    digest = hashlib.sha256()
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        while data := running.stdout.read1(1 << 18):
            digest.update(data)
    assert running.returncode == 0
    return digest.hexdigest()


def test_both_ways_at_once_through_new_keys_every_few_megabytes(site: Site):
    data = os.urandom(1 << 20) * 20
    ran = site.ssh("-o", "RekeyLimit=3M", "tee /dev/stderr", input=data)
    assert (ran.returncode, ran.stdout == data, ran.stderr == data) == (0, True, True)


def test_the_end_of_the_input_is_seen_while_output_goes_on(site: Site):
    ran = site.ssh("cat > /dev/null; head -c 3000000 /dev/zero", input=EVERY_BYTE)
    assert (ran.returncode, len(ran.stdout)) == (0, 3_000_000)


def test_the_end_of_the_outputs_is_seen_while_the_command_goes_on(site: Site):
    with site.popen(
        "exec >&- 2>&-; read line; exit 5", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as client:
        assert client.stdin is not None and client.stdout is not None
        assert client.stdout.read() == b""
        assert client.poll() is None
        client.stdin.write(b"go on\n")
        client.stdin.close()
        assert client.wait(20) == 5


def test_a_command_that_does_not_read_its_input_ends_as_it_likes(site: Site):
    assert site.ssh("exec <&-; echo on; exit 4", input=bytes(10_000_000)).returncode == 4
    assert site.ssh("exit 3", input=bytes(10_000_000)).returncode == 3


def test_a_slow_reader_holds_the_command_back_and_loses_nothing(site: Site):
    with site.popen("head -c 20000000 /dev/zero && touch $FLAGS/written", stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        first = client.stdout.read(1)
        wait_until(lambda: waiting_in_a_write(site), 20, "a writer that waits")
        assert not (site.flags / "written").exists()
        assert len(first + client.stdout.read()) == 20_000_000
        assert client.wait(20) == 0


def waiting_in_a_write(site: Site) -> bool:
    wchans = [Path(f"/proc/{pid}/wchan").read_text() for pid in site.left()]
    return any("pipe_write" in wchan for wchan in wchans) or (
        set(wchans) <= {"0", ""} and bool(wchans)  # a kernel that does not tell
    )


def test_what_a_command_leaves_behind_is_ended_with_it(site: Site):
    before = time.monotonic()
    ran = site.ssh("trap '' TERM; sleep 1000 & echo done")
    assert (ran.returncode, ran.stdout) == (0, b"done\n")
    assert time.monotonic() - before < 20
    site.idle()
    assert site.left() == []


# Ends.


@pytest.mark.parametrize("code", [0, 3, 255])
def test_exit_codes_pass(site: Site, code: int):
    assert site.ssh(f"exit {code}").returncode == code


def test_a_signal_is_no_exit_code(site: Site):
    assert site.ssh("kill -9 $$").returncode == 255

    async def story() -> None:
        async with connected(site) as connection:
            for name, number in (("KILL", 9), ("SEGV", 11), ("TERM", 15)):
                ran = await connection.run(f"kill -{number} $$")
                assert (ran.exit_status, ran.exit_signal[0]) == (-1, name)

    asyncio.run(story())


def connected(site: Site, **more: Any) -> Any:
    return asyncssh.connect(
        IP,
        site.port,
        known_hosts=asyncssh.import_known_hosts(f"[{IP}]:{site.port} {site.keys.host}\n"),
        client_keys=[str(site.folder / "ssh" / "login_key")],
        config=None,
        **more,
    )


def test_a_command_that_cannot_be_started_says_why(site: Site):
    ran = site.ssh("no bash")
    assert (ran.returncode, ran.stderr) == (127, b"raycontrol ssh: /no/such/bash: no such file\n")
    ran = site.ssh("no start")
    assert ran.returncode == 255
    assert ran.stderr == b"raycontrol ssh: the command could not be started: the disk is full\n"
    ran = site.ssh("no-such-program")
    assert (ran.returncode, b"no-such-program: command not found" in ran.stderr) == (127, True)


def test_a_clients_signals_reach_the_command(site: Site):
    async def story() -> None:
        async with connected(site) as connection:
            ran = await connection.create_process("trap 'exit 9' USR1; echo on; while :; do sleep 0.05; done")
            assert await ran.stdout.readline() == "on\n"
            ran.send_signal("USR1")
            ended = await ran.wait()
            assert ended.exit_status == 9

    asyncio.run(story())


def test_a_client_sets_what_it_belongs_to_and_the_language_and_nothing_else(site: Site):
    ran = site.ssh(
        "-o",
        "SetEnv=RAYCONTROL_WORLD=3 RAYCONTROL_INSIDE=exec LC_ALL=C LANG=de_DE.UTF-8 LD_PRELOAD=/x INDEX=7",
        "echo $RAYCONTROL_WORLD $LC_ALL $LANG -$INDEX-",
    )
    assert ran.stdout == b"3 C de_DE.UTF-8 --\n"
    assert dict(site.seen[-1]) == {
        "RAYCONTROL_WORLD": "3",
        "RAYCONTROL_INSIDE": "exec",
        "LC_ALL": "C",
        "LANG": "de_DE.UTF-8",
    }


def test_a_hundred_commands_at_once(site: Site):
    before, cpu = time.monotonic(), time.process_time()
    clients = [site.popen(f"sleep 1; exit {i}", stdin=subprocess.DEVNULL) for i in range(100)]
    assert [client.wait(60) for client in clients] == list(range(100))
    seconds, cpu = time.monotonic() - before, time.process_time() - cpu
    print(f"100 commands of a second each: {seconds:.1f} s, {cpu:.2f} CPU seconds of the endpoint")
    site.idle()


# Lost clients.

TREE = "trap '' TERM HUP; setsid sleep 1000 & (sleep 1000 &) ; touch $FLAGS/on; "


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_tree_of_a_lost_client_is_killed(site: Site, number: int):
    client = site.popen(TREE + "sleep 1000", stdin=subprocess.DEVNULL)
    site.flagged("on")
    client.send_signal(number)
    client.wait(20)
    site.idle()
    assert site.left() == []
    assert site.broken == []


def test_a_peer_that_is_cut_off_silently_is_noticed(tmp_path: Path):
    with open_site(tmp_path, silence_s=1.0) as site:
        site.serve()
        client = site.popen("-o", "SetEnv=RAYCONTROL_WORLD=1", TREE + "cat", stdin=subprocess.PIPE)
        site.flagged("on")
        try:
            client.send_signal(signal.SIGSTOP)
            site.idle()
            assert site.left() == []
            assert site.broken == [f"the ssh connection from {IP} was lost while `trap …` ran"]
        finally:
            client.kill()
            client.communicate()


def test_a_closed_channel_of_a_living_connection_ends_its_command_even_if_it_does_not_read(tmp_path: Path):
    # OpenSSH closes the channel of a killed second client when something wakes its first: our next sign of life.
    with tempfile.TemporaryDirectory() as short, open_site(tmp_path, silence_s=3.0) as site:
        site.serve()
        shared = ("-o", f"ControlPath={short}/s")
        master = site.popen(
            "-M", *shared, "touch $FLAGS/one; cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        site.flagged("one")
        client = site.popen(*shared, "touch $FLAGS/two; sleep 1000", stdin=subprocess.PIPE)
        site.flagged("two")
        assert client.stdin is not None
        fill(client.stdin.fileno())
        assert site.endpoint.sessions == 2
        client.kill()
        client.wait()
        wait_until(lambda: site.endpoint.sessions == 1, 20, "the end of the second command")
        assert master.communicate(b"still here\n", timeout=20)[0] == b"still here\n"
        assert master.returncode == 0


def fill(pipe: int) -> None:
    """Write until nothing is taken any more: not by the pipe, nor by the client, nor by the endpoint."""
    os.set_blocking(pipe, False)
    while select.select([], [pipe], [], 1.0)[1]:
        os.write(pipe, bytes(65536))


def test_no_input_is_cut_short_when_the_connection_is_lost(site: Site):
    """A command must not take a lost connection for the end of its data."""
    with site.popen("cat > part && mv part whole; touch $FLAGS/ended", stdin=subprocess.PIPE) as client:
        assert client.stdin is not None
        client.stdin.write(bytes(1_000_000))
        client.stdin.flush()
        wait_until(lambda: size(site.code / "part") > 500_000, 20, "the first bytes")
        client.kill()
    site.idle()
    assert not (site.code / "whole").exists()
    assert not (site.flags / "ended").exists()


def size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


# What an MPI launcher's commands report.

WORLD = ("-o", "SetEnv=RAYCONTROL_WORLD=1")


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("TOKEN=hunter2 prted --key hunter2", "an MPI daemon (prted …) ended with exit code 127"),
        ("exit 3", "an MPI daemon (exit …) ended with exit code 3"),
        ("kill -9 $$", "an MPI daemon (kill …) was ended by SIGKILL while its world ran"),
        ("no start", "an MPI daemon (no …) could not be started"),
    ],
)
def test_an_abnormal_end_is_reported_once_without_the_arguments(site: Site, command: str, text: str):
    site.ssh(*WORLD, command)
    site.idle()
    assert site.broken == [text]


def test_a_lost_connection_is_reported(site: Site):
    client = site.popen(
        *WORLD, "touch $FLAGS/on; exec sleep 1000 --hunter2 2>/dev/null", stdin=subprocess.DEVNULL
    )
    site.flagged("on")
    client.kill()
    client.wait()
    site.idle()
    wait_until(lambda: len(site.broken) == 1, 10, "a report")


def test_a_good_end_and_commands_of_people_are_not_reported(site: Site):
    site.ssh(*WORLD, "true")
    site.ssh("exit 3")
    site.ssh("kill -9 $$")
    site.idle()
    assert site.broken == []


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("prted -mca a b", "prted"),
        ("PATH=/x:$PATH ; export PATH ; LD_LIBRARY_PATH=/x ; /opt/mpi/bin/prted --key k", "prted"),
        ("( test ! -r ./.profile || . ./.profile; /usr/bin/orted )", "orted"),
        ('"/opt/my mpi/bin/hydra_pmi_proxy" --pmi-secret s', "hydra_pmi_proxy"),
        ("A='a secret' /bin/train --token t", "train"),
        ("TOKEN=a{secret} train", "train"),
        ("'odd name' --token secret", "a command"),
        ("it's", "a command"),
        ("", "a command"),
    ],
)
def test_only_the_programs_name_is_told(command: str, name: str):
    assert sshsession.program_name(command) == name


# The end.


def test_drain_waits_then_kills_and_takes_no_new_command(site: Site):
    short = site.popen("-n", "touch $FLAGS/a; until [ -e $FLAGS/go ]; do sleep 0.05; done; exit 6")
    long = site.popen("-n", *WORLD, TREE + "sleep 1000", stderr=subprocess.PIPE)
    site.flagged("a")
    site.flagged("on")
    draining = asyncio.run_coroutine_threadsafe(site.endpoint.drain(3, "the job stops"), site._loop)
    wait_until(lambda: site.endpoint._service.closing, 5, "the drain")
    ran = site.ssh("true")
    assert (ran.returncode, ran.stderr) == (255, b"raycontrol ssh: no new commands: the job stops\n")
    (site.flags / "go").touch()
    assert short.wait(20) == 6
    draining.result(20)
    assert site.endpoint.sessions == 0
    assert site.left() == []
    assert (long.wait(20), long.communicate()[1]) == (255, b"raycontrol ssh: the job stops\n")
    assert site.broken == []


def test_drain_is_not_held_up_by_a_client_that_takes_no_output(site: Site):
    with site.popen("touch $FLAGS/on; cat /dev/zero", stdout=subprocess.PIPE) as client:
        site.flagged("on")
        wait_until(lambda: waiting_in_a_write(site), 20, "a writer that waits")
        site.play(site.endpoint.drain(0, "the job stops"))
        assert site.left() == []
        client.kill()


def test_close_kills_and_listens_no_more(site: Site):
    client = site.popen("-n", *WORLD, TREE + "sleep 1000", stderr=subprocess.DEVNULL)
    site.flagged("on")
    site.play(site.endpoint.close())
    assert site.left() == []
    assert client.wait(20) == 255
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((IP, site.port), timeout=5)
    site.play(site.endpoint.close())
    assert site.broken == []


def test_an_endpoint_that_was_never_opened_closes(tmp_path: Path):
    async def story() -> None:
        sshd.make_keys(tmp_path)
        endpoint = sshd.Endpoint(tmp_path, None, lambda text: None)
        await endpoint.drain(1, "nothing was opened")
        await endpoint.close()

    asyncio.run(story())


def test_it_keeps_no_descriptor_of_commands_that_ended(site: Site):
    site.ssh("true")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for command in ("true", "kill -9 $$", "no bash", "no start", "head -c 1000000 /dev/zero"):
        site.ssh(command, input=EVERY_BYTE)
    site.idle()
    wait_until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before, 10, "closed descriptors")


# Files.


@pytest.mark.parametrize("old", [(), ("-O",)], ids=["sftp", "old protocol"])
def test_scp_copies_both_ways(site: Site, tmp_path: Path, old: tuple[str, ...]):
    (tmp_path / "here").write_bytes(EVERY_BYTE * 20)
    for source, target in ((f"{tmp_path}/here", "host:there"), ("host:there", f"{tmp_path}/back")):
        ran = subprocess.run(
            site.argv("-q", *old, source, target, program="scp"), capture_output=True, timeout=30
        )
        assert (ran.returncode, ran.stderr) == (0, b"")
    assert (site.code / "there").read_bytes() == (tmp_path / "back").read_bytes() == EVERY_BYTE * 20
    ran = subprocess.run(
        site.argv(*old, "host:absent", f"{tmp_path}/x", program="scp"), capture_output=True, timeout=30
    )
    assert (ran.returncode, b"No such file" in ran.stderr) == (1, True)
    site.idle()


def test_scp_copies_folders_and_keeps_modes(site: Site, tmp_path: Path):
    folder = tmp_path / "tree" / "sub"
    folder.mkdir(parents=True)
    (folder / "run me").write_text("x")
    (folder / "run me").chmod(0o755)
    ran = subprocess.run(site.argv("-rpq", str(tmp_path / "tree"), "host:.", program="scp"), timeout=30)
    assert ran.returncode == 0
    copied = site.code / "tree" / "sub" / "run me"
    assert (copied.read_text(), stat.S_IMODE(copied.stat().st_mode)) == ("x", 0o755)


def test_sftp_lists_and_copies_from_the_working_directory(site: Site, tmp_path: Path):
    (site.code / "data").mkdir()
    (site.code / "data" / "x").write_text("hello")
    batch = f"pwd\ncd data\nget x {tmp_path}/x\nput {tmp_path}/x y\nrename y z\nls -1\n"
    ran = subprocess.run(
        site.argv("-b", "-", "host", program="sftp"), input=batch, text=True, capture_output=True, timeout=30
    )
    assert ran.returncode == 0, ran.stderr
    assert f"Remote working directory: {site.code}" in ran.stdout
    assert (tmp_path / "x").read_text() == (site.code / "data" / "z").read_text() == "hello"


def test_rsync_copies_both_ways(site: Site, tmp_path: Path):
    source = tmp_path / "from" / "sub"
    source.mkdir(parents=True)
    for i in range(20):
        (source / f"{i}").write_bytes(EVERY_BYTE)
    shell = f"ssh -F {site.config}"
    for start, end in ((f"{tmp_path}/from/", "host:there/"), ("host:there/", f"{tmp_path}/back/")):
        ran = subprocess.run(["rsync", "-a", "-e", shell, start, end], capture_output=True, timeout=30)
        assert (ran.returncode, ran.stderr) == (0, b"")
    assert all((tmp_path / "back" / "sub" / f"{i}").read_bytes() == EVERY_BYTE for i in range(20))
