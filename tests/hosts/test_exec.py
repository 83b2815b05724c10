"""Commands across nodes over three hosts, each with a shell, a home and a cable of its own."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.conftest import Cluster
from tests.hosts.network import Hosts
from tests.support import wait_until

NVCC = "#!/bin/sh\necho nvcc 12.4 of $CUDA_HOME\n"

FOLDED = """
import resource, sys
from raycontrol.cli import invoke
status = invoke(["exec", "--all", "--fold", "-N", "--", "yes 0123456789abcde | head -c 500M"])
print(status, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, file=sys.stderr)
"""

MANY = """
import threading
from raycontrol import Client
with Client() as client:
    client.exec("true", all=True).close()
    statuses = []
    def one(number):
        with client.exec(f"sleep 1; echo {number}", all=True, timeout_s=300) as outcomes:
            statuses.append((outcomes.status, {outcomes[name].text for name in outcomes} == {f"{number}\\n"}))
    threads = [threading.Thread(target=one, args=(number,)) for number in range(67)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(len(statuses), set(statuses))
"""


@pytest.fixture
def shells(cluster: Cluster) -> Iterator[Path]:
    """A compiler in a folder that only rc files put on PATH: of all users on two hosts, root's own on the third. They talk, too."""
    cuda = cluster.hosts.shared / "cuda"
    (cuda / "bin").mkdir(parents=True)
    (cuda / "bin/nvcc").write_text(NVCC)
    (cuda / "bin/nvcc").chmod(0o755)
    lines = f"echo Welcome to $HOSTNAME; export PATH={cuda}/bin:$PATH CUDA_HOME={cuda}\n"
    rc = cluster.hosts.shared / "bash.bashrc"
    rc.write_text(f'[ -z "$PS1" ] && return\n{lines}')
    for i in (0, 1):
        cluster.hosts.run(i, ["mount", "--bind", str(rc), "/etc/bash.bashrc"], check=True)
    cluster.hosts.run(2, ["bash", "-c", f"cat > ~/.profile <<'END'\n{lines}END"], check=True)
    yield cuda
    for i in (0, 1):
        cluster.hosts.run(i, ["umount", "/etc/bash.bashrc"], check=True)
    cluster.hosts.run(2, ["rm", "/root/.profile"], check=True)


def test_what_only_an_interactive_shell_has_on_its_path_is_found(cluster: Cluster, shells: Path) -> None:
    names = [cluster.hosts.name(i) for i in range(3)]
    ran = cluster.raycontrol(1, "exec", "--all", "--", "nvcc", "--version", timeout_s=180)
    assert sorted(ran.stdout.splitlines()) == [f"{name}: nvcc 12.4 of {shells}" for name in names], ran
    assert (ran.returncode, ran.stderr) == (0, f"exec: as root@{names[0][:-1]}[0-2]\n")
    folded = cluster.raycontrol(1, "exec", "--all", "--fold", "--", "nvcc --version", check=True)
    assert folded.stdout == f"{names[0][:-1]}[0-2]: nvcc 12.4 of {shells}\n"
    plain = cluster.raycontrol(1, "exec", "--all", "--plain", "--fold", "--", "echo home $CUDA_HOME")
    assert plain.stdout == f"{names[0][:-1]}[0-2]: home\n"


def test_a_command_in_a_job_has_what_its_start_command_has(cluster: Cluster) -> None:
    run = ("submit", "--nodes", "2", "--env", "SEEN=a b", "--", "sleep 600")
    job_id = cluster.raycontrol(0, *run, check=True).stdout.strip()
    wait_until(lambda: cluster.json(0, "get", job_id)["state"] == "RUNNING", 60, "the job runs")
    inside = ("exec", "--job", job_id[:-1])
    shown = cluster.raycontrol(2, *inside, "--fold", "--", 'echo "$SEEN $WORLD_SIZE"; pwd', check=True).stdout
    assert next(line.partition(": ")[2] for line in shown.splitlines()) == "a b 2"
    assert "/code/" in shown
    one = cluster.raycontrol(2, *inside, "--instance", "worker-0", "--", "echo $RANK$INDEX")
    assert (one.stdout.partition(":")[0], one.returncode) == ("worker-0", 0)
    wrong = cluster.raycontrol(2, *inside, "--group", "ps", "--", "true")
    assert (wrong.returncode, "has no group 'ps'" in wrong.stderr) == (2, True)
    cluster.raycontrol(0, "stop", "--force", job_id, check=True)
    assert cluster.raycontrol(0, "wait", job_id).returncode == 130
    ended = cluster.raycontrol(0, "exec", "--job", job_id, "--", "true")
    assert (ended.returncode, "has ended" in ended.stderr) == (2, True)


def test_ctrl_c_ends_it_everywhere_and_what_failed_can_be_run_again(cluster: Cluster) -> None:
    marker = str(cluster.hosts.shared / "tails")
    running = cluster.popen(0, "exec", "--all", "--", f"echo began; exec -a {marker} sleep 1000")
    assert running.stdout is not None
    for _ in range(3):
        assert running.stdout.readline().endswith(": began\n")
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=30)
    assert (running.returncode, stdout) == (130, "")
    assert "interrupted; ending it everywhere" in stderr and "0 of 3 places exited 0" in stderr
    wait_until(lambda: marker.encode() not in _command_lines(cluster), 10, "all of it is gone")
    failing = f"[ $(hostname) != {cluster.hosts.name(1)} ]"
    failed = cluster.raycontrol(0, "exec", "--all", "--", failing)
    assert failed.returncode == 1 and f"1       {cluster.hosts.name(1)}" in failed.stderr
    again = cluster.raycontrol(0, "exec", "--rerun-failed", "--", "hostname", check=True)
    assert again.stdout == f"{cluster.hosts.name(1)}: {cluster.hosts.name(1)}\n"


