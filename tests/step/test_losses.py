# SPDX-License-Identifier: Apache-2.0
"""Losses that a step computes itself are counted as those of one replica, while the step is traced."""

from __future__ import annotations

import threading

import keras
import pytest
import tensorflow as tf

import tfdist
from tfdist.compat.tensorflow import replicas
from tfdist.step import losses
from tfdist.step.step import Step

pytestmark = pytest.mark.devices


class Own(keras.Sequential):
    """A model whose step may have a loss of its own."""

    def train_step(self, data):
        return super().train_step(data)


def test_steps_that_two_threads_trace_do_not_change_each_other_s_flag():
    strategy = tfdist.MirroredStrategy(["CPU:0", "CPU:1"])
    models = [kind([keras.Input((3,)), keras.layers.Dense(1)]) for kind in (Own, keras.Sequential)]
    for model in models:
        model.compile("sgd", "mse")
    own, other = (Step(model.train_step) for model in models)
    is_left = threading.Event()

    def trace() -> None:
        with losses.counted_as_one(strategy, other):
            is_left.wait(20)

    thread = threading.Thread(target=trace)
    with losses.counted_as_one(strategy, own) as has_own_loss:
        thread.start()
        # Long enough for the thread to set the flag, if it may.
        thread.join(0.3)
        assert has_own_loss
        assert replicas.facts_of(strategy).counts_as_one_replica
    is_left.set()
    thread.join(20)
    assert not replicas.facts_of(strategy).counts_as_one_replica


@pytest.mark.parametrize(
    ("examples", "batch_rows", "share"), [(0, None, 0.0), (3, None, 0.5), (0, 4, 0.0), (3, 4, 0.75), (0, 0, 0.0)]
)
def test_share_of_a_part_is_that_of_its_examples(examples: int, batch_rows: int | None, share: float):
    total = None if batch_rows is None else tf.constant(batch_rows, tf.int64)
    assert float(losses.share_of_batch(tf.zeros([examples, 2]), total, 2)) == share


def test_share_of_parts_of_one_known_size_is_no_tensor():
    traced = tf.function(lambda batch: tf.constant(losses.share_of_batch(batch, tf.size(batch, tf.int64), 4) == 0.25))
    assert bool(traced(tf.zeros([3, 2])))


def test_metrics_of_numbers_alone_are_counted_by_examples():
    batch = tf.zeros([3, 2])
    numbers, both = metrics = [keras.metrics.Mean() for _ in range(2)]
    counted = losses.CountedByExamples(batch, 2, {})
    weights = [counted.weight_of(metric)(True) for metric in metrics]
    assert [int(weight) for weight in weights] == [3, 3]
    assert counted.weight_of(both)(False) is None
    assert counted.mixed() == [both]
    without = losses.CountedByExamples(batch, 2, {id(both)})
    assert [float(without.weight_of(metric)(True)) for metric in metrics] == [3.0, 0.5]
    assert without.variables() == {id(variable) for variable in numbers.variables}


class _Counting(keras.metrics.Mean):
    """Counts its updates besides."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = self.add_variable((), "zeros", dtype="int32", aggregation="sum")


def test_counts_of_a_mean_besides_its_numbers_are_sums():
    counted, mean = losses.CountedByExamples(tf.zeros([3, 2]), 2, {}), _Counting()
    counted.weight_of(mean)(True)
    total = keras.metrics.Sum()
    counted.weight_of(total)(True)
    assert counted.variables() == {id(mean.total), id(mean.count), id(total.total)}
