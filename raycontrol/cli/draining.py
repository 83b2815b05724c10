"""What people say of nodes: ``node offline``, ``node online``, ``node group``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from raycontrol.cli import options
from raycontrol.cli.render import moment
from raycontrol.cli.services import Services
from raycontrol.errors import UsageError

if TYPE_CHECKING:
    from raycontrol.hardware import NodeGroup, OfflineNode

COLUMNS = ("GROUP", "NODES", "ABSENT")
OFFLINE_COLUMNS = ("NAME", "SINCE", "BY", "REASON", "NOTE")

Names = Annotated[
    list[str],
    typer.Argument(metavar="NAME", help="Nodes: names, IPs or beginnings of ids.", show_default=False),
]
Group = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.", show_default=False)]


def offline(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Nodes: names, IPs or beginnings of ids.  [default: list those that are offline]",
            show_default=False,
        ),
    ] = None,
    reason: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Why, for all who will see it in `raycontrol nodes`.", show_default=False
        ),
    ] = None,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Let nodes take no new job, until `node online`; jobs that run there go on to their end.

    It holds by the node's name, also when Ray or the controller start anew. Other users of Ray are not kept away.
    Without names: list the nodes that are offline, also those that are not in the cluster now.

    \b
    Examples:
      raycontrol node offline host-b --reason "fan 2 is broken"
      raycontrol node offline host-b host-c --reason maintenance
      raycontrol node offline
    """
    services: Services = context.obj
    if not names and reason is None:
        _list_offline(services, address, as_json)
        return
    if not names or reason is None:
        raise UsageError(f"give nodes and --reason; {'nodes are' if not names else '--reason is'} missing")
    with services.client(address) as client:
        found = client.set_offline(names, reason=reason)
    _note_absent(services, [node.name for node in found if node.absent])
    if as_json:
        services.out.json([node.model_dump(mode="json") for node in found])
    else:
        for node in found:
            services.out.line(f"{node.name} offline: {node.reason}")


def _list_offline(services: Services, address: str | None, as_json: bool) -> None:
    with services.client(address) as client:
        found = client.offline_nodes()
    if as_json:
        services.out.json([node.model_dump(mode="json") for node in found])
    elif found:
        services.out.table(OFFLINE_COLUMNS, [_offline_row(node) for node in found])
    else:
        services.out.note("no node is offline")


def _offline_row(node: OfflineNode) -> tuple[str, ...]:
    absent = "not in the cluster now" if node.absent else ""
    return node.name, moment(node.at), node.by, node.reason, absent


def online(
    context: typer.Context, names: Names, address: options.Address = None, as_json: options.Json = False
) -> None:
    """Let nodes take jobs again.

    \b
    Example:
      raycontrol node online host-b
    """
    services: Services = context.obj
    with services.client(address) as client:
        found = client.set_online(names)
    if as_json:
        services.out.json(found)
    else:
        for name in found:
            services.out.line(f"{name} online")


def list_groups(
    context: typer.Context, address: options.Address = None, as_json: options.Json = False
) -> None:
    """List the groups of nodes, with those of their nodes that are not in the cluster now.

    \b
    Example:
      raycontrol node group list
    """
    services: Services = context.obj
    with services.client(address) as client:
        found = client.node_groups()
    if as_json:
        services.out.json([group.model_dump(mode="json") for group in found])
    else:
        services.out.table(COLUMNS, [_row(group) for group in found])


def add(
    context: typer.Context,
    group: Group,
    names: Names,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Put nodes into a group, made if there is none. A node may be in several.

    \b
    Example:
      raycontrol node group add a100 host-b host-c
    """
    services: Services = context.obj
    with services.client(address) as client:
        found = client.add_to_group(group, names)
    _note_absent(services, [name for name in names if name in found.absent])
    _print_group(services, found, as_json)


def remove(
    context: typer.Context,
    group: Group,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Nodes to take out of it.  [default: all]", show_default=False),
    ] = None,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Take nodes out of a group; without nodes there is no such group any more. Jobs that run there go on.

    \b
    Examples:
      raycontrol node group remove a100 host-c
      raycontrol node group remove a100
    """
    services: Services = context.obj
    with services.client(address) as client:
        found = client.remove_from_group(group, names or None)
    _print_group(services, found, as_json)


def _print_group(services: Services, group: NodeGroup, as_json: bool) -> None:
    if as_json:
        services.out.json(group.model_dump(mode="json"))
    else:
        services.out.line(f"{group.name}: {', '.join(group.nodes) or 'no nodes'}")


def _row(group: NodeGroup) -> tuple[str, ...]:
    return group.name, ", ".join(group.nodes), ", ".join(group.absent)


def _note_absent(services: Services, names: Sequence[str]) -> None:
    """A name may be misspelt, or its node come later."""
    if names:
        services.out.note(f"note: not in the cluster now: {', '.join(names)}")
