"""Waits until a Ray cluster lists a living node of each rank: ``python raynodes.py ADDRESS RANKS LIMIT_S``.

A program of its own, run with the job's environment (Ray finds the token by it) by the Python that the start command
finds, because the job's Ray need not be the one that raycontrol itself runs on. A node shows its rank by its resource
``Rank:k``. Exit 0 when all have joined; else 1, with ``missing 1 3`` as the last line.
"""

from __future__ import annotations

import sys
import time
from typing import Any

POLL_S = 0.05
ANSWER_S = 5.0
ALIVE = 0
"""``GcsNodeInfo.ALIVE`` of Ray's protocol (gcs.proto)."""


def main(address: str, ranks: int, limit_s: float) -> int:
    deadline = time.monotonic() + limit_s
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # half a second of CPU

    client: Any = None
    missing = set(range(ranks))
    trouble = ""
    while True:
        try:
            client = client or GcsClient(address=address)
            missing = set(range(ranks)) - joined(client.get_all_node_info(timeout=ANSWER_S).values())
        except Exception as error:  # Ray has many kinds, and the head may not be up yet
            trouble = f"{type(error).__name__}: {error}".splitlines()[0]
        if not missing:
            return 0
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    if len(missing) == ranks and trouble:
        print(trouble)
    else:
        print("missing", *sorted(missing))
    return 1


def joined(nodes: Any) -> set[int]:
    """Return the ranks of living nodes."""
    return {
        int(name.removeprefix("Rank:"))
        for node in nodes
        if node.state == ALIVE
        for name in node.resources_total
        if name.startswith("Rank:")
    }


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules are not meant: `queue`, …
    sys.exit(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
