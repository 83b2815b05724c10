"""Specs as they come in: as JSON or as YAML, checked with every fault told, and fit to be run without their author's disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from raycontrol import backends, specfile
from raycontrol.api.problems import BadRequest
from raycontrol.errors import Fault, SpecError
from raycontrol.spec import JobSpec


def spec_of_json(document: Mapping[str, Any]) -> JobSpec:
    """Return the spec of plain data, which may be as large as one in YAML; raises SpecError."""
    refuse_too_much(document)
    return JobSpec.from_dict(document)


def spec_of_yaml(body: bytes) -> JobSpec:
    """Return the spec of a text, its faults with their lines; raises SpecError.

    A relative ``working_dir`` stays as it is: it is a folder of whoever wrote it, not of this server.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadRequest("the spec must be UTF-8 text") from None
    document = specfile.parse(text)
    return JobSpec.model_validate(document.data, context=document)


def refuse_too_much(document: Any) -> None:
    """Raise SpecError when there is more in a document, or deeper, than is worth checking."""
    level, values = [document], 0
    for _ in range(specfile.MAX_DEPTH):
        values += len(level)
        if values > specfile.MAX_VALUES:
            raise SpecError((Fault("", f"must hold at most {specfile.MAX_VALUES} values"),))
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return
    raise SpecError((Fault("", "is nested too deeply"),))


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def submittable(spec: JobSpec, package: str | None) -> JobSpec:
    """Return the spec with a name, once it is known that there is a plan for it; raises SpecError and PlanError."""
    if spec.working_dir is not None and package is None:
        rule = "is not here: upload the packed folder with PUT /api/v1/packages and name it by `package`"
        raise SpecError((Fault("working_dir", rule),))
    open_ones = tuple(name for name, value in spec.secret_env.items() if value is None)
    if open_ones:
        # The server's own environment is not the caller's to read.
        raise SpecError(
            tuple(Fault(f"secret_env.{name}", "must have a value: send it") for name in open_ones)
        )
    spec = spec.named("job")
    backends.plan_of(spec)
    return spec


def fingerprint(kind: str, query: str, body: bytes) -> str:
    """Return what stands for a request: with the same key, another request is refused."""
    return hashlib.sha256(b"\0".join((kind.encode(), query.encode(), body))).hexdigest()
