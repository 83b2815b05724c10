"""The rules of ``.gitignore``, applied to one path at a time (https://git-scm.com/docs/gitignore).

A walk asks for each entry it meets and does not go into folders that are ignored, as git does; so a pattern is only
ever compared with the entry itself. Paths are bytes, as they are to git and to the file system.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

CLASSES = {
    b"alnum": rb"0-9A-Za-z",
    b"alpha": rb"A-Za-z",
    b"blank": rb" \t",
    b"cntrl": rb"\x00-\x1f\x7f",
    b"digit": rb"0-9",
    b"graph": rb"\x21-\x7e",
    b"lower": rb"a-z",
    b"print": rb"\x20-\x7e",
    b"punct": rb"!-/:-@\[-`{-~",
    b"space": rb"\s",
    b"upper": rb"A-Z",
    b"xdigit": rb"0-9A-Fa-f",
}


@dataclass(frozen=True)
class Pattern:
    """One line. ``anchored``: compared with the path below the rules' folder, else with the last name alone."""

    matches: re.Pattern[bytes]
    ignore: bool
    folders_only: bool
    anchored: bool


@dataclass(frozen=True)
class Rules:
    """The rules of one folder: ``base`` is its path with a slash at the end; of its patterns the last match wins."""

    base: bytes
    patterns: tuple[Pattern, ...]

    def verdict(self, path: bytes, is_folder: bool) -> bool | None:
        """True: ignored; False: taken in again by a ``!`` line; None: no line speaks of it."""
        below = path[len(self.base) :]
        name = path.rpartition(b"/")[2]
        for pattern in reversed(self.patterns):
            if pattern.folders_only and not is_folder:
                continue
            if pattern.matches.fullmatch(below if pattern.anchored else name):
                return pattern.ignore
        return None


def is_ignored(path: bytes, is_folder: bool, rules: Sequence[Rules]) -> bool:
    """Judge ``path`` by the rules of the folders above it, outermost first; the innermost that speaks decides."""
    for folder_rules in reversed(rules):
        verdict = folder_rules.verdict(path, is_folder)
        if verdict is not None:
            return verdict
    return False


def parse(text: bytes, base: bytes) -> Rules:
    """Read the lines of a ``.gitignore`` in the folder ``base``."""
    lines = text.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    patterns = (parse_line(line.removesuffix(b"\r")) for line in lines)
    return Rules(base.rstrip(b"/") + b"/", tuple(pattern for pattern in patterns if pattern is not None))


def parse_line(line: bytes) -> Pattern | None:
    line = without_trailing_spaces(line)
    if not line or line.startswith(b"#"):
        return None
    ignore = not line.startswith(b"!")
    glob = line if ignore else line[1:]
    folders_only = glob.endswith(b"/")
    glob = glob.removesuffix(b"/")
    anchored = b"/" in glob
    expression = translate(glob.removeprefix(b"/"), anchored)
    if expression is None or not glob:
        return None
    return Pattern(re.compile(expression, re.DOTALL), ignore, folders_only, anchored)


def without_trailing_spaces(line: bytes) -> bytes:
    """Spaces at the end do not count, unless a backslash keeps one."""
    stripped = line.rstrip(b" ")
    backslashes = len(stripped) - len(stripped.rstrip(b"\\"))
    kept = b" " if backslashes % 2 and len(stripped) < len(line) else b""
    return stripped + kept


def translate(glob: bytes, anchored: bool) -> bytes | None:
    """A regular expression for ``glob``; ``None`` when it can match nothing (an open bracket, a lone backslash)."""
    expression = b""
    at = 0
    while at < len(glob):
        if anchored and (deep := DEEP.match(glob, at)) and (at == 0 or glob[at - 1 : at] == b"/"):
            expression += rb".+" if deep.end() == len(glob) and not deep[0].endswith(b"/") else rb"(?:.+/)?"
            at = deep.end()
        elif stars := STARS.match(glob, at):
            expression, at = expression + rb"[^/]*", stars.end()
        elif glob[at : at + 1] == b"?":
            expression, at = expression + rb"[^/]", at + 1
        elif glob[at : at + 1] == b"[":
            bracket = BRACKET.match(glob, at)
            if bracket is None:
                return None
            expression, at = expression + translate_bracket(bracket), bracket.end()
        elif glob[at : at + 1] == b"\\":
            if at + 1 == len(glob):
                return None
            expression, at = expression + re.escape(glob[at + 1 : at + 2]), at + 2
        else:
            expression, at = expression + re.escape(glob[at : at + 1]), at + 1
    return expression


DEEP = re.compile(rb"\*\*(?:/(?:\*\*/)*|\Z)")
STARS = re.compile(rb"\*+")
BRACKET = re.compile(rb"\[([!^]?)((?:\]|)(?:\[:[a-z]+:\]|\\.|[^\]\\])*)\]", re.DOTALL)
MEMBER = re.compile(rb"\[:([a-z]+):\]|(\\.|[^\\])-(\\.|[^\\\]])|(\\.|[^\\])", re.DOTALL)


def translate_bracket(bracket: re.Match[bytes]) -> bytes:
    members = b""
    for member in MEMBER.finditer(bracket[2]):
        name, first, last, single = member.groups()
        if name is not None:
            members += CLASSES.get(name, b"")
        elif single is not None:
            members += re.escape(single[-1:])
        elif first[-1:] <= last[-1:]:
            members += re.escape(first[-1:]) + b"-" + re.escape(last[-1:])
    # A bracket never matches a slash; one without members matches nothing.
    if bracket[1]:
        return rb"[^/" + members + b"]"
    return rb"(?!/)[" + members + b"]" if members else rb"(?!)"
