"""What a job's spec is made of: modes and roles, the kinds of values, and the models of its parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    SecretStr,
    Tag,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from raycontrol import presets
from raycontrol.arrayspec import MOST_MEMBERS, indices_of
from raycontrol.arrayspec import RULE as INDICES_RULE
from raycontrol.errors import SpecError
from raycontrol.specfaults import LINE, WORDS, faults_of, problems_of
from raycontrol.status import Word


class Mode(Word):
    """How the processes of a job find each other; each mode is one backend."""

    DDP = "ddp"
    MPI = "mpi"
    HOROVOD = "horovod"
    PS = "ps"
    RAY = "ray"


class Placement(Word):
    """``strict``: every instance on a node of its own; ``pack``: several may share a node."""

    STRICT = "strict"
    PACK = "pack"


class RunOn(Word):
    """Where the start command of an mpi job runs.

    ``every_instance``: on every instance, and an MPI launcher that it calls is one call of them all; ``launcher``: once,
    on the launcher; ``ranks``: it is itself the ranks of one world, one for each slot.
    """

    EVERY_INSTANCE = "every_instance"
    LAUNCHER = "launcher"
    RANKS = "ranks"


class Success(Word):
    """Who decides that a ps job has succeeded.

    ``chief``: the chief, or where there is none all workers; ``all``: every instance has to exit 0, TI-ONE's rule.
    """

    CHIEF = "chief"
    ALL = "all"


class When(Word):
    """``auto``: where the job and its nodes allow it; ``on``: what is missing is an error; ``off``: never."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun", "horovodrun")
"""Programs that start an MPI or Horovod world over hosts."""

MAX_INSTANCES = 4096
"""The most instances one job may have."""
LEAST_CPU, MAX_CPU = 0.0001, 100_000
"""Ray counts in steps of 0.0001; more than any node has is a slip."""
MAX_GPU = 1024
"""The most GPUs of one instance: a plan names every one of them."""
MAX_MEMORY_TIB = 512
"""Ray counts bytes in steps of 0.0001, in 64 bits."""
MAX_WORKER_GROUPS = 5
LEAST_RAY_MEMORY = 256 << 20
"""The least memory of an instance in mode ray: Ray's own least for an object store is 75 MiB, and 30 % of this holds it."""

SINGLE_ROLE = {Mode.DDP: "master", Mode.MPI: "launcher", Mode.HOROVOD: "launcher", Mode.RAY: "head"}
"""The role that exactly one instance has; ``ps`` has none."""

ROLES = {
    **{mode: (single, "worker") for mode, single in SINGLE_ROLE.items()},
    Mode.PS: ("ps", "worker", "chief", "evaluator"),
}

# -- the kinds of values ---------------------------------------------------------------------------------------------


