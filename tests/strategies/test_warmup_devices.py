# SPDX-License-Identifier: Apache-2.0
"""Warmup under MirroredStrategy: first as one device, to the bit; then all replicas, from the same state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from training import OPTIMIZERS, X, Y, assert_close, assert_copies_are_equal, compiled, dense_model

import tfdist

pytestmark = pytest.mark.devices

# 45 examples in batches of 8: six steps, the last of 5 examples, which two replicas can't share evenly.
BATCH = 8


def with_state() -> keras.Model:
    layers = [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])


def batches(taking_part: Callable[[int], int], replicas: int, epochs: int) -> tf.data.Dataset:
    """Returns the batches for one device that does the same: of each batch the parts of the replicas that take part."""

    def generate():
        step = 0
        for _ in range(epochs):
            for start in range(0, len(X), BATCH):
                size = min(BATCH, len(X) - start)
                stop = start + size * taking_part(step) // replicas
                yield X[start:stop], Y[start:stop]
                step += 1

    signature = tf.TensorSpec((None, 3), tf.float32), tf.TensorSpec((None, 1), tf.float32)
    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
    # Where the end is not known, Keras tries another step there, of which TensorFlow makes the parts that need no data.
    return dataset.apply(tf.data.experimental.assert_cardinality(6 * epochs))


def values(model: keras.Model) -> list[np.ndarray]:
    return [keras.ops.convert_to_numpy(variable) for variable in (*model.variables, *model.optimizer.variables)]


@pytest.mark.parametrize(
    ("made", "optimizer", "options"),
    [
        pytest.param(with_state, lambda: OPTIMIZERS.Adam(0.01), {}, id="statistics and seeds"),
        pytest.param(
            dense_model,
            lambda: OPTIMIZERS.SGD(
                0.1, clipnorm=0.05, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=3
            ),
            {"steps_per_execution": 4},
            id="accumulation, ema, steps_per_execution",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_phase_is_training_on_one_device(cpus: Sequence[str], made, optimizer, options):
    strategy = tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.Warmup(epochs=3)])
    model = compiled(strategy, made, optimizer, **options)
    history = model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history

    alone = compiled(tf.distribute.get_strategy(), made, optimizer, **options)
    expected = alone.fit(batches(lambda step: 1, 2, 1), epochs=2, verbose=0).history
    for one, other in zip(values(alone), values(model), strict=True):
        np.testing.assert_array_equal(one, other)
    assert history == expected
    # The epoch's end has given all what the first has learned.
    assert_copies_are_equal(model)
    assert strategy.report().accepted == {"worker:0": 12, "worker:1": 0}
    assert strategy.replicas_to_aggregate == 1


def array() -> dict[str, Any]:
    return {"x": X, "y": Y, "batch_size": BATCH, "shuffle": False}


def unknown_size() -> dict[str, Any]:
    def generate():
        for start in range(0, len(X), BATCH):
            yield X[start : start + BATCH], Y[start : start + BATCH]

    signature = tf.TensorSpec((None, 3), tf.float32), tf.TensorSpec((None, 1), tf.float32)
    return {"x": tf.data.Dataset.from_generator(generate, output_signature=signature)}


def everybody_after(steps: int, total: int) -> Callable[[int], int]:
    return lambda step: total if step >= steps else 1


def one_more_every(steps: int, total: int) -> Callable[[int], int]:
    return lambda step: min(total, 1 + step // steps)


@pytest.mark.parametrize(
    ("num_devices", "policies", "data", "taking_part"),
    [
        # "ramp, then backup workers" has this, but for the end in mid-epoch.
        pytest.param(
            *(2, [tfdist.Warmup(steps=9)], array, everybody_after(9, 2)), id="in mid-epoch", marks=pytest.mark.slow
        ),
        pytest.param(
            3,
            [tfdist.BackupWorkers(spares=0), tfdist.Warmup(epochs=1, ramp=True)],
            unknown_size,
            one_more_every(6, 3),
            id="ramp, then backup workers",
        ),
    ],
)
def test_all_go_on_from_what_one_has_learned(cpus: Sequence[str], num_devices, policies, data, taking_part):
    strategy = tfdist.MirroredStrategy(cpus[:num_devices], tf.distribute.ReductionToOneDevice(), policies=[*policies])
    model = compiled(strategy, dense_model, lambda: OPTIMIZERS.SGD(0.1, momentum=0.9))
    seen = []

    def look(batch: int, logs: Any) -> None:
        seen.append(strategy.replicas_to_aggregate)

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    found = model.fit(**data(), epochs=4, verbose=0, callbacks=[watch], validation_data=(X, Y)).history

    alone = compiled(tf.distribute.get_strategy(), dense_model, lambda: OPTIMIZERS.SGD(0.1, momentum=0.9))
    reference = batches(taking_part, num_devices, 4)
    expected = alone.fit(reference, epochs=4, steps_per_epoch=6, verbose=0, validation_data=(X, Y)).history
    assert seen == [taking_part(step) for step in range(24)]
    assert_close(alone.get_weights(), model.get_weights())
    for name, series in expected.items():
        np.testing.assert_allclose(series, found[name], atol=1e-4, err_msg=name)
    assert int(model.optimizer.iterations.numpy()) == 24
    assert_copies_are_equal(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policies",
    [(), pytest.param((tfdist.BackupWorkers(spares=0),), marks=pytest.mark.slow)],
    ids=["synchronous", "backup workers"],
)
def test_shuffle_has_the_order_of_one_device_in_and_after_the_phase(cpus: Sequence[str], policies):
    """Each iterator of a shuffle draws an order, also those that Keras makes and never reads."""

    def shuffled() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(45, seed=5).batch(BATCH)

    strategy = tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.Warmup(epochs=2), *policies])
    model = compiled(strategy, dense_model, lambda: OPTIMIZERS.SGD(0.1))
    found = model.fit(shuffled(), epochs=4, verbose=0).history["loss"]

    alone, data = compiled(tf.distribute.get_strategy(), dense_model, lambda: OPTIMIZERS.SGD(0.1)), shuffled()
    halves = data.map(lambda x, y: (x[: tf.shape(x)[0] // 2], y[: tf.shape(y)[0] // 2]))
    expected = [loss for part in (halves, data) for loss in alone.fit(part, epochs=2, verbose=0).history["loss"]]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_replicas_with_data_of_their_own_go_on_where_they_are(cpus: Sequence[str]):
    def own(context):
        return tf.data.Dataset.from_tensor_slices((X[:40], Y[:40])).batch(4)

    policies = [tfdist.Warmup(steps=7), tfdist.BackupWorkers(spares=0)]
    strategy = tfdist.MirroredStrategy(cpus[:2], policies=policies)
    model = compiled(strategy, dense_model, lambda: OPTIMIZERS.SGD(0.1))
    model.fit(strategy.distribute_datasets_from_function(own), epochs=2, verbose=0)
    # Both replicas have the same data, so each update is that of one device.
    alone = compiled(tf.distribute.get_strategy(), dense_model, lambda: OPTIMIZERS.SGD(0.1))
    alone.fit(own(None), epochs=2, verbose=0)
    assert_close(alone.get_weights(), model.get_weights())
    assert strategy.report().accepted == {"worker:0": 20, "worker:1": 13}


def test_what_makes_no_sense_is_refused(cpus: Sequence[str]):
    with pytest.raises(ValueError, match="has only one"):
        tfdist.MirroredStrategy(cpus[:1], policies=[tfdist.Warmup(steps=1)])
    strategy = tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.Warmup(steps=1)])
    with pytest.raises(ValueError, match="options"):
        strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(X).batch(4), tf.distribute.InputOptions()
        )
