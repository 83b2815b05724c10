"""A Ray driver that ends in a given way: ``ray_ends.py raise | hungry | stay FILE``.

``stay`` has one task on every other node that does not end; when it is up, FILE holds the job's id.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import ray


@ray.remote(num_cpus=0)
def wait() -> None:
    time.sleep(600)


@ray.remote(num_cpus=0, max_retries=0)
def hungry() -> None:
    """Takes memory until it is stopped."""
    taken = []
    while True:
        taken.append(bytearray(b"x" * (64 << 20)))
        time.sleep(0.02)


ray.init()
how = sys.argv[1]
if how == "raise":
    raise ValueError("no labels found")
if how == "hungry":
    ray.get(hungry.remote())
ranks = [name for name in ray.cluster_resources() if name.startswith("Rank:") and name != "Rank:0"]
waiting = [wait.options(resources={rank: 0.001}).remote() for rank in ranks]
Path(sys.argv[2]).write_text(os.environ["RAYCONTROL_JOB_ID"])
ray.get(waiting)
