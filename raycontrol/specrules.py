"""The rules of a job's spec that no single field can tell: groups, roles and counts, slots and GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ModelWrapValidatorHandler, ValidationError

from raycontrol import conditions
from raycontrol.errors import SpecError
from raycontrol.specfaults import Problem, faults_of, got, problems_of
from raycontrol.specfile import Document, Keys
from raycontrol.specparts import (
    GROUP_NAME,
    GROUP_NAME_RULE,
    LAUNCHERS,
    LEAST_RAY_MEMORY,
    MAX_INSTANCES,
    MAX_WORKER_GROUPS,
    RAY_RESERVED,
    ROLES,
    SINGLE_ROLE,
    Group,
    Mode,
    Placement,
    RayOptions,
    RunOn,
    Success,
    Timeouts,
    When,
    codes_of,
    groups_of,
    lead_group,
    resources_of,
    role_of,
)

if TYPE_CHECKING:
    from raycontrol.spec import JobSpec


CALLS_LAUNCHER = re.compile(rf"(\S*/)?({'|'.join(map(re.escape, LAUNCHERS))})(\s|$)")


def checked(
    data: Any, handler: ModelWrapValidatorHandler[JobSpec], model: type[BaseModel], document: Document
) -> JobSpec:
    """The spec in ``data``, read from ``document``, or a SpecError with every fault: of the text, of single fields, and of their sum.

    When single fields are wrong, the rules for the sum are checked on what is left without them.
    """
    if isinstance(data, BaseModel):
        return handler(data)
    if not isinstance(data, Mapping):
        wanted = "a job's spec must be a mapping of fields, such as `command: torchrun train.py`"
        raise SpecError(faults_of([Problem((), wanted, got((), data, document))], document), document.source)
    written = _written(data)
    problems: list[Problem] = []
    spec: JobSpec | None
    try:
        spec = handler(written)
    except ValidationError as error:
        problems = problems_of(error, model, document)
        spec = _rest(written, problems, handler)
    if spec is not None:
        problems += _Sum(spec, written, problems, document).problems()
    if spec is None or problems or document.faults:
        raise SpecError(faults_of(problems, document), document.source)
    return spec


def _written(data: Mapping[Any, Any]) -> dict[Any, Any]:
    """``data`` without what is null (a field with nothing after its colon was not given; an empty group is a group)."""
    fields = {key: value for key, value in data.items() if value is not None}
    for part in ("resources", "timeouts", "ray", "rdma", "after", "array"):
        if isinstance(fields.get(part), dict):
            fields[part] = {key: value for key, value in fields[part].items() if value is not None}
    groups = fields.get("groups")
    if isinstance(groups, dict):
        fields["groups"] = {
            name: _written(group) if isinstance(group, dict) else {} if group is None else group
            for name, group in groups.items()
        }
    return fields


# -- what is left without the wrong values ---------------------------------------------------------------------------


def _rest(
    data: dict[Any, Any], problems: list[Problem], handler: ModelWrapValidatorHandler[JobSpec]
) -> JobSpec | None:
    for problem in problems:
        match problem.path:
            case path if problem.at_key:
                data = _without(data, path)
            case ("groups", name):
                data = _with(data, ("groups", name), {})
            case ("command", *_):
                data = _with(data, ("command",), "true")
            case ("groups", name, "command", *_):
                data = _without(data, ("groups", name, "command"))
            case path:
                data = _without(data, path)
    try:
        return handler({"command": "true", **data})
    except ValidationError:
        return None


def _with(data: Any, path: Keys, value: Any) -> Any:
    if not path:
        return value
    return (
        {**data, path[0]: _with(data.get(path[0], {}), path[1:], value)} if isinstance(data, dict) else data
    )


def _without(data: Any, path: Keys) -> Any:
    if not path or not isinstance(data, dict) or path[0] not in data:
        return data
    if len(path) == 1:
        return {key: value for key, value in data.items() if key != path[0]}
    return {**data, path[0]: _without(data[path[0]], path[1:])}


# -- the rules -------------------------------------------------------------------------------------------------------


class _Sum:
    """Checks a spec whose single fields are right; values that ``broken`` problems took away are not judged."""

    def __init__(
        self,
        spec: JobSpec,
        written: Mapping[Any, Any],
        broken: list[Problem],
        document: Document,
    ) -> None:
        self._spec = spec
        self._written = written
        self._broken = {problem.path for problem in broken if not problem.unknown}
        self._document = document
        self._groups = groups_of(spec.mode, spec.groups, spec.span[1])

    def problems(self) -> Iterator[Problem]:
        yield from self._shape()
        for name, group in self._spec.groups.items():
            yield from self._group(name, group)
        if self._known("mode"):
            yield from self._roles()
        total = sum(group.count for group in self._spec.groups.values() if group.count > 0)
        if total > MAX_INSTANCES:
            yield Problem(("groups",), f"must have at most {MAX_INSTANCES} instances in all", f"{total}")
        yield from self._slots()
        yield from self._secrets()
        yield from self._exit_codes()
        yield from self._after()
        yield from self._node_names()
        yield from self._where()
        if self._spec.exclusive and self._spec.placement is Placement.PACK:
            rule = "must not be given together with `placement: pack`, whose instances share nodes"
            yield Problem(("exclusive",), rule)
        if self._known("mode") and self._known("run_on"):
            yield from self._run_on()
        if self._known("mode"):
            yield from self._of_one_mode()
        if self._known("mode") and self._spec.mode is Mode.RAY:
            yield from self._ray_resources()
        if self._known("mode") and self._spec.array is not None:
            yield from self._array()
        if self._known("rdma") and self._spec.rdma.when is When.ON:
            yield from self._rdma_on()

    def _node_names(self) -> Iterator[Problem]:
        """One instance on each: a count beside them can only be the same."""
        names, written = self._spec.node_names, self._written.get("nodes")
        if not names or not self._known("nodes") or not self._known("groups"):
            return
        if self._spec.placement is Placement.PACK:
            rule = "are for `placement: strict`, one instance on each; with pack choose nodes by `node_group` or `where`"
            yield Problem(("node_names",), rule)
        count = self._spec.span if written is not None else (len(names),) * 2
        if self._spec.groups:
            count = (sum(group.count for group in self._spec.groups.values()),) * 2
        if count != (len(names),) * 2:
            wanted = f"{count[0]}" if count[0] == count[1] else f"{count[0]} to {count[1]}"
            rule = f"must name as many nodes as there are instances ({wanted})"
            yield Problem(("node_names",), rule, f"{len(names)}")
        both = sorted({*names} & {*self._spec.exclude})
        if both:
            yield Problem(("exclude",), f"must not name nodes of node_names ({', '.join(both)})")

    def _where(self) -> Iterator[Problem]:
        for name, text in self._spec.where.items():
            try:
                conditions.parsed(name, text)
            except ValueError as error:
                path: Keys = ("where", name)
                yield Problem(path, str(error), got(path, text, self._document))

    def _rdma_on(self) -> Iterator[Problem]:
        """What no nodes can mend."""
        path: Keys = ("rdma", "when") if isinstance(self._written.get("rdma"), Mapping) else ("rdma",)
        if self._groups and sum(group.count for group in self._groups.values()) < 2:
            yield Problem(path, "must not be on for a single instance, which has nobody to talk to")
        for name, group in self._groups.items():
            gpu = resources_of(self._spec.resources, group).gpu
            if (
                gpu < 1
                and self._known("resources", "gpu")
                and self._known("groups", name, "resources", "gpu")
            ):
                yield Problem(
                    path,
                    f"must not be on where instances hold no whole GPUs; {name} has {gpu:g} (`resources.gpu`)",
                )
                return

    def _known(self, *path: str) -> bool:
        """Whether the value at ``path`` is the user's (or the default), not one that was taken away."""
        return not any(path[: len(broken)] == broken for broken in self._broken)

    def _shape(self) -> Iterator[Problem]:
        mode = self._spec.mode
        nodes, groups = self._written.get("nodes"), self._written.get("groups")
        if nodes is not None and groups:
            rule = "must not be given together with groups, whose counts say how many instances there are"
            yield Problem(("nodes",), rule, got(("nodes",), nodes, self._document))
        if self._known("mode") and mode is Mode.PS and not groups:
            workers = max(1, (self._spec.span[1] if nodes is not None else 2) - 1)
            wanted = f"groups: {{ps: {{count: 1}}, worker: {{count: {workers}}}}}"
            if nodes is None:
                yield Problem(("groups",), f"must be given in mode ps, such as `{wanted}`")
            else:
                rule = f"is not enough in mode ps; write `{wanted}` instead"
                yield Problem(("nodes",), rule, got(("nodes",), nodes, self._document))

    def _group(self, name: str, group: Group) -> Iterator[Problem]:
        if not GROUP_NAME.match(name):
            yield Problem(("groups", name), GROUP_NAME_RULE, None, True)
        mode_known = self._known("mode")
        role = role_of(self._spec.mode, name, group) if mode_known else group.role or name
        least = 0 if role == "ps" else 1
        if group.count < least and self._known("groups", name, "count"):
            yield self._count(name, f"must be at least {least}", group)
        if mode_known and group.role is not None and group.role not in ROLES[self._spec.mode]:
            roles = ", ".join(ROLES[self._spec.mode])
            path = ("groups", name, "role")
            yield Problem(
                path,
                f"must be one of {roles} in mode {self._spec.mode}",
                got(path, group.role, self._document),
            )

    def _roles(self) -> Iterator[Problem]:
        mode, groups = self._spec.mode, self._spec.groups
        by_role: dict[str, list[str]] = {}
        for name, group in groups.items():
            if self._known("groups", name, "role"):
                by_role.setdefault(role_of(mode, name, group), []).append(name)
        for role in [SINGLE_ROLE[mode]] if mode in SINGLE_ROLE else ["chief", "evaluator"]:
            for name in by_role.get(role, [])[:1]:
                if groups[name].count > 1 and self._known("groups", name, "count"):
                    yield self._count(name, f"must be 1, a job has one {role}", groups[name])
            for name in by_role.get(role, [])[1:]:
                yield Problem(
                    ("groups", name), f"must not be a second group with the role {role}", None, True
                )
        workers = len(by_role.get("worker", []))
        if workers > MAX_WORKER_GROUPS:
            rule = f"must have at most {MAX_WORKER_GROUPS} groups of workers"
            yield Problem(("groups",), rule, f"{workers}", True)
        if mode is Mode.PS and groups and self._known("groups") and self._all_roles_known():
            if "ps" not in by_role:
                rule = "must have a group ps in mode ps (`ps: {count: 0}` for no parameter server)"
                yield Problem(("groups",), rule, None, True)
            if "worker" not in by_role:
                yield Problem(("groups",), "must have a group of workers in mode ps", None, True)

    def _run_on(self) -> Iterator[Problem]:
        """``run_on`` is mpi's; and a command that would never run is a mistake, not a wish."""
        spec, mode = self._spec, self._spec.mode
        if mode is Mode.HOROVOD and spec.run_on is not RunOn.EVERY_INSTANCE:
            yield Problem(("run_on",), "mode horovod always runs the command on the launcher; leave it out")
        elif mode is not Mode.MPI and spec.run_on is not RunOn.EVERY_INSTANCE:
            path = ("run_on",)
            yield Problem(
                path, f"is for mode mpi only, not {mode}", got(path, self._written["run_on"], self._document)
            )
        words = spec.command if isinstance(spec.command, str) else spec.command[0]
        if mode is Mode.MPI and spec.run_on is RunOn.RANKS and CALLS_LAUNCHER.match(words):
            rule = "calls an MPI launcher, but with `run_on: ranks` it is the ranks: write only their program, or `run_on: launcher`"
            yield Problem(("command",), rule)
        if mode in (Mode.HOROVOD, Mode.RAY) or (mode is Mode.MPI and spec.run_on is not RunOn.EVERY_INSTANCE):
            lead = lead_group(mode, spec.groups)
            where = f"with `run_on: {spec.run_on}`" if mode is Mode.MPI else f"in mode {mode}"
            for name, group in spec.groups.items():
                if group.command is not None and name != lead:
                    rule = f"would never run: only the {SINGLE_ROLE[mode]}'s does {where}"
                    yield Problem(("groups", name, "command"), rule)

    def _of_one_mode(self) -> Iterator[Problem]:
        """What only one mode knows must not be written for another, where it would do nothing."""
        spec = self._spec
        if spec.mode is not Mode.PS and spec.success is not Success.CHIEF:
            yield self._only_for(Mode.PS, ("success",))
        if spec.mode is not Mode.PS and spec.timeouts.evaluator_wait_s != Timeouts().evaluator_wait_s:
            yield self._only_for(Mode.PS, ("timeouts", "evaluator_wait_s"))
        if spec.mode is not Mode.RAY:
            if spec.ray != RayOptions():
                yield self._only_for(Mode.RAY, ("ray",))
            return
        envs: dict[Keys, Mapping[str, Any]] = {**self._envs(), ("secret_env",): spec.secret_env}
        for path, env in envs.items():
            for name in (name for name in env if name in RAY_RESERVED):
                yield Problem((*path, name), "is set by raycontrol itself in mode ray and must not be given")

    def _secrets(self) -> Iterator[Problem]:
        """A variable is secret or it is not: its value must not stand in both places."""
        for path, env in self._envs().items():
            for name in (name for name in env if name in self._spec.secret_env):
                yield Problem((*path, name), "must not be given in secret_env too")

    def _exit_codes(self) -> Iterator[Problem]:
        """One code has one meaning: what is a success is not tried again, and is no failure."""
        codes = self._spec.retry.exit_codes
        both = sorted(codes_of(codes.retry) & codes_of(codes.fail))
        if both:
            rule = "must not name what exit_codes.retry names too"
            yield Problem(("retry", "exit_codes", "fail"), rule, ", ".join(map(str, both)))
        if not self._known("valid_exit_codes") or not self._known("retry"):
            return
        valid = codes_of(self._spec.valid_exit_codes)
        for field in ("retry", "fail"):
            for code in sorted(codes_of(getattr(self._spec.retry.exit_codes, field)) & valid):
                path = ("retry", "exit_codes", field)
                yield Problem(path, f"must not name {code}, which is among `valid_exit_codes`")

    def _array(self) -> Iterator[Problem]:
        if self._spec.mode is not Mode.DDP:
            yield Problem(("array",), f"is for mode ddp only, not {self._spec.mode}")
        elif sum(group.count for group in self._groups.values()) > 1:
            rule = (
                "must have one instance for each member: leave `nodes` out; a gang can be submitted in a loop"
            )
            yield Problem(("array",), rule)
        if self._spec.timeouts.keep_failed_s and self._known("timeouts", "keep_failed_s"):
            yield Problem(
                ("timeouts", "keep_failed_s"), "is not for arrays, whose other members wait for the nodes"
            )

    def _after(self) -> Iterator[Problem]:
        """A job that is to succeed and to fail is a mistake, and so is one that is named twice."""
        seen: set[str] = set()
        for field in ("ok", "any", "failed"):
            for job_id in getattr(self._spec.after, field):
                if job_id in seen:
                    yield Problem(("after", field), f"must not name {job_id}, which is named already")
                seen.add(job_id)

    def _envs(self) -> dict[Keys, Mapping[str, str | None]]:
        groups: dict[Keys, Mapping[str, str | None]] = {
            ("groups", name, "env"): group.env for name, group in self._spec.groups.items()
        }
        return {("env",): self._spec.env, **groups}

    def _only_for(self, mode: Mode, path: Keys) -> Problem:
        return Problem(path, f"is for mode {mode} only, not {self._spec.mode}")

    def _ray_resources(self) -> Iterator[Problem]:
        """Ray counts whole cores, and its object store needs room; the job's own values are reported once."""
        reported: set[Keys] = set()
        for name, group in self._groups.items():
            found = resources_of(self._spec.resources, group)
            wrong: dict[str, str] = {}
            if found.cpu != int(found.cpu):
                became = f"{found.cpu:g} would become {int(found.cpu)}"
                wrong["cpu"] = f"must be a whole number in mode ray: Ray nodes have whole CPUs, {became}"
            if found.memory is not None and found.memory < LEAST_RAY_MEMORY:
                least = f"{LEAST_RAY_MEMORY >> 20}MiB"
                wrong["memory"] = (
                    f"must be at least {least} in mode ray, for the node's object store takes up to 30 % of it"
                )
            for field, rule in wrong.items():
                own = getattr(group.resources, field, None) is not None
                path = ("groups", name, "resources", field) if own else ("resources", field)
                if self._known(*path) and path not in reported:
                    reported.add(path)
                    yield Problem(path, rule, got(path, getattr(found, field), self._document))

    def _all_roles_known(self) -> bool:
        return all(self._known("groups", name, "role") for name in self._spec.groups)

    def _count(self, name: str, rule: str, group: Group) -> Problem:
        path = ("groups", name, "count")
        return Problem(path, rule, got(path, group.count, self._document))

    def _slots(self) -> Iterator[Problem]:
        """One process a GPU, unless ``share_gpus`` allows more; the job's own slots are reported once."""
        reported = False
        if self._spec.share_gpus or not self._known("share_gpus"):
            return
        for name, group in self._groups.items():
            own = ("groups", name, "slots")
            gpu_known = self._known("resources", "gpu") and self._known("groups", name, "resources", "gpu")
            slots = group.slots if group.slots is not None else self._spec.slots
            gpu = resources_of(self._spec.resources, group).gpu
            if slots is None or gpu < 1 or slots <= gpu or not gpu_known or not self._known(*own):
                continue
            path: Keys = own if group.slots is not None else ("slots",)
            if path == ("slots",) and reported:
                continue
            reported = reported or path == ("slots",)
            where = f" of {name}" if group.resources is not None and path == ("slots",) else ""
            rule = f"must be at most the number of GPUs{where} ({gpu:g}); `share_gpus: true` allows more"
            yield Problem(path, rule, got(path, slots, self._document))
