"""Tokens of the HTTP interface as text: ``rct_<id>_<secret>``. Only the id and a hash of the secret are ever kept or sent on.

The secret is 32 random bytes, so that a plain SHA-256 of it cannot be searched backwards and needs no salt.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import NamedTuple

from raycontrol.errors import UsageError
from raycontrol.specparts import NAME, NAME_RULE

ID_LENGTH = 8
SECRET_BYTES = 32
NOBODYS = "0" * 64
"""What the hash of an unknown token is compared with, so that the answer takes as long as for a known one."""

_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
_TEXT = re.compile(r"rct_([a-z0-9]{8})_([A-Za-z0-9_-]{43})")


class Parsed(NamedTuple):
    """A token without its secret: which one it says it is, and the SHA-256 of its secret in hexadecimal digits."""

    id: str
    digest: str


def new_token() -> str:
    """Return the text of a fresh token."""
    token_id = "".join(secrets.choice(_ALPHABET) for _ in range(ID_LENGTH))
    return f"rct_{token_id}_{secrets.token_urlsafe(SECRET_BYTES)}"


def parsed(text: str) -> Parsed | None:
    """Return the parts of a token's text; None for any other text."""
    match = _TEXT.fullmatch(text)
    return None if match is None else Parsed(match[1], hashlib.sha256(match[2].encode()).hexdigest())


def same(digest: str, kept: str | None) -> bool:
    """Whether the digest is the one that is kept, in constant time; None: there is no token of that id."""
    equal = hmac.compare_digest(digest.encode("utf-8", "replace"), (kept or NOBODYS).encode())
    return equal and kept is not None


def checked_name(name: str) -> str:
    """Return the name if a token may have it; raises UsageError."""
    if not NAME.match(name):
        raise UsageError(f"name of a token: {NAME_RULE}, got {name!r}")
    return name


def checked_user(user: str) -> str:
    """Return the name of a user if a token may stand for him; raises UsageError."""
    if not user.isprintable() or user.strip() != user or not 0 < len(user) <= 256:
        rule = "must be 1 to 256 printable characters without space around them"
        raise UsageError(f"user of a token: {rule}, got {user!r}")
    return user


def checked_ttl(ttl_s: float) -> float:
    """Return how long a token lives, in seconds; raises UsageError when that is no time."""
    if not 0 < ttl_s < float("inf"):
        raise UsageError(f"lifetime of a token: must be more than 0 seconds, got {ttl_s:g}")
    return ttl_s
