"""Ray Train: two workers train one model on the digits and report to a shared folder: ``ray_train.py FOLDER``."""

from __future__ import annotations

import sys
import tempfile

import ray
import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from sklearn.datasets import load_digits


def train(config: dict[str, int]) -> None:
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    digits = load_digits()
    images = torch.tensor(digits.data[rank::size] / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target[rank::size])
    model = prepare_model(
        torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(config["steps"]):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Checkpoint.from_directory(folder) if rank == 0 else None
        ray.train.report({"accuracy": accuracy, "world": size}, checkpoint=checkpoint)


ray.init()
result = TorchTrainer(
    train,
    train_loop_config={"steps": 100},
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
    torch_config=TorchConfig(backend="gloo"),
    run_config=RunConfig(name="digits", storage_path=sys.argv[1]),
).fit()
print(f"world {result.metrics['world']}, test accuracy {result.metrics['accuracy']:.4f}")
