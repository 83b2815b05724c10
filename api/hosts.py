"""Which names this server answers to, so that a web page of somebody else's cannot reach it through a browser.

A page can point a name of its own at 127.0.0.1 (DNS rebinding): the Host header then holds that name. And what a page
sends to another server carries its Origin. Pure.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from starlette.types import Scope

ANYWHERE = frozenset({"0.0.0.0", "::"})
HERE = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Hosts:
    """``names`` in lower case. ``addresses``: any IP address will do, for the server listens on all it has; no name
    can be pointed at a page's own server in that way."""

    names: frozenset[str]
    addresses: bool = False

    @classmethod
    def of(cls, bound: str, allowed: Iterable[str] = (), own_name: str = "") -> Hosts:
        bound = bound.strip("[]").lower()
        everywhere = bound in ANYWHERE
        own = {own_name.lower()} if everywhere and own_name else set()
        names = HERE | {bound, *own} | {name.strip("[]").lower() for name in allowed}
        return cls(frozenset(names - ANYWHERE), everywhere)

    def know(self, header: str) -> bool:
        """Whether a Host header names this server; its port does not matter."""
        name = host_name(header)
        if name is None:
            return False
        return name in self.names or (self.addresses and is_address(name))


def in_origin_form(scope: Scope) -> Scope:
    """Return a request whose target is a whole URL as one for its path; that host counts, whatever its header says (RFC 9112, 3.2.2)."""
    target = re.fullmatch(rb"(?i:https?)://([^/]*)(/.*)?", scope.get("raw_path") or b"", re.DOTALL)
    if target is None:
        return scope
    raw_path = target[2] or b"/"
    headers = [(name, target[1] if name == b"host" else value) for name, value in scope["headers"]]
    return {**scope, "path": unquote(raw_path.decode("latin-1")), "raw_path": raw_path, "headers": headers}


def is_own_origin(origin: str, host_header: str) -> bool:
    """Whether a page came from this very server. ``null``, which sandboxed pages send, is nobody's own."""
    try:
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and parts.netloc.lower() == host_header.strip().lower()
    except ValueError:
        return False


def host_name(header: str) -> str | None:
    """Return the name in a Host header (``[::1]:8642`` has ``::1``); None when it is none."""
    if not header or any(letter in header for letter in "/?#@\\ \t,"):
        return None
    try:
        parts = urlsplit(f"//{header}")
        parts.port  # noqa: B018  -- raises ValueError for what is no port
    except ValueError:
        return None
    return parts.hostname


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
