"""Builds the application: routes, the answers to errors, and the edge around them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute

from raycontrol.api import (
    changeroutes,
    clusterroutes,
    execroutes,
    healthroutes,
    jobroutes,
    listings,
    logroutes,
    models,
    noderoutes,
    packageroutes,
    tokenroutes,
)
from raycontrol.api.answers import Answers
from raycontrol.api.audits import Audits
from raycontrol.api.calls import Calls
from raycontrol.api.clusterroutes import SIZES_KEPT_S
from raycontrol.api.edge import Edge
from raycontrol.api.files import LogFiles
from raycontrol.api.guards import JOBS_KEPT, Authenticator
from raycontrol.api.healthroutes import Readiness
from raycontrol.api.hosts import Hosts
from raycontrol.api.hubs import Hub
from raycontrol.api.limits import Buckets, Limits
from raycontrol.api.measures import Measures
from raycontrol.api.problems import answer_error, answer_invalid, answer_refusal_of_the_router
from raycontrol.api.shares import Shares
from raycontrol.api.uploads import Uploads
from raycontrol.api.watchers import Watchers
from raycontrol.archive import bytes_of_jobs
from raycontrol.errors import RaycontrolError
from raycontrol.readers import ServerDoor
from raycontrol.spec import JobSpec
from raycontrol.version import __version__

ROUTES = (
    jobroutes,
    changeroutes,
    logroutes,
    packageroutes,
    clusterroutes,
    noderoutes,
    execroutes,
    tokenroutes,
    healthroutes,
)
BODIES = (
    models.NewJob,
    models.Stop,
    models.LogRead,
    models.SpecOnly,
    models.NewToken,
    models.NamedNodes,
    models.NodesToRemove,
    models.NodesToDrain,
    models.JobExec,
    models.NodesExec,
)
OPEN = frozenset({"/healthz", "/readyz", "/docs", "/openapi.json"})
"""What needs no token: it tells nothing of jobs."""

DESCRIPTION = """Submit training jobs to this Ray cluster, and watch them. Every request needs a token, as
`Authorization: Bearer rct_…`; errors are problem documents (RFC 9457)."""


@dataclass(frozen=True)
class Config:
    """``host`` is what the server binds; ``allowed_hosts`` are more names by which it may be asked for."""

    home: Path
    host: str = "127.0.0.1"
    allowed_hosts: Sequence[str] = ()
    package_cap_bytes: int = 512 << 20
    limits: Limits = field(default_factory=Limits)


def make_app(open_door: Callable[[], ServerDoor], config: Config) -> Edge:
    """Return the application; ``open_door`` is called when it is first needed."""
    hub = _hub(open_door, config)
    app = _routes(hub)
    return Edge(app, hub, Hosts.of(config.host, config.allowed_hosts, socket.gethostname()))


def _hub(open_door: Callable[[], ServerDoor], config: Config) -> Hub:
    calls = Calls(open_door, config.limits)
    return Hub(
        home=config.home,
        calls=calls,
        authenticator=Authenticator(calls, config.limits),
        glances=Answers(
            calls,
            lambda job_id: calls.ask(lambda door: door.glance(job_id)),
            config.limits.glance_s,
            JOBS_KEPT,
        ),
        listings=Answers(
            calls,
            lambda wanted: calls.ask(lambda door: listings.page(door, wanted)),
            config.limits.glance_s,
            listings.KEPT,
        ),
        sizes=Answers(calls, lambda _: calls.read(lambda: bytes_of_jobs(config.home)), SIZES_KEPT_S, 1),
        watchers=Watchers(
            calls, config.limits, lambda job_id, attempt: LogFiles(config.home, job_id, attempt)
        ),
        measures=Measures(),
        limits=config.limits,
        package_cap_bytes=config.package_cap_bytes,
        audits=Audits(calls, config.limits.audit_retry_s, config.limits.audit_wait_s),
        refusals=Buckets(config.limits.refusals_per_s, config.limits.refusals_burst),
        execs=Shares(config.limits.execs_per_token, "commands across nodes"),
        uploads=Uploads(config.limits.uploads_per_user),
    )


def _routes(hub: Hub) -> FastAPI:
    app = FastAPI(
        title="raycontrol",
        version=__version__,
        description=DESCRIPTION,
        lifespan=_lifespan,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,
    )
    app.state.hub = hub
    app.state.readiness = Readiness()
    for module in ROUTES:
        app.router.routes.extend([*module.router.routes, *_heads(module.router.routes)])
    app.add_exception_handler(RaycontrolError, answer_error)
    app.add_exception_handler(Exception, answer_error)
    app.add_exception_handler(HTTPException, answer_refusal_of_the_router)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    _complete_schema(app)
    return app


def _heads(routes: Sequence[BaseRoute]) -> Iterator[BaseRoute]:
    """Yield, for what can be got, a route that answers HEAD with the head of that alone. No document has to tell of them."""
    for route in routes:
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            head = copy(route)
            head.methods, head.include_in_schema = {"HEAD"}, False
            yield head


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    hub: Hub = app.state.hub
    hub.watchers.close()
    hub.audits.close()
    hub.calls.close()


def _complete_schema(app: FastAPI) -> None:
    """Add the models of bodies that routes read themselves, and of problems: FastAPI does not see them."""
    described = app.openapi

    @cache  # it takes a tenth of a second, and needs no token
    def openapi() -> dict[str, Any]:
        document = described()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for model in (*BODIES, models.Problem, JobSpec):
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
        for name in ("NewJob", "SpecOnly"):
            schemas[name]["properties"]["spec"] = {"$ref": "#/components/schemas/JobSpec"}
        return document

    app.openapi = openapi  # type: ignore[method-assign]
