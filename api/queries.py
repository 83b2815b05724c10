"""What may stand in a request's query: a filter that is misspelled must not be taken for none at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import Request

from raycontrol.api.problems import Unfit
from raycontrol.errors import Fault


def refuse_unknown(request: Request) -> None:
    """Raise Unfit for every parameter of the query that its route does not have."""
    if not request.query_params:
        return
    known = known_parameters(request.scope["route"])
    unknown = [name for name in dict.fromkeys(request.query_params) if name not in known]
    if unknown:
        there_are = f"there are {', '.join(known)}" if known else "there are none"
        raise Unfit(
            *(Fault(name[:100], f"is no parameter of this request; {there_are}") for name in unknown[:20])
        )


def known_parameters(route: Any) -> tuple[str, ...]:
    """Return the names of a route's query parameters, those of its guards included."""
    return tuple(dict.fromkeys(_names(route.dependant)))


def _names(dependant: Any) -> Iterator[str]:
    for inner in dependant.dependencies:
        yield from _names(inner)
    yield from (parameter.alias for parameter in dependant.query_params)
