"""What a user asks for: :class:`JobSpec`, one model for YAML, JSON, Python and HTTP, and the instances it stands for.

A spec is checked once, at birth, and is frozen after that. Every way to make one raises :class:`SpecError` with all of
its faults at once; none raises pydantic's own error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ModelWrapValidatorHandler, ValidationInfo, model_validator

from raycontrol import specfile, specrules
from raycontrol.errors import UsageError
from raycontrol.specfaults import MASKED, is_secret_name
from raycontrol.specfile import Document
from raycontrol.specmounts import Mounts
from raycontrol.specnodes import NodeCount, NodeNames, Where, span
from raycontrol.specparts import (
    LAUNCHERS,
    RESERVED,
    SINGLE_ROLE,
    After,
    Array,
    ArrayField,
    Bool,
    Command,
    Env,
    FolderText,
    Group,
    GroupResources,
    Groups,
    LabelName,
    LabelValue,
    Mode,
    Name,
    Part,
    Placement,
    RayOptions,
    Rdma,
    RdmaField,
    Resources,
    Retry,
    RunOn,
    SecretEnv,
    Site,
    Slots,
    Success,
    Timeouts,
    ValidCodes,
    When,
    Whole,
    as_part,
    codes_of,
    groups_of,
    lead_group,
    resources_of,
    role_of,
)

__all__ = [
    "LAUNCHERS",
    "RESERVED",
    "After",
    "Array",
    "Group",
    "GroupResources",
    "JobSpec",
    "Member",
    "Mode",
    "Placement",
    "RayOptions",
    "Rdma",
    "Resources",
    "Retry",
    "RunOn",
    "Site",
    "Success",
    "Timeouts",
    "When",
    "build",
    "load",
    "members",
    "runs_everywhere",
    "schema",
    "serves_ssh",
]


class JobSpec(Part):
    """A job, as its user describes it."""

    name: Name | None = None
    """The job's name; by default that of the file, or the first word of the command."""
    mode: Mode = Mode.DDP
    """How the job's processes find each other."""
    command: Command
    """The start command: text runs in bash with pipefail, a list runs without a shell."""
    nodes: NodeCount | None = None
    """How many instances: one master (launcher, head) and n - 1 workers; by default 1. Instead of groups. 2-4: as many of these as fit when the job starts."""
    node_names: NodeNames = ()
    """Exactly these nodes, by name or IP, one instance on each."""
    exclude: NodeNames = ()
    """Never on these nodes, by name or IP."""
    where: Where = Field(default_factory=dict)
    """Only on nodes of which all of this is true: Ray's labels (rack: r1, rack: in(r1,r2), rack: "!in(r1,r2)"), gpu_model, gpu_memory_gib, rdma."""
    node_group: Name | None = None
    """Only on nodes of this group of the cluster's (raycontrol node group)."""
    exclusive: Bool = False
    """No other job of raycontrol's on the nodes of this one."""
    resources: Resources = Resources()
    """What every instance gets of its node."""
    slots: Slots | None = None
    """Processes per instance; by default one a GPU, or 1 without GPUs."""
    run_on: RunOn = RunOn.EVERY_INSTANCE
    """Mode mpi: every_instance (mpirun is one call of all of them), launcher (once, there), ranks (the command is the ranks)."""
    success: Success = Success.CHIEF
    """Mode ps: chief (the chief decides, or all workers where there is none), all (every instance has to exit 0)."""
    ray: RayOptions = RayOptions()
    """Mode ray: what the job's own Ray cluster is like."""
    ssh: Bool = False
    """Let instances reach each other with ssh, scp and rsync; jobs of the modes mpi and horovod always do."""
    share_gpus: Bool = False
    """Allow more slots than GPUs."""
    rdma: RdmaField = Rdma()
    """Whether and how NCCL uses RDMA: auto, on, off, or {when: auto, preset: hcc}."""
    groups: Groups = Field(default_factory=dict)
    """Groups of instances that are alike, by name."""
    env: Env = Field(default_factory=dict)
    """Environment variables. Values are text; null unsets."""
    secret_env: SecretEnv = Field(default_factory=dict)
    """Environment variables whose values are never shown, logged or kept after the job's end; null: whoever submits has it in his own environment."""
    shell_env: Bool = False
    """Start from PATH, LD_LIBRARY_PATH and CUDA_* as an interactive shell on each node has them; env goes before."""
    working_dir: FolderText | None = None
    """The folder of the job's code, relative to this file; every node gets a copy."""
    cwd: FolderText | None = None
    """Where the command starts; by default in the copy of working_dir."""
    mounts: Mounts = Field(default_factory=dict)
    """Paths that exist for the job only, and what is found there: a path of the code's folder, or an absolute one of the nodes; `:ro` after it: read-only."""
    placement: Placement = Placement.STRICT
    """strict: every instance on a node of its own; pack: several may share one."""
    priority: Annotated[Whole, Field(ge=0, le=9)] = 5
    """0 (highest) to 9 (lowest)."""
    preemptible: Bool = False
    """Allow the job to be stopped for one of a higher priority; it goes back to the queue, and no retry is counted."""
    timeouts: Timeouts = Timeouts()
    """Limits in seconds."""
    retry: Retry = Retry()
    """Whether a job that has failed is tried again."""
    valid_exit_codes: ValidCodes = (0,)
    """Exit codes of the start command that count as success, such as [0, "3-5"]."""
    after: After = After()
    """Jobs whose ends it waits for before it can start: {ok: [id]}, {failed: [id]}, {any: [id]}."""
    array: ArrayField | None = None
    """One job with many members: 0-99%8, or {indices: 0-99, parallel: 8, fail_fast: true}. Mode ddp, one instance each."""
    pipefail: Bool = True
    """A pipeline fails if any of its commands does (bash -o pipefail)."""
    labels: dict[LabelName, LabelValue] = Field(default_factory=dict)
    """The user's own marks, stored and shown; jobs can be listed by them."""

    @model_validator(mode="wrap")
    @classmethod
    def _checked(cls, data: Any, handler: ModelWrapValidatorHandler[Any], info: ValidationInfo) -> Any:
        document = info.context if isinstance(info.context, Document) else Document(None)
        with as_part():
            return specrules.checked(data, handler, cls, document)

    @classmethod
    def from_yaml(cls, path: str | Path) -> JobSpec:
        """The spec in a YAML or JSON file (``-``: standard input). Raises SpecError with every fault and its place."""
        return load(path)

    @classmethod
    def from_text(
        cls, text: str, source: str | None = None, overrides: Sequence[str] = (), env: Sequence[str] = ()
    ) -> JobSpec:
        """The spec in a YAML or JSON text; a relative ``working_dir`` is taken from the current folder."""
        return _from_document(specfile.parse(text, source), Path.cwd(), overrides, env)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> JobSpec:
        """The spec in plain data, as JSON gives it."""
        return cls.model_validate(data)

    def is_valid(self, code: int | None) -> bool:
        """Whether a start command that exited so has succeeded; None: it was ended by a signal, or never ran."""
        return code is not None and code in codes_of(self.valid_exit_codes)

    def named(self, default: str | None = None) -> JobSpec:
        """This spec with a name: its own, else one made of ``default``, else of the command's first word."""
        if self.name is not None:
            return self
        return self.model_copy(
            update={"name": _as_name(default) or _as_name(_first_word(self.command)) or "job"}
        )

    def with_secrets(self, environ: Mapping[str, str]) -> JobSpec:
        """This spec with the secrets that it leaves open (null) taken from ``environ``, that of whoever submits.

        ``Client.submit`` and the commands do so before anything leaves their process; whoever takes a spec from others,
        as the HTTP server does, must not: its own environment would be theirs to read. Raises UsageError, naming the
        variables that are not set.
        """
        open_ones = [name for name, value in self.secret_env.items() if value is None]
        missing = [name for name in open_ones if name not in environ]
        if missing:
            raise UsageError(f"secret_env: {_listed(missing)} not set in this environment; export it first")
        if not open_ones:
            return self
        found = {**self.secret_env, **{name: environ[name] for name in open_ones}}
        return JobSpec.model_validate({**self.model_dump(), "secret_env": found})

    def secrets(self) -> dict[str, str]:
        """The values of ``secret_env``, in the clear. Raises UsageError when one is left open."""
        missing = [name for name, value in self.secret_env.items() if value is None]
        if missing:
            raise UsageError(
                f"secret_env: {_listed(missing)} without a value; whoever submits has to give it"
            )
        return {
            name: value.get_secret_value() for name, value in self.secret_env.items() if value is not None
        }

    def without_secrets(self) -> JobSpec:
        """This spec with the names of its secrets and no values, as it is kept."""
        return self.model_copy(update={"secret_env": dict.fromkeys(self.secret_env)})

    def revealed(self) -> dict[str, Any]:
        """This spec as plain JSON values, its secrets in the clear: for the way to a cluster, and nothing else."""
        return {**self.model_dump(mode="json"), "secret_env": self.secrets()}

    def shown(self) -> dict[str, Any]:
        """This spec as plain JSON values for people: what is not at its default, and what may be secret masked."""
        document = self.without_secrets().model_dump(mode="json", exclude_defaults=True)
        for part, usual in _of_any_site().items():
            asked = document.pop(part, {})
            if own := {name: value for name, value in asked.items() if usual.get(name) != value}:
                document[part] = own
        for part in (document, *document.get("groups", {}).values()):
            env = part.get("env", {})
            secret = [name for name in env if env[name] is not None and is_secret_name(name)]
            env.update(dict.fromkeys(secret, MASKED))
        return document

    @property
    def span(self) -> tuple[int, int]:
        """The least and the most instances that ``nodes`` allows; groups have counts of their own."""
        return span(self.nodes if self.nodes is not None else len(self.node_names) or 1)

    def sized(self, nodes: int | str) -> JobSpec:
        """This spec with another value of ``nodes``: one of its range, or the range again."""
        return self.model_copy(update={"nodes": nodes})

    @property
    def smallest(self) -> JobSpec:
        """This spec with the least of its range of nodes; itself where it has none."""
        return self.sized(self.span[0]) if isinstance(self.nodes, str) else self

    @property
    def largest(self) -> JobSpec:
        """This spec with the most of its range of nodes; itself where it has none."""
        return self.sized(self.span[1]) if isinstance(self.nodes, str) else self

    def settled(self, site: Site) -> JobSpec:
        """This spec with the site's values where it leaves the choice to the site."""
        rdma = Rdma(
            when=self.rdma.when,
            preset=self.rdma.preset or site.rdma_preset,
            min_gpus=self.rdma.min_gpus or site.rdma_min_gpus,
        )
        idle_s = self.timeouts.idle_gpu_warn_s
        idle_s = site.idle_gpu_warn_s if idle_s is None else idle_s
        timeouts = self.timeouts.model_copy(update={"idle_gpu_warn_s": idle_s})
        return self.model_copy(update={"rdma": rdma, "timeouts": timeouts})


