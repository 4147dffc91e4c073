# SPDX-License-Identifier: Apache-2.0
"""The policies of asynchronous training and the warmup phase, on four workers and two parameter servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from aggregated_cluster import IDS, NUM_WORKERS, Examples, compiled, leaves_nothing_behind  # noqa: F401
from parameter_server_cluster import BATCH, COUNT, STEPS, X, Y, layers
from training import assert_close

import tfdist
from tfdist import transforms
from tfdist.coordination import delay_hook, keepalive
from tfdist.step import gradients

Policies = Callable[..., tfdist.ParameterServerStrategy]


@pytest.fixture
def slow() -> Iterator[None]:
    """The last worker takes 50 ms longer than the others for each gradient."""

    def delay(replica: int, attempt: int) -> None:
        if replica == NUM_WORKERS - 1:
            time.sleep(0.05)

    delay_hook.set_hook(delay)
    yield
    delay_hook.uninstall(delay)


# Each label is another number, and their sum is exact in float32.
LABELS = np.arange(COUNT, dtype=np.float32)[:, None]


def counting(strategy: Any) -> Any:
    with strategy.scope():
        metrics = [Examples()]
    return compiled(strategy, optimizer=lambda: keras.optimizers.SGD(0.0), metrics=metrics)


def generator() -> tf.data.Dataset:
    def batches() -> Iterator[Any]:
        for start in range(0, COUNT, BATCH):
            yield X[start : start + BATCH], LABELS[start : start + BATCH]

    spec = (tf.TensorSpec((None, 6), tf.float32), tf.TensorSpec((None, 1), tf.float32))
    return tf.data.Dataset.from_generator(batches, output_signature=spec)


def shuffled() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, LABELS)).shuffle(COUNT).batch(BATCH)


@pytest.mark.parametrize(("data", "updates"), [(shuffled, 3), (generator, 1)])
def test_every_example_is_used_once_in_each_pass(
    with_policies: Policies, data: Callable[[], tf.data.Dataset], updates: int
) -> None:
    strategy = with_policies(tfdist.SoftSync(updates), tfdist.StalenessScaling())
    model = counting(strategy)
    history = model.fit(data(), epochs=2, verbose=0).history
    assert history["examples"] == [float(COUNT)] * 2
    assert history["sum"] == [float(LABELS.sum())] * 2
    assert int(model.optimizer.iterations.numpy()) == 2 * STEPS
    report = strategy.report()
    assert report.updates == 2 * STEPS
    assert sum(report.accepted.values()) == sum(report.staleness.values()) == 2 * STEPS * updates
    assert sum(report.dropped.values()) == 0


def test_a_killed_worker_leaves_nothing_out_and_nothing_twice(with_policies: Policies, slow: None) -> None:
    strategy = with_policies(tfdist.SoftSync(1))

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3:
                tfdist.testing.kill(strategy, "worker:1")

    model = counting(strategy)
    history = model.fit(shuffled(), epochs=2, verbose=0, callbacks=[Kill()]).history
    assert history["examples"] == [float(COUNT)] * 2
    assert history["sum"] == [float(LABELS.sum())] * 2


@pytest.mark.parametrize("bound", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_no_gradient_is_older_than_the_bound(with_policies: Policies, slow: None, bound: int) -> None:
    strategy = with_policies(tfdist.BoundedStaleness(bound))
    model = compiled(strategy)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).repeat()
    model.fit(data, steps_per_epoch=30, epochs=2, verbose=0)
    report = strategy.report()
    assert max(report.staleness) <= bound
    assert report.updates == 60
    assert report.accepted["worker:3"]
    assert sum(report.held_secs.values()) > 0


def test_transforms_know_staleness_and_weight(
    with_policies: Policies, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted(given: Any, state: Any, info: Any) -> Any:
        count = tf.cast(info.contributors, tf.float32)
        return given, state + tf.stack([tf.cast(info.staleness, tf.float32), info.weight, count])

    strategy = with_policies(tfdist.SoftSync(2), tfdist.StalenessScaling(lambda staleness: 1 / (1 + staleness)))
    memory = strategy.distribution.transforms.memory
    own = transforms.GradientTransform(lambda variables: tf.zeros([3]), noted, where="arrival")
    monkeypatch.setattr(strategy.distribution, "transforms", gradients.Transforms([own], memory))
    model = counting(strategy)
    model.fit(shuffled(), verbose=0)
    _, (found, *_) = strategy.distribution.transforms.collect(model)
    counted = strategy.report().staleness
    assert sum(age * count for age, count in counted.items()) > 0
    np.testing.assert_allclose(found[0], sum(age * count for age, count in counted.items()))
    np.testing.assert_allclose(found[1], sum(count / (1 + age) for age, count in counted.items()), rtol=1e-5)
    np.testing.assert_allclose(found[2], 2 * 2 * STEPS)


class Summing(keras.Sequential):
    """Its loss is a sum of outputs, whose gradient is the same for all weights."""

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self(data[0])) / BATCH
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_an_own_sum_is_that_of_the_whole_batch_from_several_parts(with_policies: Policies) -> None:
    make = lambda: Summing([keras.Input((6,)), keras.layers.Dense(1, use_bias=False)])  # noqa: E731
    model = compiled(with_policies(tfdist.SoftSync(2)), make, lambda: keras.optimizers.SGD(1.0))
    before = model.get_weights()[0]
    count = STEPS * BATCH
    model.fit(tf.ones([count, 6]), tf.zeros([count, 1]), batch_size=BATCH, verbose=0)
    assert_close([before - STEPS], model.get_weights())


def with_embedding() -> keras.Model:
    return keras.Sequential(
        [keras.Input((3,), dtype="int64"), keras.layers.Embedding(50, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
    )


def in_turn(array: np.ndarray) -> np.ndarray:
    """The examples in the order in which one worker reads the shares, its own first."""
    batches = [array[start : start + BATCH] for start in range(0, COUNT, BATCH)]
    return np.concatenate([batch for share in range(NUM_WORKERS) for batch in batches[share::NUM_WORKERS]])


@pytest.mark.parametrize("make", [pytest.param(layers, marks=pytest.mark.slow), with_embedding])
def test_in_the_warmup_phase_it_is_one_device_and_weights_scale_its_gradients(
    with_policies: Policies, make: Callable[[], keras.Model]
) -> None:
    halve = tfdist.StalenessScaling(lambda staleness: 0.5)
    strategy = with_policies(tfdist.Warmup(steps=10**6), tfdist.SoftSync(4), halve)
    x = X if make is layers else IDS
    # Full batches only: an uneven one would be cut into parts of other sizes.
    model = compiled(strategy, make, lambda: keras.optimizers.SGD(0.1))
    model.fit(x[:192], Y[:192], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    alone = compiled(tf.distribute.get_strategy(), make, lambda: keras.optimizers.SGD(0.05))
    order = in_turn(np.arange(COUNT))
    order = order[order < 192]
    alone.fit(x[order], Y[order], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    assert_close(alone.get_weights(), model.get_weights())
    assert strategy.report().accepted == {"worker:0": 24 * 4, "worker:1": 0, "worker:2": 0, "worker:3": 0}


def test_what_is_too_old_is_dropped_and_the_pass_still_ends(
    with_policies: Policies, capfd: pytest.CaptureFixture
) -> None:
    strategy = with_policies(tfdist.DropStale(0))
    model = counting(strategy)
    model.fit(shuffled(), verbose=0)
    report = strategy.report()
    assert set(report.staleness) == {0}
    assert int(model.optimizer.iterations.numpy()) == report.updates < STEPS
    # What is dropped after the last update is told with the next one.
    known = sum(report.accepted.values()) + sum(report.dropped.values())
    assert STEPS - NUM_WORKERS <= known <= STEPS
    assert f"this pass over the data made {report.updates} updates" in capfd.readouterr().err


@pytest.mark.slow
def test_a_rule_that_gives_no_weight_ends_fit_and_the_next_one_is_clean(with_policies: Policies) -> None:
    weights = iter([1.0, 1.0, 1.0, 1.0, float("nan")])
    strategy = with_policies(tfdist.StalenessScaling(lambda staleness: next(weights, 1.0)))
    model = compiled(strategy)
    with pytest.raises(Exception, match=r"must return a finite weight of 0 or more\. Received: nan"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert all(np.isfinite(each).all() for each in model.get_weights())
    assert len(model.fit(X, Y, batch_size=BATCH, verbose=0).history["loss"]) == 1


def test_an_error_of_a_slow_step_is_raised(with_policies: Policies) -> None:
    def fail(replica: int, attempt: int) -> None:
        time.sleep(2 * keepalive.POLL_SECS)
        raise ValueError("in a step")

    model = compiled(with_policies(tfdist.SoftSync(2)))
    delay_hook.set_hook(fail)
    try:
        with pytest.raises(ValueError, match="in a step"):
            model.fit(X, Y, batch_size=BATCH, verbose=0)
    finally:
        delay_hook.uninstall(fail)


class OwnLoss(keras.Model):
    """Model whose train_step does not touch the loss that Keras tracks."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"own": loss}


