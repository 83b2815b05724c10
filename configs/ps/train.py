"""Trains a classifier of handwritten digits (scikit-learn's bundled 1,797 images) with parameter servers.

Every instance runs this program. Parameter servers hold the weights and workers compute; both only wait for orders. The
chief gives them: it hands steps to whichever worker is free, so that a slow worker does not hold up the others, and ends
the job by ending. All that TensorFlow needs to know about the cluster is in TF_CONFIG.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

EPOCHS = 6
STEPS_PER_EPOCH = 40
BATCH = 64
LEARNING_RATE = 0.5


class Classifier(tf.Module):
    """Two dense layers. Its variables are spread over the parameter servers when it is made in a strategy's scope."""

    def __init__(self) -> None:
        super().__init__()
        random = tf.random.Generator.from_seed(0)
        self.w1 = tf.Variable(random.normal([64, 64], stddev=0.2))
        self.b1 = tf.Variable(tf.zeros([64]))
        self.w2 = tf.Variable(random.normal([64, 10], stddev=0.2))
        self.b2 = tf.Variable(tf.zeros([10]))

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(images @ self.w1 + self.b1) @ self.w2 + self.b2


def load_data() -> tuple[tuple, tuple]:
    """Four fifths to train on, one fifth to test with, each as images and labels."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (images[order] / 16).astype("float32"), labels[order]
    share = len(labels) // 5
    return (images[share:], labels[share:]), (images[:share], labels[:share])


def serve(cluster: tf.distribute.cluster_resolver.ClusterResolver) -> None:
    """Waits for the chief's orders. It never returns: raycontrol ends it when the chief has ended."""
    server = tf.distribute.Server(
        cluster.cluster_spec(),
        job_name=cluster.task_type,
        task_index=cluster.task_id,
        protocol="grpc",
    )
    server.join()


def coordinate(cluster: tf.distribute.cluster_resolver.ClusterResolver) -> None:
    strategy = tf.distribute.ParameterServerStrategy(cluster)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    train, test = load_data()
    with strategy.scope():
        model = Classifier()

    def batches() -> tf.data.Dataset:
        """Runs once for each worker, which thus shuffles for itself."""
        return tf.data.Dataset.from_tensor_slices(train).shuffle(len(train[1])).batch(BATCH).repeat()

    @tf.function
    def step(iterator: tf.data.Iterator) -> tf.Tensor:
        """One step of gradient descent, run by a worker."""
        images, labels = next(iterator)
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images))
            loss = tf.reduce_mean(losses)
        variables = model.trainable_variables
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(LEARNING_RATE * gradient)
        return loss

    workers = cluster.cluster_spec().num_tasks("worker")
    print(f"training on {len(train[1])} images with {workers} workers", flush=True)
    iterator = iter(coordinator.create_per_worker_dataset(batches))
    for epoch in range(1, EPOCHS + 1):
        losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(STEPS_PER_EPOCH)]
        coordinator.join()
        loss = sum(coordinator.fetch(losses)) / STEPS_PER_EPOCH
        print(f"epoch {epoch}/{EPOCHS}  loss {loss:.4f}", flush=True)

    images, labels = test
    right = tf.argmax(model(images), axis=1) == labels
    print(f"test accuracy {tf.reduce_mean(tf.cast(right, tf.float32)):.4f}", flush=True)
    save(model)


def save(model: Classifier) -> None:
    """Writes a checkpoint on this machine; without the option each parameter server would write a part on its own."""
    folder = Path(os.environ.get("RAYCONTROL_OUTPUT_DIR", "outputs"))
    here = tf.train.CheckpointOptions(experimental_io_device="/job:chief")
    path = tf.train.Checkpoint(model=model).write(str(folder / "model"), here)
    print(f"saved {Path(path).name} to the outputs of the job", flush=True)


def main() -> None:
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if cluster.task_type == "chief":
        coordinate(cluster)
    else:
        serve(cluster)


if __name__ == "__main__":
    main()