def _rule(holds: Callable[[Any], object], rule: str) -> AfterValidator:
    """A rule in our own words: ``rule`` is what a fault says when ``holds`` is false."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise PydanticCustomError("rule", "{rule}", {"rule": rule})
        return value

    return AfterValidator(check)


rule = _rule  # for the modules that have further parts


def _encodes(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _has_no_nul(text: str) -> bool:
    return "\0" not in text


def _is_short(text: str) -> bool:
    return len(text.encode()) <= _ONE_ARGUMENT


_ONE_ARGUMENT = 128 * 1024 - 1  # Linux: MAX_ARG_STRLEN, the end mark included
UTF8_RULE = "must be text that UTF-8 can hold"
NUL_RULE = "must not contain a NUL byte"
SHORT_RULE = "must be shorter than 128 KiB (Linux's limit for an argument)"
_no_nul = _rule(_has_no_nul, NUL_RULE)
_fits = _rule(_is_short, SHORT_RULE)
_not_blank = _rule(str.strip, "must not be empty")

GROUP_NAME_RULE = "names of groups must be 1 to 40 lowercase letters, digits or '-', starting and ending with a letter or digit"
GROUP_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?\Z")
NAME_RULE = "must be 1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")

Text = Annotated[str, Field(strict=True), _rule(_encodes, UTF8_RULE)]
Bool = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
FolderText = Annotated[Text, _not_blank, _no_nul]
Name = Annotated[
    Text,
    _rule(NAME.match, NAME_RULE),
    Field(json_schema_extra={"pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"}),
]
Line = Annotated[Text, _not_blank, _no_nul, _fits]
Words = Annotated[
    tuple[Annotated[Text, _no_nul, _fits], ...],
    _rule(lambda words: len(words) > 0 and words[0] != "", "must name a program"),
    Field(json_schema_extra={"minItems": 1}),
]
Command = Annotated[
    Annotated[Line, Tag(LINE)] | Annotated[Words, Tag(WORDS)],
    Discriminator(lambda value: WORDS if isinstance(value, list | tuple) else LINE),
]
Count = Annotated[Whole, Field(le=MAX_INSTANCES, json_schema_extra={"minimum": 0})]
Slots = Annotated[Whole, Field(ge=1, le=MAX_INSTANCES)]
Cpu = Annotated[Number, Field(ge=LEAST_CPU, le=MAX_CPU)]
Gpu = Annotated[
    Number,
    Field(le=MAX_GPU),
    _rule(
        lambda gpu: gpu >= 0 and (gpu == int(gpu) or (gpu < 1 and gpu == round(gpu, 2))),
        "must be a whole number, or a fraction below 1 with at most two decimals such as 0.5: "
        "an instance gets whole GPUs, or a share of one",
    ),
    Field(json_schema_extra={"minimum": 0}),
]
LabelName = Annotated[
    Text,
    _rule(
        re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}\Z").match,
        "names must be 1 to 63 letters, digits, '.', '_', '-' or '/'",
    ),
]
LabelValue = Annotated[
    Text, _no_nul, _rule(lambda text: len(text) <= 255, "must have at most 255 characters")
]

_UNITS = {"k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([KMGT])(i?)B?\Z", re.IGNORECASE)
_MEMORY_RULE = "must be a size with its unit, such as 8GiB or 512MiB"


def _bytes(value: Any) -> Any:
    """``8GiB`` (or ``8GB``, ``8Gi``) in bytes; a number is bytes already, and must not be a forgotten unit."""
    if isinstance(value, str):
        match = _SIZE.match(value.strip())
        if match is None:
            raise PydanticCustomError("rule", "{rule}", {"rule": _MEMORY_RULE})
        number, unit, binary = match.groups()
        value = round(float(number) * (1024 if binary else 1000) ** _UNITS[unit.lower()])
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 << 20:
        raise PydanticCustomError("rule", "{rule}", {"rule": _MEMORY_RULE})
    if value > MAX_MEMORY_TIB << 40:
        raise PydanticCustomError("rule", "{rule}", {"rule": f"must be at most {MAX_MEMORY_TIB}TiB"})
    return value


Memory = Annotated[
    int,
    BeforeValidator(_bytes),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*[KMGTkmgt]i?[Bb]?\s*$"},
                {"type": "integer", "minimum": 1 << 20, "maximum": MAX_MEMORY_TIB << 40},
            ]
        }
    ),
]

RESERVED = frozenset(
    [
        "NODE_LIST",
        "NODE_NUM",
        "INDEX",
        "GPU_NUM",
        "GPU_NUM_PER_NODE",
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "TF_CONFIG",
        "HEAD_ADDR",
        "HEAD_PORT",
        "RAY_ADDRESS",
        "CUDA_VISIBLE_DEVICES",
        "NODE_IP_SLOT_LIST",
    ]
)
"""Variables that only raycontrol sets; so is every name that starts with ``RAYCONTROL_``."""

RAY_RESERVED = frozenset(["RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_TMPDIR"])
"""Variables that a user may set, but not in mode ray."""

EnvName = Annotated[
    Text,
    _rule(
        lambda name: name and not re.search(r"[=\s\0]", name),
        "names of variables must not be empty or contain '=', spaces or NUL bytes",
    ),
    _rule(
        lambda name: name not in RESERVED and not name.startswith("RAYCONTROL_"),
        "is set by raycontrol itself and must not be given",
    ),
]
EnvValue = Annotated[Text, _no_nul, _fits]
Env = dict[EnvName, EnvValue | None]


def _secretly(holds: Callable[[str], object], rule: str) -> AfterValidator:
    """A rule for the text behind a secret."""
    return _rule(lambda secret: holds(secret.get_secret_value()), rule)


MASK = str(SecretStr("x"))
SecretValue = Annotated[
    SecretStr,
    Field(strict=True),
    _secretly(_encodes, UTF8_RULE),
    _secretly(_has_no_nul, NUL_RULE),
    _secretly(_is_short, SHORT_RULE),
    _secretly(lambda text: text != MASK, "must be the value itself, not what is shown for it"),
]
SecretEnv = dict[EnvName, SecretValue | None]

# -- the models ------------------------------------------------------------------------------------------------------

_within: ContextVar[bool] = ContextVar("_within", default=False)


@contextmanager
def as_part() -> Iterator[None]:
    """While a spec is checked, its parts hand their errors to it instead of raising a SpecError of their own."""
    token = _within.set(True)
    try:
        yield
    finally:
        _within.reset(token)


class Part(BaseModel):
    """A part of a spec. Made on its own (``Resources(gpu=1.5)``), it raises SpecError too."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="wrap")
    @classmethod
    def _checked(cls, data: Any, handler: ModelWrapValidatorHandler[Any], info: ValidationInfo) -> Any:
        if _within.get():
            return handler(data)
        try:
            return handler(data)
        except ValidationError as error:
            raise SpecError(faults_of(problems_of(error, cls))) from None


