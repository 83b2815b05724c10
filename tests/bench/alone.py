"""Runs one bench from its own command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from tests.bench.tables import Table, text
from tests.hosts.network import why_no_hosts


def alone(about: str | None, tables: Callable[[int], Sequence[Table]], *, rounds: int) -> None:
    """Measure so many rounds, or as many as the command line says, and print the tables."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"how often each way takes its turn (default {rounds})"
    )
    chosen = parser.parse_args().rounds
    if reason := why_no_hosts():
        sys.exit(f"bench: {reason}")
    for table in tables(chosen):
        print(text(table), end="\n\n")
