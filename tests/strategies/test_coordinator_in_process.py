# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's way to try parameter servers: servers in the program's own process, and a `ClusterCoordinator`."""

from __future__ import annotations

import pathlib

import programs
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

CLUSTER = """
import socket

def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]

jobs = {job: [f"localhost:{free_port()}" for _ in range(count)] for job, count in (("worker", 2), ("ps", 2))}
spec = tf.train.ClusterSpec(jobs)
threads = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4)
servers = [
    tf.distribute.Server(spec, job_name=job, task_index=index, config=threads, protocol="grpc")
    for job, addresses in jobs.items()
    for index in range(len(addresses))
]
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc", task_type=TASK_TYPE)
strategy = tfdist.ParameterServerStrategy(
    resolver,
    variable_partitioner=tf.distribute.experimental.partitioners.MinSizePartitioner(min_shard_bytes=64, max_shards=2),
)
"""

LOOP = """
with strategy.scope():
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    optimizer, error = keras.optimizers.RMSprop(0.01), keras.metrics.MeanSquaredError()

@tf.function
def step(iterator):
    def on_replica(x, y):
        with tf.GradientTape() as tape:
            predicted = made(x, training=True)
            loss = tf.nn.compute_average_loss(tf.reduce_sum((predicted - y) ** 2, axis=1))
        gradients = tape.gradient(loss, made.trainable_variables)
        optimizer.apply_gradients(zip(gradients, made.trainable_variables))
        error.update_state(y, predicted)
        return loss
    x, y = next(iterator)
    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(on_replica, args=(x, y)), axis=None)

def dataset_fn(context):
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(64).repeat().batch(16)

@tf.function
def per_worker_dataset_fn():
    return strategy.distribute_datasets_from_function(dataset_fn)

coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
iterator = iter(coordinator.create_per_worker_dataset(per_worker_dataset_fn))
errors = []
for _ in range(3):
    error.reset_state()
    for _ in range(20):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    errors.append(float(error.result()))
assert errors[-1] < errors[0], errors
assert np.isfinite(coordinator.schedule(step, args=(iterator,)).fetch())
assert int(optimizer.iterations) == 61
try:
    distributed = strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2))
    iter(coordinator.create_per_worker_dataset(distributed))
except TypeError as refused:
    assert "the data set itself" in str(refused)
else:
    raise AssertionError
history = model(strategy).fit(X, Y, epochs=2, verbose=0).history["loss"]
assert history[1] < history[0], history
print("trained")
"""


@pytest.mark.parametrize("task_type", ["", "chief"])
def test_a_cluster_in_the_programs_process_trains(tmp_path: pathlib.Path, task_type: str) -> None:
    # Only one of them in full: what the resolver says matters when the strategy is built.
    script = CLUSTER.replace("TASK_TYPE", repr(task_type)) + (LOOP if not task_type else "print('trained')")
    with programs.running(script, tmp_path) as program:
        assert program.wait(150) == 0, program.output
        assert "trained" in program.output
