"""``controller status`` and ``controller restart``."""

from __future__ import annotations

from typing import Any

import typer

from raycontrol.cli import options
from raycontrol.cli.services import Services


def status(context: typer.Context, address: options.Address = None, as_json: options.Json = False) -> None:
    """Show the cluster's controller: where it runs, its version, store and jobs.

    \b
    Example:
      raycontrol controller status --json | jq .version
    """
    services: Services = context.obj
    with services.client(address) as client:
        _print(services, client.controller_status(), as_json)


def restart(context: typer.Context, address: options.Address = None, as_json: options.Json = False) -> None:
    """Replace the controller by a new one, of the version that is installed now. Jobs run on.

    \b
    Example:
      raycontrol controller restart
    """
    services: Services = context.obj
    with services.client(address) as client:
        _print(services, client.controller_restart(), as_json)


def _print(services: Services, facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        services.out.json(facts)
    else:
        services.out.details({name: None if value is None else str(value) for name, value in facts.items()})
