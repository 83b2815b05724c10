"""Routes about the cluster: who waits, which nodes there are, what is kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from raycontrol.access import Action, Identity, allowed
from raycontrol.api.described import PREFIX, PROBLEMS
from raycontrol.api.guards import Guard, own_only, require
from raycontrol.api.hubs import Hub, hub_of
from raycontrol.api.problems import NotThere
from raycontrol.errors import UsageError
from raycontrol.hardware import NodeInfo
from raycontrol.status import JobState, QueueEntry

router = APIRouter(prefix=PREFIX, tags=["cluster"], responses=PROBLEMS)

Viewer = Annotated[Identity, Depends(Guard(Action.READ_CLUSTER))]
Reader = Annotated[Identity, Depends(Guard(Action.READ_JOB))]
Check = Annotated[bool, Query(description="Measure clocks and name look-ups too; for operators.")]

SIZES_KEPT_S = 5.0
"""To add them up takes looking at every file of every job."""
CHECKS = "a check of nodes"


@router.get("/queue", response_model=list[QueueEntry])
async def queue(request: Request, identity: Viewer) -> list[QueueEntry]:
    """List the jobs that wait for this cluster in their order, with why they wait. The role `user` sees its own, with their positions."""
    waiting = await hub_of(request).calls.ask(lambda door: door.queue())
    return [entry for entry in waiting if allowed(identity, Action.READ_JOB, entry.user)]


@router.get("/nodes", response_model=list[NodeInfo])
async def nodes(
    request: Request,
    identity: Viewer,
    name: Annotated[list[str] | None, Query(max_length=100)] = None,
    check: Check = False,
) -> list[NodeInfo]:
    """List the cluster's nodes; what they are made of is for operators. The role `user` sees its own jobs on them."""
    if check:
        require(identity, Action.READ_NODE, CHECKS)
    hub = hub_of(request)
    found = await hub.calls.ask(lambda door: door.nodes(name or None, check))
    return await _seen(hub, identity, found)


@router.get("/nodes/{name}", response_model=NodeInfo)
async def node(request: Request, identity: Viewer, name: str, check: Check = False) -> NodeInfo:
    """Show the node of this name, IP or beginning of an id."""
    if check:
        require(identity, Action.READ_NODE, CHECKS)
    hub = hub_of(request)
    try:
        found = await hub.calls.ask(lambda door: door.nodes([name], check))
    except UsageError as error:
        raise NotThere(str(error)) from None
    if len(found) != 1:
        raise NotThere(f"{name!r} is the name of {len(found)} nodes; give an IP")
    return (await _seen(hub, identity, found))[0]


@router.get("/sizes", response_model=dict[str, int])
async def sizes(request: Request, identity: Reader) -> dict[str, int]:
    """Show the bytes that each job keeps, as they were within the last 5 seconds. The role `user` sees its own."""
    hub, own = hub_of(request), own_only(identity)
    kept = await hub.sizes.get(None)
    if own is None:
        return kept
    ids = await _ids(hub, own, None)
    return {job_id: size for job_id, size in kept.items() if job_id in ids}


async def _seen(hub: Hub, identity: Identity, found: list[NodeInfo]) -> list[NodeInfo]:
    """Return the nodes as this role may see them."""
    if allowed(identity, Action.READ_NODE):
        return found
    own = own_only(identity)
    active = [state for state in JobState if not state.terminal]
    ids = None if own is None else await _ids(hub, own, active)
    return [item.model_copy(update={"facts": None, "jobs": _known(item.jobs, ids)}) for item in found]


async def _ids(hub: Hub, user: str, states: Sequence[JobState] | None) -> set[str]:
    return {job.id for job in await hub.calls.ask(lambda door: door.jobs(states, user, None))}


def _known(jobs: tuple[str, ...], ids: Collection[str] | None) -> tuple[str, ...]:
    return jobs if ids is None else tuple(job_id for job_id in jobs if job_id in ids)
