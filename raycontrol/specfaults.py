"""From pydantic's errors to faults in our own words: what must hold, what was given, and where."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from raycontrol.errors import Fault
from raycontrol.specfile import Document, Keys, dotted, shown
from raycontrol.wording import counted

LINE, WORDS = "<line>", "<words>"
"""Tags of a command's two forms; pydantic puts them into the location of an error."""


@dataclass(frozen=True)
class Problem:
    """A fault before its place in the file is looked up. ``at_key``: the name itself is wrong, not its value."""

    path: Keys
    rule: str
    got: str | None = None
    at_key: bool = False
    unknown: bool = False


def problems_of(
    error: ValidationError, model: type[BaseModel], document: Document | None = None
) -> list[Problem]:
    """Each of pydantic's errors as a problem; ``model`` is the one that was validated."""
    return [
        _problem(details, model, document or Document(None)) for details in error.errors(include_url=False)
    ]


def faults_of(problems: Iterable[Problem], document: Document | None = None) -> tuple[Fault, ...]:
    """Problems, and the faults of the document's text, in the order of the document."""
    source = document or Document(None)
    faults = [
        Fault(dotted(problem.path), problem.rule, problem.got, *source.where(problem.path, problem.at_key))
        for problem in problems
    ]
    return in_order([*source.faults, *faults])


