"""What is installed here: clients over HTTP do without Ray and without all else that only the nodes of a cluster need."""

from __future__ import annotations

import importlib.util

from raycontrol.errors import UsageError

CLUSTER = {
    "ray": "Ray",
    "sqlalchemy": "SQLAlchemy",
    "psutil": "psutil",
    "fastapi": "FastAPI",
    "uvicorn": "uvicorn",
}
"""Modules of the extra `cluster` by which it is told whether that is installed, and what people call them."""


def require(*modules: str) -> None:
    """Raise UsageError where one of these is not installed; Ray, which all others are for, is named first."""
    missing = [
        name for module, name in CLUSTER.items() if module in ("ray", *modules) and not _is_there(module)
    ]
    needed = {CLUSTER[module] for module in modules}
    if needed & {*missing}:
        raise UsageError(
            f"{missing[0]} is not installed here: set RAYCONTROL_URL to a server's address, or install raycontrol[cluster]"
        )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
