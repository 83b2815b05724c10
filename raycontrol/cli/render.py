"""A job in words: the lines, tables and details that a person reads."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raycontrol.wording import assigned, counted, some

if TYPE_CHECKING:
    from raycontrol.cli.output import Output
    from raycontrol.status import (
        AttemptInfo,
        Event,
        InstanceInfo,
        JobInfo,
        JobState,
        QueueEntry,
        Reason,
        Verdict,
    )

NODES_SHOWN = 4
LIST_COLUMNS = ("ID", "STATE", "MODE", "USER", "SUBMITTED", "TOOK", "NOTE")
QUEUE_COLUMNS = ("PLACE", "ID", "PRIORITY", "USER", "SUBMITTED", "WAITS FOR")
STATE_WIDTH = len("STOPPING (INSTANCE_FAILED)")
INSTANCE_COLUMNS = ("INSTANCE", "GROUP", "ROLE", "NODE", "IP", "STATE", "ENDED WITH", "NOTE")
NOTE_WIDTH = 200


def duration(seconds: float) -> str:
    """Return a span as 3.2 s, 4:05 (minutes) or 1:02:03 (hours); a clock that went backwards counts as 0."""
    seconds = max(0.0, seconds)
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def ago(at: float, now: float) -> str:
    """Return how long ago ``at`` was, in the largest whole unit: 12 s ago, 3 days ago."""
    seconds = max(0, int(now - at))
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "min")):
        count = seconds // size
        if count:
            return f"{count} {unit}{'s' if count > 1 and unit != 'min' else ''} ago"
    return f"{seconds} s ago"


def moment(at: float) -> str:
    """Return an epoch time as this machine's local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def nodes_line(info: JobInfo) -> str:
    """Return ``2 instances on host-a, host-b``, or nothing when the job has none."""
    if not info.instances:
        return ""
    nodes = list(dict.fromkeys(instance.node for instance in info.instances))
    return f"{counted(len(info.instances), 'instance')} on {some(nodes, NODES_SHOWN)}"


def with_reason(state: JobState, reason: Reason) -> str:
    """Return ``STOPPING (STOP_REQUESTED)``, or the state alone where the reason only says it again."""
    waits = state == "QUEUED" and reason in ("WAITING", "HELD")
    return f"{state} ({reason})" if waits or state == "STOPPING" or state.terminal else state


def list_row(info: JobInfo, now: float) -> tuple[str, ...]:
    return (
        info.id,
        info.state,
        info.mode,
        info.user,
        ago(info.submitted_at, now),
        _took(info, now),
        _note(info),
    )


def queue_row(entry: QueueEntry, now: float) -> tuple[str, ...]:
    return (
        "" if entry.position is None else str(entry.position),
        entry.id,
        str(entry.priority),
        entry.user,
        ago(entry.submitted_at, now),
        _cut(one_line(entry.why or "")),
    )


def attempt_lines(attempts: Sequence[AttemptInfo]) -> list[str]:
    """Return a line for each attempt that has ended: its number, outcome, nodes, and why."""
    return [
        f"attempt {one.number}: {one.outcome}, {moment(one.ended_at)}, on {some(one.nodes, NODES_SHOWN)}: "
        f"{_cut(one_line(one.summary))}"
        for one in attempts
    ]


def details(info: JobInfo, now: float, *, over_http: bool = False) -> dict[str, str | None]:
    """Return what ``get`` prints above the table of instances; ``over_http`` as in ``outputs_of``."""
    return {
        "id": info.id,
        "name": info.name,
        "state": with_reason(info.state, info.reason),
        "abandoned" if info.abandoned else "waiting": info.pending,
        "array": _array(info),
        "mode": info.mode,
        "user": info.user,
        "cluster": info.cluster or None,
        "priority": str(info.priority),
        "attempt": str(info.attempt),
        "labels": ", ".join(f"{key}={value}" for key, value in info.labels.items()) or None,
        "submitted": f"{moment(info.submitted_at)} ({ago(info.submitted_at, now)})",
        "started": moment(info.started_at) if info.started_at is not None else None,
        "ended": moment(info.ended_at) if info.ended_at is not None else None,
        "took": _took(info, now) or None,
        "rdma": info.rdma,
        "kept until": moment(info.kept_until) if info.kept_until is not None else None,
        "exit status": str(info.exit_status) if info.over and not info.abandoned else None,
        "outputs": outputs_of(info, over_http),
    }


SHOWN_ABOVE = frozenset({"name", "mode", "priority", "labels"})
"""Fields of a spec that ``details`` tells of already."""


def spec_lines(spec: Mapping[str, Any]) -> dict[str, str | None]:
    """Return what was asked for, a field a line: text as it is, all else as YAML would write it in one line."""
    return {
        name: one_line(value if isinstance(value, str) else json.dumps(_plain(value), ensure_ascii=False))
        for name, value in spec.items()
        if name not in SHOWN_ABOVE
    }