@cache
def _of_any_site() -> dict[str, dict[str, Any]]:
    """Return what ``settled`` puts into every spec where the site has no settings of its own."""
    usual = JobSpec(command="true").settled(Site()).model_dump(mode="json", exclude_defaults=True)
    return {part: usual[part] for part in ("rdma", "timeouts")}


# -- ways in ---------------------------------------------------------------------------------------------------------


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    env: Sequence[str] = (),
    secret_env: Sequence[str] = (),
) -> JobSpec:
    """The spec in a file, with ``--set``, ``--env`` and ``--secret-env`` applied, and named after the file if it has no name.

    A relative ``working_dir`` in the file is taken from the file's folder, one in ``overrides`` from the current one.
    """
    document = specfile.parse(specfile.read_file(path), "<stdin>" if str(path) == "-" else str(path))
    if str(path) == "-":
        return _from_document(document, Path.cwd(), overrides, env, secret_env).named()
    file = Path(path).expanduser()
    return _from_document(document, file.parent, overrides, env, secret_env).named(file.stem)


def build(
    data: Mapping[str, Any],
    overrides: Sequence[str] = (),
    env: Sequence[str] = (),
    secret_env: Sequence[str] = (),
) -> JobSpec:
    """The spec that a command line describes without a file: ``data``, then ``--set``, ``--env`` and ``--secret-env``; named."""
    return _from_document(Document(dict(data)), Path.cwd(), overrides, env, secret_env).named()


