"""Routes by which a packed working directory comes to the archive, in pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from raycontrol import wording
from raycontrol.access import Action, Identity
from raycontrol.api import bodies
from raycontrol.api.described import BYTES, PREFIX, PROBLEMS, takes
from raycontrol.api.guards import Guard
from raycontrol.api.hubs import Hub, hub_of
from raycontrol.api.models import Held
from raycontrol.api.problems import NotThere, TooLarge
from raycontrol.api.visits import visit_of
from raycontrol.errors import PackageError
from raycontrol.readers import ServerDoor

router = APIRouter(prefix=PREFIX, tags=["packages"], responses=PROBLEMS)

Asker = Annotated[Identity, Depends(Guard(Action.SUBMIT))]
Sender = Annotated[Identity, Depends(Guard(Action.SUBMIT, "upload"))]
Digest = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="The SHA-256 of the package.")]


@router.head("/packages/{digest}", status_code=200, response_class=Response)
async def has_package(request: Request, _: Asker, digest: Digest) -> Response:
    """Say whether a package is in the archive: 200, else 404. One that is stays for the next hour at least."""
    if not await hub_of(request).calls.ask(lambda door: door.has_package(digest)):
        raise NotThere(f"no package {digest}")
    return Response(status_code=200)


@router.put(
    "/packages/{digest}",
    response_model=Held,
    openapi_extra=takes(("application/octet-stream", BYTES)),
)
async def put_package(
    request: Request,
    sender: Sender,
    digest: Digest,
    offset: Annotated[int, Query(ge=0, le=2**50)] = 0,
    last: Annotated[bool, Query(description="This piece ends the package.")] = False,
) -> Held:
    """Send a piece of at most 8 MiB; the answer says where to go on. An empty one asks how much is there."""
    hub, visit = hub_of(request), visit_of(request)
    with hub.uploads.piece(sender.user, digest):
        hint = f"; send pieces of at most {wording.size(hub.limits.piece_bytes)} with offset="
        data = await bodies.read_body(request, hub.limits.piece_bytes, hub.limits.piece_s, hint)
        if offset + len(data) > hub.package_cap_bytes:
            raise TooLarge(f"a package must have at most {hub.package_cap_bytes >> 20} MiB")
        held = await _put(hub, sender.user, digest, lambda door: door.put_package(digest, offset, data, last))
    if held == 0 or (last and held >= offset + len(data)):
        hub.uploads.end(sender.user, digest)
    if not last:
        visit.change = None  # the audit has the whole upload once, when it is complete
    return Held(held=held)


async def _put(hub: Hub, user: str, digest: str, piece: Callable[[ServerDoor], int]) -> int:
    """Return how much the archive has then; what of it is there when nobody answers is not known, so that it counts."""
    hub.uploads.begin(user, digest)
    try:
        return await hub.calls.ask(piece)
    except PackageError:  # its bytes were not its own, or no archive, and are gone
        hub.uploads.end(user, digest)
        raise
