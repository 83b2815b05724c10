"""A Horovod world in which one rank exits 3 while the others wait: ``horovod_dies.py RANK`` (none: all wait)."""

from __future__ import annotations

import os
import sys
import time

import horovod.torch as hvd

hvd.init()
print(f"rank {hvd.rank()} is up", flush=True)
if sys.argv[1] == str(hvd.rank()):
    os._exit(3)
time.sleep(600)
