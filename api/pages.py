"""Reads the cursors of lists (``cursors``), opaque to who holds one. Nothing in it is trusted but its form."""

from __future__ import annotations

import base64
import binascii
import json
import math

from raycontrol.api.problems import Unfit
from raycontrol.errors import Fault


def place_of(cursor: str) -> tuple[float, str]:
    """Return the last job's time and id; raises Unfit."""
    try:
        place = json.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError):
        raise _unfit() from None
    match place:
        case [float() | int() as at, str() as job_id] if (
            math.isfinite(at) and abs(at) < 1e15 and job_id.isascii()
        ):
            return float(at), job_id
    raise _unfit()


def _unfit() -> Unfit:
    return Unfit(Fault("after", "must be the `next` of a page before"))
