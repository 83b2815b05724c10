"""Small helpers that every test may use."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout_s: float = 10, what: str = "the condition") -> T:
    """Return the first true value of ``condition``; fail, naming ``what``, when there is none in ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:g} s (last value {value!r})")
        time.sleep(0.02)
