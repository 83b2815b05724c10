"""The commands that look at jobs, wait for them, stop and remove them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from raycontrol.cli import options
from raycontrol.cli.services import Services
from raycontrol.errors import RaycontrolError, UsageError

if TYPE_CHECKING:
    from raycontrol.client import Client, JobHandle
    from raycontrol.hardware import InstanceUsage
    from raycontrol.status import Event, JobInfo, JobState, MemberInfo

FINISHED_SHOWN = 20
_PREFIX = re.compile(r"(?P<instance>\S+) \| (?P<line>.*)", re.DOTALL)


def list_jobs(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also all jobs that ended.")] = False,
    states: Annotated[
        list[str] | None,
        typer.Option(
            "--state", metavar="STATE", help="Only jobs in this state. May be repeated.", show_default=False
        ),
    ] = None,
    user: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this user's jobs.", show_default=False)
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--label", metavar="K=V", help="Only jobs with this label. May be repeated.", show_default=False
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Only jobs with this in their id or name.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            callback=options.at_least(1),
            metavar="N",
            help="At most so many jobs, the newest ones.",
            show_default=False,
        ),
    ] = None,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """List jobs, newest first: all that have not ended, and the last 20 that have.

    Asks the controller where a cluster answers, else reads what is stored on this machine.

    \b
    Examples:
      raycontrol list
      raycontrol list --all --state FAILED --limit 50
      raycontrol list --label team=vision --text digits
      raycontrol list --json | jq -r '.[].id'
    """
    services: Services = context.obj
    wanted = _states(states or [])
    filters = {"user": user, "labels": _labels(labels or []), "text": text}
    with services.client(address) as client, says_when_offline(services, client):
        look = partial(client.list, **filters)  # type: ignore[arg-type]
        if everything or wanted or limit is not None:
            jobs = look(states=wanted or None, limit=limit)
        else:
            jobs = _unfinished_and_last(look)
    jobs = sorted(jobs, key=lambda info: info.submitted_at, reverse=True)
    if as_json:
        services.out.json([info.model_dump(mode="json") for info in jobs])
        return
    _print_list(services, jobs)


def get(
    context: typer.Context,
    job_id: options.JobId,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Show everything about one job: state, why, what it asked for, instances, how it ended, outputs.

    Asks the controller where a cluster answers, else reads what is stored on this machine.

    \b
    Examples:
      raycontrol get digits-ab12cd
      raycontrol get digits --json | jq .verdict
      raycontrol get sweep-ab12cde --json | jq '.members[] | select(.state == "FAILED")'
    """
    services: Services = context.obj
    with services.client(address) as client:
        job = _job(services, client, job_id)
        info = job.info()
        usage = _last_usage(services, job, info.attempt) if info.array is None else {}
        members = [] if info.array is None else job.members()
    if as_json:
        document = {**info.model_dump(mode="json"), **_usage_document(usage)}
        if members:
            document["members"] = [member.model_dump(mode="json") for member in members]
        services.out.json(document)
        return
    _print_details(services, info, usage, over_http=client.url is not None)
    if members:
        _print_members(services, members)


def logs(
    context: typer.Context,
    job_id: options.JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    member: Annotated[
        int | None,
        typer.Option(
            callback=options.at_least(0),
            metavar="INDEX",
            help="Of an array, only this member.",
            show_default=False,
        ),
    ] = None,
    instance: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only this instance, such as worker-0.", show_default=False),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Only instances of this group, such as worker.", show_default=False
        ),
    ] = None,
    tail: Annotated[
        int | None,
        typer.Option(
            callback=options.at_least(0),
            metavar="N",
            help="Begin with the last N lines of each instance, of its last 256 KiB at most.",
            show_default=False,
        ),
    ] = None,
    prefix: Annotated[
        bool | None,
        typer.Option(
            "--prefix/--no-prefix",
            help="Put the instance's name before each line.  [default: unless --instance is given]",
            show_default=False,
        ),
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option(
            callback=options.at_least(0),
            metavar="N",
            help="Only this attempt, from 0.  [default: the current one, and with -f those after it]",
            show_default=False,
        ),
    ] = None,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Print what a job's programs wrote. Ctrl-C ends the printing, never the job.

    Asks the archive where a cluster answers, else reads what is stored on this machine. With --json each line is an
    object with `instance` and `line`.

    \b
    Examples:
      raycontrol logs -f digits-ab12cd
      raycontrol logs digits-ab12cd --instance worker-0 --tail 100
      raycontrol logs digits-ab12cd --group ps
      raycontrol logs sweep-ab12cde --member 17
      raycontrol logs digits-ab12cd --attempt 0
    """
    services: Services = context.obj
    shown = instance is None if prefix is None else prefix
    with services.client(address) as client:
        job = _job(services, client, job_id)
        job = job if member is None else job.member(member)
        lines = job.logs(
            follow=follow,
            instance=instance,
            group=group,
            tail=tail,
            prefix=shown or as_json,
            attempt=attempt,
        )
        for line in lines:
            if as_json:
                services.out.json_line(_log_document(line))
            else:
                services.out.line(line, flush=follow)


def events(
    context: typer.Context,
    job_id: options.JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    after: Annotated[
        int, typer.Option(metavar="SEQ", help="Only events after this `seq`.", show_default=False)
    ] = 0,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Print every change of a job, with its time and what happened.

    Asks the controller where a cluster answers, else reads what is stored on this machine. With --json one list; with
    --json and --follow one object a line.

    \b
    Examples:
      raycontrol events digits-ab12cd
      raycontrol events -f digits-ab12cd --json
    """
    services: Services = context.obj
    with services.client(address) as client:
        job = _job(services, client, job_id)
        if follow:
            for event in job.watch(after):
                _print_event(services, event, as_json)
            return
        past = job.events(after)
    if as_json:
        services.out.json([event.model_dump(mode="json") for event in past])
        return
    for event in past:
        _print_event(services, event, as_json=False)


