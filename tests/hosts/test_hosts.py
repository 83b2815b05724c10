"""The hosts are hosts, and the watch over them sees what a job could leave behind."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.cluster_state import nothing_left as watch
from tests.hosts.conftest import Cluster
from tests.hosts.network import Hosts, ip, links, namespaces, state_folder
from tests.support import wait_until

WHERE = """
import ray, socket
ray.init(address={address!r}, log_to_driver=False)
at = ray.remote(num_cpus=1)(lambda: socket.gethostname())
spots = [{{"node:" + node["NodeManagerAddress"]: 0.01}} for node in ray.nodes() if node["Alive"]]
print(*sorted(ray.get([at.options(resources=spot).remote() for spot in spots])))
"""


def test_each_host_runs_a_task_of_the_cluster(cluster: Cluster) -> None:
    hosts = cluster.hosts
    ran = hosts.run(
        1, [sys.executable, "-c", WHERE.format(address=hosts.address)], env=cluster.env, check=True
    )
    assert ran.stdout.split()[-3:] == [hosts.name(0), hosts.name(1), hosts.name(2)]


def test_a_host_has_its_own_name_address_files_and_processes(cluster: Cluster) -> None:
    hosts = cluster.hosts
    assert hosts.run(1, ["hostname"], check=True).stdout.strip() == hosts.name(1)
    assert hosts.run(0, ["getent", "hosts", hosts.name(2)], check=True).stdout.split() == [
        hosts.ip(2),
        hosts.name(2),
    ]
    interfaces = hosts.run(1, ["ls", "/sys/class/net"], check=True).stdout.split()
    assert [name for name in interfaces if not name.startswith("veth")] == [
        "adm0",
        "adm0-end",
        "docker0",
        "eth0",
        "lo",
    ]
    hosts.run(1, ["touch", "/tmp/mine", "/dev/shm/mine"], check=True)
    assert hosts.run(2, ["ls", "/tmp/mine"]).returncode != 0
    assert hosts.run(2, ["ls", "/dev/shm/mine"]).returncode != 0
    hosts.run(1, ["rm", "/tmp/mine", "/dev/shm/mine"], check=True)


def test_a_command_runs_as_a_plain_user_with_a_home_of_their_own(cluster: Cluster) -> None:
    program = "import os, ray; open(os.environ['HOME'] + '/x', 'w').close(); print(os.getuid())"
    ran = cluster.hosts.run(2, [sys.executable, "-c", program], user="nobody", check=True)
    assert ran.stdout.split() == ["65534"]


def test_signals_and_ends_pass_through(cluster: Cluster) -> None:
    process = cluster.hosts.popen(
        1, ["bash", "-c", "trap 'exit 9' INT; echo on; while :; do sleep 0.1; done"]
    )
    assert process.stdout is not None and process.stdout.readline() == "on\n"
    process.send_signal(2)
    process.communicate(timeout=10)
    assert process.returncode == 9


def test_hosts_crash_boot_and_leave_nothing(needs_hosts: None) -> None:
    hosts = Hosts(1)
    hosts.start()
    number = hosts._number
    try:
        hosts.add()
        sleeper = hosts.popen(1, ["sleep", "600"])
        hosts.kill(1)
        sleeper.communicate(timeout=10)
        assert not hosts.pids(1)
        hosts.boot(1)
        hosts.run(1, ["true"], check=True)
        assert reached(hosts)
        hosts.cut(1)
        assert not reached(hosts)
        hosts.mend(1)
        assert reached(hosts)
        sleeper = hosts.popen(0, ["sleep", "600"])
    finally:
        hosts.stop()
    sleeper.communicate(timeout=10)
    assert not namespaces(number)
    assert not links(number)
    assert not state_folder(number).exists()


def test_hosts_that_were_left_by_a_killed_process_are_removed_by_the_next(needs_hosts: None) -> None:
    program = "from tests.hosts.network import Hosts; import os; h = Hosts(1); h.start(); print(h._number, h.hosts[0].pid1); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    number, pid1 = map(int, killed.stdout.split())
    assert namespaces(number)
    with Hosts(1) as hosts:
        if hosts._number == number:  # else another run has claimed, and cleared, it
            wait_until(lambda: not ip("netns", "pids", hosts.name(0)).split().count(str(pid1)), 10)
            hosts.run(0, ["true"], check=True)


LEAVINGS = {
    "a marked process": "import subprocess; subprocess.Popen(['sleep', '600'], env={'RAYCONTROL_ATTEMPT_ID': 'j.0'})",
    "an unmarked process": "import subprocess; subprocess.Popen(['sleep', '600'], env={})",
    "a job's folder": (
        "import pathlib; s = next(pathlib.Path('/tmp/ray').glob('session_2*'));"
        " (s / 'raycontrol/n/jobs/j').mkdir(parents=True)"
    ),
    "an actor": (
        "import ray; ray.init(address=ADDRESS, namespace='raycontrol', log_to_driver=False);"
        " A = ray.remote(num_cpus=1)(type('A', (), {'f': lambda self: 1}));"
        " a = A.options(name='rc:c:j:0:worker-0', lifetime='detached').remote(); ray.get(a.f.remote())"
    ),
    "a placement group": (
        "import ray; ray.init(address=ADDRESS, namespace='raycontrol', log_to_driver=False);"
        " g = ray.util.placement_group([{'GPU': 1}], name='rc:c:j:0', lifetime='detached'); ray.get(g.ready())"
    ),
}
UNDO = {
    "a job's folder": "import shutil, glob; [shutil.rmtree(f) for f in glob.glob('/tmp/ray/session_2*/raycontrol')]",
    "an actor": (
        "import ray; ray.init(address=ADDRESS, namespace='raycontrol', log_to_driver=False);"
        " ray.kill(ray.get_actor('rc:c:j:0:worker-0'))"
    ),
    "a placement group": (
        "import ray; ray.init(address=ADDRESS, namespace='raycontrol', log_to_driver=False);"
        " ray.util.remove_placement_group(ray.util.get_placement_group('rc:c:j:0'))"
    ),
}
SEEN = {
    "a marked process": "(sleep 600) of attempt j.0",
    "an unmarked process": "(sleep 600) of attempt None",
    "a job's folder": "jobs/j",
    "an actor": "actor 'rc:c:j:0:worker-0' (A) is ALIVE",
    "a placement group": "placement group 'rc:c:j:0'",
}


@pytest.mark.parametrize("leaving", LEAVINGS)
def test_the_watch_sees(cluster: Cluster, leaving: str) -> None:
    with pytest.raises(AssertionError) as failed, watch(cluster, within_s=0.5):
        python(cluster, LEAVINGS[leaving])
    undo(cluster, leaving)
    assert SEEN[leaving] in str(failed.value)


def reached(hosts: Hosts) -> bool:
    """Whether host 0 can open a connection to host 1."""
    server = "import socket, sys; s = socket.create_server(('', 7)); print('on', flush=True); s.accept()"
    client = f"import socket; socket.create_connection(({hosts.ip(1)!r}, 7), 1)"
    listening = hosts.popen(1, [sys.executable, "-I", "-S", "-c", server])
    try:
        assert listening.stdout is not None and listening.stdout.readline() == "on\n"
        return hosts.run(0, [sys.executable, "-I", "-S", "-c", client]).returncode == 0
    finally:
        listening.end()
        listening.communicate()


def undo(cluster: Cluster, leaving: str) -> None:
    if leaving in UNDO:
        python(cluster, UNDO[leaving])
    else:
        sleepers = [pid for pid in cluster.hosts.pids(0) if psutil.Process(pid).name() == "sleep"]
        for pid in sleepers:
            psutil.Process(pid).kill()


def python(cluster: Cluster, program: str) -> None:
    code = program.replace("ADDRESS", repr(cluster.address))
    # Not captured: what is left behind would hold the pipes open.
    process = cluster.hosts.popen(
        0, [sys.executable, "-c", code], env=cluster.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    assert process.wait(timeout=60) == 0
