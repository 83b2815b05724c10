"""Trains a linear classifier of handwritten digits (scikit-learn's bundled 1,797 images) with mpi4py.

Each rank has its share of the images; the gradient is the mean over all ranks, so that all have the same weights.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from mpi4py import MPI
from sklearn.datasets import load_digits

EPOCHS = 200
LEARNING_RATE = 0.5


def main() -> None:
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = digits.data[order] / 16, digits.target[order]
    test, train = slice(0, len(labels) // 5), slice(len(labels) // 5, None)
    x, y = images[train][rank::size], np.eye(10)[labels[train][rank::size]]
    if rank == 0:
        print(f"training on {len(labels[train])} images with {size} ranks", flush=True)

    weights = np.zeros((x.shape[1] + 1, 10))
    for epoch in range(1, EPOCHS + 1):
        scores = x @ weights[1:] + weights[0]
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        error = (chances - y) / len(y)
        gradient = np.vstack([error.sum(axis=0), x.T @ error])
        total = np.empty_like(gradient)
        world.Allreduce(gradient, total)
        weights -= LEARNING_RATE * total / size
        if rank == 0 and epoch % 50 == 0:
            loss = -np.log(chances[y == 1]).mean()
            print(f"epoch {epoch}/{EPOCHS}  loss {loss:.4f}", flush=True)

    if rank == 0:
        right = (images[test] @ weights[1:] + weights[0]).argmax(axis=1) == labels[test]
        print(f"test accuracy {right.mean():.3f}", flush=True)
        np.save(Path(os.environ.get("RAYCONTROL_OUTPUT_DIR", ".")) / "weights.npy", weights)


if __name__ == "__main__":
    main()
