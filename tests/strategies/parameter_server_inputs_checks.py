# SPDX-License-Identifier: Apache-2.0
"""Inputs of all kinds are counted once. Run by `test_parameter_server.py`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from parameter_server_cluster import (
    BATCH,
    COUNT,
    IDS,
    STEPS,
    Batches,
    Moment,
    X,
    compiled,
    dataset,
    dense,
    fit,
    layers,
    moments,
)

ALL = np.arange(COUNT)


def observed(strategy: Any) -> keras.Model:
    """A net that learns nothing and sees which labels it is given."""
    return compiled(
        strategy,
        layers,
        optimizer=lambda: keras.optimizers.SGD(0.0),
        metrics=lambda: [Moment(power) for power in range(3)] + [Batches()],
    )


@functools.cache
def observed_often(strategy: Any, steps_per_execution: int = 1) -> keras.Model:
    """The same for many data sets, which are traced once where they are alike."""
    model = observed(strategy)
    model.steps_per_execution = steps_per_execution
    return model


def seen(history: dict[str, list[float]]) -> list[list[float]]:
    """(number, sum, sum of squares) of the labels of each epoch."""
    return [list(values) for values in zip(*(history[f"moment{power}"] for power in range(3)), strict=True)]


def slices() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, IDS))


def generated() -> Iterator[Any]:
    yield from zip(X, IDS, strict=True)


def from_generator() -> tf.data.Dataset:
    signature = (tf.TensorSpec((6,), tf.float32), tf.TensorSpec((1,), tf.float64))
    return tf.data.Dataset.from_generator(generated, output_signature=signature).batch(BATCH)


class Rows(keras.utils.PyDataset):
    def __len__(self) -> int:
        return math.ceil(COUNT / BATCH)

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows], IDS[rows]


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Without TensorFlow's tuning nobody reads ahead, not even to the end of the data."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


SOURCES = {
    "arrays": lambda: (X, IDS),
    "batches": lambda: (slices().batch(BATCH),),
    "shuffled without a seed": lambda: (slices().shuffle(COUNT).batch(BATCH),),
    "repeated": lambda: (slices().shuffle(COUNT).repeat(2).batch(BATCH),),
    "cached, not tuned": lambda: (untuned(slices().shuffle(COUNT).cache().batch(BATCH)),),
    "of unknown size": lambda: (slices().shuffle(COUNT).filter(lambda x, y: True).batch(BATCH),),
    "generator": lambda: (from_generator(),),
    "PyDataset": lambda: (Rows(),),
}


# Others read in the same way.
SLOW_SOURCES = {"arrays", "batches", "repeated"}


@pytest.mark.parametrize(
    "source", [pytest.param(each, marks=[pytest.mark.slow] if each in SLOW_SOURCES else []) for each in SOURCES]
)
def test_each_example_is_trained_on_once_per_epoch(strategy: Any, source: str) -> None:
    model, times = observed_often(strategy), 2 if source == "repeated" else 1
    before = int(model.optimizer.iterations)
    history = fit(model, *SOURCES[source](), epochs=3)
    assert seen(history) == [[times * moment for moment in moments(ALL)]] * 3
    assert int(model.optimizer.iterations) - before == sum(history["batches"])
    assert history["batches"] == [math.ceil(times * COUNT / BATCH)] * 3


@pytest.mark.parametrize("strategy", ["replicate"], indirect=True)
def test_replicated_data_are_read_by_each_worker(strategy: Any) -> None:
    history = fit(observed_often(strategy), slices().batch(BATCH).repeat(), epochs=2, steps_per_epoch=STEPS)
    assert history["batches"] == [STEPS, STEPS]


def test_the_user_may_give_each_worker_its_own_data(strategy: Any) -> None:
    def share(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return slices().shard(context.num_input_pipelines, context.input_pipeline_id).batch(BATCH)

    history = fit(observed_often(strategy), strategy.distribute_datasets_from_function(share))
    assert seen(history) == [moments(ALL)]


@pytest.mark.parametrize(
    ("source", "steps_per_execution"),
    [pytest.param("batches", 5, marks=pytest.mark.slow), ("of unknown size", 5), ("generator", 1)],
)
def test_evaluate_sees_each_example_once(strategy: Any, source: str, steps_per_execution: int) -> None:
    model = observed_often(strategy, steps_per_execution)
    found = model.evaluate(*SOURCES[source](), verbose=0, return_dict=True)
    assert [found[f"moment{power}"] for power in range(3)] == moments(ALL)
    assert found["batches"] == STEPS


@pytest.mark.parametrize("steps_per_execution", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2 * STEPS))])
def test_predict_gives_each_example_its_own_in_order(strategy: Any, steps_per_execution: int) -> None:
    model = dense(strategy, steps_per_execution=steps_per_execution)
    expected = layers()
    expected.set_weights(model.get_weights())
    unknown = tf.data.Dataset.from_tensor_slices(X).filter(lambda x: True).batch(BATCH)
    for data, options in ((X, {"batch_size": BATCH}), (dataset(), {}), (unknown, {})):
        np.testing.assert_allclose(model.predict(data, verbose=0, **options), expected(X), rtol=1e-5, atol=1e-6)


def test_hundreds_of_asynchronous_steps_are_counted_exactly(strategy: Any) -> None:
    model = observed_often(strategy)
    before = int(model.optimizer.iterations)
    history = fit(model, slices().repeat().batch(4), epochs=2, steps_per_epoch=150)
    assert int(model.optimizer.iterations) - before == 300
    assert history["batches"] == [150, 150]


# Kinds of data.


def test_validation_data_are_read_exactly(strategy: Any) -> None:
    model = observed_often(strategy)
    history = fit(model, X, IDS, epochs=2, validation_data=slices().take(50).batch(7))
    assert [history[f"val_moment{power}"] for power in range(3)] == [[moment] * 2 for moment in moments(ALL[:50])]


def test_endless_data_are_not_read_to_fill_a_cache(strategy: Any) -> None:
    history = fit(observed_often(strategy), slices().cache().repeat().batch(BATCH), epochs=2, steps_per_epoch=7)
    assert history["batches"] == [7, 7]
