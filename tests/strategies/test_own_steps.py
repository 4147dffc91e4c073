# SPDX-License-Identifier: Apache-2.0
"""Models with a `train_step` or losses of their own train under MirroredStrategy as they do on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_mirrored import OPTIMIZERS, X, Y, assert_like_one_device

import tfdist

pytestmark = pytest.mark.devices


@pytest.fixture(scope="module", params=["synchronous", "backup workers"])
def strategy(request, cpus: list[str]) -> tfdist.MirroredStrategy:
    policies = [] if request.param == "synchronous" else [tfdist.BackupWorkers(spares=0)]
    return tfdist.MirroredStrategy(cpus[:2], policies=policies)


@pytest.fixture(scope="module")
def synchronous(cpus: list[str]) -> tfdist.MirroredStrategy:
    return tfdist.MirroredStrategy(cpus[:2])


class Own(keras.Model):
    """Two layers, to be given a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="tracked")

    def build(self, input_shape: Any = None) -> None:
        self.first.build((None, 3))
        self.second.build((None, 8))
        self.built = True

    def call(self, x, training=False):
        return self.second(self.first(x))

    def update(self, loss_of: Callable[[], tf.Tensor]) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of()
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.tracker.update_state(loss)
        return loss


def stepping(train_step: Callable[[Any, Any, Any], Any]) -> type[Own]:
    class Stepping(Own):
        def train_step(self, data):
            return train_step(self, *data)

    return Stepping


def mean_by_hand(model, x, y):
    return {"loss": model.update(lambda: tf.reduce_mean((model(x) - y) ** 2))}


def of_keras(model, x, y):
    return {"loss": model.update(lambda: model.compute_loss(x, y, model(x, training=True)))}


def tracked(model, x, y):
    model.update(lambda: tf.reduce_mean((model(x) - y) ** 2))
    return {"tracked": model.tracker.result()}


def of_both(model, x, y):
    squares = keras.losses.MeanSquaredError()
    return {"loss": model.update(lambda: squares(y, model(x)) + tf.reduce_mean(tf.abs(model(x))))}


def average_by_tensorflow(model, x, y):
    squares = lambda: tf.reduce_sum((model(x) - y) ** 2, 1)  # noqa: E731
    return {"loss": model.update(lambda: tf.nn.compute_average_loss(squares()))}


@pytest.mark.parametrize(
    "step", [mean_by_hand, of_keras, of_both, average_by_tensorflow], ids=lambda step: step.__name__
)
@pytest.mark.parametrize("batch_size", [8, 1], ids=["one over", "fewer examples than replicas"])
def test_own_loss_is_a_mean_over_the_global_batch(strategy, step, batch_size):
    options = {"metrics": None, "fit": {"batch_size": batch_size, "epochs": 1}, "calls": ()}
    if step is average_by_tensorflow and batch_size == 8:
        # It divides by the size of the batch that a replica has, times their number.
        options["data"] = (X[:40], Y[:40])
    assert_like_one_device(strategy, lambda: OPTIMIZERS.SGD(0.1), model=stepping(step), **options)


@pytest.mark.parametrize("batch_size", [8, 1], ids=["one over", "fewer examples than replicas"])
def test_metric_of_an_own_loss_is_that_of_one_device(synchronous, batch_size):
    options = {"metrics": None, "fit": {"batch_size": batch_size, "epochs": 1}, "calls": ()}
    assert_like_one_device(synchronous, lambda: OPTIMIZERS.SGD(0.1), model=stepping(tracked), **options)


class Decorated(stepping(mean_by_hand)):
    train_step = tf.function(stepping(mean_by_hand).train_step)


def test_step_decorated_with_tf_function_counts_once(strategy):
    options = {"metrics": None, "fit": {"epochs": 1}, "calls": ()}
    assert_like_one_device(strategy, lambda: OPTIMIZERS.SGD(0.1), model=Decorated, **options)


class OwnLoss(Own):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(tf.abs(y - y_pred)) + 0.1 * tf.reduce_sum(self.first.kernel**2)


def test_own_compute_loss_is_a_mean_over_the_global_batch(strategy):
    assert_like_one_device(strategy, lambda: OPTIMIZERS.Adam(0.01), calls=["evaluate"], model=OwnLoss)


@pytest.mark.parametrize("size", [8, None], ids=["known sizes", "unknown sizes"])
def test_batch_of_several_first_dimensions_is_refused(strategy, size):
    scales = np.ones(3, np.float32)
    data = tf.data.Dataset.from_tensor_slices((X[:40], Y[:40])).batch(8, drop_remainder=size is not None)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    before = model.get_weights()
    with pytest.raises(
        ValueError, match=r"^dataset: .*different (batch sizes|numbers of examples).*Received"
    ) as raised:
        model.fit(data.map(lambda x, y: ((scales, x), y)), verbose=0)
    assert "\n" not in str(raised.value)
    tf.nest.map_structure(np.testing.assert_array_equal, model.get_weights(), before)


