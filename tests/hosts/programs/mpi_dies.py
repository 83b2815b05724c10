"""An MPI world in which one rank ends in a given way while the others wait: ``mpi_dies.py HOW RANK``."""

from __future__ import annotations

import os
import signal
import sys
import time

from mpi4py import MPI

ENDS = {
    "exit": lambda: os._exit(3),
    "abort": lambda: MPI.COMM_WORLD.Abort(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sys.exit": lambda: sys.exit(3),
    "stay": lambda: None,
}

how, victim = sys.argv[1], int(sys.argv[2])
rank = MPI.COMM_WORLD.Get_rank()
MPI.COMM_WORLD.Barrier()
print(f"rank {rank} is up", flush=True)
if rank == victim:
    ENDS[how]()
time.sleep(600)
