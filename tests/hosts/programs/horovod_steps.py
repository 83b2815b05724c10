"""Five steps of Horovod's DistributedOptimizer on a small float64 model; each rank writes what it has learnt.

Every step's 24 examples are the same for any number of ranks, which share them evenly: the weights must not depend on
the number. ``--alone FILE`` trains on whole batches in one process, without Horovod.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 5
BATCH = 24


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--alone"]:
        save(Path(sys.argv[2]), {"weights": train(0, 1)})
        return
    import horovod.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    total = hvd.allreduce(torch.tensor(rank + 1.0), op=hvd.Sum).item()
    print(f"rank {rank} of {size}: sum {total:g}", flush=True)
    document = {
        "rank": rank,
        "size": size,
        "sum": total,
        "index": int(os.environ["INDEX"]),
        "mpi": hvd.mpi_enabled(),
        "env": dict(os.environ),
        "weights": train(rank, size),
    }
    save(Path(os.environ["RAYCONTROL_OUTPUT_DIR"]) / f"rank-{rank}.json", document)
    hvd.shutdown()


def train(rank: int, size: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    inputs = torch.randn(STEPS, BATCH, 8, dtype=torch.float64)
    targets = torch.randn(STEPS, BATCH, 3, dtype=torch.float64)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if size > 1:
        import horovod.torch as hvd

        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    share = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[share]), y[share]).backward()
        optimizer.step()
    weights: list[float] = torch.cat(
        [parameter.detach().flatten() for parameter in model.parameters()]
    ).tolist()
    return weights


def save(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document))


if __name__ == "__main__":
    main()