def in_order(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Faults in the order of the document."""
    return tuple(sorted(faults, key=_place))


def _place(fault: Fault) -> tuple[float, float]:
    return (
        fault.line if fault.line is not None else float("inf"),
        fault.column if fault.column is not None else 0,
    )


# -- one error -------------------------------------------------------------------------------------------------------


def _problem(details: Mapping[str, Any], model: type[BaseModel], document: Document) -> Problem:
    path, at_key = _path(details["loc"])
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "missing":
        return Problem(path, _MISSING.get(path[-1], "must be given"))
    if kind == "extra_forbidden":
        return Problem(path, _unknown_field(str(path[-1]), _model_at(model, path[:-1])), None, True, True)
    if at_key:
        return Problem(
            path, "names must be text" if kind == "string_type" else _rule(kind, context), None, True
        )
    if kind == "string_type":
        return Problem(path, _text_rule(path, value, document), got(path, value, document))
    return Problem(path, _rule(kind, context) + _example(kind, path), got(path, value, document))


def _example(kind: str, path: Keys) -> str:
    return _LISTS.get(path[-1], "") if kind == "tuple_type" and path else ""


_LISTS: Mapping[str | int, str] = {
    "node_names": ", such as [host-a, host-b]",
    "exclude": ", such as [host-a, host-b]",
    "valid_exit_codes": ', such as [0, "3-5"]',
    "retry": ', such as [3, "64-78"]',
    "fail": ', such as [3, "64-78"]',
    "ok": ", such as [prepare-ab12cd]",
    "any": ", such as [prepare-ab12cd]",
    "failed": ", such as [prepare-ab12cd]",
}

_MISSING: Mapping[str | int, str] = {
    "command": "must be given: the line that starts the program, such as `command: torchrun train.py`"
}

_RULES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "rule": lambda context: str(context["rule"]),
    "greater_than": lambda context: f"must be more than {context['gt']:g}",
    "greater_than_equal": lambda context: f"must be at least {context['ge']:g}",
    "less_than": lambda context: f"must be less than {context['lt']:g}",
    "less_than_equal": lambda context: f"must be at most {context['le']:g}",
    "enum": lambda context: "must be one of " + re.sub(r"' or '|', '", ", ", context["expected"]).strip("'"),
    "missing": lambda context: "must be given",
    "extra_forbidden": lambda context: "unknown field",
    "string_too_short": lambda context: f"must have at least {counted(context['min_length'], 'character')}",
    "string_too_long": lambda context: f"must have at most {counted(context['max_length'], 'character')}",
    "too_short": lambda context: f"must have at least {context['min_length']}",
    "too_long": lambda context: f"must have at most {context['max_length']}",
    "finite_number": lambda context: "must be a finite number",
    "string_unicode": lambda context: "must be text that UTF-8 can hold",
    "invalid_key": lambda context: "names must be text",
    "recursion_loop": lambda context: "must not contain itself",
}

_RULES_OF_KIND: Mapping[str, str] = {
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "string": "must be text",
    "dict": "must be a mapping",
    "mapping": "must be a mapping",
    "model": "must be a mapping",
    "tuple": "must be a list",
    "list": "must be a list",
}


def _rule(kind: str, context: Mapping[str, Any]) -> str:
    return known_rule(kind, context) or "has a value that is not possible here"


def known_rule(kind: str, context: Mapping[str, Any]) -> str | None:
    """Return what must hold, by pydantic's type of error; the families ``int_…``, ``dict_…`` have one rule each."""
    if kind in _RULES:
        return _RULES[kind](context)
    return None if "pattern" in kind else _RULES_OF_KIND.get(kind.partition("_")[0])


def _path(location: tuple[int | str, ...]) -> tuple[Keys, bool]:
    """Where the error is: without the tags of commands, and whether it is a mapping's key that is wrong."""
    at_key = len(location) > 1 and location[-1] == "[key]"
    keys = location[:-1] if at_key else location
    return tuple(
        key for i, key in enumerate(keys) if not (_is_tag(key) and i and keys[i - 1] == "command")
    ), at_key


def _is_tag(key: int | str) -> bool:
    return key in (LINE, WORDS)


# -- what was given --------------------------------------------------------------------------------------------------

MASKED = "(masked)"
_SECRET = re.compile(r"token|key|secret|passw|credential", re.IGNORECASE)


def got(path: Keys, value: Any, document: Document) -> str:
    """The value as its author wrote it; never one whose name speaks of a secret, nor text that may hold all of env."""
    if _is_secret(path):
        return "a value that is not shown"
    if path and path[-1] in ("env", "secret_env"):
        return "text" if isinstance(value, str) else shown(value)
    text = document.text_of(path)
    return shown(value, text or None)


def _is_secret(path: Keys) -> bool:
    return "secret_env" in path[:-1] or ("env" in path[:-1] and is_secret_name(str(path[-1])))


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name may hold a secret."""
    return _SECRET.search(name) is not None


def _text_rule(path: Keys, value: Any, document: Document) -> str:
    """The rule for a number or a boolean where text belongs, with the quoted form to write."""
    if not isinstance(value, bool | int | float):
        return "must be text"
    if _is_secret(path):
        return "must be text; put the value in quotes"
    quoted = f'"{shown(value, document.text_of(path))}"'
    key = path[-1] if path else ""
    return f"must be text, write {quoted if isinstance(key, int) else f'{key}: {quoted}'}"


# -- unknown fields --------------------------------------------------------------------------------------------------


def _unknown_field(name: str, model: type[BaseModel] | None) -> str:
    known = _known_fields(model) if model is not None else {}
    near = get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    if near:
        return f"unknown field, did you mean {known[near[0]]}?"
    own = list(model.model_fields) if model is not None else []
    return f"unknown field; there are {', '.join(own)}"


def _known_fields(model: type[BaseModel]) -> dict[str, str]:
    """Names a user may have meant here: the model's fields, and (``cpu``: ``resources.cpu``) those of its parts."""
    inner = {
        name: f"{outer}.{name}"
        for outer, field in model.model_fields.items()
        if (part := _part(field.annotation)) is not None and not _is_named(field.annotation)
        for name in part.model_fields
    }
    return {**inner, **{name: name for name in model.model_fields}}


def _model_at(model: type[BaseModel], path: Keys) -> type[BaseModel] | None:
    """The model of the mapping at ``path``; names of groups are passed over."""
    current: type[BaseModel] | None = model
    named = False
    for key in path:
        if named:
            named = False
        elif current is not None and key in current.model_fields:
            annotation = current.model_fields[str(key)].annotation
            current, named = _part(annotation), _is_named(annotation)
        else:
            return None
    return current


def _part(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as ``dict[str, Group]`` or ``GroupResources | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((part for inner in get_args(annotation) if (part := _part(inner)) is not None), None)


def _is_named(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is dict
