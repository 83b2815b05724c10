"""Routes that say what nodes are for: which take no new job, and the groups they are in."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from raycontrol.access import Action, Identity
from raycontrol.api import bodies
from raycontrol.api.described import PREFIX, PROBLEMS, takes
from raycontrol.api.guards import Guard
from raycontrol.api.hubs import hub_of
from raycontrol.api.models import NamedNodes, NodesToDrain, NodesToRemove
from raycontrol.api.visits import visit_of
from raycontrol.hardware import NodeGroup, OfflineNode

router = APIRouter(prefix=PREFIX, tags=["cluster"], responses=PROBLEMS)

Viewer = Annotated[Identity, Depends(Guard(Action.READ_CLUSTER))]
Drainer = Annotated[Identity, Depends(Guard(Action.MANAGE_NODES, "set nodes offline"))]
Opener = Annotated[Identity, Depends(Guard(Action.MANAGE_NODES, "set nodes online"))]
Adder = Annotated[Identity, Depends(Guard(Action.MANAGE_NODES, "add nodes to group"))]
Remover = Annotated[Identity, Depends(Guard(Action.MANAGE_NODES, "remove nodes from group"))]


@router.post(
    "/nodes/offline",
    response_model=list[OfflineNode],
    openapi_extra=takes(("application/json", NodesToDrain)),
)
async def set_offline(request: Request, identity: Drainer) -> list[OfflineNode]:
    """Let nodes take no new job; jobs that run there go on. A name that no node has now is kept for one that will."""
    hub = hub_of(request)
    wanted = await bodies.read_model(request, NodesToDrain, hub.limits.body_bytes, hub.limits.body_s)
    visit_of(request).target = _listed(wanted.nodes)
    return await hub.calls.change(lambda door: door.set_offline(wanted.nodes, wanted.reason, identity.user))


@router.get("/offline_nodes", response_model=list[OfflineNode])
async def offline_nodes(request: Request, _: Viewer) -> list[OfflineNode]:
    """List the nodes that are to take no new job, also such as are not in the cluster now (`absent`)."""
    return await hub_of(request).calls.ask(lambda door: door.offline_nodes())


@router.post(
    "/nodes/online",
    response_model=list[str],
    openapi_extra=takes(("application/json", NamedNodes)),
)
async def set_online(request: Request, identity: Opener) -> list[str]:
    """Let nodes take jobs again; the answer is their names."""
    hub = hub_of(request)
    wanted = await bodies.read_model(request, NamedNodes, hub.limits.body_bytes, hub.limits.body_s)
    visit_of(request).target = _listed(wanted.nodes)
    return await hub.calls.change(lambda door: door.set_online(wanted.nodes, identity.user))


@router.get("/node_groups", response_model=list[NodeGroup])
async def node_groups(request: Request, _: Viewer) -> list[NodeGroup]:
    """List the groups of nodes that jobs may ask for."""
    return await hub_of(request).calls.ask(lambda door: door.node_groups())


@router.post(
    "/node_groups/{group}/add",
    response_model=NodeGroup,
    openapi_extra=takes(("application/json", NamedNodes)),
)
async def add_to_group(request: Request, identity: Adder, group: str) -> NodeGroup:
    """Put nodes into a group, made if there is none; the answer is the group as it is then."""
    hub = hub_of(request)
    wanted = await bodies.read_model(request, NamedNodes, hub.limits.body_bytes, hub.limits.body_s)
    return await hub.calls.change(lambda door: door.add_to_group(group, wanted.nodes, identity.user))


@router.post(
    "/node_groups/{group}/remove",
    response_model=NodeGroup,
    openapi_extra=takes(("application/json", NodesToRemove)),
)
async def remove_from_group(request: Request, identity: Remover, group: str) -> NodeGroup:
    """Take nodes out of a group; without nodes there is no such group any more."""
    hub = hub_of(request)
    wanted = await bodies.read_model(request, NodesToRemove, hub.limits.body_bytes, hub.limits.body_s)
    return await hub.calls.change(lambda door: door.remove_from_group(group, wanted.nodes, identity.user))


def _listed(names: list[str]) -> str:
    """Return the names as the audit keeps them."""
    return ",".join(names)[:1000]
