"""Trains on scikit-learn's digits in the way of TensorFlow 1: PS_HOSTS, WORKER_HOSTS, JOB_NAME and TASK_INDEX.

The parameter server serves for ever; the workers train without waiting for each other and end at a common step.
"""

from __future__ import annotations

import os
import time

import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits

LAST_STEP = 400
BATCH = 64
LEARNING_RATE = 0.3


def main() -> None:
    tf.disable_v2_behavior()
    role, index = os.environ["JOB_NAME"], int(os.environ["TASK_INDEX"])
    hosts = {"ps": os.environ["PS_HOSTS"].split(","), "worker": os.environ["WORKER_HOSTS"].split(",")}
    cluster = tf.train.ClusterSpec(hosts)
    # With the filter a worker neither waits for the other workers nor fails because one has ended.
    filters = ["/job:ps", f"/job:worker/task:{index}"] if role == "worker" else []
    config = tf.ConfigProto(device_filters=filters)
    server = tf.train.Server(cluster, job_name=role, task_index=index, config=config)
    if role == "ps":
        server.join()
    else:
        work(cluster, server, config, index)


def work(cluster: tf.train.ClusterSpec, server: tf.train.Server, config: tf.ConfigProto, index: int) -> None:
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = (x[order] / 16).astype("float32"), y[order]
    test = slice(0, len(y) // 5)
    device = tf.train.replica_device_setter(cluster=cluster, worker_device=f"/job:worker/task:{index}")
    with tf.device(device):
        images = tf.placeholder(tf.float32, [None, 64])
        labels = tf.placeholder(tf.int64, [None])
        hidden = tf.nn.relu(dense("hidden", images, 64))
        scores = dense("scores", hidden, 10)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores))
        step = tf.train.get_or_create_global_step()
        optimize = tf.train.GradientDescentOptimizer(LEARNING_RATE).minimize(loss, global_step=step)
        accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(scores, 1), labels), tf.float32))

    if index > 0:
        wait_for_variables(server, config)
    draw = np.random.default_rng(index)
    mine = done = 0
    session = tf.train.MonitoredTrainingSession(server.target, is_chief=index == 0, config=config)
    with session:
        while done < LAST_STEP:
            rows = draw.integers(test.stop, len(y), BATCH)
            _, done = session.run([optimize, step], {images: x[rows], labels: y[rows]})
            mine += 1
        print(f"worker {index} ran {mine} of {done} steps", flush=True)
        if index == 0:
            print(
                f"test accuracy {session.run(accuracy, {images: x[test], labels: y[test]}):.4f}", flush=True
            )


def dense(name: str, inputs: tf.Tensor, units: int) -> tf.Tensor:
    with tf.variable_scope(name):
        start = tf.truncated_normal_initializer(stddev=0.2, seed=0)
        weights = tf.get_variable("weights", [inputs.shape[1], units], initializer=start)
        return inputs @ weights + tf.get_variable("bias", [units], initializer=tf.zeros_initializer())


def wait_for_variables(server: tf.train.Server, config: tf.ConfigProto) -> None:
    """Returns when worker 0 has given them values; MonitoredTrainingSession would look only every 30 s."""
    missing = tf.report_uninitialized_variables()
    with tf.Session(server.target, config=config) as session:
        while session.run(missing).size:
            time.sleep(0.1)


if __name__ == "__main__":
    main()
