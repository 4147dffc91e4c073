# SPDX-License-Identifier: Apache-2.0
"""Custom loops over data sets, iterators and values of replicas, as guides write them; see `guide_loops`."""

from __future__ import annotations

import guide_nets
import numpy as np
import tensorflow as tf
from guide_nets import BATCH, Net, distributed, loop

# Over a data set.


@loop
def for_outside_of_a_graph(strategy):
    net = Net(strategy)
    return net.result([float(net.run(batch)) for batch in distributed(strategy)])


@loop
def data_set_as_an_argument(strategy):
    net = Net(strategy)

    @tf.function
    def epoch(data):
        found, count = 0.0, 0
        for batch in data:
            found += net.run(batch)
            count += 1
        return found / tf.cast(count, tf.float32)

    data = distributed(strategy)
    return net.result([float(epoch(data)) for _ in range(2)])


@loop
def batches_unpacked_by_the_caller(strategy):
    net = Net(strategy)

    @tf.function
    def step(x, y):
        return net.total(strategy.run(net.unpacked, args=(x, y)))

    outside = [float(net.total(strategy.run(net.unpacked, args=(x, y)))) for x, y in distributed(strategy)]
    return net.result(outside + [float(step(x, y)) for x, y in distributed(strategy)])


@loop
def batches_given_by_name(strategy):
    net = Net(strategy)

    @tf.function
    def step(x, y):
        return net.total(strategy.run(net.unpacked, kwargs={"y": y, "x": x}))

    return net.result([float(step(x, y)) for x, y in distributed(strategy)])


# Over an iterator.


@loop
def iterator_as_an_argument(strategy):
    net = Net(strategy)

    @tf.function
    def some(iterator, steps):
        found = 0.0
        for _ in tf.range(steps):
            found += net.run(next(iterator))
        return found

    iterator = iter(distributed(strategy))
    return net.result([float(some(iterator, tf.constant(steps))) for steps in (1, 2, 1)])


@loop
def next_until_the_end(strategy):
    net, iterator, losses = Net(strategy), iter(distributed(strategy)), []
    try:
        while True:
            losses.append(float(net.run(next(iterator))))
    except (StopIteration, tf.errors.OutOfRangeError):
        return net.result(losses)


@loop
def optional_in_a_graph(strategy):
    net = Net(strategy)

    @tf.function
    def until_the_end(iterator):
        found = 0.0
        for _ in tf.range(100):
            some = iterator.get_next_as_optional()
            if not some.has_value():
                break
            found += net.run(some.get_value())
        return found

    return net.result(float(until_the_end(iter(distributed(strategy)))))


# What replicas return.


@loop
def results_of_replicas(strategy):
    net = Net(strategy)

    @tf.function
    def predict(batch):
        return strategy.run(lambda batch: net.model(batch[0]), args=(batch,))

    found = []
    for batch in distributed(strategy, 16):
        predictions = predict(batch)
        found += [
            np.sort(strategy.gather(predictions, axis=0).numpy(), 0),
            float(strategy.reduce("MEAN", predictions, axis=0)[0]),
            float(tf.reduce_sum(strategy.reduce("SUM", predictions, axis=0))),
            sum(len(each.shape) for each in strategy.experimental_local_results(predictions))
            / len(strategy.experimental_local_results(predictions)),
        ]
    return found


@loop
def reduced_within_a_replica(strategy):
    net = Net(strategy)

    def step(batch):
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", net.step(batch))

    @tf.function
    def once(batch):
        return strategy.run(step, args=(batch,))

    losses = [strategy.experimental_local_results(once(batch))[0] for batch in distributed(strategy)]
    return net.result([float(loss) for loss in losses])


@loop
def data_sets_from_a_function(strategy):
    net = Net(strategy)

    def make(context):
        size = context.get_per_replica_batch_size(BATCH)
        data = tf.data.Dataset.from_tensor_slices((guide_nets.X[:24], guide_nets.Y[:24])).batch(size)
        return data.shard(context.num_input_pipelines, context.input_pipeline_id)

    step, losses = tf.function(net.run), []
    for batch in strategy.distribute_datasets_from_function(make):
        losses.append(float(step(batch)))
    return [len(losses), *net.result(losses)]


@loop
def values_from_a_function(strategy):
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(1.0 / context.num_replicas_in_sync)
    )
    return float(strategy.reduce("SUM", strategy.run(lambda value: 2 * value, args=(values,)), axis=None))
