"""Writes a checkpoint into its working directory and reads it back, beside another job that does the same.

``checkpoint.py FOLDER N``: FOLDER is one that all jobs see, N the number of jobs that meet there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

CHECKPOINT = Path("checkpoint")
LIMIT_S = 120


def main() -> None:
    folder, jobs = Path(sys.argv[1]), int(sys.argv[2])
    job, index = os.environ["RAYCONTROL_JOB_ID"], os.environ["INDEX"]
    print("found", CHECKPOINT.read_text() if CHECKPOINT.exists() else "none", flush=True)
    CHECKPOINT.write_text(f"{job} {index}")
    (folder / f"{job}.{index}").touch()
    deadline = time.monotonic() + LIMIT_S
    while len(list(folder.glob(f"*.{index}"))) < jobs:
        if time.monotonic() > deadline:
            sys.exit("the other jobs did not come")
        time.sleep(0.05)
    print("read", CHECKPOINT.read_text(), flush=True)


if __name__ == "__main__":
    main()