def conditional(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    tf.cond(loss > 0, lambda: [model.optimizer.apply(gradients, model.trainable_variables), 0][1], lambda: 0)
    return {"loss": loss}


def test_update_in_a_conditional_is_refused_in_one_line(synchronous):
    with synchronous.scope():
        model = stepping(conditional)()
        model.build()
        model.compile("sgd")
    with pytest.raises(RuntimeError, match="inside of a conditional") as raised:
        model.fit(X, Y, batch_size=8, verbose=0)
    assert "\n" not in str(raised.value)


def by_hand(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    for weight, gradient in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True):
        weight.assign_sub(0.1 * gradient)
    return {"loss": loss}


def test_weights_that_a_step_assigns_are_those_of_one_device(strategy):
    options = {"metrics": None, "fit": {"epochs": 1}, "calls": ()}
    assert_like_one_device(strategy, lambda: OPTIMIZERS.SGD(0.1), model=stepping(by_hand), **options)


def one_number(y, predicted):
    return tf.reduce_mean((y - predicted) ** 2)


def one_per_example(y, predicted):
    return tf.reduce_mean(tf.abs(y - predicted), -1)


class OneNumber(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return tf.reduce_mean((y_true - y_pred) ** 2)


@pytest.mark.parametrize("loss", [one_number, tf.function(one_number), one_per_example, OneNumber()])
@pytest.mark.parametrize("batch_size", [8, 1], ids=["one over", "fewer examples than replicas"])
def test_loss_of_users_code_that_returns_one_number_counts_as_on_one_device(strategy, loss, batch_size):
    options = {"loss": loss, "fit": {"batch_size": batch_size, "epochs": 1}}
    assert_like_one_device(strategy, lambda: OPTIMIZERS.SGD(0.1), calls=["evaluate"], **options)


def two_outputs() -> keras.Model:
    inputs = keras.Input((3,))
    return keras.Model(inputs, [keras.layers.Dense(1, name="one")(inputs), keras.layers.Dense(1, name="other")(inputs)])


def test_loss_of_users_code_beside_one_of_keras_counts_as_on_one_device(strategy):
    data = tf.data.Dataset.from_tensor_slices((X, (Y, 2 * Y))).batch(8)
    found = []
    for each in (tf.distribute.get_strategy(), strategy):
        keras.utils.set_random_seed(0)
        with each.scope():
            model = two_outputs()
            model.compile(OPTIMIZERS.SGD(0.1), [one_number, "mae"], loss_weights=[1.0, 0.5])
        history = model.fit(data, epochs=2, verbose=0).history
        found.append([history, model.get_weights(), model.evaluate(data, verbose=0)])
    tf.nest.map_structure(lambda one, many: np.testing.assert_allclose(many, one, atol=1e-5), *found)


class Penalty(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


def penalized() -> keras.Model:
    layers = [
        keras.layers.Dense(8, activity_regularizer="l2", kernel_regularizer="l1"),
        Penalty(),
        keras.layers.Dense(1),
    ]
    return keras.Sequential([keras.Input((3,)), *layers])


@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size"])
@pytest.mark.parametrize("rows", [45, 41], ids=["uneven", "one example left"])
def test_penalties_count_as_on_one_device(strategy, reduction, rows):
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    options = {"model": penalized, "loss": loss, "data": (X[:rows], Y[:rows]), "fit": {"epochs": 1}}
    assert_like_one_device(strategy, lambda: OPTIMIZERS.SGD(0.01), calls=["evaluate"], **options)


class PenalizedOwn(stepping(mean_by_hand)):
    def __init__(self):
        super().__init__()
        self.penalty = Penalty()

    def call(self, x, training=False):
        return self.second(self.penalty(self.first(x)))


def test_evaluate_after_an_own_step_counts_no_empty_replica(strategy):
    with strategy.scope():
        model = PenalizedOwn()
        model.build()
        model.compile("sgd", "mse")
    found = model.evaluate(X[:9], Y[:9], batch_size=8, verbose=0, return_dict=True)["loss"]
    penalties = [0.1 * np.mean(np.square(model.first(X[rows]))) for rows in (slice(8), slice(8, 9))]
    expected = np.mean((model.predict(X[:9], verbose=0) - Y[:9]) ** 2) + np.dot(penalties, [8 / 9, 1 / 9])
    assert found == pytest.approx(expected, rel=1e-5)


def test_metric_variable_of_aggregation_mean_is_read(strategy):
    with strategy.scope():
        metric = keras.metrics.Metric(name="largest")
        largest = metric.add_variable((), "ones", name="largest", aggregation="mean")
    assert float(tf.convert_to_tensor(largest.value)) == 1.0
