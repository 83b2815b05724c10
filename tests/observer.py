"""Looks at a Ray cluster from outside: one JSON answer on stdout for each line on stdin.

Run as ``python observer.py ADDRESS`` on a host of the cluster; it keeps one connection open, so that an answer
costs milliseconds. It imports nothing of raycontrol, and says ``ready`` when it is connected.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
from ray._private.state import available_resources_per_node, state
from ray.core.generated.gcs_pb2 import ActorTableData


def main() -> None:
    ray.init(address=sys.argv[1], namespace="raycontrol", log_to_driver=False, logging_level="ERROR")
    answer("ready")
    for _ in sys.stdin:
        answer({"actors": actors(), "groups": groups(), "nodes": nodes()})


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


def actors() -> list[dict[str, Any]]:
    """Every actor that is not dead, named or not, of all namespaces."""
    table = map(ActorTableData.FromString, state._connect_and_get_accessor().get_actor_table(None, None))
    return [
        {
            "id": actor.actor_id.hex(),
            "name": actor.name,
            "namespace": actor.ray_namespace,
            "class": actor.class_name,
            "state": ActorTableData.ActorState.Name(actor.state),
            "node": actor.address.node_id.hex(),
            "ip": actor.address.ip_address,
            "pid": actor.pid,
            "detached": actor.is_detached,
            "runtime_env": json.loads(actor.serialized_runtime_env or "{}"),
        }
        for actor in table
        if actor.state != ActorTableData.ActorState.DEAD
    ]


def groups() -> list[dict[str, Any]]:
    """Every placement group that is not removed."""
    table = ray.util.placement_group_table().values()
    return [
        {"id": group["placement_group_id"], "name": group["name"], "state": group["state"]}
        for group in table
        if group["state"] != "REMOVED"
    ]


def nodes() -> list[dict[str, Any]]:
    """Every living node with its resources, in all and free."""
    free = available_resources_per_node()
    return [
        {
            "id": node["NodeID"],
            "ip": node["NodeManagerAddress"],
            "total": node["Resources"],
            "available": free.get(node["NodeID"], {}),
        }
        for node in ray.nodes()
        if node["Alive"]
    ]


if __name__ == "__main__":
    main()
