# SPDX-License-Identifier: Apache-2.0
"""A train step in two halves is the plain step: the same weights, metrics, statistics and logs."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import keras
import numpy as np
import own_models
import pytest
import tensorflow as tf
from halves import Halves, X, Y, batches, dense, made, state
from training import assert_close

pytestmark = pytest.mark.devices


# `TestBackupWorkers` of `tests/conformance` has other optimizers and losses.
def test_two_halves_are_the_plain_step() -> None:
    plain, halved = (made(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)) for _ in range(2))
    plain_step, halves = tf.function(plain.train_step, autograph=False), Halves(halved)
    for x, y in batches():
        expected, found = plain_step((tf.constant(x), tf.constant(y))), halves(x, y)
        assert_close(expected, found)
    assert_close(state(plain), state(halved))


class Double(keras.Model):
    """A model of float64."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = self.add_weight(shape=(3, 1), initializer="ones", dtype="float64")

    def call(self, x: Any) -> Any:
        return x

    def train_step(self, data: Any) -> Any:
        x, y = (tf.cast(each, tf.float64) for each in data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.matmul(x, tf.convert_to_tensor(self.kernel)) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, [self.kernel]), [self.kernel])
        return {"loss": loss}


@pytest.mark.slow
def test_gradients_of_float64_are_scaled_in_float64() -> None:
    plain, halved = (made(Double, optimizer=keras.optimizers.SGD(0.125), metrics=None) for _ in range(2))
    plain.train_step((tf.constant(X[:7]), tf.constant(Y[:7])))
    Halves(halved)(X[:7], Y[:7])
    np.testing.assert_allclose(plain.get_weights()[0], halved.get_weights()[0], rtol=1e-13)


def test_nothing_is_written_before_the_update() -> None:
    model = made(lambda: keras.Sequential([dense(), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]))
    before = state(model)
    halves = Halves(model)
    x, y = batches()[0]
    halves.contribute(x, y)
    for old, new in zip(before, state(model), strict=True):
        np.testing.assert_array_equal(old, new)
    halves(x, y)
    assert any((old != new).any() for old, new in zip(before, state(model), strict=True))
    assert int(model.optimizer.iterations.numpy()) == 1


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_who_does_not_contribute_leaves_no_trace(reduction: str) -> None:
    """The gradient of a mean is that over the contributors' examples; that of a sum is scaled to all replicas."""
    scale = 1.0 if reduction == "sum_over_batch_size" else 1.5
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    plain = made(optimizer=keras.optimizers.SGD(0.01 * scale), loss=loss)
    halved = made(optimizer=keras.optimizers.SGD(0.01), loss=loss)
    halves = Halves(halved, contributors=(0, 2))
    for x, y in batches()[:2]:
        kept = np.concatenate([x[:3], x[6:]]), np.concatenate([y[:3], y[6:]])
        expected, found = plain.train_step([tf.constant(part) for part in kept]), halves(x, y)
        assert_close(expected["mae"], found["mae"])
        assert_close(expected["loss"] * scale, found["loss"])
    assert_close(plain.get_weights(), halved.get_weights())


def test_statistics_are_the_mean_over_examples_and_seeds_advance_once() -> None:
    def model() -> keras.Model:
        return keras.Sequential(
            [keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1)]
        )

    halved, once = made(model), made(model)
    x, y = batches()[2]
    halved_layer, dropout = halved.layers
    Halves(halved)(x, y)
    np.testing.assert_allclose(halved_layer.moving_mean.numpy(), 0.01 * x.mean(0), atol=1e-6)
    once.train_step((tf.constant(x), tf.constant(y)))
    np.testing.assert_array_equal(dropout.seed_generator.state.numpy(), once.layers[1].seed_generator.state.numpy())


def test_without_any_example_nothing_but_the_count_changes() -> None:
    model = made(
        lambda: keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    )
    before = model.get_weights()
    halves = Halves(model, contributors=(0,))
    logs = halves(X[:1], Y[:1])  # the one example is the last replica's
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert np.isfinite([*logs.values()]).all()
    assert int(model.optimizer.iterations.numpy()) == 1


class _Refusing(keras.layers.Layer):
    def call(self, x: tf.Tensor) -> tf.Tensor:
        tf.debugging.Assert(tf.reduce_all(x > 0) & (tf.shape(x)[0] > 0), ["no value of the data"])
        return tf.identity(x)


def test_replicas_without_examples_run_no_layer() -> None:
    def model() -> keras.Model:
        layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((3,)), _Refusing(), *layers])

    def one(largest: own_models.Combined) -> keras.Model:
        result = made(model, optimizer="adam", metrics=[largest])
        largest.total.assign(-5.0)
        return result

    plain, halved = (one(own_models.Combined(lambda a, y: tf.maximum(a, tf.reduce_max(y)))) for _ in range(2))
    halves = Halves(halved)
    for row in (0, 1):
        x, y = X[row : row + 1], Y[row : row + 1] - 2
        assert_close(plain.train_step((tf.constant(x), tf.constant(y))), halves(x, y))
    assert_close(state(plain), state(halved))


