"""Runs one task on the node of every rank and one on a node of every group: ``ray_groups.py GROUP…``.

Prints a line of JSON: by rank and by group the instance that the task ran on, and what a task with a GPU sees of it.
"""

from __future__ import annotations

import json
import os
import sys

import ray

ray.init()


@ray.remote(num_cpus=0)
def instance() -> str:
    return os.environ["RAYCONTROL_INSTANCE"]


@ray.remote(num_cpus=1, num_gpus=1)
def gpu() -> tuple[str, str]:
    return os.environ["RAYCONTROL_INSTANCE"], os.environ["CUDA_VISIBLE_DEVICES"]


resources = ray.cluster_resources()
ranks = sorted(name for name in resources if name.startswith("Rank:"))
by_rank = [instance.options(resources={rank: 0.001}).remote() for rank in ranks]
by_group = [instance.options(label_selector={"group": group}).remote() for group in sys.argv[1:]]
with_gpu = [
    gpu.options(label_selector={"group": group}).remote() for group in sys.argv[1:] if group.endswith("gpu")
]
print(
    json.dumps(
        {
            "by_rank": dict(zip(ranks, ray.get(by_rank), strict=True)),
            "by_group": dict(zip(sys.argv[1:], ray.get(by_group), strict=True)),
            "with_gpu": sorted(ray.get(with_gpu)),
            "cpus": resources["CPU"],
            "gpus": resources.get("GPU", 0),
        }
    )
)