def _command_lines(cluster: Cluster) -> bytes:
    found = b""
    for pid in cluster.hosts.pids():
        try:
            found += Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.long
def test_a_host_that_is_cut_off_in_the_middle_is_named_and_the_rest_is_not_held_up(
    needs_hosts: None, tmp_path: Path
) -> None:
    with Hosts(3, keep=[tmp_path]) as hosts:
        hosts.start_cluster()
        cluster = Cluster(hosts, tmp_path / "home")
        running = cluster.popen(0, "exec", "--all", "--", "echo began; sleep 8; echo ended")
        assert running.stdout is not None
        for _ in range(3):
            running.stdout.readline()
        hosts.cut(2)
        cut_at = time.monotonic()
        stdout, stderr = running.communicate(timeout=90)
        assert sorted(stdout.splitlines()) == [f"{hosts.name(i)}: ended" for i in (0, 1)]
        assert running.returncode == 125 and time.monotonic() - cut_at < 40
        assert f"125     {hosts.name(2)}" in stderr


@pytest.mark.long
def test_two_hundred_commands_at_once(cluster: Cluster) -> None:
    ran = cluster.hosts.run(0, [sys.executable, "-c", MANY], env=cluster.env, timeout_s=280, check=True)
    assert ran.stdout.splitlines()[-1] == "67 {(0, True)}"


@pytest.mark.long
def test_half_a_gigabyte_is_folded_without_eating_memory(cluster: Cluster, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with output.open("w") as file:
        running = cluster.hosts.popen(0, [sys.executable, "-c", FOLDED], env=cluster.env, stdout=file)
        _, stderr = running.communicate(timeout=280)
    status, peak_mib = stderr.splitlines()[-1].split()
    assert (status, output.stat().st_size) == ("0", 500 << 20), stderr
    with output.open("rb") as written:
        while piece := written.read(1 << 20):
            assert piece == b"0123456789abcde\n" * (1 << 16)
    assert int(peak_mib) < 200
