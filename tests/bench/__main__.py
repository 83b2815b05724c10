"""All figures beside their peers: ``python -m tests.bench [NAME…] [--rounds N] [--output FILE]``, as root.

Each bench has three (or four) hosts of its own, as network namespaces on this machine, and prints its tables as soon as they
are there. With ``--output`` they also go into that document, in the place of those that it has of the same benches. A bench that
fails, or whose peer is not installed, is named at the end, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import time
import traceback
from pathlib import Path

from tests.bench.tables import machine, markdown, text
from tests.hosts.network import REPOSITORY, why_no_hosts

ROUNDS = {
    "launch": 20,
    "ddp": 5,
    "many": 2,
    "gang": 2,
    "logs": 3,
    "ends": 10,
    "idle": 2,
    "package": 3,
    "exec": 20,
    "mpi": 10,
    "ray": 5,
}
"""The benches, modules of this package, and how many rounds each has by default."""
HEAD = """# Benchmarks

Written by `make bench`. Every way does the same work on the same hosts in the same run, and they take turns, round by round.
The hosts are network namespaces on one machine: ratios say more than seconds.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ROUNDS)} (default: all)")
    parser.add_argument(
        "--rounds", type=int, help="how often each way takes its turn (default: as each bench says)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="the document to be written")
    chosen = parser.parse_args()
    if unknown := sorted(set(chosen.names) - set(ROUNDS)):
        parser.error(f"unknown: {', '.join(unknown)}")
    if reason := why_no_hosts():
        sys.exit(f"bench: {reason}")
    failed = [name for name in chosen.names or ROUNDS if not run(name, chosen.rounds, chosen.output)]
    if failed:
        sys.exit(f"bench: without a figure: {', '.join(failed)}")


def run(name: str, rounds: int | None, output: Path | None) -> bool:
    """Measure, print and write down; return whether there are figures."""
    bench = importlib.import_module(f"tests.bench.{name}")
    try:
        tables = bench.tables(rounds or ROUNDS[name])
    except (Exception, SystemExit) as error:  # the others may have theirs
        print(f"bench: {name}: {error}", file=sys.stderr, flush=True)
        traceback.print_exc()
        return False
    for table in tables:
        print(text(table), end="\n\n", flush=True)
    if output is not None:
        about = " ".join(bench.__doc__.partition("\n\n")[0].split())
        where = f"{time.strftime('%Y-%m-%d')}, {commit()}, {machine()}."
        section = "\n\n".join([f"## {name}", about, *map(markdown, tables), where])
        put(output, name, section)
    return True


def put(output: Path, name: str, section: str) -> None:
    """Write a section in the place of the one of the same name; sections stand in the order of the benches."""
    old = output.read_text() if output.exists() else ""
    sections = {
        found[1]: found[0].strip() for found in re.finditer(r"^## (\w+)\n.*?(?=^## |\Z)", old, re.M | re.S)
    }
    sections[name] = section
    ordered = [sections[one] for one in ROUNDS if one in sections]
    output.write_text("\n\n".join([HEAD.strip(), *ordered]) + "\n")


def commit() -> str:
    """Return which state of the project was measured."""
    asked = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    return f"commit {found}" if found else "no commit"


if __name__ == "__main__":
    main()
