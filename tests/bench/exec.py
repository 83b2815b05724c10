"""How long ``exec("true")`` over three hosts takes a connected client, beside `srun -N3 true` of Slurm on the same hosts.

``python -m tests.bench.exec [--rounds N]``, as root, with Debian's slurmctld, slurmd, slurm-client and munge: three hosts,
Ray and a slurmd on each, then rounds in which each way takes its turn. Both are measured by a process on the first host.
The goal is 0.3 s, and twice as long as Slurm.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.bench.alone import alone
from tests.bench.peers import SRUN, no_slurm, slurm
from tests.bench.tables import Table, measure, waiting
from tests.hosts.network import Hosts

SDK = """
import sys, time
from raycontrol import Client
with Client() as client:
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        with client.exec("true", all=True) as outcomes:
            assert len(outcomes) == 3 and outcomes.status == 0
        print(time.perf_counter() - began, flush=True)
"""


def tables(rounds: int) -> Sequence[Table]:
    if (lacking := no_slurm()) is not None:
        raise SystemExit(f"bench: needs {lacking}")
    with tempfile.TemporaryDirectory() as name, Hosts(3, keep=[Path(name)]) as hosts:
        hosts.start_cluster()
        env = {"RAYCONTROL_HOME": f"{name}/home", "RAY_ADDRESS": hosts.address, "RAY_AUTH_MODE": "disabled"}
        with (
            slurm(hosts, Path(name), cpus=1) as conf,
            waiting(hosts, 0, SRUN, conf) as srun,
            waiting(hosts, 0, SDK, env) as sdk,
        ):
            ways = {
                "srun -N3 true": lambda: float(srun("")),
                'Client().exec("true", all=True), connected': lambda: float(sdk("")),
            }
            return [Table("A command on three nodes", measure(ways, rounds))]


if __name__ == "__main__":
    alone(__doc__, tables, rounds=20)
