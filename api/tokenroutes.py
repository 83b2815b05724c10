"""Routes for admins: tokens, and the audit."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from raycontrol.access import Action, Identity, TokenInfo
from raycontrol.api import bodies
from raycontrol.api.described import PREFIX, PROBLEMS, takes
from raycontrol.api.guards import Guard
from raycontrol.api.hubs import hub_of
from raycontrol.api.models import AuditPage, MadeToken, NewToken
from raycontrol.api.problems import NotThere
from raycontrol.api.visits import visit_of
from raycontrol.errors import UsageError

router = APIRouter(prefix=PREFIX, tags=["admin"], responses=PROBLEMS)

Admin = Annotated[Identity, Depends(Guard(Action.MANAGE_TOKENS))]
Maker = Annotated[Identity, Depends(Guard(Action.MANAGE_TOKENS, "create token"))]
Revoker = Annotated[Identity, Depends(Guard(Action.MANAGE_TOKENS, "revoke token"))]
Auditor = Annotated[Identity, Depends(Guard(Action.READ_AUDIT))]


@router.get("/tokens", response_model=list[TokenInfo])
async def list_tokens(request: Request, _: Admin) -> list[TokenInfo]:
    """List all tokens, also expired and revoked ones; none has its secret."""
    return await hub_of(request).calls.ask(lambda door: door.tokens())


@router.post(
    "/tokens",
    status_code=201,
    response_model=MadeToken,
    openapi_extra=takes(("application/json", NewToken)),
)
async def create_token(request: Request, identity: Maker) -> MadeToken:
    """Make a token; its text is in this answer and nowhere else."""
    hub = hub_of(request)
    new = await bodies.read_model(request, NewToken, hub.limits.body_bytes, hub.limits.body_s)
    visit_of(request).target = new.name
    info, text = await hub.calls.change(
        lambda door: door.create_token(new.name, new.role, new.user, new.ttl_s, identity.token)
    )
    return MadeToken(token=text, info=info)


@router.delete("/tokens/{name}", response_model=TokenInfo)
async def revoke_token(request: Request, _: Revoker, name: str) -> TokenInfo:
    """End a token, within two seconds for those who use it now."""
    hub = hub_of(request)
    try:
        return await hub.calls.change(lambda door: door.revoke_token(name))
    except UsageError as error:
        raise NotThere(str(error)) from None
    finally:  # also where nobody can say that it was done
        hub.authenticator.forget()


@router.get("/audit", response_model=AuditPage)
async def audit_log(
    request: Request,
    _: Auditor,
    after: Annotated[int, Query(ge=0, le=2**62)] = 0,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> AuditPage:
    """List who changed what, or tried to, oldest first."""
    entries = await hub_of(request).calls.ask(lambda door: door.audit_log(after, limit))
    return AuditPage(entries=entries, next=entries[-1].seq if len(entries) == limit else None)