class Resources(Part):
    """What every instance gets of its node."""

    cpu: Cpu = 1
    """CPUs that Ray reserves: they decide what fits on a node and do not limit the processes."""
    gpu: Gpu = 0
    """GPUs: a whole number, or a fraction of one."""
    memory: Memory | None = None
    """Memory that Ray reserves, such as 8GiB; by default none. It does not limit the processes."""


class GroupResources(Part):
    """Resources of one group; what is not given is the job's."""

    cpu: Cpu | None = None
    """CPUs that Ray reserves: they decide what fits on a node and do not limit the processes."""
    gpu: Gpu | None = None
    """GPUs: a whole number, or a fraction of one."""
    memory: Memory | None = None
    """Memory that Ray reserves, such as 8GiB. It does not limit the processes."""


class Timeouts(Part):
    """Limits in seconds."""

    queue_s: Annotated[Number, Field(gt=0)] | None = None
    """How long the job may wait for its nodes."""
    run_s: Annotated[Number, Field(gt=0)] | None = None
    """How long the job may run."""
    grace_s: Annotated[Number, Field(ge=0)] = 40
    """Time between the request to end (SIGTERM) and SIGKILL."""
    evaluator_wait_s: Annotated[Number, Field(ge=0)] = 300
    """Mode ps: how long an evaluator may go on when the job's work is done, for its last round."""
    keep_failed_s: Annotated[Number, Field(ge=0, le=604800)] = 0
    """How long a job that has failed for good keeps its nodes for a look inside (`raycontrol shell`); stopping it ends that."""
    idle_gpu_warn_s: Annotated[Number, Field(ge=0)] | None = None
    """Tell when an instance's GPUs have been idle for so long; 0 never; by default the site's."""


def codes_of(ranges: Iterable[int | str]) -> frozenset[int]:
    """The exit codes that are meant by ``[0, "3-5"]``."""
    bounds = [(one, one) if isinstance(one, int) else _bounds(one) for one in ranges]
    return frozenset(code for first, last in bounds for code in range(first, last + 1))


def _bounds(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last)


def _are_codes(one: Any, least: int) -> bool:
    if isinstance(one, str) and re.fullmatch(r"[0-9]{1,3}-[0-9]{1,3}", one):
        first, last = _bounds(one)
        return least <= first <= last <= 255
    return isinstance(one, int) and not isinstance(one, bool) and least <= one <= 255


