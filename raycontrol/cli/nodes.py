"""The commands about nodes: ``nodes``, ``node show``, ``doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from raycontrol.cli import nodeview, options
from raycontrol.cli.services import Services
from raycontrol.errors import UsageError
from raycontrol.wording import some

if TYPE_CHECKING:
    from raycontrol.doctor import Check
    from raycontrol.hardware import NodeInfo

CHECK_FAILED = 1
ABSENT_SHOWN = 5

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="The node's name, its IP or the beginning of its id.", show_default=False
    ),
]
Names = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        metavar="A,B",
        help="Only these nodes: names, IPs or beginnings of ids.",
        show_default=False,
    ),
]


def list_nodes(
    context: typer.Context, address: options.Address = None, as_json: options.Json = False
) -> None:
    """List the cluster's nodes: what is free of what they have, and the jobs that run on them.

    Memory is what Ray may give to jobs. RDMA counts the ports that are up. Starts the cluster's controller if it has none.

    \b
    Examples:
      raycontrol nodes
      raycontrol nodes --json | jq '.[] | select(.silent) | .name'
    """
    services: Services = context.obj
    with services.client(address) as client:
        found = client.nodes()
        absent = [] if as_json else [node.name for node in client.offline_nodes() if node.absent]
    if as_json:
        services.out.json([node.model_dump(mode="json") for node in found])
    else:
        services.out.table(nodeview.COLUMNS, [nodeview.row(node) for node in found])
    if absent:
        services.out.note(
            f"offline, and not in the cluster now: {some(absent, ABSENT_SHOWN)} (`raycontrol node offline` says why)"
        )


def show(
    context: typer.Context, name: Name, address: options.Address = None, as_json: options.Json = False
) -> None:
    """Show everything about one node: hardware, driver, network, RDMA, software, limits, jobs.

    \b
    Examples:
      raycontrol node show host-b
      raycontrol node show 10.0.0.7 --json
    """
    services: Services = context.obj
    with services.client(address) as client:
        node = _only(name, client.nodes([name], check=True))
    if as_json:
        services.out.json(node.model_dump(mode="json"))
        return
    for title, facts in nodeview.sections(node).items():
        services.out.line(title if facts else f"{title}: none")
        services.out.details({f"  {label}": value for label, value in facts.items()})


def doctor(
    context: typer.Context,
    nodes: Names = None,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Check the nodes for what training needs: one line per check, ok or what to do.

    Without a Ray cluster it checks this machine alone. Exit status: 0, also with warnings; 1 if a check failed.

    \b
    Examples:
      raycontrol doctor
      raycontrol doctor --nodes host-a,host-b | grep -v ' ok '
    """
    services: Services = context.obj
    found = _checked(_patients(services, _split(nodes), address))
    if as_json:
        services.out.json([check.model_dump(mode="json") for check in found])
    else:
        for line in nodeview.check_lines(found):
            services.out.line(line)
        services.out.note(nodeview.tally(found))
    raise typer.Exit(CHECK_FAILED if any(check.verdict == "fail" for check in found) else 0)


def _only(name: str, found: list[NodeInfo]) -> NodeInfo:
    """Return the one node; raises UsageError where several Ray nodes have the name, as on one machine."""
    if len(found) == 1:
        return found[0]
    ids = ", ".join(node.id for node in found)
    raise UsageError(f"{len(found)} nodes are called {name!r}; give the beginning of an id: {ids}")


def _split(names: str | None) -> list[str] | None:
    if names is None:
        return None
    found = [name.strip() for name in names.split(",") if name.strip()]
    if not found:
        raise UsageError(f"--nodes: must name a node, got {names!r}")
    return found


def _patients(services: Services, names: list[str] | None, address: str | None) -> list[NodeInfo]:
    if services.find_address(address) is not None:
        with services.client(address) as client:
            return client.nodes(names, check=True)
    if names is not None:
        raise UsageError(
            "no Ray cluster found, so there are no --nodes to choose; without it this machine is checked"
        )
    here = services.this_machine()
    services.out.note("note: no Ray cluster found; checking this machine alone")
    return [here]


def _checked(nodes: list[NodeInfo]) -> list[Check]:
    from raycontrol.doctor import checks

    return [check for node in nodes for check in checks(node, nodes)]
