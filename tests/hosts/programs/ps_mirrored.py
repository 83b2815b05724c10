"""Trains on scikit-learn's digits with MultiWorkerMirroredStrategy: workers only, found through TF_CONFIG.

All workers take each step together: every one has the same variables, and gradients are summed in a ring over gRPC.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

STEPS = 200
BATCH = 64  # images per step, over all workers
LEARNING_RATE = 0.5


def main() -> None:
    ring = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
    index, workers = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = (x[order] / 16).astype("float32"), y[order]
    test, train = slice(0, len(y) // 5), slice(len(y) // 5, None)

    shape = [64, 64, 10]
    with strategy.scope():
        tf.random.set_seed(0)
        weights = [tf.Variable(tf.random.normal(pair, stddev=0.2)) for pair in pairwise(shape)]
        biases = [tf.Variable(tf.zeros([units])) for units in shape[1:]]

    def scores(images: tf.Tensor) -> tf.Tensor:
        hidden = tf.nn.relu(images @ weights[0] + biases[0])
        return hidden @ weights[1] + biases[1]

    def share(context: tf.distribute.InputContext) -> tf.data.Dataset:
        """Every n-th image of the training set is this worker's."""
        data = tf.data.Dataset.from_tensor_slices((x[train], y[train]))
        data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.shuffle(len(y), seed=0).repeat().batch(BATCH // workers)

    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores(images))
            loss = tf.reduce_mean(losses) / workers
        variables = weights + biases
        gradients = tf.distribute.get_replica_context().all_reduce("sum", tape.gradient(loss, variables))
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(LEARNING_RATE * gradient)
        return loss

    @tf.function
    def train_step(iterator: tf.distribute.DistributedIterator) -> tf.Tensor:
        return strategy.reduce("sum", strategy.run(step, args=next(iterator)), axis=None)

    print(f"worker {index} of {workers}", flush=True)
    iterator = iter(strategy.distribute_datasets_from_function(share))
    for _ in range(STEPS):
        loss = train_step(iterator)
    print(f"worker {index} ends with loss {loss:.4f}", flush=True)
    if index == 0:
        right = tf.argmax(scores(x[test]), axis=1) == y[test]
        print(f"test accuracy {tf.reduce_mean(tf.cast(right, tf.float32)):.4f}", flush=True)


if __name__ == "__main__":
    main()
