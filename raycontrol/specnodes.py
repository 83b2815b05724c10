"""Which nodes a job wants, as its spec writes it: how many, by name, by what is true of them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from raycontrol.specparts import MAX_INSTANCES, LabelName, Text

_RANGE = re.compile(r"\s*(\d{1,9})\s*-\s*(\d{1,9})\s*\Z")


def span(nodes: int | str) -> tuple[int, int]:
    """Return the least and the most of a count or a range."""
    if isinstance(nodes, int):
        return nodes, nodes
    least, _, most = nodes.partition("-")
    return int(least), int(most)


def _fault(rule: str) -> PydanticCustomError:
    return PydanticCustomError("rule", "{rule}", {"rule": rule})


def _count(value: Any) -> int | str:
    """Return a count, or a range in one form: ``2-4``."""
    if isinstance(value, int) and not isinstance(value, bool):
        least, most = value, value
    else:
        found = _RANGE.match(value) if isinstance(value, str) else None
        if found is None:
            raise _fault('must be a whole number, or a range such as "2-4"')
        least, most = int(found[1]), int(found[2])
    if least < 1:
        raise _fault("must be at least 1")
    if most > MAX_INSTANCES:
        raise _fault(f"must be at most {MAX_INSTANCES}")
    if least > most:
        raise _fault("must begin with the least number of nodes")
    return least if least == most else f"{least}-{most}"


def _is_name(text: str) -> str:
    if not text or not text.isprintable() or text.strip() != text or len(text) > 255 or "," in text:
        raise _fault("must be a node's name or IP")
    return text


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if names.count(name) > 1:
            raise _fault(f"must name each node once, not {name} again")
    return names


def _condition_text(value: Any) -> Any:
    """YAML reads ``rdma: true`` and ``rack: 3`` as what labels cannot hold."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


NodeCount = Annotated[
    int | str,
    BeforeValidator(_count),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": MAX_INSTANCES},
                {"type": "string", "pattern": r"^\s*[0-9]+\s*-\s*[0-9]+\s*$"},
            ]
        }
    ),
]
NodeNames = Annotated[tuple[Annotated[Text, AfterValidator(_is_name)], ...], AfterValidator(_each_once)]
_ConditionText = Annotated[
    Text,
    BeforeValidator(_condition_text, json_schema_input_type=str | bool | float),
    Field(max_length=1000),
]
Where = dict[LabelName, _ConditionText]
