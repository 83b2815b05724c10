"""Each rank of an MPI world keeps what it sees: its environment, host, cores and, on rank 0, standard input.

``--stdin N`` reads so many characters (Open MPI 5 passes input on, but never its end); ``--megabytes N`` adds an allreduce of so much; ``--data-dir`` is only there to be given, as people do.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

parser = argparse.ArgumentParser()
parser.add_argument("--megabytes", type=int, default=0)
parser.add_argument("--data-dir")
parser.add_argument("--stdin", type=int, default=0)
parser.add_argument("--name", default="rank")
arguments = parser.parse_args()

world = MPI.COMM_WORLD
rank, size = world.Get_rank(), world.Get_size()
total = world.allreduce(rank + 1)
checked = None
if arguments.megabytes:
    mine = np.full(arguments.megabytes * 131072, rank + 1, dtype=np.float64)
    sum_of_all = np.empty_like(mine)
    world.Allreduce(mine, sum_of_all)
    checked = bool((sum_of_all == size * (size + 1) // 2).all())
document = {
    "rank": rank,
    "size": size,
    "sum": total,
    "allreduce": checked,
    "index": int(os.environ["INDEX"]),
    "host": socket.gethostname(),
    "cores": sorted(os.sched_getaffinity(0)),
    "cwd": str(Path.cwd()),
    "data_dir": arguments.data_dir,
    "stdin": sys.stdin.read(arguments.stdin) if rank == 0 and arguments.stdin else "",
    "env": dict(os.environ),
}
(Path(os.environ["RAYCONTROL_OUTPUT_DIR"]) / f"{arguments.name}-{rank}.json").write_text(json.dumps(document))
print(f"{rank} of {size} on {socket.gethostname()}", flush=True)
