"""What a backend makes of a spec and facts: a plan, a value that can be printed before anything starts.

A plan holds, for each instance, environment and files; and stages, in order. A stage is runs and conditions
(``until``) that must hold before the next stage begins. One function of the instance carries out stages for all
modes; no backend contains a loop or a wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from raycontrol.hardware import Essentials
from raycontrol.status import Word
from raycontrol.wording import assigned, counted


@dataclass(frozen=True)
class Brief:
    """Which try of which job a plan is for; ``attempt_id`` marks every process of it.

    ``array_index``: the job is this member of an array.
    """

    job_id: str
    job_name: str
    attempt: int
    attempt_id: str
    array_index: str | None = None


@dataclass(frozen=True)
class Facts:
    """What an instance reported when it had prepared itself.

    ``ip`` is the address Ray knows the node by; ``ports`` maps a purpose (``master``, ``probe``) to a port that is
    leased or listening on that node; ``gpus`` are the ids this instance may see, ``interface`` is the network
    interface that owns ``ip`` (None when none does) and ``network`` that address's network (``10.0.0.0/24``).
    ``private_dir`` is this instance's own folder of this attempt; ``python`` and ``package_dir`` are raycontrol's
    interpreter and files on the node; ``root`` says that programs run as root. ``login_key`` and ``host_key`` are
    the public keys of its ssh endpoint. ``temp_dir`` is a folder of this attempt with a short path, for sockets;
    ``memory`` and ``object_store`` are bytes that a Ray node of this instance may say it has. ``hardware`` is what
    the node is made of, None in symbolic facts, ``shared_outputs`` that all nodes see ``output_dir``. ``shell_env`` is what
    the node's shell makes of some variables, where the job wants that, and ``shell_trouble`` says why there may be none. The
    rest is text, so that a plan can be made with symbolic facts
    (``<ip of worker-0>``) when there is no cluster.
    """

    instance: str
    ip: str
    node_name: str
    ports: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    interface: str | None = None
    code_dir: str = ""
    output_dir: str = ""
    network: str | None = None
    private_dir: str = ""
    python: str = ""
    package_dir: str = ""
    root: bool = False
    login_key: str = ""
    host_key: str = ""
    temp_dir: str = ""
    memory: str = ""
    object_store: str = ""
    hardware: Essentials | None = None
    shared_outputs: bool = False
    shell_env: Mapping[str, str] = field(default_factory=dict)
    shell_trouble: str | None = None


ASKED = "asked"
"""A file in the folder of a service's run: the job itself has asked the service to end."""


@dataclass(frozen=True)
class PlannedRun:
    """One command of one instance: a string runs under ``bash -c`` (``-o pipefail`` too if ``pipefail``), a list without a shell.

    A ``service`` is no start command: others of the job use it, and it is ended when start commands have ended.
    """

    name: str
    command: str | tuple[str, ...]
    pipefail: bool = True
    cwd: str | None = None
    service: bool = False


def shell_argv(command: str | tuple[str, ...], pipefail: bool) -> tuple[str, ...]:
    """Return what a start command executes: a line is bash's, a list is run as it is."""
    if not isinstance(command, str):
        return tuple(command)
    return ("bash", "-o", "pipefail", "-c", command) if pipefail else ("bash", "-c", command)


@dataclass(frozen=True)
class TcpReachable:
    """``source`` can open a TCP connection to ``host``:``port``, a listener of the instance ``target``."""

    source: str
    target: str
    host: str
    port: str


@dataclass(frozen=True)
class ServesSsh:
    """The ssh endpoint of ``source`` takes commands from the job's other instances."""

    source: str


@dataclass(frozen=True)
class SshAnswers:
    """``source`` can run a command on the instance ``target`` through ``ssh``."""

    source: str
    target: str


@dataclass(frozen=True)
class Alive:
    """The run ``run`` of the instance ``source`` has been started."""

    source: str
    run: str


@dataclass(frozen=True)
class RayNodesJoined:
    """The Ray cluster of ``source`` lists a living node of each of ``instances``, which are named in the order of their ranks."""

    source: str
    instances: tuple[str, ...]


Until = TcpReachable | ServesSsh | SshAnswers | Alive | RayNodesJoined


@dataclass(frozen=True)
class Stage:
    """Runs (by instance) and the conditions that end the stage within ``limit_s`` seconds; ``says`` is told when it has passed."""

    name: str
    says: str
    limit_s: float
    runs: Mapping[str, tuple[PlannedRun, ...]] = field(default_factory=dict)
    until: tuple[Until, ...] = ()


