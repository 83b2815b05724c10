"""The commands about the queue: who waits and for what, who goes first, who is not to start."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from raycontrol.cli import options
from raycontrol.cli.jobs import print_states
from raycontrol.cli.services import Services
from raycontrol.errors import UsageError

if TYPE_CHECKING:
    from raycontrol.client import JobHandle
    from raycontrol.status import JobInfo

JobIds = Annotated[
    list[str], typer.Argument(metavar="ID...", help="Ids, or beginnings of ids.", show_default=False)
]


def queue(context: typer.Context, address: options.Address = None, as_json: options.Json = False) -> None:
    """Show the jobs that wait for nodes, in the order in which they are decided upon, with what each waits for.

    PLACE is that in the line. A job that stands aside has none: it is held, waits for other jobs or for its user's
    limit, or the cluster as it is could not run it.

    \b
    Examples:
      raycontrol queue
      raycontrol queue --json | jq -r '.[] | select(.held) | .id'
    """
    from raycontrol.cli.render import QUEUE_COLUMNS, queue_row

    services: Services = context.obj
    with services.client(address) as client:
        entries = client.queue()
    if as_json:
        services.out.json([entry.model_dump(mode="json") for entry in entries])
    elif entries:
        services.out.table(QUEUE_COLUMNS, [queue_row(entry, time.time()) for entry in entries])
    else:
        services.out.note("no job waits")


def priority(
    context: typer.Context,
    job_id: options.JobId,
    value: Annotated[
        int,
        typer.Argument(metavar="N", min=0, max=9, help="0 (highest) to 9 (lowest).", show_default=False),
    ],
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Give a waiting job another priority. Its place in the line follows from that and from when it was submitted.

    \b
    Examples:
      raycontrol priority digits-ab12cd 0
    """
    _change(context, [job_id], lambda job: job.set_priority(value), address, as_json)


def hold(
    context: typer.Context,
    job_ids: JobIds,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Keep waiting jobs from being started, until `raycontrol release`.

    Of several jobs each is held that can be; those that cannot are named, and the exit status is 2.

    \b
    Examples:
      raycontrol hold digits-ab12cd
    """
    _change(context, job_ids, lambda job: job.hold(), address, as_json)


def release(
    context: typer.Context,
    job_ids: JobIds,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Let jobs go that were held or suspended; they are at their old place in the queue.

    \b
    Examples:
      raycontrol release digits-ab12cd
    """
    _change(context, job_ids, lambda job: job.release(), address, as_json)


def suspend(
    context: typer.Context,
    job_ids: JobIds,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Stop jobs and keep them in the queue, until `raycontrol resume`.

    Their programs get SIGTERM, then `timeouts.grace_s` to save, then SIGKILL. The next attempt finds the same code and
    output folders where it runs on the same nodes (in a `shared_dir` the latter anywhere). Returns before they have stopped. Of several jobs each is suspended that can be; those that cannot
    are named, and the exit status is 2.

    \b
    Examples:
      raycontrol suspend digits-ab12cd
    """
    _change(context, job_ids, lambda job: job.suspend(), address, as_json)


def resume(
    context: typer.Context,
    job_ids: JobIds,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Let suspended jobs go on, each with another attempt, when it is its turn.

    \b
    Examples:
      raycontrol resume digits-ab12cd
    """
    _change(context, job_ids, lambda job: job.resume(), address, as_json)


def _change(
    context: typer.Context,
    job_ids: list[str],
    change: Callable[[JobHandle], JobInfo],
    address: str | None,
    as_json: bool,
) -> None:
    """Change each job; one that cannot be changed does not keep the others from it, and makes the exit status 2."""
    services: Services = context.obj
    done: list[JobInfo] = []
    refused: list[UsageError] = []
    with services.client(address) as client:
        jobs = [client.job(job_id) for job_id in job_ids]  # a wrong id changes nothing
        for job in jobs:
            try:
                done.append(change(job))
            except UsageError as error:
                refused.append(error)
    print_states(services, done, as_json, single=len(job_ids) == 1)
    for refusal in refused[1:]:
        services.out.note(f"raycontrol: {refusal}")
    if refused:
        raise refused[0]
