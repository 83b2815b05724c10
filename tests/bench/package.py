"""How long a working directory of 200 MiB takes to three hosts, beside one copy of it over the same link, in the same run.

``python -m tests.bench.package [--rounds N]``, as root: three hosts whose links carry 1 Gbit/s each way. The folder is new in
every round (random bytes), and is counted from the submission until all three instances run, less what the same job takes
with an empty folder. The goal: 1.5 times one copy.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from sys import executable

from tests.bench.alone import alone
from tests.bench.peers import recommended
from tests.bench.tables import Table, brief, measure, waiting
from tests.hosts.network import Hosts

MIB, FILES = 200, 20
RATE = "1gbit"
SDK = """
import sys, time
from raycontrol import Client, JobSpec
client = Client()
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    job = client.submit(JobSpec(command="true", nodes=3, working_dir=line.strip()))
    assert job.wait(timeout_s=300).state == "SUCCEEDED"
    print(time.perf_counter() - began, flush=True)
"""
SEND = """
import socket, sys
server = socket.create_server((sys.argv[1], 7799))
print("ready", flush=True)
connection, _ = server.accept()
with open(sys.argv[2], "rb") as file:
    connection.sendfile(file)
connection.close()
"""
RECEIVE = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 7799))
with open("/tmp/copy", "wb") as file:
    while data := connection.recv(1 << 20):
        file.write(data)
    file.flush()
"""
COPY, EMPTY, FULL = (
    "one copy of 200 MiB to one host",
    "the job with an empty folder",
    "the job with 200 MiB to three hosts",
)


def tables(rounds: int) -> Sequence[Table]:
    with tempfile.TemporaryDirectory() as name, Hosts(3, keep=[Path(name)]) as hosts:
        hosts.start_cluster(env=recommended())
        for i in range(3):
            limit(hosts.hosts[i].link, hosts.hosts[i].name)
        env = {"RAYCONTROL_HOME": f"{name}/home", "RAY_ADDRESS": hosts.address, "RAY_AUTH_MODE": "disabled"}
        with waiting(hosts, 0, SDK, env) as submit:
            one = hosts.shared / "one"

            def copy() -> float:
                one.write_bytes(os.urandom(MIB << 20))
                return copied(hosts, one)

            def empty() -> float:
                return float(submit(str(folder(hosts.shared / "empty", 0))))

            def full() -> float:
                return float(submit(str(folder(hosts.shared / "full", FILES))))

            found = measure({COPY: copy, EMPTY: empty, FULL: full}, rounds)
    net = [a - b for a, b in zip(found[FULL], found[EMPTY], strict=True)]
    ratio = statistics.median(a / b for a, b in zip(net, found[COPY], strict=True))
    note = f"200 MiB to three hosts take {brief(statistics.median(net))} s beside an empty folder: {brief(ratio)} copies. Goal: 1.5"
    return [Table(f"A working directory of {MIB} MiB, links of {RATE}", found, notes=[note])]


def limit(link: str, name: str) -> None:
    """Give a host a link of that speed each way."""
    shape = ["root", "tbf", "rate", RATE, "burst", "256kb", "latency", "100ms"]
    subprocess.run(["tc", "qdisc", "add", "dev", link, *shape], check=True)
    subprocess.run(["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", *shape], check=True)


def folder(path: Path, files: int) -> Path:
    """Make a folder of new files, ten MiB each."""
    path.mkdir(exist_ok=True)
    (path / "name").write_bytes(os.urandom(16))
    for number in range(files):
        (path / f"part-{number}").write_bytes(os.urandom((MIB << 20) // files))
    return path


def copied(hosts: Hosts, file: Path) -> float:
    """Send a file from the first host to the second; return how long that took."""
    with hosts.popen(0, [executable, "-c", SEND, hosts.ip(0), file]) as sender:
        assert sender.stdout is not None and sender.stdout.readline() == "ready\n"
        began = time.perf_counter()
        hosts.run(1, [executable, "-c", RECEIVE, hosts.ip(0)], check=True, timeout_s=120)
        return time.perf_counter() - began


if __name__ == "__main__":
    alone(__doc__, tables, rounds=3)
