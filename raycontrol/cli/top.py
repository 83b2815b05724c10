"""``raycontrol top``: what running jobs use, instance by instance, again and again."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from raycontrol.cli import options
from raycontrol.cli.jobs import says_when_offline
from raycontrol.cli.services import Services
from raycontrol.cli.topview import COLUMNS, Look, document, rows

if TYPE_CHECKING:
    from raycontrol.client import Client, JobHandle
    from raycontrol.status import JobInfo

INTERVAL_S = 5.0

Show = Callable[[Look], None]


def top(
    context: typer.Context,
    job_id: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="The job's id, or the beginning of it.  [default: all running jobs]",
            show_default=False,
        ),
    ] = None,
    interval_s: Annotated[
        float,
        typer.Option(
            "--interval",
            callback=options.at_least(1),
            metavar="SECONDS",
            help="Look again after so long; new samples come every 5 seconds.",
        ),
    ] = INTERVAL_S,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Show what jobs use: CPU, memory, disk and GPUs of each instance, with the age of the sample.

    CPU is 100 for one core. Goes on until the job ends or Ctrl-C. With --json each look is one line with an object.

    \b
    Examples:
      raycontrol top
      raycontrol top digits-ab12cd --interval 10
      raycontrol top --once --json | jq '.jobs[].instances[].usage.cpu_percent'
    """
    services: Services = context.obj
    with services.client(address) as client, _ctrl_c_ends(), _shown(services, as_json, once) as show:
        with says_when_offline(services, client):
            job = client.job(job_id) if job_id is not None else None
            first = look_at(client, job)
        show(first)
        if once:
            return
        for look in looks_after(first, client, job, lambda: time.sleep(interval_s)):
            show(look)


def looks_after(
    look: Look, client: Client, job: JobHandle | None, pause: Callable[[], None]
) -> Iterator[Look]:
    """Yield what is seen after each pause; end with the job, without one never."""
    while job is None or not look.jobs[0][0].over:
        pause()
        look = look_at(client, job)
        yield look


def look_at(client: Client, job: JobHandle | None) -> Look:
    """Look at the job, without one at all that run, newest first."""
    infos = _running(client) if job is None else [job.info()]
    seen = [(info, client.job(info.id).usage(last=2, attempt=info.attempt)) for info in infos]
    return Look(time.time(), tuple(seen))


@contextmanager
def _ctrl_c_ends() -> Iterator[None]:
    """Within, Ctrl-C is the usual end, with exit status 0; where it is ignored it stays so."""
    before = signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _shown(services: Services, as_json: bool, once: bool) -> Iterator[Show]:
    """Give what shows a look: as JSON, in one place of the terminal, or below the one before."""
    out = services.out
    if as_json:
        yield lambda look: out.json_line(document(look))
    elif once:
        yield lambda look: _print_once(services, look)
    elif out.terminal:
        with out.live(COLUMNS) as show:
            yield lambda look: show(rows(look))
    else:
        yield lambda look: _print_block(services, look)


def _print_once(services: Services, look: Look) -> None:
    shown = rows(look)
    services.out.table(COLUMNS, shown)
    if not shown:
        services.out.note("nothing runs")


def _print_block(services: Services, look: Look) -> None:
    from raycontrol.cli.render import moment

    services.out.line(moment(look.at))
    services.out.table(COLUMNS, rows(look))
    services.out.log("")


def _running(client: Client) -> list[JobInfo]:
    from raycontrol.status import JobState

    states = [JobState.STARTING, JobState.RUNNING, JobState.STOPPING]
    return [info for info in client.list(states=states, limit=None) if not info.over]
