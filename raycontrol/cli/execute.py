"""``exec``: a command on many nodes at once, or inside a job's instances."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raycontrol.cli import options
from raycontrol.cli.services import Services
from raycontrol.errors import UsageError

if TYPE_CHECKING:
    from raycontrol.execution import Target
    from raycontrol.outcomes import Outcomes
    from raycontrol.readers import Execution

INTERRUPTED = 130
FAILED_FILE = "exec-failed.json"
"""Where the last ``exec`` failed; no word of what it ran."""

Nodes = Annotated[
    str | None,
    typer.Option(
        "--nodes", metavar="A,B", help="These nodes: names, IPs or beginnings of ids.", show_default=False
    ),
]
All = Annotated[bool, typer.Option("--all", help="All nodes of the cluster.")]
OfJob = Annotated[
    str | None,
    typer.Option(
        "--job",
        metavar="JOB",
        help="Inside this job's instances, as its start command runs.",
        show_default=False,
    ),
]
Instances = Annotated[
    str | None,
    typer.Option("--instance", metavar="A,B", help="Only these instances of the job.", show_default=False),
]
Group = Annotated[
    str | None,
    typer.Option(
        "--group",
        metavar="NAME",
        help="The nodes of this group (`raycontrol node group`); with --job its instances of this group.",
        show_default=False,
    ),
]
RerunFailed = Annotated[
    bool, typer.Option("--rerun-failed", help="Where the last exec of this home did not exit 0.")
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout", metavar="SECONDS", help="End it where it takes longer (status 124).", show_default=False
    ),
]
Parallel = Annotated[
    int | None,
    typer.Option(
        "--parallel", metavar="N", help="On so many at a time (default: on all at once).", show_default=False
    ),
]
Script = Annotated[
    str | None,
    typer.Option(
        "--script",
        metavar="FILE",
        help="Run this file's contents (- is stdin), by its #! line or bash; after `--` stand its arguments.",
        show_default=False,
    ),
]
Plain = Annotated[
    bool, typer.Option("--plain", help="Without what the node's shell sets (PATH, LD_LIBRARY_PATH, CUDA_*).")
]
Root = Annotated[bool, typer.Option("--root", help="Through `sudo -n`.")]
Fold = Annotated[bool, typer.Option("--fold", help="At the end, and once for all that wrote the same.")]
NoPrefix = Annotated[
    bool, typer.Option("--no-prefix", "-N", help="Without names in front: bytes as they come.")
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print the table of exit statuses also when all are 0.")
]


def execute(
    context: typer.Context,
    nodes: Nodes = None,
    all_nodes: All = False,
    job: OfJob = None,
    instances: Instances = None,
    group: Group = None,
    rerun_failed: RerunFailed = False,
    timeout: Timeout = None,
    parallel: Parallel = None,
    script: Script = None,
    plain: Plain = False,
    root: Root = False,
    fold: Fold = False,
    no_prefix: NoPrefix = False,
    verbose: Verbose = False,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Run a command on many nodes at once, or inside a job's instances.

    It waits for no resources, and leaves nothing running. One word after `--` is a line for bash, several are a program with
    its arguments. Lines come as they are written, each behind the name of where it was; who runs it, and a table of what
    did not exit 0, go to stderr. Ctrl-C ends it everywhere (TERM, 5 seconds, KILL), a second one leaves at once.

    \b
    Examples:
      raycontrol exec --all -- nvidia-smi -L
      raycontrol exec --nodes host-a,host-b --fold -- 'cat /etc/os-release | head -1'
      raycontrol exec --all --root --script mount-nfs.sh
      raycontrol exec --rerun-failed --timeout 60 -- ./probe
      raycontrol exec --job digits-ab12cd --group worker -- py-spy dump --pid 1234

    \b
    Exit status:
      0 if it exited 0 everywhere; else the highest of: its own codes (128+n for
      signal n), 124 its time was over, 125 no answer; 130 stopped by Ctrl-C;
      2 wrong usage, and nothing was started.
    """
    from raycontrol.execution import command_of

    services: Services = context.obj
    contents = None if script is None else _contents(script)
    if job is not None and (root or plain):
        raise UsageError(
            f"{'--root' if root else '--plain'} is for nodes: in a job everything runs as its start command does"
        )
    if contents is None and not services.words:
        raise UsageError("name a command after `--`, such as `-- nvidia-smi -L`, or a file with --script")
    if timeout is not None and not 0 < timeout < 1e9:
        raise UsageError(f"--timeout: must be above 0, got {timeout:g}")
    if parallel is not None and parallel < 1:
        raise UsageError(f"--parallel: must be at least 1, got {parallel}")
    command = command_of(services.words, contents, timeout_s=timeout, plain=plain, root=root)
    with services.client(address) as client:
        memory = client.home / FAILED_FILE
        target = _target(nodes, all_nodes, job, instances, group, memory if rerun_failed else None)
        shown = _Shown(services, target, fold=fold, prefix=not no_prefix, verbose=verbose, as_json=as_json)
        raise typer.Exit(_carried_out(lambda: client.execute(target, command, parallel), shown, memory))


