"""What commands are given to work with: an output, and the ways to a cluster. Tests hand in their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raycontrol.cli.output import Output

if TYPE_CHECKING:
    from raycontrol.client import Client

FOLLOWING = "raycontrol-follow"  # the name of threads that follow a job begins with it

ClientFactory = Callable[..., "Client"]


def make_client(address: str | None = None, *, embedded: bool = False) -> Client:
    """Return a client of the cluster at ``address``, or of one that it starts itself.

    From now on what libraries print is no result: Ray tells on ``sys.stdout`` of nodes that it has lost, whatever it was
    told of logs. ``Output`` has taken the stream before.
    """
    from raycontrol.client import Client

    sys.stdout = sys.stderr
    return Client(address, embedded=embedded)


def find_address(explicit: str | None) -> str | None:
    """Return the address of the cluster to use (``--address``, RAY_ADDRESS, a local one that answers), or None."""
    from raycontrol.connect import find_address as find
    from raycontrol.settings import Settings

    return find(Settings.load(), explicit)


@dataclass
class Services:
    """``words`` is the job's command as it stood after ``--``."""

    out: Output
    client: ClientFactory = make_client
    find_address: Callable[[str | None], str | None] = find_address
    words: tuple[str, ...] = field(default=())