@dataclass(frozen=True)
class SharedSecret:
    """A secret of the attempt: which instance makes it, and the file below every private folder that holds it."""

    maker: str
    path: str


@dataclass(frozen=True)
class Mount:
    """``source`` (a folder or file of the node) appears at ``target``, for the runs of one instance.

    One that is ``optional`` is left out where it cannot be made and, with ``beside``, where that folder does not exist.
    """

    source: str
    target: str
    read_only: bool = False
    optional: bool = False
    beside: str | None = None


class RdmaUse(Word):
    """Whether NCCL is to use RDMA. ``open``: that depends on nodes that are not known yet; ``missed``: the job could have,
    had its nodes been others; ``off``: it is none that would.
    """

    OFF = "off"
    OPEN = "open"
    MISSED = "missed"
    ON = "on"


@dataclass(frozen=True)
class RdmaDecision:
    """Whether NCCL is to use RDMA, with the variables of which preset, or what was missing."""

    use: RdmaUse = RdmaUse.OFF
    preset: str | None = None
    missing: tuple[str, ...] = ()

    @property
    def on(self) -> bool:
        return self.use is RdmaUse.ON


@dataclass(frozen=True)
class Plan:
    """The whole of what will be done.

    ``environment[name]`` is what the job adds to the node's own environment on that instance (None unsets);
    ``files[name]`` are texts by path below the instance's private folder, those in ``bin`` programs
    (it comes first on PATH); ``deciders`` are the instances whose start commands must all exit 0 for the attempt
    to succeed; ``meeting`` are those whose calls of MPI launchers belong together, the launcher first.

    ``servers`` work for the others and not for themselves: they are stopped when the others have ended, and one that
    ends before the deciders has failed, also with exit 0, unless it is a decider itself or ``dispensable``. ``finishers`` may go on for
    ``finish_s`` seconds after the deciders. ``secret`` is known to all instances, and to nobody else.

    ``secret_env`` are variables whose values are not in a plan: ``environment`` has ``SECRET`` for them.
    ``mounts[name]`` are paths that exist for that instance's runs only.

    ``origins[name]`` says of variables about network and GPUs where their values come from, ``rdma`` whether NCCL is to
    use RDMA and why not, ``notes`` what else the facts told that a person should know.
    """

    mode: str
    environment: Mapping[str, Mapping[str, str | None]]
    files: Mapping[str, Mapping[str, str]]
    stages: tuple[Stage, ...]
    deciders: frozenset[str]
    warnings: tuple[str, ...] = ()
    meeting: tuple[str, ...] = ()
    servers: frozenset[str] = frozenset()
    dispensable: frozenset[str] = frozenset()
    finishers: frozenset[str] = frozenset()
    finish_s: float = 0.0
    secret: SharedSecret | None = None
    origins: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    rdma: RdmaDecision = RdmaDecision()
    notes: tuple[str, ...] = ()
    secret_env: tuple[str, ...] = ()
    mounts: Mapping[str, tuple[Mount, ...]] = field(default_factory=dict)


SECRET = "(secret)"
"""What a plan shows for the value of a secret."""


@dataclass(frozen=True)
class Orders:
    """One instance's part of one stage, as it travels to the instance. ``secret_env`` goes on top of ``environment``."""

    stage: int
    says: str
    limit_s: float
    environment: Mapping[str, str | None]
    files: Mapping[str, str]
    runs: tuple[PlannedRun, ...]
    until: tuple[Until, ...]
    meeting: tuple[str, ...] = ()
    secret: SharedSecret | None = None
    secret_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    mounts: tuple[Mount, ...] = ()


@dataclass(frozen=True)
class Cause:
    """What a launcher said of the rank that failed: its global rank and its code (negative: a signal).

    ``advice`` is what one of raycontrol's stand-ins told the user to do.
    """

    rank: int | None = None
    exit_code: int | None = None
    advice: str | None = None


def orders(plan: Plan, stage: int, instance: str, secrets: Mapping[str, str] | None = None) -> Orders:
    """Return what ``instance`` has to do in the stage of that number. Files and ``secrets``, the values of
    ``secret_env``, go with the first stage only, as ``mounts`` do."""
    work = plan.stages[stage]
    environment = plan.environment[instance]
    return Orders(
        stage=stage,
        says=work.says,
        limit_s=work.limit_s,
        environment={name: text for name, text in environment.items() if name not in plan.secret_env},
        files=plan.files.get(instance, {}) if stage == 0 else {},
        runs=tuple(work.runs.get(instance, ())),
        until=tuple(condition for condition in work.until if condition.source == instance),
        meeting=plan.meeting,
        secret=plan.secret,
        secret_env=dict(secrets or {}) if stage == 0 else {},
        mounts=tuple(plan.mounts.get(instance, ())) if stage == 0 else (),
    )


