"""Reads bodies: never more than a route takes, never for longer than is decent, and only after its guard has let in."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from raycontrol.api.guards import still_let_in
from raycontrol.api.problems import (
    BadRequest,
    BodyCut,
    BodyTooSlow,
    TooLarge,
    Unfit,
    UnknownMedia,
    faults_of,
)
from raycontrol.errors import Fault

JSON = "application/json"

M = TypeVar("M", bound=BaseModel)


async def read_body(request: Request, cap_bytes: int, timeout_s: float, hint: str = "") -> bytes:
    """Return the body; raises TooLarge (as soon as it is known, with the ``hint`` behind it), BodyTooSlow and BodyCut.

    Also Unauthorized where the token was revoked, or has expired, while the body came.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > cap_bytes):
        raise _too_large(cap_bytes, hint)
    try:
        body = await asyncio.wait_for(_gathered(request, cap_bytes, hint), timeout_s)
    except asyncio.TimeoutError:
        raise BodyTooSlow(
            f"the body had not arrived after {timeout_s:g} s", {"Connection": "close"}
        ) from None
    except ClientDisconnect:
        raise BodyCut("the client has left within the body") from None
    await still_let_in(request)
    return body


async def read_model(request: Request, model: type[M], cap_bytes: int, timeout_s: float) -> M:
    """Return a JSON body as ``model``; without a body, what the model is by its defaults."""
    body = await read_body(request, cap_bytes, timeout_s)
    if body and media_type(request) not in (JSON, ""):
        raise UnknownMedia(f"the body must be {JSON}")
    return validated(model, parsed_json(body or b"{}"))


def media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def parsed_json(body: bytes) -> Any:
    """Return what a JSON text says; raises BadRequest with the place where it stops being one."""
    try:
        return json.loads(body, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise BadRequest(
            f"this is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None
    except UnicodeDecodeError:
        raise BadRequest("this is not JSON: it must be UTF-8") from None
    except (ValueError, RecursionError):
        raise BadRequest(
            "this is not JSON that can be read: a number or its nesting is beyond bounds"
        ) from None


def validated(model: type[M], document: Any) -> M:
    """Return the document as ``model``; raises Unfit with every fault."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise Unfit(*faults_of(error.errors(include_url=False, include_input=False))) from None
    except RecursionError:
        raise Unfit(Fault("", "is nested too deeply")) from None


async def _gathered(request: Request, cap_bytes: int, hint: str) -> bytes:
    """Without Content-Length, as in chunks, nobody knows before how much will come."""
    pieces = bytearray()
    async for piece in request.stream():
        pieces += piece
        if len(pieces) > cap_bytes:
            raise _too_large(cap_bytes, hint)
    return bytes(pieces)


def _too_large(cap_bytes: int, hint: str) -> TooLarge:
    return TooLarge(f"the body must have at most {cap_bytes} bytes{hint}", {"Connection": "close"})


def _no_number(word: str) -> Any:
    raise ValueError(word)
