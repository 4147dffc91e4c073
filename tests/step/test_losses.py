# SPDX-License-Identifier: Apache-2.0
"""Losses of a replica's step are weighted so that several replicas train as one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.compat.keras import optimizers
from tfdist.compat.tensorflow import replicas
from tfdist.step import losses, trials
from tfdist.step.step import Step

pytestmark = pytest.mark.devices


def test_replicas_count_as_one_until_the_trace_ends():
    strategy = tfdist.MirroredStrategy(["CPU:0", "CPU:1"])
    with losses.counted_as_one(strategy):
        with losses.counted_as_one(strategy):
            assert replicas.facts_of(strategy).counts_as_one_replica
        assert replicas.facts_of(strategy).counts_as_one_replica
        assert strategy.run(lambda: tf.distribute.get_strategy().num_replicas_in_sync) == 1
    assert strategy.run(lambda: tf.distribute.get_strategy().num_replicas_in_sync) == 2


@pytest.mark.parametrize(("reduction", "factor"), [("sum", 4.0), ("sum_over_batch_size", 1.0)])
def test_a_part_of_a_sum_becomes_an_estimate_of_the_whole(reduction: str, factor: float):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", keras.losses.MeanSquaredError(reduction=reduction))
    zeros, ones = tf.zeros([2, 1]), tf.ones([2, 1])
    alone = float(model.compute_loss(None, zeros, ones))
    with optimizers.patched_attributes(losses.patches(model, lambda: 0.25)):
        assert float(model.compute_loss(None, zeros, ones)) == factor * alone
        assert float(model.optimizer.scale_loss(tf.constant(3.0))) == 3.0
        np.testing.assert_array_equal(model.optimizer.scale_loss(tf.ones([2])), [4.0, 4.0])
    with optimizers.patched_attributes(losses.patches(model, lambda: 0.25, weighs_loss=True)):
        assert float(model.optimizer.scale_loss(tf.constant(4.0))) == 1.0
    assert float(model.compute_loss(None, zeros, ones)) == alone


@pytest.mark.parametrize("left_out", [0.0, -1.0, -100.0, 255.0, float("nan")])
@pytest.mark.parametrize("by", [lambda of_all: of_all, lambda of_all: of_all[:, :1]])
def test_a_mean_of_some_labels_is_none_of_all_examples(left_out, by):
    def loss(y, p):
        counted = tf.cast(by(~(tf.math.is_nan(y) | (y == left_out))), p.dtype)
        return tf.reduce_sum(tf.math.multiply_no_nan((y - p) ** 2, counted)) / tf.maximum(tf.reduce_sum(counted), 1.0)

    assert losses._kind_of_number(loss, tf.zeros([2, 4]), tf.ones([2, 4])) == "other"
    large = lambda y, p: tf.reduce_sum(tf.nn.relu(abs(y - p) - 1.5)) / 8  # noqa: E731
    assert losses._kind_of_number(large, tf.zeros([2, 3]), tf.ones([2, 3])) == "sum"


def test_a_loss_and_a_step_that_keep_state_are_not_tried():
    seen = tf.Variable(0.0)

    def loss(y, p):
        seen.assign_add(1.0)
        return tf.reduce_sum((y - p) ** 2)

    class Reading(keras.Sequential):
        def train_step(self, data):
            return {**super().train_step(data), "read": tf.reduce_max(next(self.others))}

    assert losses._kind_of_number(loss, tf.zeros([2, 1]), tf.ones([2, 1])) == "sum"
    assert float(seen) == 0.0
    reading = lambda y, p: tf.reduce_sum((y - p) ** 2) * tf.cast(next(iter(numbers)), "float32")  # noqa: E731
    numbers = iter(tf.data.Dataset.range(100))
    assert losses._kind_of_number(reading, tf.zeros([2, 1]), tf.ones([2, 1])) == "unknown"

    def annealed(y, p):
        seen.assign_add(0.1)
        return seen * tf.reduce_mean((y - p) ** 2)

    assert losses._kind_of_number(annealed, tf.zeros([2, 1]), tf.ones([2, 1])) == "mean"
    in_python = lambda y, p: tf.numpy_function(np.sum, [(y - p) ** 2], "float32")  # noqa: E731
    assert losses._kind_of_number(in_python, tf.zeros([2, 1]), tf.ones([2, 1])) == "unknown"
    assert int(next(numbers)) == 0
    with tfdist.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = Reading([keras.Input((1,)), keras.layers.Dense(1)])
        model.others = iter(tf.data.Dataset.range(100))
        model.compile("sgd", "mse")
    history = model.fit(tf.zeros([8, 1]), tf.zeros([8, 1]), batch_size=8, verbose=0).history
    # Both replicas read.
    assert (history["read"], int(next(model.others))) == ([0], 2)


def test_a_step_is_tried_anew_once_it_is_compiled_and_with_axes_of_unknown_size():
    class Own(keras.Sequential):
        reduce = staticmethod(tf.reduce_mean)

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = self.reduce(self(data, training=True) ** 2) / 8
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    strategy, optimizer = tfdist.MirroredStrategy(["CPU:0", "CPU:1"]), keras.optimizers.SGD(0.1)
    with strategy.scope():
        model = Own([keras.Input((None, 1)), keras.layers.Dense(1)])
    optimizer.build(model.trainable_variables)
    for reduce, found in ((tf.reduce_mean, frozenset()), (tf.reduce_sum, {id(optimizer)})):
        model.reduce = reduce
        model.compile(optimizer, "mse")
        step = Step(model.train_step)
        assert trials.sums_in(strategy, step, tf.TensorSpec([None, None, 1]), 2).optimizers == found


@pytest.mark.parametrize(
    ("examples", "batch_rows", "share"), [(0, None, 0.0), (3, None, 0.5), (0, 4, 0.0), (3, 4, 0.75), (0, 0, 0.0)]
)
def test_share_of_a_part_is_that_of_its_examples(examples: int, batch_rows: int | None, share: float):
    total = None if batch_rows is None else tf.constant(batch_rows, tf.int64)
    assert float(losses.share_of_batch(tf.zeros([examples, 2]), total, 2)) == share


def test_share_of_parts_of_one_known_size_is_no_tensor():
    traced = tf.function(lambda batch: tf.constant(losses.share_of_batch(batch, tf.size(batch, tf.int64), 4) == 0.25))
    assert bool(traced(tf.zeros([3, 2])))
