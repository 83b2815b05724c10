"""How long a job takes that does nothing, beside what else could start it on the same hosts, in the same run.

``python -m tests.bench.launch [--rounds N]``, as root: three hosts, Ray on them, then rounds in which each way takes
its turn, so that all meet the same machine. Prints the median of each, its spread, and its ratio to the first.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.hosts.network import BIN, HostProcess, Hosts, why_no_hosts

SDK = """
import sys
from raycontrol import Client, JobSpec
client = Client()
spec = JobSpec(command="true", nodes=3)
client.submit(spec).wait(timeout_s=300)
print("ready", flush=True)
for line in sys.stdin:
    assert client.submit(spec).wait(timeout_s=300).state == "SUCCEEDED"
    print("done", flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each way takes its turn (default 5)")
    rounds = parser.parse_args().rounds
    reason = why_no_hosts()
    if reason:
        sys.exit(f"bench: {reason}")
    with tempfile.TemporaryDirectory() as home, Hosts(3, keep=[Path(home)]) as hosts:
        hosts.start_cluster()
        env = {"RAYCONTROL_HOME": home, "RAY_ADDRESS": hosts.address, "RAY_AUTH_MODE": "disabled"}
        with hosts.popen(1, [sys.executable, "-c", SDK], env=env, stdin=subprocess.PIPE) as client:
            expect(client, "ready")
            report(measure(ways(hosts, env, client), rounds))
            assert client.stdin is not None
            client.stdin.close()


def ways(hosts: Hosts, env: Mapping[str, str], client: HostProcess) -> dict[str, Callable[[], object]]:
    """Each does the same: it runs ``true`` and returns when it is known to have ended well."""
    ray_env = {**env, "RAY_ADDRESS": f"http://{hosts.ip(0)}:8265"}

    def connected() -> None:
        assert client.stdin is not None
        client.stdin.write("go\n")
        client.stdin.flush()
        expect(client, "done")

    def command(i: int, *argv: str | Path, environment: Mapping[str, str] = env) -> None:
        hosts.run(i, argv, env=environment, check=True, timeout_s=300)

    return {
        "ray job submit -- true (one process)": lambda: command(
            0, BIN / "ray", "job", "submit", "--", "true", environment=ray_env
        ),
        "raycontrol run --nodes 3 -- true": lambda: command(
            1, BIN / "raycontrol", "run", "--nodes", "3", "--", "true"
        ),
        "Client().submit(3 x true).wait(), connected": connected,
        "floor: python -c 'import typer, rich'": lambda: command(
            1, sys.executable, "-c", "import typer, rich"
        ),
    }


def measure(actions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds that each action took in each round; one that returns a float has measured itself."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for action in actions.values():
        action()  # the first of each pays for what the rest finds ready
    for _ in range(rounds):
        for name, action in actions.items():
            began = time.perf_counter()
            measured = action()
            taken = time.perf_counter() - began
            times[name].append(measured if isinstance(measured, float) else taken)
    return times


def report(times: Mapping[str, Sequence[float]]) -> None:
    first = next(iter(times.values()))
    print(f"{'':<46} {'median':>8} {'spread':>16} {'ratio to the first':>22}")
    for name, taken in times.items():
        ratios = [one / other for one, other in zip(taken, first, strict=True)]
        print(
            f"{name:<46} {statistics.median(taken):6.2f} s {min(taken):6.2f} … {max(taken):5.2f} s"
            f" {statistics.median(ratios):7.3f} ({min(ratios):.3f} … {max(ratios):.3f})"
        )


def expect(client: HostProcess, word: str) -> None:
    assert client.stdout is not None
    line = client.stdout.readline()
    assert line.strip() == word, f"the client said {line!r}"


if __name__ == "__main__":
    main()