def _plain(value: Any) -> Any:
    """Write whole numbers without a fraction, as people do."""
    match value:
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case list():
            return [_plain(item) for item in value]
        case float() if value.is_integer():
            return int(value)
    return value


def outputs_of(info: JobInfo, over_http: bool) -> str | None:
    """Return where the outputs are; who asks ``over_http`` may be on another machine than their folder."""
    if info.outputs is None or not over_http:
        return info.outputs
    return f"{info.outputs} (on the head); fetch: GET /api/v1/jobs/{info.id}/outputs.tar"


def instance_row(instance: InstanceInfo) -> tuple[str, ...]:
    return (
        instance.name,
        instance.group,
        instance.role,
        instance.node,
        instance.ip,
        instance.state,
        _ended_with(instance),
        one_line(instance.note or ""),
    )


def variable_lines(instances: Sequence[InstanceInfo]) -> list[str]:
    """Return what was set about network and GPUs: a line a variable, or one for each of its values with who has it."""
    lines = []
    for name in dict.fromkeys(name for item in instances for name in item.variables):
        holders: dict[tuple[str, str], list[str]] = {}
        for item in instances:
            if (found := item.variables.get(name)) is not None:
                holders.setdefault((found.value, found.origin), []).append(item.name)
        for (value, origin), who in holders.items():
            whom = "" if len(who) == len(instances) else f", {some(who, NODES_SHOWN)}"
            lines.append(f"{assigned(name, value)}  # {origin}{whom}")
    return lines


def event_line(event: Event) -> str:
    state = with_reason(event.state, event.reason)
    return f"{moment(event.at)}  {state:<{STATE_WIDTH}}  {one_line(event.message)}".rstrip()


def verdict_lines(verdict: Verdict) -> list[str]:
    """Return why a job ended, the first cause first, with what the program last said."""
    lines = [one_line(verdict.summary)]
    if verdict.last_lines:
        lines.append(f"last lines of {verdict.instance or 'the program'}:")
        lines += [f"  | {line}" for line in verdict.last_lines]
    if verdict.hint is not None:
        lines.append(f"hint: {verdict.hint}")
    return lines


def summary(info: JobInfo, out: Output, *, over_http: bool = False) -> Sequence[str]:
    """Return the last lines of ``run``: state, cause, where outputs and logs are; ``over_http`` as in ``outputs_of``."""
    status = f", exit status {info.exit_status}" if info.exit_status else ""
    if info.kept_until is None:
        took = duration((info.ended_at or info.submitted_at) - info.submitted_at)
        lines = [f"{out.state(info.state)} ({info.reason}) after {took}{status}"]
    else:
        lines = [f"failed ({info.reason}){status}"]
    if info.verdict is not None and (info.state == "FAILED" or info.kept_until is not None):
        lines += [f"  {line}" for line in verdict_lines(info.verdict)]
    lines += kept_lines(info)
    if info.outputs is not None:
        lines.append(f"outputs: {outputs_of(info, over_http)}")
    lines.append(f"logs: raycontrol logs {info.id}")
    return lines


def kept_lines(info: JobInfo) -> list[str]:
    """Return what can be done with a job that has failed and keeps its nodes; nothing for another."""
    if info.kept_until is None:
        return []
    return [
        f"its nodes are kept for a look inside until {moment(info.kept_until)}: raycontrol shell {info.id}",
        f"to let them go: raycontrol stop {info.id}",
    ]


def _array(info: JobInfo) -> str | None:
    from raycontrol.cli.members import counts

    return None if info.array is None else f"{info.array.indices}; {counts(info.array)}"


def _took(info: JobInfo, now: float) -> str:
    from raycontrol.status import JobState

    if info.state is JobState.QUEUED:  # that of an earlier attempt is no measure of how long it waits
        return ""
    if info.started_at is None or info.abandoned:
        return ""
    return duration((info.ended_at if info.ended_at is not None else now) - info.started_at)


def _note(info: JobInfo) -> str:
    if info.array is not None and info.array.begun:
        return (_array(info) or "") + (f"; {_cut(info.pending)}" if info.pending else "")
    if info.kept_until is not None:
        return _cut(f"failed, kept for a look inside until {moment(info.kept_until)}")
    if info.pending is not None and not info.state.terminal:
        return ("abandoned: " if info.abandoned else "") + _cut(info.pending)
    if info.verdict is not None:  # there is one as soon as a job is being stopped for it
        return _cut(info.verdict.summary)
    return info.reason if info.state in ("STOPPING", "STOPPED", "FAILED") else ""


def one_line(text: str) -> str:
    """Return the text in one line, without what would command the terminal: another user may have written it."""
    words = " ".join(text.split())
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in words)


def _cut(text: str) -> str:
    """Return what of the text fits into a table; `get` shows all of it."""
    line = one_line(text)
    return line if len(line) <= NOTE_WIDTH else line[: NOTE_WIDTH - 1] + "…"


def _ended_with(instance: InstanceInfo) -> str:
    if instance.signal is not None:
        return f"signal {instance.signal}"
    return f"code {instance.exit_code}" if instance.exit_code is not None else ""
