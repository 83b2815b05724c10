"""What is laid down for the runs of an instance before the first one starts: their environment, the plan's files, a secret."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from raycontrol import nodeenv
from raycontrol.disk import write_private
from raycontrol.links import Identity, Links
from raycontrol.plan import Orders
from raycontrol.proofs import UnreachableError

RETRY_S = 0.2
BIN = "bin/"
ENVIRONMENT_FILE = "environment"
"""Where stand-ins find what this instance's runs were given: ``NAME=value`` and a zero byte each."""


async def lay_down(orders: Orders, me: Identity, links: Links, own_secret: str) -> dict[str, str]:
    """Write what the orders bring; return the environment of every run. ``own_secret`` is what this instance has made."""
    environment = _environment(orders, me)
    if orders.secret is not None:
        maker = orders.secret.maker
        secret = own_secret if maker == me.instance else await _secret_of(maker, me, links, orders.limit_s)
        await asyncio.to_thread(_write_files, me.folder, {orders.secret.path: secret})
    if orders.files:
        text = "".join(f"{name}={value}\0" for name, value in environment.items())
        await asyncio.to_thread(_write_files, me.folder, {**orders.files, ENVIRONMENT_FILE: text})
    return environment


def _environment(orders: Orders, me: Identity) -> dict[str, str]:
    """Return the node's environment with the job's on top, then its secrets; stand-ins come first on PATH, whoever set it."""
    base = nodeenv.raylet_environment(me.raylet_pid)
    base["PATH"] = nodeenv.search_path(base, str(Path(sys.executable).parent))
    changed = {name for name, value in orders.environment.items() if value is None}
    added = {name: value for name, value in orders.environment.items() if value is not None}
    kept = {name: value for name, value in base.items() if name not in changed}
    environment = {**kept, **added, **orders.secret_env}
    if any(path.startswith(BIN) for path in orders.files):
        environment["PATH"] = os.pathsep.join(
            filter(None, [str(me.folder / BIN.rstrip("/")), environment.get("PATH")])
        )
    return environment


async def _secret_of(maker: str, me: Identity, links: Links, limit_s: float) -> str:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return await links.secret_of(maker)
        except Exception as error:  # any call may fail for a while
            if time.monotonic() > deadline:
                raise UnreachableError(f"{me.named} cannot ask {maker} for the job's token") from error
        await asyncio.sleep(RETRY_S)


def _write_files(folder: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        program = path.startswith(BIN)
        data = text.encode("utf-8", "surrogateescape")
        write_private(folder / path, data, 0o700 if program else 0o600)
