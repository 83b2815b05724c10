"""A job's text: YAML (and so JSON) with the place of every value, and the overrides of the command line.

The text is read by the rules of YAML 1.2: ``on`` and ``yes`` are text, and so are ``0123``, ``1_000`` and dates. Only
``true``/``false``, ``null`` (or nothing), plain decimal, ``0x`` and ``0o`` numbers are anything else. What the text
itself gets wrong (a key given twice, a tag) is collected in :attr:`Document.faults`, so that it appears in one answer
with what the spec gets wrong.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from raycontrol.errors import Fault, SpecError

MAX_BYTES = 1 << 20
"""The largest text that is read as a spec."""
MAX_VALUES = 20_000
"""How many values a text may hold once its aliases are followed: a bound on what a few lines of anchors can cost."""
MAX_DEPTH = 50
"""How deep values may be nested; a spec needs five levels, and YAML's reader becomes slow with many."""

Keys = tuple[str | int, ...]
"""The way to a value: names of fields, positions in lists."""


class Place(NamedTuple):
    """Where a value was written: its own place and its key's, from 1, and its source text if it is a plain scalar."""

    line: int | None = None
    column: int | None = None
    key_line: int | None = None
    key_column: int | None = None
    text: str | None = None


@dataclass
class Document:
    """A spec as it was written: plain data, the place of every value, and the faults of the text itself."""

    data: Any
    source: str | None = None
    places: dict[Keys, Place] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def text_of(self, path: Keys) -> str | None:
        """The source text of a plain scalar (``1e-3``, where the data holds 0.001)."""
        place = self.places.get(path)
        return place.text if place is not None else None

    def where(self, path: Keys, at_key: bool = False) -> tuple[int | None, int | None]:
        """Line and column of ``path``, or of the nearest thing around it that has a place."""
        for length in range(len(path), -1, -1):
            place = self.places.get(path[:length])
            if place is not None:
                if at_key and place.key_line is not None:
                    return place.key_line, place.key_column
                return place.line, place.column
        return None, None


# -- reading ---------------------------------------------------------------------------------------------------------


def read_file(path: str | Path) -> str:
    """The text of a spec file, or of standard input for ``-``. Raises SpecError when it is not a text of decent size."""
    source = "<stdin>" if str(path) == "-" else str(path)
    try:
        if str(path) == "-":
            content = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(path).expanduser().open("rb") as file:
                content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _refusal("there is no such file", source) from None
    except IsADirectoryError:
        raise _refusal("this is a folder; name the file in it, such as job.yaml", source) from None
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _refusal(f"the file cannot be read: {reason}", source) from None
    if len(content) > MAX_BYTES:
        raise _refusal(f"the file is larger than {MAX_BYTES >> 20} MiB; this is not a job's spec", source)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        fault = Fault("", "the file must be UTF-8 text", f"byte 0x{content[error.start]:02x}", line, column)
        raise SpecError((fault,), source) from None


def parse(text: str, source: str | None = None) -> Document:
    """Read one YAML document. Raises SpecError when it has no structure at all; smaller faults are in the result."""
    document = Document(None, source)
    try:
        node = _compose(text, source)
        if node is not None:
            document.data = _Reader(document).value(node, (), None)
    except _TooMany:
        raise _refusal(
            f"the text holds more than {MAX_VALUES} values (aliases included)", source, 1
        ) from None
    except _TooDeep:
        raise _refusal("the text is nested too deeply", source, 1) from None
    if node is None:
        raise _refusal("there is nothing in it; a job needs at least `command: …`", source, 1)
    return document


class _TooMany(Exception):
    """More values than a spec may hold."""


class _TooDeep(Exception):
    """More levels than a spec may have."""


class _Composer(Composer):
    """Gives up as soon as there is too much: to read the rest of a large text takes half a minute."""

    _depth = 0
    _nodes = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        self._nodes += 1
        if self._nodes > 2 * MAX_VALUES:  # keys are nodes too
            raise _TooMany
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _TooDeep
        node: Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _compose(text: str, source: str | None) -> Node | None:
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _Composer
    yaml.composer.warn_double_anchors = False
    try:
        node: Node | None = yaml.compose(text)
        return node
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = (mark.line + 1, mark.column + 1) if mark is not None else (None, None)
        problem = " ".join(str(part) for part in (error.context, error.problem) if part)
        if "secret_env" in text:  # what was taken for an alias's name may be a value that begins with a *
            problem = _ALIAS.sub("alias", problem)
        raise SpecError((Fault("", f"this is not YAML: {problem}", None, *place),), source) from None
    except ReaderError as error:
        before = text[: error.position]
        place = (before.count("\n") + 1, error.position - before.rfind("\n"))
        problem = f"character U+{_code_point(error.character):04X} is not allowed in YAML"
        raise SpecError((Fault("", f"this is not YAML: {problem}", None, *place),), source) from None
    except (YAMLError, ValueError) as error:
        raise _refusal(f"this is not YAML: {error}", source, 1) from None


