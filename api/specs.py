"""Specs as they come in: as JSON or as YAML, checked with every fault told, and fit to be run without their author's disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from raycontrol import backends, specfile
from raycontrol.api.problems import BadRequest
from raycontrol.errors import Fault, SpecError
from raycontrol.spec import JobSpec
from raycontrol.specfaults import in_order
from raycontrol.specfile import Document


def spec_of_json(data: Mapping[str, Any]) -> JobSpec:
    """Return the spec of plain data; raises SpecError."""
    return JobSpec.from_dict(document_of_json(data).data)


def document_of_json(data: Mapping[str, Any]) -> Document:
    """Return plain data, which may be as large as a text in YAML; raises SpecError."""
    refuse_too_much(data)
    return Document(data)


def document_of_yaml(body: bytes) -> Document:
    """Return what a text holds, and where; raises SpecError when it has no structure at all."""
    try:
        return specfile.parse(body.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise BadRequest("the spec must be UTF-8 text") from None


def submittable(document: Document, package: str | None) -> JobSpec:
    """Return the spec with a name, once it is known that there is a plan for it; raises SpecError with all faults, PlanError.

    A relative ``working_dir`` stays as it is: it is a folder of whoever wrote it, not of this server.
    """
    lacking = [*_lacking(document, package)]
    try:
        spec = JobSpec.model_validate(document.data, context=document)
    except SpecError as error:
        raise SpecError(in_order([*error.faults, *lacking])) from None
    if lacking:
        raise SpecError(in_order(lacking))
    spec = spec.named("job")
    backends.plan_of(spec)
    return spec


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


def _lacking(document: Document, package: str | None) -> Iterator[Fault]:
    """Yield what a spec may leave open on the machine of who wrote it, and not here."""
    data = document.data if isinstance(document.data, dict) else {}
    if isinstance(data.get("working_dir"), str) and package is None:
        rule = "is not here: upload the packed folder with PUT /api/v1/packages and name it by `package`"
        yield Fault("working_dir", rule, None, *document.where(("working_dir",)))
    secrets = data.get("secret_env")
    for name, value in secrets.items() if isinstance(secrets, dict) else ():
        if value is None:  # the server's own environment is not the caller's to read
            path = ("secret_env", name)
            yield Fault(
                specfile.dotted(path), "must have a value: send it", None, *document.where(path, at_key=True)
            )


def fingerprint(kind: str, query: str, body: bytes) -> str:
    """Return what stands for a request: with the same key, another request is refused."""
    return hashlib.sha256(b"\0".join((kind.encode(), query.encode(), body))).hexdigest()
