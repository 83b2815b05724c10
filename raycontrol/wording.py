"""Sizes, counts and lists in words, as every surface writes them."""

from __future__ import annotations

from collections.abc import Sequence

KIB, MIB, GIB = 2**10, 2**20, 2**30
SHOWN = 4


def size(amount_bytes: float) -> str:
    """Return a size in the largest unit that it fills: 64 KiB, 3.5 GiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if amount_bytes >= unit:
            amount = amount_bytes / unit
            return f"{amount:.1f}".removesuffix(".0") + f" {name}" if amount < 10 else f"{amount:.0f} {name}"
    return f"{amount_bytes:.0f} bytes"


def some(items: Sequence[str], shown: int = SHOWN) -> str:
    """Return the first of many items, and how many more there are: ``a, b and 7 more``."""
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return ", ".join(items[:shown]) + more


def assigned(name: str, value: str) -> str:
    """Return ``NAME=value``; a value that itself begins with ``=``, as some of NCCL's do, stands in quotes."""
    return f"{name}='{value}'" if value.startswith("=") else f"{name}={value}"


def counted(number: float, noun: str) -> str:
    """Return a number of things: ``1 node``, ``2 nodes``, ``0.5 GPUs``."""
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}s"