def wait(
    context: typer.Context,
    job_id: options.JobId,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            callback=options.at_least(0),
            metavar="SECONDS",
            help="Wait no longer (then exit 124).",
            show_default=False,
        ),
    ] = None,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Wait until a job has ended, print how, and exit with its status (see `raycontrol run --help`).

    \b
    Examples:
      raycontrol wait digits-ab12cd && ./evaluate.sh
      raycontrol wait digits-ab12cd --timeout 3600
    """
    services: Services = context.obj
    with services.client(address) as client:
        info = _job(services, client, job_id).wait(timeout_s)
    if as_json:
        services.out.json(info.model_dump(mode="json"))
    else:
        _print_state(services, info)
        _note_verdict(services, info)
    raise typer.Exit(info.exit_status)


def stop(
    context: typer.Context,
    job_ids: Annotated[
        list[str], typer.Argument(metavar="ID...", help="Ids, or beginnings of ids.", show_default=False)
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Kill at once, without the job's grace time.")
    ] = False,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Ask jobs to stop: their programs get SIGTERM, then `timeouts.grace_s` to save, then SIGKILL.

    Returns before they have stopped; `raycontrol wait` waits for the end. Several ids give a JSON list, one id one object.

    \b
    Examples:
      raycontrol stop digits-ab12cd
      raycontrol stop --force digits-ab12cd && raycontrol wait digits-ab12cd
    """
    services: Services = context.obj
    with services.client(address) as client:
        with says_when_offline(services, client):
            jobs = [client.job(job_id) for job_id in job_ids]  # a wrong id stops nothing
        stopped = [job.stop(force=force) for job in jobs]
    print_states(services, stopped, as_json, single=len(job_ids) == 1)


def print_states(services: Services, infos: list[JobInfo], as_json: bool, *, single: bool) -> None:
    """Write a line each; as JSON one object where a ``single`` job was asked for, else a list."""
    if as_json:
        documents = [info.model_dump(mode="json") for info in infos]
        if documents or not single:
            services.out.json(documents[0] if single else documents)
        return
    for info in infos:
        _print_state(services, info)


