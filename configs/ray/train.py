"""Trains a classifier of handwritten digits (scikit-learn's bundled 1,797 images) with one Ray actor on every node.

Each actor has a share of the images and computes gradients on it; this program, the driver, averages them. ``ray.init()``
without arguments finds the job's own Ray cluster.
"""

from __future__ import annotations

import numpy as np
import ray
from sklearn.datasets import load_digits

STEPS = 300
LEARNING_RATE = 1.0


def load_data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Four fifths to train on, one fifth to test with, each as images (with a column of ones) and labels."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = np.hstack([images[order] / 16, np.ones((len(labels), 1))])
    labels = labels[order]
    share = len(labels) // 5
    return (images[share:], labels[share:]), (images[:share], labels[:share])


def probabilities(images: np.ndarray, weights: np.ndarray) -> np.ndarray:
    scores = np.exp(images @ weights)
    return scores / scores.sum(axis=1, keepdims=True)


@ray.remote
class Trainer:
    """Holds a share of the images."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images = images
        self.wanted = np.eye(10)[labels]
        print(f"training on {len(labels)} images")

    def gradient(self, weights: np.ndarray) -> np.ndarray:
        error = probabilities(self.images, weights) - self.wanted
        return self.images.T @ error / len(error)


def main() -> None:
    ray.init()
    ranks = sorted(name for name in ray.cluster_resources() if name.startswith("Rank:"))
    (images, labels), (test_images, test_labels) = load_data()
    trainers = [
        # The node of instance k has the resource `Rank:k`; a little of it is enough to be placed there.
        Trainer.options(resources={rank: 0.001}).remote(
            images[share :: len(ranks)], labels[share :: len(ranks)]
        )
        for share, rank in enumerate(ranks)
    ]
    weights = np.zeros((images.shape[1], 10))
    for step in range(1, STEPS + 1):
        gradients = ray.get([trainer.gradient.remote(weights) for trainer in trainers])
        weights -= LEARNING_RATE * np.mean(gradients, axis=0)
        if step % 100 == 0:
            right = probabilities(test_images, weights).argmax(axis=1) == test_labels
            print(f"step {step}/{STEPS}  test accuracy {right.mean():.4f}", flush=True)


if __name__ == "__main__":
    main()
