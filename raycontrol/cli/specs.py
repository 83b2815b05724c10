"""From the words of a command line to a JobSpec."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycontrol.errors import UsageError

if TYPE_CHECKING:
    from raycontrol.spec import JobSpec

_RESOURCES = frozenset({"cpu", "gpu", "memory"})


@dataclass(frozen=True)
class Fields:
    """The fields of a spec that have options of their own; None where the option was not given."""

    name: str | None = None
    mode: str | None = None
    nodes: str | None = None
    cpu: float | None = None
    gpu: float | None = None
    memory: str | None = None
    slots: int | None = None
    working_dir: str | None = None
    placement: str | None = None
    priority: int | None = None
    after: list[str] | None = None
    array: str | None = None

    def given(self) -> dict[str, Any]:
        """Return what was given by its place in a spec: ``{"resources.gpu": 1}``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["after"] = _after(self.after or [])
        values["nodes"] = _count(self.nodes)
        values["array"] = _array(self.array)
        return {
            f"resources.{name}" if name in _RESOURCES else name: value
            for name, value in values.items()
            if value is not None
        }


def _array(text: str | None) -> dict[str, Any] | str | None:
    """Return ``--array 0-99%8`` as the mapping that it is short for, so that ``--set array.fail_fast=true`` goes with it."""
    if text is None:
        return None
    indices, percent, parallel = text.partition("%")
    if not percent:
        return {"indices": indices}
    return {"indices": indices, "parallel": int(parallel)} if parallel.isdecimal() else text


AFTER_KINDS = ("ok", "any", "failed")


def _after(words: Sequence[str]) -> dict[str, list[str]] | None:
    """Return ``after`` as a spec has it; None where no option was given."""
    found: dict[str, list[str]] = {}
    for word in words:
        kind, colon, job_id = word.rpartition(":")
        if colon and kind not in AFTER_KINDS:
            raise UsageError(f"--after: must be ok:ID, any:ID, failed:ID or ID alone, got {word}")
        found.setdefault(kind or "ok", []).append(job_id)
    return found or None


def read_spec(
    path: str | None,
    words: Sequence[str],
    given: Fields,
    overrides: Sequence[str],
    env: Sequence[str],
    secret_env: Sequence[str] = (),
) -> JobSpec:
    """Return the spec of a file, of a command after ``--``, or of both: then the command replaces the file's.

    Options win over the file, ``--set`` over options. ``secret_env`` are names whose values are taken from the environment
    when the job is submitted (``JobSpec.with_secrets``). Raises SpecError with every fault, UsageError without a job.
    """
    from raycontrol import spec

    command = _command(words)
    values = given.given()
    if "working_dir" in values:
        values["working_dir"] = str(Path(values["working_dir"]).expanduser().absolute())
    if path is not None:
        if command is not None:
            values["command"] = command
        return spec.load(path, [*(_override(*item) for item in values.items()), *overrides], env, secret_env)
    if command is None:
        raise UsageError("no job: give a spec (`run job.yaml`) or a command (`run -- python train.py`)")
    if "working_dir" not in values and names_a_file_here(words):
        values["working_dir"] = str(Path.cwd())
    return spec.build({"command": command, **_nested(values)}, overrides, env, secret_env)


def names_a_file_here(words: Sequence[str]) -> bool:
    """Whether a word of the command is a file below the current folder, as ``train.py`` in ``torchrun train.py``."""
    here = Path.cwd()
    return any(_is_file_below(here, word) for word in _split(words))


def _is_file_below(here: Path, word: str) -> bool:
    if Path(word).is_absolute() or ".." in Path(word).parts:
        return False
    try:
        return (here / word).is_file()
    except (OSError, ValueError):  # too long for a file name, or with a NUL
        return False


def _split(words: Sequence[str]) -> Sequence[str]:
    if len(words) != 1:
        return words
    try:
        return shlex.split(words[0])
    except ValueError:  # an open quote: bash will say so
        return words[0].split()


def _count(nodes: str | None) -> int | str | None:
    """Return a count as a number, for the check to judge; what is none as it stands."""
    try:
        return None if nodes is None else int(nodes)
    except ValueError:
        return nodes


def _command(words: Sequence[str]) -> str | list[str] | None:
    if not words:
        return None
    return words[0] if len(words) == 1 else list(words)


def _override(field: str, value: Any) -> str:
    """Return ``field=value`` as ``--set`` takes it; JSON is YAML, and quotes keep text text."""
    return f"{field}={json.dumps(_number(value), ensure_ascii=False)}"


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for field, value in values.items():
        first, _, rest = field.partition(".")
        if rest:
            document.setdefault(first, {})[rest] = _number(value)
        else:
            document[first] = _number(value)
    return document


def _number(value: Any) -> Any:
    """Write 2 for 2.0, as a person would: errors show the value."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
