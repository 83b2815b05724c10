"""How routes are described in the OpenAPI document where FastAPI cannot know by itself."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from raycontrol.api.problems import MEDIA_TYPE

PREFIX = "/api/v1"

PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": text,
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    for status, text in (
        ("4XX", "Refused: what was asked for."),
        ("5XX", "Failed: try again, or see the log."),
    )
}
"""What every route may answer instead."""

MEDIA = {
    "bytes": "application/octet-stream",
    "events": "text/event-stream",
    "plain": "text/plain",
    "tar": "application/x-tar",
}
TEXT = {"type": "string"}
BYTES = {"type": "string", "format": "binary"}
EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}, "id": {"type": "string"}},
    "required": ["data"],
}
"""One server-sent event."""


def takes(*kinds: tuple[str, type[BaseModel] | dict[str, Any]], required: bool = True) -> dict[str, Any]:
    """Return ``openapi_extra`` of a route that reads its body itself: by content type, the model or schema."""
    content = {kind: {"schema": _schema(of)} for kind, of in kinds}
    return {"requestBody": {"content": content, "required": required}}


def gives(description: str, status: int = 200, **schemas: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """Return ``responses`` of a route that answers with something else than JSON: the schema by the name of a media type."""
    content = {MEDIA[name]: {"schema": schema} for name, schema in schemas.items()}
    return {status: {"description": description, "content": content}}


def _schema(of: type[BaseModel] | dict[str, Any]) -> dict[str, Any]:
    return of if isinstance(of, dict) else {"$ref": f"#/components/schemas/{of.__name__}"}
