"""``raycontrol outputs get``: a job's outputs, fetched to this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from raycontrol.cli import options

if TYPE_CHECKING:
    from raycontrol.cli.services import Services
    from raycontrol.status import JobInfo


def get(
    context: typer.Context,
    job: options.JobId,
    folder: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR",
            help="Where to; by default a new folder outputs-ID here.",
            show_default=False,
        ),
    ] = None,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Fetch what a job has left in $RAYCONTROL_OUTPUT_DIR, as DIR/INSTANCE/PATH.

    Files that DIR has already are replaced. While the job runs there is nothing yet, unless the nodes share a folder.

    \b
    Example:
      raycontrol outputs get digits-ab12cd
      raycontrol outputs get digits-ab12cd results
    """
    from raycontrol.wording import counted, size

    services: Services = context.obj
    with services.client(address) as client:
        handle = client.job(job)
        fetched = handle.get_outputs(folder)
        info = None if fetched.files else handle.info()
    if as_json:
        services.out.json(asdict(fetched))
    elif info is None:
        services.out.line(
            f"{counted(fetched.files, 'file')}, {size(fetched.size)}, in {ascii_line(fetched.folder)}"
        )
    else:
        services.out.note(_nothing(info))


def _nothing(info: JobInfo) -> str:
    if not info.over:
        return "no outputs yet: they are collected when an attempt has ended"
    if info.outputs is not None:
        return f"no outputs found; the job's folder for them was {ascii_line(info.outputs)}"
    return "no outputs: the job has left nothing in $RAYCONTROL_OUTPUT_DIR"


def ascii_line(text: str) -> str:
    """Return a path that may hold anything in one line."""
    return text if text.isprintable() else repr(text)
