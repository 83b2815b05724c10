"""``controller status`` and ``controller restart``."""

from __future__ import annotations

from typing import Any

import typer

from raycontrol.cli import options
from raycontrol.cli.services import Services


def status(context: typer.Context, address: options.Address = None, as_json: options.Json = False) -> None:
    """Show the cluster's controller: its version, cluster name, home, host, process and jobs. Starts nothing.

    The first `raycontrol submit` or `run` on a cluster starts its controller; before that none is running.

    \b
    Example:
      raycontrol controller status --json | jq .version
    """
    services: Services = context.obj
    with services.client(address) as client:
        facts = client.controller_status()
    _print(services, facts, as_json)
    if not facts["running"]:
        services.out.note(
            "the first `raycontrol submit` or `run` starts one; `raycontrol controller restart` does so now"
        )


def restart(context: typer.Context, address: options.Address = None, as_json: options.Json = False) -> None:
    """Replace the controller by a new one, of the version that is installed on the head now. Jobs run on.

    Starts one where there is none.

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
        services.out.details({_label(name): _words(value) for name, value in facts.items()})


def _label(name: str) -> str:
    return "ray address" if name == "ray" else name.replace("_", " ")


def _words(value: Any) -> str | None:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return None if value is None else str(value)