def _codes(least: int) -> tuple[AfterValidator, WithJsonSchema]:
    """The rule for one exit code or a range of them, and how the schema says it."""
    forms = [
        {"type": "integer", "minimum": least, "maximum": 255},
        {"type": "string", "pattern": "^[0-9]{1,3}-[0-9]{1,3}$"},
    ]
    rule = f'must be exit codes from {least} to 255, or ranges of them such as "3-5", the lower first'
    return _rule(lambda one: _are_codes(one, least), rule), WithJsonSchema({"anyOf": forms})


_ANY_CODE, _BAD_CODE = _codes(0), _codes(1)
FailureCodes = tuple[Annotated[Any, _BAD_CODE[0], _BAD_CODE[1]], ...]
ValidCodes = Annotated[
    tuple[Annotated[Any, _ANY_CODE[0], _ANY_CODE[1]], ...],
    _rule(len, "must name at least one exit code"),
    Field(json_schema_extra={"minItems": 1}),
]


class ExitCodes(Part):
    """What exit codes of the start command mean, such as [3, "64-78"]; 128 and its number stands for a signal."""

    retry: FailureCodes = ()
    """Only these are tried again; by default all but 0 are."""
    fail: FailureCodes = ()
    """These are never tried again; none of them may be among ``retry``."""


class Retry(Part):
    """How often a job that has failed is tried again. Nodes and instances that were lost have a budget of their own."""

    max: Annotated[Whole, Field(ge=0, le=1000)] = 0
    """How often again after the program has failed."""
    infra_max: Annotated[Whole, Field(ge=0, le=1000)] = 3
    """How often again after a node or an instance was lost, or could not be made ready."""
    exit_codes: ExitCodes = ExitCodes()
    """Which exit codes of the program are tried again."""
    backoff_s: Annotated[Number, Field(ge=0)] = 0
    """Seconds before the first retry, twice as many before each further one, 600 at most; 0: at once, on the same nodes where they are sound."""


MOST_AWAITED = 1000
AwaitedJob = Annotated[
    Text,
    _rule(lambda text: "~" not in text, "must not be a member of an array: wait for the array"),
    _rule(re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}\Z").match, "must be the id of a job"),
]
AwaitedJobs = Annotated[tuple[AwaitedJob, ...], Field(max_length=MOST_AWAITED)]


class After(Part):
    """Other jobs whose ends the job waits for, by their ids; all of it must come."""

    ok: AwaitedJobs = ()
    """These have succeeded."""
    any: AwaitedJobs = ()
    """These have ended, however."""
    failed: AwaitedJobs = ()
    """These have failed; one that was stopped has not."""


def _is_indices(text: str) -> bool:
    try:
        return bool(indices_of(text))
    except ValueError:
        return False


class Array(Part):
    """One job with many members, each a job of one instance that is started when there is room for it."""

    indices: Annotated[
        Text,
        BeforeValidator(lambda one: str(one) if isinstance(one, int) and not isinstance(one, bool) else one),
        _rule(_is_indices, INDICES_RULE),
        WithJsonSchema({"type": ["string", "integer"]}),
    ]
    """The members' indices, as Slurm writes them: 0-99, or 0-15:4,20."""
    parallel: Annotated[Whole, Field(ge=1, le=MOST_MEMBERS)] | None = None
    """So many members at most have nodes at a time; by default as many as there is room for."""
    fail_fast: Bool = False
    """Once a member has failed, its further attempts included, stop the others and begin no more."""


