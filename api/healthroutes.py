"""Routes for those who watch over the server: is it there, can it work, how does it fare. Not versioned."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from raycontrol.access import Action, Identity
from raycontrol.api.described import PROBLEMS, TEXT, gives
from raycontrol.api.guards import Guard
from raycontrol.api.hubs import Hub, hub_of
from raycontrol.api.measures import MEDIA_TYPE, GpuUse, gpus_of
from raycontrol.api.models import Alive, Ready
from raycontrol.api.problems import NotReady
from raycontrol.api.usages import last_samples
from raycontrol.errors import StoreError

router = APIRouter(tags=["health"], responses=PROBLEMS)

READY_S = 5.0
READY_KEPT_S = 1.0
GPU_JOBS_MAX = 100
NO_CONTROLLER = "the controller does not answer"
NO_STORE = "the controller's store takes no write"

Viewer = Annotated[Identity, Depends(Guard(Action.READ_CLUSTER))]


class Readiness:
    """Asks whether the controller answers and its store takes a write, once for all who want to know in the same second."""

    def __init__(self) -> None:
        self._answer: asyncio.Task[str | None] | None = None
        self._asked_at = 0.0

    async def trouble(self, hub: Hub) -> str | None:
        """Return why the cluster cannot work now; None: it can."""
        now = time.monotonic()
        stale = self._answer is None or (self._answer.done() and now - self._asked_at > READY_KEPT_S)
        if self._answer is None or stale:
            self._answer = asyncio.ensure_future(_trouble(hub))
            self._asked_at = now
        try:
            return await asyncio.wait_for(asyncio.shield(self._answer), READY_S)
        except asyncio.TimeoutError:
            return NO_CONTROLLER


@router.get("/healthz", response_model=Alive)
async def healthz() -> Alive:
    """Say that this server runs. Needs no token."""
    return Alive(alive=True)


@router.get("/readyz", response_model=Ready)
async def readyz(request: Request) -> Ready:
    """Say whether the controller answers and its store takes a write; else 503. Needs no token."""
    readiness: Readiness = request.app.state.readiness
    trouble = await readiness.trouble(hub_of(request))
    if trouble is not None:
        raise NotReady(f"not ready: {trouble}")
    return Ready(ready=True)


@router.get(
    "/metrics",
    response_class=Response,
    responses=gives("Figures in Prometheus' text format.", plain=TEXT),
)
async def metrics(request: Request, _: Viewer) -> Response:
    """Show figures about the cluster's jobs and this server, for Prometheus."""
    hub = hub_of(request)
    found = await hub.calls.ask(lambda door: door.metrics())
    text = hub.measures.text(found, await _gpus(hub), hub.watchers.followers)
    return Response(text, media_type=MEDIA_TYPE)


async def _trouble(hub: Hub) -> str | None:
    try:
        writable = await hub.calls.ask(lambda door: door.writable())
    except StoreError:
        writable = False
    except Exception:  # whatever it is: it is not ready
        return NO_CONTROLLER
    return None if writable else NO_STORE


async def _gpus(hub: Hub) -> list[GpuUse]:
    """Return the last samples of running jobs, from their files."""
    running = (await hub.calls.ask(lambda door: door.running()))[-GPU_JOBS_MAX:]
    return await hub.calls.read(
        lambda: [
            gpu for job in running for gpu in gpus_of(job, last_samples(hub.home, job.id, job.attempt, 1))
        ]
    )
