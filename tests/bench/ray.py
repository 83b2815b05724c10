"""How long it takes from a submit to the first line of a ray job over three hosts, beside a shell script's `ray start`s.

``python -m tests.bench.ray [--rounds N]``, as root: three hosts, Ray on them, then rounds in which each way takes its
turn. The script starts a head with the same options and ports of its own, then both other nodes at once, and ends when
all three have said that they are up; the start command's first line and the script's next one are what is waited for.
Ending what was started is not part of the figures.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.bench.alone import alone
from tests.bench.tables import Table, Way, measure, waiting
from tests.hosts.network import BIN, HostProcess, Hosts
from tests.support import wait_until

SDK = """
import sys, time
from raycontrol import Client, JobSpec
client = Client()
print("ready", flush=True)
for line in sys.stdin:
    mark = line.strip()
    command = f"date +%s.%N > {mark}"
    spec = JobSpec.from_dict({"mode": "ray", "command": command, "nodes": 3, "resources": {"memory": "1GiB"}})
    began = time.time()
    assert client.submit(spec).wait(timeout_s=300).state == "SUCCEEDED"
    print(f"{float(open(mark).read()) - began:.4f}", flush=True)
"""
PORT, CLIENT_PORT = 7701, 7702
GONE_S = 60


def tables(rounds: int) -> Sequence[Table]:
    with tempfile.TemporaryDirectory() as name, Hosts(3, keep=[Path(name)]) as hosts:
        folder = Path(name)
        hosts.start_cluster()
        env = {"RAYCONTROL_HOME": name, "RAY_ADDRESS": hosts.address, "RAY_AUTH_MODE": "disabled"}
        with waiting(hosts, 0, SDK, env) as submitted:
            ways: dict[str, Way] = {
                "3 x ray start, by a script": script(hosts, folder),
                "raycontrol": lambda: float(submitted(str(folder / "first-line"))),
            }
            return [Table("A Ray cluster of three nodes for a job", measure(ways, rounds))]


def script(hosts: Hosts, folder: Path) -> Callable[[], float]:
    """Start a head, then two nodes at once, as a person would write it; return how many seconds that took."""
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    env = {
        "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
    }

    def start(i: int, *place: str) -> HostProcess:
        options = [
            f"--node-ip-address={hosts.ip(i)}",
            "--num-cpus=1",
            "--num-gpus=0",
            f"--memory={1 << 30}",
            f"--object-store-memory={int(0.3 * (1 << 30))}",
            f'--resources={{"Rank:{i}": 1}}',
            "--labels=group=worker",
            f"--temp-dir=/tmp/by-hand-{i}",
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--dashboard-agent-listen-port=0",
            "--disable-usage-stats",
        ]
        return hosts.popen(i, ["ray", "start", *place, *options], env=env, stdout=subprocess.DEVNULL)

    def call() -> float:
        before = set(hosts.pids())
        began = time.time()
        head = [f"--port={PORT}", f"--ray-client-server-port={CLIENT_PORT}", "--include-dashboard=false"]
        up(start(0, "--head", "--dashboard-port=0", *head))
        for node in [start(i, f"--address={hosts.ip(0)}:{PORT}") for i in (1, 2)]:
            up(node)
        first = hosts.run(0, ["date", "+%s.%N"], check=True).stdout
        taken = float(first) - began
        end(hosts, before)
        return taken

    return call


def up(process: HostProcess) -> None:
    assert process.wait(timeout=120) == 0, "ray start failed"


def end(hosts: Hosts, before: set[int]) -> None:
    """Kill every process that was not there before."""

    def gone() -> bool:
        left = set(hosts.pids()) - before
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    wait_until(gone, GONE_S, "the Ray that was started by hand is gone")


if __name__ == "__main__":
    alone(__doc__, tables, rounds=5)