def _from_document(
    document: Document,
    folder: Path,
    overrides: Sequence[str],
    env: Sequence[str],
    secret_env: Sequence[str] = (),
) -> JobSpec:
    _anchor(document, folder)
    specfile.override(document, overrides, env, secret_env)
    _anchor(document, Path.cwd())
    return JobSpec.model_validate(document.data, context=document)


def _anchor(document: Document, folder: Path) -> None:
    """Make a relative ``working_dir`` absolute (text that cannot be a path is left for the check to name)."""
    data = document.data
    written = data.get("working_dir") if isinstance(data, dict) else None
    if isinstance(written, str) and written.strip() and "\0" not in written:
        data["working_dir"] = str(folder.absolute() / _expanded(Path(written)))


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # no such user: taken as it stands, and packing will say that it is missing
        return path


def _first_word(command: str | tuple[str, ...]) -> str:
    words = command.split() if isinstance(command, str) else command
    program = next((word for word in words if not re.match(r"\w+=", word)), "")
    return program.rstrip("/").rpartition("/")[2]


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _as_name(text: str | None) -> str:
    """``text`` with what a name may not hold replaced or cut off; empty when nothing is left."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text or "").strip("-._")[:63]


def schema() -> dict[str, Any]:
    """The JSON Schema of a job's file, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **JobSpec.model_json_schema(),
        "title": "A raycontrol job",
    }


