"""The probe of mode ray: what the start command finds, and what a task of its Ray finds on every other instance.

The start command, which is INDEX 0, writes down what is around it before it imports ray, as ``probe.py`` does, then
calls ``ray.init()`` without arguments. One task for each other INDEX k, pinned with the resource ``Rank:k``, writes a
document on that instance. All meet as the processes of ``probe.py``, whose options this takes too; then the start
command adds which cluster it has found and which nodes this has.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import probe

Document = dict[str, Any]


def main() -> None:
    options = probe.arguments()
    document = probe.surroundings(0, probe.descriptors())

    import ray  # only now: it changes the environment of whoever imports it

    ray.init()
    gpus = [float(entry.rpartition(":")[2]) for entry in os.environ["NODE_LIST"].split(",")]
    task = ray.remote(look_around)
    others = [
        task.options(num_gpus=gpus[index], resources={f"Rank:{index}": 0.001}).remote(options)
        for index in range(1, len(gpus))
    ]
    probe.meet_and_wait(document, options)
    document["gcs_address"] = ray.get_runtime_context().gcs_address
    document["nodes"] = [described(node) for node in ray.nodes()]
    ray.get(others)
    probe.write_down(document)


def look_around(options: argparse.Namespace) -> None:
    """The task: Ray decides what such a process is like, but whose instance it is on must show."""
    document = probe.surroundings(0, [], by="task")
    probe.meet_and_wait(document, options)
    probe.write_down(document)


def described(node: Document) -> Document:
    return {
        "id": node["NodeID"],
        "alive": node["Alive"],
        "ip": node["NodeManagerAddress"],
        "resources": node["Resources"],
        "labels": node["Labels"],
    }


if __name__ == "__main__":
    main()
