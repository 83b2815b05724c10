"""Where the next page of a list of jobs begins, as text for its ``after``. To be had without a server, too."""

from __future__ import annotations

import base64
import json


def cursor_after(place: tuple[float, str]) -> str:
    """Return the cursor of the jobs that are older than that of this ``submitted_at`` and id."""
    return base64.urlsafe_b64encode(json.dumps([*place]).encode()).decode().rstrip("=")
