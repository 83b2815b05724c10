"""``raycontrol shell``: a shell in a running instance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from raycontrol.cli import options

if TYPE_CHECKING:
    from raycontrol.cli.services import Services


def shell(
    context: typer.Context,
    job: options.JobId,
    instance: Annotated[
        str | None,
        typer.Argument(
            metavar="INSTANCE",
            help="The instance, such as worker-1; by default the one with INDEX 0.",
            show_default=False,
        ),
    ] = None,
    address: options.Address = None,
) -> None:
    """Open a shell in a running instance, with the job's environment, mounts and working directory, on this terminal.

    Ctrl-C goes to the program in front there. The shell ends with the job, and when this command is gone. Of a failed job
    with `keep_failed_s` it works until the nodes are let go. It goes by way of Ray: run it where the cluster can be
    reached (not over HTTP).

    \b
    Example:
      raycontrol shell digits-ab12cd
      raycontrol shell digits-ab12cd worker-1

    Exit status: that of the shell.
    """
    services: Services = context.obj
    with services.client(address) as client:
        raise typer.Exit(client.job(job).shell(instance))