def _array(value: Any) -> Any:
    """``array: 0-99%8`` is short for ``array: {indices: 0-99, parallel: 8}``."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {"indices": value}
    if not isinstance(value, str | Mapping | Array):
        raise PydanticCustomError("rule", "{rule}", {"rule": "must be indices such as 0-99%8, or a mapping"})
    if not isinstance(value, str):
        return value
    indices, percent, parallel = value.partition("%")
    if not percent:
        return {"indices": indices}
    return {"indices": indices, "parallel": int(parallel) if parallel.isdecimal() else parallel}


ArrayField = Annotated[Array, BeforeValidator(_array, json_schema_input_type=str | int | Array)]


class Rdma(Part):
    """Whether and how the job uses RDMA. What a site leaves open is in its settings (``rdma_preset``, ``rdma_min_gpus``)."""

    when: When = When.AUTO
    """auto: when every instance holds all GPUs of a node of its own and the nodes have RDMA; on: or fail; off."""
    preset: (
        Annotated[
            Text,
            _rule(lambda name: name in presets.names(), f"must be one of {', '.join(presets.names())}"),
            Field(json_schema_extra={"enum": list(presets.names())}),
        ]
        | None
    ) = None
    """The set of variables: auto (from the nodes' facts) or one with fixed values; by default the site's."""
    min_gpus: Annotated[Whole, Field(ge=1, le=MAX_INSTANCES)] | None = None
    """Only for auto: how many GPUs an instance must hold at least; by default the site's."""


def _rdma(value: Any) -> Any:
    """``rdma: on`` is short for ``rdma: {when: on}``."""
    if not isinstance(value, str | Mapping | Rdma):
        raise PydanticCustomError("rule", "{rule}", {"rule": "must be auto, on or off, or a mapping"})
    return {"when": value} if isinstance(value, str) else value


RdmaField = Annotated[Rdma, BeforeValidator(_rdma, json_schema_input_type=When | Rdma)]


class RayOptions(Part):
    """What the job's own Ray cluster is like; mode ray only."""

    dashboard: Bool = False
    """Start Ray's dashboard on the head, and with it `ray job submit`."""
    tolerate_worker_loss: Bool = False
    """Go on when the Ray node of a worker ends or its machine is lost while the job runs; by default the job fails."""


@dataclass(frozen=True)
class Site:
    """What a job gets of the site's settings where its spec leaves it open."""

    rdma_preset: str = "auto"
    rdma_min_gpus: int = 8
    idle_gpu_warn_s: float = 600.0


def _given(value: Any) -> Any:
    """Let a :class:`Resources` stand for a group's: what it was not given is the job's."""
    return value.model_dump(include=value.model_fields_set) if isinstance(value, Resources) else value


class Group(Part):
    """Instances that are alike."""

    role: Text | None = None
    """What the instances are in the job's mode; by default the group's name if that is a role, else worker."""
    count: Count = 1
    """How many instances."""
    command: Command | None = None
    """The group's own start command."""
    env: Env = Field(default_factory=dict)
    """Environment variables, on top of the job's; null unsets."""
    resources: Annotated[GroupResources | None, BeforeValidator(_given)] = None
    """The group's own resources."""
    slots: Slots | None = None
    """Processes per instance."""


Groups = Annotated[
    dict[Text, Group],
    Field(json_schema_extra={"propertyNames": {"pattern": "^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"}}),
]


# -- groups and their roles ----------------------------------------------------------------------------------------


def groups_of(mode: Mode, groups: Mapping[str, Group], nodes: int | None) -> dict[str, Group]:
    """The groups as written, or those that ``nodes`` is short for."""
    if groups or mode not in SINGLE_ROLE:
        return dict(groups)
    single = {SINGLE_ROLE[mode]: Group()}
    workers = (nodes or 1) - 1
    return {**single, "worker": Group(count=workers)} if workers else single


def role_of(mode: Mode, name: str, group: Group) -> str:
    """A group's role: as written, else its name if that is a role of the mode, else worker."""
    return group.role or (name if name in ROLES[mode] else "worker")


def lead_group(mode: Mode, groups: Mapping[str, Group]) -> str | None:
    """The group that INDEX 0 is of: that of the single role (ps: chief), else the first of workers."""
    roles = {name: role_of(mode, name, group) for name, group in groups.items()}
    for wanted in (SINGLE_ROLE.get(mode, "chief"), "worker"):
        for name, role in roles.items():
            if role == wanted:
                return name
    return None


def resources_of(job: Resources, group: Group) -> Resources:
    """A group's resources: where it gives none, the job's."""
    own = group.resources or GroupResources()
    return Resources(
        cpu=job.cpu if own.cpu is None else own.cpu,
        gpu=job.gpu if own.gpu is None else own.gpu,
        memory=job.memory if own.memory is None else own.memory,
    )
