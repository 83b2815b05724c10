"""How long a submit and a small job take on three hosts: ``python -m scripts.bench [--jobs N]``, as root.

Numbers depend on the machine; compare them with those of another run on the same one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.hosts.network import BIN, Hosts, why_no_hosts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10, help="how often each thing is done")
    times = parser.parse_args().jobs
    reason = why_no_hosts()
    if reason:
        sys.exit(f"bench: {reason}")
    with tempfile.TemporaryDirectory() as home, Hosts(3, keep=[Path(home)]) as hosts:
        report("three hosts with Ray", [timed(hosts.start_cluster)])
        env = {"RAYCONTROL_HOME": home, "RAY_ADDRESS": hosts.address, "RAY_AUTH_MODE": "disabled"}

        def raycontrol(*arguments: str) -> None:
            hosts.run(1, [BIN / "raycontrol", *arguments], env=env, check=True, timeout_s=300)

        report("raycontrol version", [timed(partial(raycontrol, "version")) for _ in range(times)])
        report("first job, which starts the controller", [timed(partial(raycontrol, "run", "--", "true"))])
        for nodes in (1, 3):
            run = ("run", "--nodes", str(nodes), "--", "true")
            report(f"run true on {nodes} hosts", [timed(partial(raycontrol, *run)) for _ in range(times)])
        report("submit", [timed(partial(raycontrol, "submit", "--", "true")) for _ in range(times)])


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def report(what: str, seconds: Sequence[float]) -> None:
    spread = f"  ({min(seconds):.2f} to {max(seconds):.2f})" if len(seconds) > 1 else ""
    print(f"{what:<40} {statistics.median(seconds):6.2f} s{spread}", flush=True)


if __name__ == "__main__":
    main()