def to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain JSON values; conditions carry their kind."""
    document = asdict(plan)
    for name in ("deciders", "servers", "dispensable", "finishers"):
        document[name] = sorted(getattr(plan, name))
    if not plan.mounts:
        del document["mounts"]
    for stage, described in zip(plan.stages, document["stages"], strict=True):
        described["until"] = [{"kind": type(item).__name__, **asdict(item)} for item in stage.until]
    return document


def render(plan: Plan) -> str:
    """Return the plan as text for a person."""
    lines = [
        f"mode {plan.mode}, {counted(len(plan.environment), 'instance')}; success when these exit 0: "
        + _names(plan.deciders)
    ]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    if len(plan.meeting) > 1:
        lines.append(
            f"MPI launchers are one call of {', '.join(plan.meeting)}; it starts on {plan.meeting[0]}"
        )
    if plan.servers:
        lines.append(f"{_names(plan.servers)}: stopped when the others have ended; {_early(plan)}")
    if plan.finishers:
        lines.append(f"{_names(plan.finishers)}: may go on for {plan.finish_s:g} s after that")
    if plan.secret is not None:
        lines.append(f"{plan.secret.maker} makes a secret, which every instance has in {plan.secret.path}")
    if (rdma := _rdma_line(plan.rdma)) is not None:
        lines.append(rdma)
    lines += plan.notes
    for name, variables in plan.environment.items():
        origins = plan.origins.get(name, {})
        group, role = variables.get("RAYCONTROL_GROUP"), variables.get("RAYCONTROL_ROLE")
        lines.append(f"\n{name} (group {group}, role {role}):")
        if files := plan.files.get(name):
            lines.append(f"  has files {' '.join(files)}")
        lines += [f"  {_describe_mount(mount)}" for mount in plan.mounts.get(name, ())]
        for key, value in variables.items():
            origin = f"  # {origins[key]}" if key in origins else ""
            lines.append(f"  unset {key}" if value is None else f"  {assigned(key, value)}{origin}")
    for number, stage in enumerate(plan.stages, start=1):
        lines.append(f"\nstage {number}: {stage.name} (at most {stage.limit_s:g} s), then: {stage.says}")
        lines += [f"  {_describe(condition)}" for condition in stage.until]
        for name, runs in stage.runs.items():
            lines += [f"  {name} runs {run.name}: {_command(run)}" for run in runs]
    return "\n".join(lines)


def _rdma_line(rdma: RdmaDecision) -> str | None:
    if rdma.use is RdmaUse.OPEN:
        when = "if every instance gets a node of its own with all GPUs, and the nodes have RDMA"
        return f"RDMA: on {when} (`--set rdma=on` shows the variables of preset {rdma.preset})"
    if rdma.use is RdmaUse.MISSED:
        return f"RDMA: off, because {'; '.join(rdma.missing)}"
    return f"RDMA: on (preset {rdma.preset})" if rdma.on else None


def _names(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


def _early(plan: Plan) -> str:
    may_end = plan.servers <= plan.dispensable | plan.deciders
    return "to end earlier is no failure" if may_end else "to end earlier is a failure"


def _describe_mount(mount: Mount) -> str:
    where = " (where the node lets it make mounts)" if mount.optional else ""
    if mount.beside is not None:
        where = f" (where the node lets it make mounts and has a folder {mount.beside})"
    return f"mounts {mount.target} from {mount.source}{', read-only' if mount.read_only else ''}{where}"


def _describe(condition: Until) -> str:
    match condition:
        case TcpReachable():
            return f"until {condition.source} can connect to {condition.target} at {condition.host}:{condition.port}"
        case ServesSsh():
            return f"until {condition.source} serves ssh"
        case SshAnswers():
            return f"until {condition.source} can run a command on {condition.target} through ssh"
        case Alive():
            return f"until {condition.run} of {condition.source} is alive"
        case RayNodesJoined():
            nodes = ", ".join(condition.instances)
            return f"until the Ray cluster of {condition.source} lists living nodes of {nodes}"


def _command(run: PlannedRun) -> str:
    import shlex

    return run.command if isinstance(run.command, str) else shlex.join(run.command)
