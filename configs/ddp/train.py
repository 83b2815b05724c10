"""Trains a classifier of handwritten digits (scikit-learn's bundled 1,797 images) with DistributedDataParallel.

It runs under torchrun, under torch.distributed.launch, or as one plain process per node: all it needs are RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, over all processes")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--checkpoint", type=Path, help="saved there after each epoch; training goes on from it"
    )
    parser.add_argument("--local-rank", "--local_rank", type=int, help="given by torch.distributed.launch")
    return parser.parse_args()


def load_data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Four fifths to train on, one fifth to test with; every process makes the same split."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train_epoch(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> float:
    """One pass over this process's share; returns the mean loss over all processes."""
    model.train()
    total = torch.zeros(2)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item() * len(labels), len(labels)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Go on from what rank 0 has saved, if it has; return how many epochs were done."""
    found: list[dict | None] = [None]
    if dist.get_rank() == 0 and path.exists():
        found[0] = torch.load(path, weights_only=True)
    dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        return 0
    model.load_state_dict(found[0]["model"])
    optimizer.load_state_dict(found[0]["optimizer"])
    return found[0]["epoch"]


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Put a new checkpoint in place of the old one: whoever stops us meanwhile leaves one of the two whole."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    model.eval()
    images, labels = data.tensors
    return (model(images).argmax(dim=1) == labels).float().mean().item()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_data, test_data = load_data(args.seed)
    sampler = DistributedSampler(train_data, seed=args.seed)
    loader = DataLoader(train_data, batch_size=max(1, args.batch_size // world_size), sampler=sampler)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    if rank == 0:
        print(f"training on {len(train_data)} images with {world_size} processes", flush=True)

    done = resume(args.checkpoint, model.module, optimizer) if args.checkpoint else 0
    if rank == 0 and done:
        print(f"going on after epoch {done}", flush=True)
    for epoch in range(done + 1, args.epochs + 1):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer)
        if rank == 0:
            print(f"epoch {epoch}/{args.epochs}  loss {loss:.4f}", flush=True)
            if args.checkpoint:
                save(args.checkpoint, model.module, optimizer, epoch)

    if rank == 0:
        print(f"test accuracy {accuracy(model.module, test_data):.3f}", flush=True)
        output = Path(os.environ.get("RAYCONTROL_OUTPUT_DIR", ".")) / "model.pt"
        torch.save(model.module.state_dict(), output)
        print(f"saved {output.name} to the outputs of the job", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