def _contents(script: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if script == "-" else Path(script).read_bytes()
    except OSError as error:
        raise UsageError(f"--script: {script}: {error.strerror}") from None


def _target(
    nodes: str | None,
    all_nodes: bool,
    job: str | None,
    instances: str | None,
    group: str | None,
    failed_before: Path | None,
) -> Target:
    from raycontrol.execution import Target

    of_nodes = job is None and group is not None
    if sum((bool(nodes), all_nodes, of_nodes, job is not None, failed_before is not None)) != 1:
        raise UsageError("say where: exactly one of --nodes, --group, --all, --job and --rerun-failed")
    if failed_before is not None:
        if instances is not None:
            raise UsageError("--rerun-failed says by itself where: leave --instance out")
        return _failed(failed_before)
    if job is None and instances is not None:
        raise UsageError("--instance is of a job: name it with --job, too")
    if instances is not None and group is not None:
        raise UsageError("give --instance or --group, not both")
    return Target(_split("--nodes", nodes), all_nodes, job, _split("--instance", instances), group)


def _split(option: str, names: str | None) -> tuple[str, ...]:
    if names is None:
        return ()
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    if not found:
        raise UsageError(f"{option}: must name something, got {names!r}")
    return found


# Showing.


class _Shown:
    """How one exec is shown: what it tells goes to ``take`` as it comes; ``end`` is for what is told at the end."""

    def __init__(
        self, services: Services, target: Target, *, fold: bool, prefix: bool, verbose: bool, as_json: bool
    ) -> None:
        self.out = services.out
        self.target = target
        self._fold = fold
        self._prefix = prefix
        self._verbose = verbose
        self._as_json = as_json

    def follow(self, running: Execution, outcomes: Outcomes) -> None:
        """Show what comes, and keep what is needed at the end."""
        from raycontrol.cli.execview import Header, LiveView
        from raycontrol.execution import Wrote

        later = self._fold or self._as_json
        header = Header(self.out, running.places)
        live = LiveView(self.out, running.places, prefix=self._prefix)
        for news in running:
            if later or not isinstance(news, Wrote):
                outcomes.take(news)
            if not later:
                live.take(news)
            if not self._as_json:
                header.take(news)

    def end(self, outcomes: Outcomes) -> None:
        from raycontrol.cli.execview import show_folded, tallied

        if self._as_json:
            self.out.json(
                {"status": outcomes.status, "places": [_document(outcomes, name) for name in outcomes]}
            )
            return
        if self._fold:
            show_folded(self.out, outcomes, prefix=self._prefix)
        if self._verbose or outcomes.status:
            for line in tallied(outcomes):
                self.out.note(line)


def _document(outcomes: Outcomes, name: str) -> dict[str, object]:
    end = outcomes[name]
    return {
        "name": name,
        "user": end.user,
        "status": end.status,
        "code": end.code,
        "signal": end.signal,
        "why": end.why,
        "output": end.text,
    }


# Running.


class _Left(BaseException):
    """A second Ctrl-C, or the terminal is gone."""


def _carried_out(begin: Callable[[], Execution], shown: _Shown, memory: Path) -> int:
    from raycontrol.outcomes import Outcomes

    with begin() as running, Outcomes(running.places) as outcomes:
        with _interruptible(running, shown) as interrupted:
            try:
                shown.follow(running, outcomes)
            except _Left:
                shown.out.note("exec: leaving; what still runs is being ended there")
                return INTERRUPTED
        shown.end(outcomes)
        _remember(memory, shown.target, outcomes.failed())
        return INTERRUPTED if interrupted() else outcomes.status


@contextmanager
def _interruptible(running: Execution, shown: _Shown) -> Iterator[Callable[[], bool]]:
    """Meanwhile a signal ends the command everywhere, and a second one leaves. Gives whether there was one."""
    came: list[int] = []

    def receive(number: int, _: object) -> None:
        came.append(number)
        if len(came) > 1 or number == signal.SIGHUP:
            raise _Left
        shown.out.note_from_signal("exec: interrupted; ending it everywhere, Ctrl-C again leaves at once")
        running.stop()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    taken = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    try:
        for number in taken:
            signal.signal(number, receive)
        yield lambda: bool(came)
    finally:
        for number in taken:
            signal.signal(number, before[number])


# Where it failed.


def _remember(memory: Path, target: Target, failed: list[str]) -> None:
    """Keep where it failed, for the next one; a home that takes nothing is no reason to fail."""
    from raycontrol.disk import replace_file

    document = {"job": target.job, "failed": failed}
    with suppress(OSError):
        if failed or memory.exists():
            memory.parent.mkdir(parents=True, exist_ok=True)
            replace_file(memory, json.dumps(document).encode(), 0o600)


def _failed(memory: Path) -> Target:
    from raycontrol.execution import Target

    try:
        document = json.loads(memory.read_bytes())
        job, failed = document["job"], tuple(map(str, document["failed"]))
    except (OSError, ValueError, KeyError, TypeError):
        job, failed = None, ()
    if not failed:
        raise UsageError(f"--rerun-failed: nothing has failed; {memory} names no places")
    return Target(nodes=failed, absent_too=True) if job is None else Target(job=str(job), instances=failed)
