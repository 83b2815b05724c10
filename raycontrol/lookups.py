"""How long a machine takes to find the names of others: torch's TCPStore, Ray Train and horovodrun look up every peer."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from raycontrol.hardware import Lookup

LOOKUP_S = 5.0
"""What a look-up may take; a resolver that has no answer asks on for longer."""
LOOKUPS_AT_ONCE = 256
PEERS_LOOKED_UP = 64
"""By each node: a name server that is slow is so for the first ones too."""

Resolve = Callable[[str], str]
"""Returns the name of an address, or raises OSError."""


async def look_up(
    ips: Sequence[str], limit_s: float, resolve: Resolve = lambda ip: socket.gethostbyaddr(ip)[0]
) -> tuple[Lookup, ...]:
    """Return how long the names of these addresses take to find, all at once; ``limit_s`` for those not found by then."""
    if not ips:
        return ()
    threads = ThreadPoolExecutor(min(len(ips), LOOKUPS_AT_ONCE), thread_name_prefix="lookup")
    loop = asyncio.get_running_loop()
    asked = {ip: loop.run_in_executor(threads, _look_up, ip, resolve) for ip in ips}
    await asyncio.wait(asked.values(), timeout=limit_s)
    threads.shutdown(wait=False, cancel_futures=True)  # a resolver cannot be hurried, and nobody waits for it
    return tuple(
        answer.result() if answer.done() and not answer.cancelled() else Lookup(ip=ip, seconds=limit_s)
        for ip, answer in asked.items()
    )


def _look_up(ip: str, resolve: Resolve) -> Lookup:
    started = time.monotonic()
    try:
        name = resolve(ip)
    except (OSError, UnicodeError):
        name = None
    return Lookup(ip=ip, seconds=round(time.monotonic() - started, 3), name=name)
