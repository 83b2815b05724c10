"""A chief that trains with parameter servers and an evaluator that follows it: ``ps_evaluated.py FOLDER``.

The chief writes checkpoints to FOLDER, which all hosts share, and as its last act the file ``done``. The evaluator
evaluates every checkpoint, and the last one once more when the chief has ended for good.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

CHECKPOINTS = 3
STEPS = 60  # between two checkpoints
BATCH = 64
LEARNING_RATE = 0.5
LATE_S = 3  # so long after the chief's end whoever watches it has seen it

Resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver


class Classifier(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        tf.random.set_seed(0)
        self.w1 = tf.Variable(tf.random.normal([64, 64], stddev=0.2))
        self.b1 = tf.Variable(tf.zeros([64]))
        self.w2 = tf.Variable(tf.random.normal([64, 10], stddev=0.2))
        self.b2 = tf.Variable(tf.zeros([10]))

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(images @ self.w1 + self.b1) @ self.w2 + self.b2

    def accuracy(self, images: np.ndarray, labels: np.ndarray) -> float:
        return float(np.mean(tf.argmax(self(images), axis=1).numpy() == labels))


def main() -> None:
    folder, cluster = Path(sys.argv[1]), Resolver()
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = (x[order] / 16).astype("float32"), y[order]
    train, test = (x[len(y) // 5 :], y[len(y) // 5 :]), (x[: len(y) // 5], y[: len(y) // 5])
    match cluster.task_type:
        case "chief":
            coordinate(cluster, folder, train, test)
        case "evaluator":
            evaluate(cluster, folder, test)
        case role:
            spec = cluster.cluster_spec()
            tf.distribute.Server(spec, job_name=role, task_index=cluster.task_id, protocol="grpc").join()


def coordinate(cluster: Resolver, folder: Path, train: tuple, test: tuple) -> None:
    strategy = tf.distribute.ParameterServerStrategy(cluster)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = Classifier()

    def batches() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(train).shuffle(len(train[1])).repeat().batch(BATCH)

    @tf.function
    def step(iterator: tf.data.Iterator) -> None:
        images, labels = next(iterator)
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images))
            loss = tf.reduce_mean(losses)
        variables = model.trainable_variables
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(LEARNING_RATE * gradient)

    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), folder, max_to_keep=None)
    iterator = iter(coordinator.create_per_worker_dataset(batches))
    for number in range(1, CHECKPOINTS + 1):
        for _ in range(STEPS):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()
        print(f"saved {Path(manager.save(number * STEPS)).name}", flush=True)
    print(f"test accuracy {model.accuracy(*test):.4f}", flush=True)
    (folder / "done").write_text(str(CHECKPOINTS * STEPS))


def evaluate(cluster: Resolver, folder: Path, test: tuple) -> None:
    model = Classifier()
    checkpoint = tf.train.Checkpoint(model=model)

    def accuracy_of(path: str) -> float:
        checkpoint.restore(path).expect_partial()
        return model.accuracy(*test)

    done, ended, step = folder / "done", False, 0
    while not ended:
        ended = done.exists()  # asked first, so that no checkpoint is missed
        state = tf.train.get_checkpoint_state(folder)
        for path in state.all_model_checkpoint_paths if state else []:
            if (number := int(path.rpartition("-")[2])) > step:
                step = number
                print(f"evaluated step {step}: accuracy {accuracy_of(path):.4f}", flush=True)
        time.sleep(0.1)
    wait_for_end(cluster.cluster_spec().task_address("chief", 0))
    time.sleep(LATE_S)
    last = int(done.read_text())
    print(f"last evaluation of step {last}: accuracy {accuracy_of(f'{folder}/ckpt-{last}'):.4f}", flush=True)


def wait_for_end(address: str) -> None:
    """Returns when nothing listens at ``ip:port`` any more."""
    host, _, port = address.rpartition(":")
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError:
            return
        time.sleep(0.1)


if __name__ == "__main__":
    main()
