"""Five steps of DistributedDataParallel on a small float64 model; each rank writes what it has seen and learnt.

Every step's 24 examples are the same for any number of ranks, which share them evenly: losses and weights must not
depend on the number. ``--alone FILE`` trains on whole batches in one process, without torch.distributed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 5
BATCH = 24


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--alone"]:
        save(Path(sys.argv[2]), train(0, 1))
        return
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    print(f"rank {rank} of {size}: sum {total.item()}", flush=True)
    document = {"rank": rank, "size": size, "sum": total.item(), "index": int(os.environ["INDEX"])}
    save(Path(os.environ["RAYCONTROL_OUTPUT_DIR"]) / f"rank-{rank}.json", {**document, **train(rank, size)})
    dist.barrier()
    dist.destroy_process_group()


def train(rank: int, size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    inputs = torch.randn(STEPS, BATCH, 8, dtype=torch.float64)
    targets = torch.randn(STEPS, BATCH, 3, dtype=torch.float64)
    model = DistributedDataParallel(plain) if size > 1 else plain
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    share = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    losses = []
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[share]), y[share])
        loss.backward()
        optimizer.step()
        losses.append(mean_over_ranks(loss, size))
    weights = torch.cat([parameter.detach().flatten() for parameter in plain.parameters()])
    return {"losses": losses, "weights": weights.tolist()}


def mean_over_ranks(loss: torch.Tensor, size: int) -> float:
    total = loss.detach().clone()
    if size > 1:
        dist.all_reduce(total)
    return total.item() / size


def save(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document))


if __name__ == "__main__":
    main()