def prune(
    context: typer.Context,
    older_than_days: Annotated[
        float | None,
        typer.Option(
            "--older-than",
            callback=options.at_least(0),
            metavar="DAYS",
            help="Jobs that ended longer ago.",
            show_default=False,
        ),
    ] = None,
    keep_gib: Annotated[
        float | None,
        typer.Option(
            "--keep-gib",
            callback=options.at_least(0),
            metavar="GIB",
            help="The oldest jobs, until what ended jobs keep fits in so much.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Remove nothing, print what would be removed.")
    ] = False,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Remove old ended jobs, with their events, logs and outputs, and packed folders that no job uses any more.

    Without --older-than the setting keep_days holds, without --keep-gib the setting keep_gib. Covers all ended jobs
    of the store that the cluster's controller keeps, else of the one on this machine: jobs of other clusters and of
    embedded runs too. A job whose embedded run was killed (abandoned) counts as ended when it was submitted. Other
    jobs that have not ended are never touched.

    The controller does the same every hour, for the jobs of its own cluster, by its keep_days and keep_gib.

    \b
    Examples:
      raycontrol prune --dry-run
      raycontrol prune --older-than 7
    """
    services: Services = context.obj
    with services.client(address) as client, says_when_offline(services, client):
        removed = client.prune(older_than_days=older_than_days, keep_gib=keep_gib, dry_run=dry_run)
    if as_json:
        services.out.json([info.model_dump(mode="json") for info in removed])
        return
    if removed:
        _print_list(services, removed)
    verb = "would be removed" if dry_run else "removed"
    services.out.note(f"{len(removed)} job{'' if len(removed) == 1 else 's'} {verb}")


def _job(services: Services, client: Client, job_id: str) -> JobHandle:
    with says_when_offline(services, client):
        return client.job(job_id)


@contextmanager
def says_when_offline(services: Services, client: Client) -> Iterator[None]:
    """Around the first look of a command: say, also beside its error, if the cluster that was named does not answer."""
    try:
        yield
    finally:
        if client.offline is not None:
            services.out.note(f"note: {client.offline}")


def _last_usage(services: Services, job: JobHandle, attempt: int) -> dict[str, InstanceUsage]:
    """Return the last sample of each instance; a job can be shown without."""
    try:
        return {name: samples[-1] for name, samples in job.usage(attempt=attempt).items()}
    except RaycontrolError as error:
        services.out.note(f"note: what the job uses is not known: {error}")
        return {}


def _usage_document(usage: dict[str, InstanceUsage]) -> dict[str, object]:
    documents = {name: sample.model_dump(mode="json") for name, sample in usage.items()}
    return {"usage": documents} if documents else {}


def _states(words: list[str]) -> list[JobState]:
    from raycontrol.status import JobState

    known = [state.value for state in JobState]
    for word in words:
        if word.upper() not in known:
            raise UsageError(f"--state: must be one of {', '.join(known)}, got {word}")
    return [JobState(word.upper()) for word in words]


def _labels(words: list[str]) -> dict[str, str] | None:
    for word in words:
        if "=" not in word:
            raise UsageError(f"--label: must be NAME=VALUE, got {word}")
    return dict(word.split("=", 1) for word in words) or None


def _unfinished_and_last(look: Callable[..., list[JobInfo]]) -> list[JobInfo]:
    from raycontrol.status import JobState

    unfinished = [state for state in JobState if not state.terminal]
    finished = [state for state in JobState if state.terminal]
    return [
        *look(states=unfinished, limit=None),
        *look(states=finished, limit=FINISHED_SHOWN),
    ]


def _print_list(services: Services, jobs: list[JobInfo]) -> None:
    from raycontrol.cli.render import LIST_COLUMNS, list_row

    now = time.time()
    services.out.table(LIST_COLUMNS, [list_row(info, now) for info in jobs])


def _print_state(services: Services, info: JobInfo) -> None:
    from raycontrol.cli.render import with_reason

    services.out.line(f"{info.id} {with_reason(info.state, info.reason)}")


def _print_details(
    services: Services, info: JobInfo, usage: dict[str, InstanceUsage], *, over_http: bool
) -> None:
    from raycontrol.cli.render import (
        INSTANCE_COLUMNS,
        attempt_lines,
        details,
        instance_row,
        spec_lines,
        variable_lines,
        verdict_lines,
    )
    from raycontrol.cli.topview import total

    out = services.out
    used = total(list(usage.values())) if usage and not info.over else None
    out.details({**details(info, time.time(), over_http=over_http), "usage": used})
    if info.spec:
        out.line()
        out.line("asked for:")
        out.details({f"  {name}": value for name, value in spec_lines(info.spec).items()})
    if info.instances:
        out.line()
        out.table(INSTANCE_COLUMNS, [instance_row(instance) for instance in info.instances])
    if variables := variable_lines(info.instances):
        out.line()
        out.line("network and GPUs:")
        for line in variables:
            out.line(f"  {line}")
    if info.verdict is not None:
        out.line()
        for line in verdict_lines(info.verdict):
            out.line(line)
    if len(info.attempts) > (1 if info.over else 0):
        out.line()
        for line in attempt_lines(info.attempts):
            out.line(line)


def _print_members(services: Services, members: list[MemberInfo]) -> None:
    from raycontrol.cli.members import COLUMNS, rows

    services.out.line()
    services.out.table(COLUMNS, rows(members))


def _note_verdict(services: Services, info: JobInfo) -> None:
    from raycontrol.cli.render import kept_lines, verdict_lines

    if info.verdict is not None and info.exit_status not in (0, 130):
        for line in [*verdict_lines(info.verdict), *kept_lines(info)]:
            services.out.note(line)


def _print_event(services: Services, event: Event, as_json: bool) -> None:
    from raycontrol.cli.render import event_line

    if as_json:
        services.out.json_line(event.model_dump(mode="json"))
    else:
        services.out.log(event_line(event))


def _log_document(line: str) -> dict[str, str | None]:
    """Take a prefixed line apart again: ``worker-0 | text``."""
    match = _PREFIX.fullmatch(line)
    return {"instance": match["instance"] if match else None, "line": match["line"] if match else line}
