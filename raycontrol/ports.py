"""Ports of this machine that nobody uses."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Collection

LEASED_PORTS = range(20_000, 29_400)
"""Where leased ports come from: below the kernel's ephemeral range, above what services use, beside torchrun's 29400 and 29500."""


def free_port(taken: Collection[int]) -> int:
    """Return a port that nobody listens on, on any address, and that is not in ``taken``; raises OSError when there is none."""
    candidates = [port for port in LEASED_PORTS if port not in taken]
    random.shuffle(candidates)
    for port in candidates:
        if _can_bind(port):
            return port
    raise OSError(f"no free port between {LEASED_PORTS.start} and {LEASED_PORTS.stop - 1}")


def _can_bind(port: int) -> bool:
    return all(_is_free(port, family) for family in (socket.AF_INET, socket.AF_INET6))


def _is_free(port: int, family: socket.AddressFamily) -> bool:
    """Whether nobody has the port on an address of this family; a family that the system does not have is all free."""
    try:
        probe = socket.socket(family)
    except OSError as error:
        if error.errno != errno.EAFNOSUPPORT:
            raise
        return True
    with probe:
        try:
            if family is socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRNOTAVAIL  # not even the address of all addresses: switched off
    return True
