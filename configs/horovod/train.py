"""Trains a classifier of handwritten digits (scikit-learn's bundled 1,797 images) with Horovod and PyTorch."""

from __future__ import annotations

import os
from pathlib import Path

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn

EPOCHS = 30


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    share = train[rank::size]

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=2e-3), named_parameters=model.named_parameters()
    )
    if rank == 0:
        print(f"training on {len(train)} images with {size} ranks", flush=True)
    steps = len(train) // size // 32  # the same on every rank
    for epoch in range(1, EPOCHS + 1):
        shuffled = share[torch.randperm(len(share))]
        for step in range(steps):
            batch = shuffled[step * 32 : (step + 1) * 32]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss").item()
        if rank == 0 and epoch % 10 == 0:
            print(f"epoch {epoch}/{EPOCHS}  loss {mean:.4f}", flush=True)

    if rank == 0:
        right = model(images[test]).argmax(dim=1) == labels[test]
        print(f"test accuracy {right.float().mean().item():.3f}", flush=True)
        torch.save(model.state_dict(), Path(os.environ.get("RAYCONTROL_OUTPUT_DIR", ".")) / "model.pt")


if __name__ == "__main__":
    main()