def serves_ssh(spec: JobSpec) -> bool:
    """Whether the job's instances have an ssh endpoint."""
    return spec.ssh or spec.mode in (Mode.MPI, Mode.HOROVOD)


def runs_everywhere(spec: JobSpec) -> bool:
    """Whether every instance runs its start command; else only INDEX 0 does, and the others serve it."""
    if spec.mode is Mode.MPI:
        return spec.run_on is RunOn.EVERY_INSTANCE
    return spec.mode not in (Mode.HOROVOD, Mode.RAY)


# -- the instances of a job ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """One instance as the spec describes it. ``index`` is its INDEX, ``local_index`` its number within the group."""

    name: str
    group: str
    role: str
    index: int
    local_index: int
    resources: Resources
    slots: int
    command: str | tuple[str, ...]
    env: Mapping[str, str | None]
    exclusive: bool = False


def members(spec: JobSpec) -> tuple[Member, ...]:
    """The instances of a job in INDEX order: the single role first (ps: chief, else worker), then groups as written.

    Of a range of nodes all that it may have: where a number was decided on, ask with ``spec.sized``.
    """
    groups = groups_of(spec.mode, spec.groups, spec.span[1])
    lead = lead_group(spec.mode, groups)
    names = sorted(groups, key=lambda name: name != lead)  # a stable sort: only the leading group moves
    wanted = [(name, number) for name in names for number in range(groups[name].count)]
    return tuple(
        _member(spec, name, groups[name], index, number) for index, (name, number) in enumerate(wanted)
    )


def _member(spec: JobSpec, name: str, group: Group, index: int, number: int) -> Member:
    role = role_of(spec.mode, name, group)
    resources = resources_of(spec.resources, group)
    return Member(
        name=f"{name}-{number}",
        group=name,
        role=SINGLE_ROLE.get(spec.mode, role) if index == 0 else role,
        index=index,
        local_index=number,
        resources=resources,
        slots=group.slots or spec.slots or max(1, int(resources.gpu)),
        command=group.command if group.command is not None else spec.command,
        env={**spec.env, **group.env},
        exclusive=spec.exclusive,
    )