@pytest.mark.slow
def test_warmup_for_epochs_needs_a_model_that_counts(with_policies: Policies) -> None:
    strategy = with_policies(tfdist.Warmup(epochs=1))
    inputs = keras.Input((6,))
    model = compiled(strategy, lambda: OwnLoss(inputs, keras.layers.Dense(1)(inputs)), metrics=None)
    with pytest.raises(Exception, match=r"train_step updates none; use Warmup\(steps=\.\.\.\)"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)


@pytest.mark.parametrize(
    "policy", [lambda: tfdist.SoftSync(2), pytest.param(lambda: tfdist.BackupWorkers(1), marks=pytest.mark.slow)]
)
def test_custom_loops_have_whole_batches_each_once(
    with_policies: Policies, policy: Callable[[], Any], capfd: pytest.CaptureFixture
) -> None:
    strategy = with_policies(policy())
    with strategy.scope():
        total = keras.metrics.Sum()
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(LABELS).batch(BATCH))

    def step(batch: tf.Tensor) -> tf.Tensor:
        total.update_state(batch)
        return tf.shape(batch)[0]

    sizes = [int(strategy.run(step, args=(batch,))) for batch in dataset]
    assert sizes == [BATCH] * (STEPS - 1) + [COUNT % BATCH]
    assert float(total.result()) == LABELS.sum()
    assert "AutoGraph" not in capfd.readouterr().err
