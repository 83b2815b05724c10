"""What NCCL says in a log of how it reaches other nodes. Pure.

With NCCL_DEBUG=INFO it prints a line for each channel between nodes: ``… NCCL INFO Channel 00/0 : 1[1] -> 8[0] [send]
via NET/IB/0/GDRDMA`` or ``… [receive] via NET/Socket/0``.
"""

from __future__ import annotations

import re
from collections.abc import Collection

GDRDMA = "GDRDMA"
SOCKET = "Socket"
MARK = b"via NET/"
LINE = re.compile(rb"\[(?:send|receive)\] via NET/([A-Za-z][\w -]{0,30})/[^/\s]{1,30}((?:/\w{1,30}){0,4})")
LONGEST_LINE = 4096
MOST_KINDS = 8
"""A log that names more kinds is not NCCL's."""


class TransportReader:
    """Reads a log in the pieces in which it is shipped, line by whole line, and remembers what it has told."""

    def __init__(self) -> None:
        self._rest = b""
        self._told: set[str] = set()

    def feed(self, data: bytes) -> list[str]:
        """Return transports (``IB/GDRDMA``, ``Socket``) that are named here for the first time."""
        text, _, rest = (self._rest + data).rpartition(b"\n")
        self._rest = rest[-LONGEST_LINE:]
        if MARK not in text or len(self._told) >= MOST_KINDS:
            return []
        named = {_transport(match) for match in LINE.finditer(text)}
        fresh = sorted(named - self._told)[: MOST_KINDS - len(self._told)]
        self._told.update(fresh)
        return fresh


def over_rdma(transports: Collection[str]) -> bool:
    """Whether NCCL has named another way than sockets."""
    return any(name != SOCKET for name in transports)


def usage(transports: Collection[str]) -> str | None:
    """Return whether RDMA is in use, for a person; None while nothing is known."""
    if not transports:
        return None
    sockets = SOCKET in transports
    others = sorted(set(transports) - {SOCKET})
    if not others:
        return f"not in use: NET/{SOCKET}"
    direct = [name.endswith(f"/{GDRDMA}") for name in others]
    kinds = sorted({name.partition("/")[0] for name in others if not name.startswith("IB")})
    ways = [GDRDMA if all(direct) else f"{GDRDMA} in part"] if any(direct) else []
    how = ", ".join([*(f"NET/{kind}" for kind in kinds), *ways])
    text = f"in use ({how})" if how else "in use"
    return f"{text}, but NET/{SOCKET} too" if sockets else text


def _transport(match: re.Match[bytes]) -> str:
    name = match[1].decode("ascii").rstrip()
    return f"{name}/{GDRDMA}" if GDRDMA.encode() in match[2].split(b"/") else name
