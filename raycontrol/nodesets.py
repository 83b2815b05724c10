"""Many names as one text, as people who administer clusters write them: ``node[1-14]``, ``gpu[01-03,07]``. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def folded(names: Iterable[str]) -> str:
    """Return the names in their order by number; those that differ in their last number only are one."""
    alike: dict[tuple[str, str, int | None], list[int]] = {}
    for name in dict.fromkeys(names):
        stem, number, tail = _split(name)
        padded = len(number) if number.startswith("0") and number != "0" else 0
        alike.setdefault((stem, tail, padded if number else None), []).append(int(number or 0))
    texts = [_together(stem, tail, width, sorted(numbers)) for (stem, tail, width), numbers in alike.items()]
    return ",".join(sorted(texts))


def in_order(names: Iterable[str]) -> list[str]:
    """Return the names as a person would put them: node2 before node10."""
    return sorted(
        names,
        key=lambda name: [
            (not part.isdigit(), int(part) if part.isdigit() else 0, part)
            for part in re.split(r"(\d+)", name)
        ],
    )


def _split(name: str) -> tuple[str, str, str]:
    """Return what is before the last number of a name, that number, and what is behind."""
    match = re.fullmatch(r"(.*?)([0-9]+)([^0-9]*)", name, re.DOTALL)
    return (match[1], match[2], match[3]) if match else (name, "", "")


def _together(stem: str, tail: str, width: int | None, numbers: Sequence[int]) -> str:
    """``width`` is that of padded numbers, 0 of others; None: the name has no number."""
    if width is None:
        return stem
    spans = ",".join(_span(first, last, width) for first, last in _runs(numbers))
    return f"{stem}{spans}{tail}" if len(numbers) == 1 else f"{stem}[{spans}]{tail}"


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _span(first: int, last: int, width: int) -> str:
    return f"{first:0{width}}" if first == last else f"{first:0{width}}-{last:0{width}}"
