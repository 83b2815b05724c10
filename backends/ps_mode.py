"""Parameter servers: TensorFlow programs that read ``TF_CONFIG``, and older ones that take lists of hosts.

``TF_CONFIG`` is TensorFlow's own contract (https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver).
An evaluator is a task beside the cluster, not part of it. ``PS_HOSTS``, ``WORKER_HOSTS``, ``JOB_NAME`` and ``TASK_INDEX``
are for programs in the style of TensorFlow 1, whose flags have these names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from raycontrol.backends import ssh
from raycontrol.backends.contract import (
    NETWORK_LIMIT_S,
    bracketed,
    environments,
    start,
    start_command,
    warnings,
)
from raycontrol.plan import Brief, Cause, Facts, Plan, Stage, TcpReachable
from raycontrol.spec import JobSpec, Member, Success, members

PORT = "tf"
"""The purpose of the port on which a task of the cluster listens."""
SERVER, EVALUATOR = "ps", "evaluator"
IN_CLUSTER = ("chief", "worker", SERVER)

Cluster = dict[str, list[str]]
"""Addresses (``ip:port``) of the tasks of each role."""


def plan(spec: JobSpec, brief: Brief, facts: tuple[Facts, ...]) -> Plan:
    """The start command on every instance, once those that talk to each other have reached each other."""
    gang = members(spec)
    cluster = _cluster(gang, facts)
    shared = _shared(gang, cluster)
    own = {
        member.name: {**shared, **_own(member, number, cluster)}
        for member, number in zip(gang, _task_numbers(gang), strict=True)
    }
    everybody = frozenset(member.name for member in gang)
    all_decide = spec.success is Success.ALL
    deciding = gang[0].role  # INDEX 0 is the chief, or where there is none a worker
    return Plan(
        mode=spec.mode,
        environment=environments(spec, brief, facts, own),
        files=ssh.files(gang, facts) if spec.ssh else {},
        stages=(
            *_prove_network(gang, facts),
            *(ssh.stages(gang) if spec.ssh else ()),
            start({member.name: start_command(spec, member) for member in gang}),
        ),
        deciders=everybody if all_decide else frozenset(_names(gang, deciding)),
        warnings=tuple(warnings(spec, gang)),
        servers=frozenset(_names(gang, SERVER)),
        finishers=frozenset() if all_decide else frozenset(_names(gang, EVALUATOR)),
        finish_s=spec.timeouts.evaluator_wait_s,
    )


def leases(member: Member) -> tuple[str, ...]:
    """A port for every task of the cluster; ``MASTER_PORT``, as in every mode, on the node of INDEX 0."""
    own = (PORT,) if member.role in IN_CLUSTER else ()
    return ("master", *own) if member.index == 0 else own


def explain(lines: Sequence[str]) -> Cause | None:
    """TensorFlow has no launcher that could name a rank."""
    return None


def _cluster(gang: Sequence[Member], facts: Sequence[Facts]) -> Cluster:
    """Return the tasks of each role, all groups of a role together, in the order of INDEX."""
    cluster: Cluster = {}
    for member, fact in zip(gang, facts, strict=True):
        if member.role in IN_CLUSTER:
            cluster.setdefault(member.role, []).append(f"{bracketed(fact.ip)}:{fact.ports[PORT]}")
    return cluster


def _task_numbers(gang: Sequence[Member]) -> list[int]:
    """Return, for each instance, how many of its role come before it."""
    counts: dict[str, int] = {}
    numbers = []
    for member in gang:
        numbers.append(counts.get(member.role, 0))
        counts[member.role] = numbers[-1] + 1
    return numbers


def _shared(gang: Sequence[Member], cluster: Cluster) -> dict[str, str]:
    """What is the same on every instance; made once, for it is long in a large gang."""
    addresses = {address.rpartition(":")[0] for tasks in cluster.values() for address in tasks}
    return {
        # TensorFlow's gRPC would go through the nodes' http_proxy, to addresses too, and wait for ever.
        "no_grpc_proxy": ",".join(sorted(address.strip("[]") for address in addresses)),
        "WORLD_SIZE": str(len(gang)),
        "PS_HOSTS": ",".join(cluster.get(SERVER, [])),
        "WORKER_HOSTS": ",".join(cluster.get("worker", [])),
    }


def _own(member: Member, number: int, cluster: Cluster) -> dict[str, str]:
    task = {"type": member.role, "index": number}
    return {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": task, "environment": "cloud"}),
        "RANK": str(member.index),
        "JOB_NAME": member.role,
        "TASK_INDEX": str(number),
    }


def _prove_network(gang: Sequence[Member], facts: Sequence[Facts]) -> tuple[Stage, ...]:
    """INDEX 0 and all others reach each other, everybody the parameter servers, and each task the next: mirrored workers
    are a ring. An evaluator needs nobody.
    """
    tasks = [pair for pair in zip(gang, facts, strict=True) if pair[0].role in IN_CLUSTER]
    servers = {place for place, (member, _) in enumerate(tasks) if member.role == SERVER}
    ways: list[TcpReachable] = []
    for place, (source, _) in enumerate(tasks):
        targets = {0, (place + 1) % len(tasks)} | (set() if place in servers else servers)
        for number in sorted((targets if place else set(range(len(tasks)))) - {place}):
            target, fact = tasks[number]
            ways.append(TcpReachable(source.name, target.name, fact.ip, fact.ports["probe"]))
    if not ways:
        return ()
    says = "the tasks of the cluster reach each other"
    return (Stage(name="prove the network", says=says, limit_s=NETWORK_LIMIT_S, until=tuple(ways)),)


def _names(gang: Sequence[Member], role: str) -> list[str]:
    return [member.name for member in gang if member.role == role]