def test_gradients_of_embeddings_stay_sparse() -> None:
    def model() -> keras.Model:
        layers = [keras.Input((3,)), keras.layers.Embedding(7, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
        return keras.Sequential(layers)

    plain, halved = made(model, optimizer="adam"), made(model, optimizer="adam")
    halves = Halves(halved)
    for x, y in batches():
        words = np.floor(6.9 * x)
        plain.train_step((tf.constant(words), tf.constant(y)))
        halves(words, y)
    gradient = halves.contribute(words, y)[1].gradients[0]
    assert isinstance(gradient, tf.IndexedSlices)
    assert gradient.values.shape == (3, 2)
    assert_close(plain.get_weights(), halved.get_weights())


class Own(keras.Model):
    """A step with two optimizers, logs of its own, and one under a name that a metric has."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = keras.layers.Dense(1), keras.layers.Dense(1)
        self.second = keras.optimizers.SGD(0.2)
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x: Any) -> Any:
        return self.one(x) + self.two(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        for optimizer, layer in ((self.optimizer, self.one), (self.second, self.two)):
            weights = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        self.seen.update_state(x)
        return {"loss": loss, "seen": self.seen.result(), "nested": {"constant": 2.5}}


def test_own_steps_with_several_optimizers_and_logs_of_their_own() -> None:
    plain, halved = (made(Own, metrics=None) for _ in range(2))
    for model in (plain, halved):
        model.optimizer = keras.optimizers.SGD(0.1)
        model.optimizer.build(model.one.trainable_variables)
        model.second.build(model.two.trainable_variables)
    halves = Halves(halved)
    for x, y in batches():
        expected, found = plain.train_step((tf.constant(x), tf.constant(y))), halves(x, y)
        assert_close(expected, found)
    assert_close(plain.get_weights(), halved.get_weights())


def test_optimizers_metrics_and_layers_are_left_as_they_were() -> None:
    model = made()
    Halves(model)(X[:9], Y[:9])
    assert "apply" not in vars(model.optimizer)
    assert "update_state" not in vars(model.metrics[0])


def test_trace_that_fails_leaves_the_step_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    halves = Halves(model)
    before = halves.step.variables()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("own words")

    monkeypatch.setattr(model, "compute_loss", fail)
    with pytest.raises(ArithmeticError, match="own words"):
        tf.function(halves._contribute_as(0), autograph=False)(X[:4], Y[:4])
    assert before and [each is other for each, other in zip(before, halves.step.variables(), strict=True)]


def test_what_cannot_be_taken_apart_is_said() -> None:
    keras.utils.set_random_seed(3)
    model = dense()
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"call optimizer\.build\(variables\)"):
        Halves(model)(X[:9], Y[:9])


class _Gathering(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        tf.distribute.get_replica_context().all_gather(x, 0)
        return self.dense(x)


class _Meeting(_Gathering):
    def call(self, x):
        context = tf.distribute.get_replica_context()
        return context.merge_call(lambda strategy, part: strategy.reduce("SUM", part, axis=None), args=(x,))


@pytest.mark.parametrize(("other", "call"), [(_Gathering, "all_gather"), (_Meeting, "merge_call")])
def test_gathering_of_other_replicas_parts_is_refused(other: Any, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    monkeypatch.setattr(model, "train_step", other().call)
    with pytest.raises(ValueError, match=rf"can't gather the other replicas' parts with {call}\("):
        Halves(model)


class Summing(keras.Sequential):
    def train_step(self, data):
        count = tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0))
        return super().train_step(data) | {"count": count}


def test_sum_over_replicas_is_said_once_to_be_of_one(capfd: Any) -> None:
    halves = Halves(made(lambda: Summing([keras.Input((3,)), keras.layers.Dense(1)])))
    assert float(halves(X[:9], Y[:9])["count"]) == 1.0
    assert capfd.readouterr().err.count("all_reduce in a train_step") == 1


def _of_large_targets(y_true: Any, y_pred: Any) -> Any:
    return tf.boolean_mask(tf.square(y_true - y_pred), y_true > 0.5)


def _of_scattered(y_true: Any, y_pred: Any) -> Any:
    places = tf.where(y_true[:, 0] > 0.5)
    return tf.scatter_nd(places, tf.gather_nd(y_true - y_pred, places), tf.shape(y_true, tf.int64))


@pytest.mark.parametrize(
    ("loss", "does"),
    [
        pytest.param(_of_large_targets, "leaves examples out", id="mask"),
        pytest.param(keras.losses.Dice(), "computes with all examples together", id="dice"),
        pytest.param(lambda y, predicted: tf.where(y > 0.5, y - predicted, 0.0)[:, 0], "", id="zeros"),
        pytest.param(_of_scattered, "", id="scattered"),
    ],
)
def test_loss_of_fewer_numbers_than_examples_is_refused(loss: Any, does: str) -> None:
    model = made(loss=loss)
    with pytest.raises(ValueError, match=f"' {does}, and a replica under") if does else contextlib.nullcontext():
        Halves(model)


@pytest.mark.slow
def test_summaries_in_a_step_are_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capfd: Any) -> None:
    model = made()
    writer, step = tf.summary.create_file_writer(str(tmp_path)), model.train_step

    def train_step(data: Any) -> Any:
        with writer.as_default(step=0):
            tf.summary.scalar("mean", tf.reduce_mean(data[0]))
        return step(data)

    Halves(model)
    monkeypatch.setattr(model, "train_step", train_step)
    monkeypatch.setattr(train_step, "__self__", model, raising=False)
    Halves(model)
    assert capfd.readouterr().err.count("tf.summary in a train_step writes once for each replica") == 1
