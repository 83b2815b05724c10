"""What commands are given to work with: an output, and the ways to a cluster. Tests hand in their own."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raycontrol.cli.output import Output

if TYPE_CHECKING:
    from raycontrol.client import Client
    from raycontrol.hardware import NodeInfo

FOLLOWING = "raycontrol-follow"  # the name of threads that follow a job begins with it

ClientFactory = Callable[..., "Client"]


def make_client(address: str | None = None, *, embedded: bool = False) -> Client:
    """Return a client of the cluster at ``address`` (which may be RAYCONTROL_URL), or of one that it starts itself.

    From now on what libraries print is no result: Ray tells on ``sys.stdout`` of nodes that it has lost, whatever it was
    told of logs. ``Output`` has taken the stream before.
    """
    from raycontrol.client import Client
    from raycontrol.settings import Settings

    sys.stdout = sys.stderr
    settings = Settings.load()
    if address is not None and address == settings.url:
        return Client(url=address, settings=settings)
    return Client(address, embedded=embedded, settings=settings)


def find_address(explicit: str | None) -> str | None:
    """Return where the cluster to use is: ``--address``, RAYCONTROL_URL, RAY_ADDRESS, a local one that answers; or None."""
    from raycontrol.connect import find_address as find
    from raycontrol.settings import Settings

    settings = Settings.load()
    if explicit is None and settings.url is not None:
        return settings.url
    return find(settings, explicit)


def this_machine() -> NodeInfo:
    """Return this machine as a node by itself, its facts collected in this process."""
    from pathlib import Path

    from raycontrol import extras

    extras.require("psutil")
    from raycontrol.hardware import NodeInfo
    from raycontrol.node import Collector
    from raycontrol.settings import Settings

    settings = Settings.load()
    ip = _own_ip()
    facts = Collector(Path(settings.scratch or settings.ray_tmpdir), ip, lambda: os.environ)(anew=True)
    return NodeInfo(id="", name=facts.hostname, ip=ip, facts=facts)


def _own_ip() -> str:
    """Return the address that this machine has towards others, as Ray looks for it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 80))
        except OSError:  # no way out of this machine
            return "127.0.0.1"
        return str(probe.getsockname()[0])


@dataclass
class Services:
    """``words`` is the job's command as it stood after ``--``."""

    out: Output
    client: ClientFactory = make_client
    find_address: Callable[[str | None], str | None] = find_address
    this_machine: Callable[[], NodeInfo] = this_machine
    words: tuple[str, ...] = field(default=())