_ALIAS = re.compile(r"alias '.*'")


def _code_point(character: Any) -> int:
    return character if isinstance(character, int) else ord(character)


def _refusal(rule: str, source: str | None, line: int | None = None) -> SpecError:
    return SpecError((Fault("", rule, None, line, line),), source)


# -- nodes to plain data ---------------------------------------------------------------------------------------------

_CORE = "tag:yaml.org,2002:"
_IMPLICIT = {_CORE + name for name in ("str", "int", "float", "bool", "null", "timestamp", "value", "merge")}
_NULL = re.compile(r"(null|Null|NULL|~|)\Z")
_BOOL = re.compile(r"(true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
_BASED = re.compile(r"0(o[0-7]+|x[0-9a-fA-F]+)\Z")
_FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?\Z")
_SPECIAL = re.compile(r"([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z")


def resolve(text: str) -> Any:
    """What a plain (unquoted) scalar means."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    if len(text) > 400:  # a number of this length is nobody's number, and Python refuses to read it
        return text
    if _INT.match(text):
        return int(text)
    if _BASED.match(text):
        return int(text, 0)
    if _FLOAT.match(text):
        return float(text)
    if _SPECIAL.match(text):
        return float(text.replace(".", ""))
    return text


class _Reader:
    """Turns nodes into data and fills in the document's places and faults."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._open: set[int] = set()
        self._count = 0

    def value(self, node: Node, path: Keys, key: Node | None) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:
            raise _TooMany
        text = node.value if isinstance(node, ScalarNode) and node.style is None else None
        self._document.places[path] = self._place(node, key, text)
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            self._fault(path, "an alias must not contain itself", node)
            return None
        self._open.add(id(node))
        try:
            return self._mapping(node, path) if isinstance(node, MappingNode) else self._list(node, path)
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: ScalarNode, path: Keys) -> Any:
        text = _joined_surrogates(node.value)
        tag = str(node.tag)
        plain = node.style is None
        if tag not in _IMPLICIT or (not plain and tag != f"{_CORE}str"):
            shown_tag = "" if "secret_env" in path else f" (!{tag.removeprefix(_CORE).lstrip('!')})"
            self._fault(path, f"must not have a tag{shown_tag}", node)
            return text
        return resolve(text) if plain and tag != f"{_CORE}str" else text

    def _list(self, node: Node, path: Keys) -> Any:
        if not isinstance(node, SequenceNode) or str(node.tag) != f"{_CORE}seq":
            self._fault(path, "must not have a tag", node)
            return None
        return [self.value(child, (*path, position), None) for position, child in enumerate(node.value)]

    def _mapping(self, node: MappingNode, path: Keys) -> dict[str, Any]:
        if str(node.tag) != f"{_CORE}map":
            self._fault(path, "must not have a tag", node)
        data: dict[str, Any] = {}
        for key, child in node.value:
            name = self._name(key, path)
            if name is None:
                continue
            if name in data:
                taken = (*path, name)
                first = self._document.places[taken].key_line
                self._fault(taken, f"must be given once, and is already on line {first}", key)
                continue
            data[name] = self.value(child, (*path, name), key)
        return data

    def _name(self, key: Node, path: Keys) -> str | None:
        if not isinstance(key, ScalarNode):
            self._fault(path, "names must be text", key)
            return None
        text: str = key.value
        if key.style is None and str(key.tag) == f"{_CORE}merge":
            self._fault(path, "`<<` is not part of YAML 1.2; write the fields out", key)
            return None
        if key.style is None and not isinstance(resolve(text), str):
            self._fault(path, f'names must be text, write "{text}" in quotes', key, shown(None, text))
            return None
        return _joined_surrogates(text)

    @staticmethod
    def _place(node: Node, key: Node | None, text: str | None) -> Place:
        own = (node.start_mark.line + 1, node.start_mark.column + 1)
        keys = (key.start_mark.line + 1, key.start_mark.column + 1) if key is not None else own
        line, column = own if isinstance(node, ScalarNode) else keys
        return Place(line, column, keys[0], keys[1], text)

    def _fault(self, path: Keys, rule: str, node: Node, got: str | None = None) -> None:
        mark = node.start_mark
        self._document.faults.append(Fault(dotted(path), rule, got, mark.line + 1, mark.column + 1))


