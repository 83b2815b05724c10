"""Says which process of how many this is, and how many of the lines under --data-dir are its share. Any mode starts it."""

import argparse
import json
import os
from pathlib import Path


def place() -> tuple[int, int]:
    """The number of this process and how many there are, by the variables of whoever started it."""
    if "TF_CONFIG" in os.environ:
        config = json.loads(os.environ["TF_CONFIG"])
        workers = [*config["cluster"].get("chief", []), *config["cluster"].get("worker", [])]
        return config["task"]["index"], len(workers)
    names = (("HOROVOD_RANK", "HOROVOD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
    for rank, size in (*names, ("PMI_RANK", "PMI_SIZE"), ("RANK", "WORLD_SIZE")):
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


parser = argparse.ArgumentParser()
parser.add_argument("--data-dir", type=Path, required=True)
data_dir = parser.parse_args().data_dir
rank, size = place()
lines = [line for path in sorted(data_dir.glob("*.csv")) for line in path.read_text().splitlines()]
print(
    f"process {rank} of {size} in {Path.cwd()}: {len(lines[rank::size])} of {len(lines)} samples", flush=True
)