def _joined_surrogates(text: str) -> str:
    r"""JSON writes a character beyond U+FFFF as two ``\u`` escapes; YAML's reader leaves them apart."""
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# -- overrides -------------------------------------------------------------------------------------------------------


def override(
    document: Document,
    settings: Sequence[str] = (),
    env: Sequence[str] = (),
    secret_env: Sequence[str] = (),
) -> None:
    """Apply ``--set FIELD=VALUE`` (values by the YAML rules), ``--env NAME=VALUE`` (always text), ``--secret-env NAME``."""
    if not isinstance(document.data, dict):
        return
    for setting in settings:
        name, equals, text = setting.partition("=")
        keys = _field_keys(name.strip())
        if not equals or not all(keys):
            document.faults.append(
                Fault("--set", "must be FIELD=VALUE, such as groups.worker.count=4", shown(name))
            )
            continue
        if keys[0] == "secret_env" and text.strip():
            document.faults.append(Fault(f"--set {dotted(keys)}", _ON_COMMAND_LINE))
            continue
        value, faults = _setting_value(text)
        document.faults += [Fault(f"--set {dotted(keys)}", fault.rule) for fault in faults]
        if not faults:
            _put(document, keys, value, text.strip() if not isinstance(value, (dict, list, str)) else None)
    for assignment in env:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            document.faults.append(Fault("--env", "must be NAME=VALUE"))
            continue
        _put(document, ("env", name), text, None)
    for name in secret_env:
        if "=" in name:
            document.faults.append(Fault("--secret-env", f"must be NAME; {_ON_COMMAND_LINE}"))
            continue
        _put(document, ("secret_env", name), None, None)


_ON_COMMAND_LINE = "the value of a secret must not stand on a command line: `--secret-env NAME` takes it from the environment"


_MEANS_A_DOCUMENT = tuple(">|!&*%@`")
"""Signs with which YAML begins blocks, tags, anchors and directives: in a value such as `>= 80` they are part of the text."""


def _setting_value(text: str) -> tuple[Any, Sequence[Fault]]:
    if not text.strip():
        return None, ()
    if text.lstrip().startswith(_MEANS_A_DOCUMENT):
        return text.strip(), ()
    try:
        document = parse(text)
    except SpecError as error:
        return None, error.faults
    return document.data, document.faults


def _field_keys(name: str) -> Keys:
    """``groups.worker.count`` in its parts; what follows ``env.``, ``labels.`` or ``where.`` is one name, dots and all (``secret_env.`` too)."""
    parts = name.split(".")
    for position, part in enumerate(parts[:-1]):
        named = part in ("env", "secret_env", "labels") and position in (0, 2)
        if named or (part == "where" and position == 0):
            return (*parts[: position + 1], ".".join(parts[position + 1 :]))
    return tuple(parts)


def _put(document: Document, keys: Keys, value: Any, text: str | None) -> None:
    holder = document.data
    for position, key in enumerate(keys[:-1]):
        inner = holder.get(key)
        if inner is None:
            inner = holder[key] = {}
        if not isinstance(inner, dict):
            outer = dotted(keys[: position + 1])
            document.faults.append(
                Fault(f"--set {dotted(keys)}", f"{outer} is not a mapping, so it has no such field")
            )
            return
        holder = inner
    holder[keys[-1]] = value
    for path in [path for path in document.places if path[: len(keys)] == keys]:
        del document.places[path]
    document.places[keys] = Place(text=text)


# -- words for faults ------------------------------------------------------------------------------------------------


def dotted(path: Sequence[str | int]) -> str:
    """``groups.worker.command[2]``; characters that would upset a terminal are escaped."""
    text = ""
    for key in path:
        part = f"[{key}]" if isinstance(key, int) else _cut(printable(str(key)), 60)
        text += part if isinstance(key, int) or not text else f".{part}"
    return text


def shown(value: Any, text: str | None = None) -> str:
    """A value as its author would write it, on one line and not too long; of lists and mappings only what they are."""
    if text is not None:
        return _cut(printable(text), 80)
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return '"' + _cut(printable(value), 80) + '"'
        case int() if value.bit_length() > 1000:
            return "a number of more than 300 digits"
        case int() | float():
            return f"{value}"
        case list() | tuple():
            return f"a list of {len(value)}"
        case Mapping():
            return "a mapping"
    return f"a Python {type(value).__name__}"


def printable(text: str) -> str:
    """``text`` with control characters, line ends and broken Unicode as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}…"
