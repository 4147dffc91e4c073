# SPDX-License-Identifier: Apache-2.0
"""Models with steps and losses of their own, as users write them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


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


class Listed(Own):
    """Has an optimizer for each layer, one in a list and one of a model in an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.other = [keras.optimizers.SGD(0.1)], types.SimpleNamespace(second=keras.Sequential())
        self.other.second.compile(keras.optimizers.SGD(0.2), "mse")

    def train_step(self, data):
        x, y = data
        weights = [self.first.trainable_variables, self.second.trainable_variables]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        optimizers = [*self.each, self.other.second.optimizer]
        for optimizer, gradients, of in zip(optimizers, tape.gradient(loss, weights), weights, strict=True):
            optimizer.apply(gradients, of)
        return {"loss": loss}


class SumByCall(keras.losses.Loss):
    """A sum, which Keras does not know of."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return tf.reduce_sum((y_true - y_pred) ** 2) / 50


class Direction(keras.layers.Layer):
    """Divides each example by its length: NaN for zeros. Fails on a batch of no examples."""

    def call(self, x):
        tf.debugging.assert_greater(tf.shape(x)[0], 0)
        return x / tf.norm(x, axis=[1, 2], keepdims=True)


def stepping(train_step: Callable[[Any, Any, Any], Any]) -> type[Own]:
    """A model of `Own` with this step."""

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


def tracked_by_other_names(model, x, y):
    """Logs that are computed from results of metrics, under other names than these have; and variables."""
    before = model.optimizer.iterations + 0
    loss = model.update(lambda: tf.reduce_mean((model(x) - y) ** 2))
    model.sum.update_state(loss)
    result = model.tracker.result()
    chosen = tf.cond(result > 0.0, lambda: 3 * result, lambda: result)
    logs = {"loss": result, "tracked": model.sum.result(), "twice": 2 * result, "chosen": chosen, "before": before}
    return logs | {"both": model.sum.result() + result, "n": model.optimizer.iterations, "constant": 2.5}


class Named(stepping(tracked_by_other_names)):
    def __init__(self) -> None:
        super().__init__()
        self.sum = keras.metrics.Sum(name="sum")


def of_both(model, x, y):
    squares = keras.losses.MeanSquaredError()
    return {"loss": model.update(lambda: squares(y, model(x)) + tf.reduce_mean(tf.abs(model(x))))}


def average_by_tensorflow(model, x, y):
    squares = lambda: tf.reduce_sum((model(x) - y) ** 2, 1)  # noqa: E731
    return {"loss": model.update(lambda: tf.nn.compute_average_loss(squares()))}


def sum_by_batch(model, x, y):
    """Adds up its losses, as `tf.nn.compute_average_loss` does with a global batch size."""
    return {"loss": model.update(lambda: tf.reduce_sum((model(x) - y) ** 2) / 8)}


def by_hand(model, x, y):
    """Assigns the weights, without an optimizer."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    for weight, gradient in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True):
        weight.assign_sub(0.1 * gradient)
    return {"loss": loss}


class Decorated(Own):
    @tf.function
    def train_step(self, data):
        return mean_by_hand(self, *data)

    @tf.function
    def test_step(self, data):
        return super().test_step(data)


class OwnLoss(Own):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(tf.abs(y - y_pred)) + 0.1 * tf.reduce_sum(self.first.kernel**2)


class Slices(stepping(mean_by_hand)):
    """Writes a part of a variable, and adds a derivative along the examples to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = self.add_weight(shape=(6, 2), initializer="ones", trainable=False, name="table")

    def train_step(self, data):
        x, y = data
        self.table.value[1:3].assign(self.table.value[3:5] + 1.0)
        self.table.value[3:5].assign(self.table.value[1:3] * 0.5)

        def loss() -> tf.Tensor:
            with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
                outputs = self(x)
            return tf.reduce_mean((outputs - y) ** 2) + tf.reduce_mean(forward.jvp(outputs) ** 2)

        return {"loss": self.update(loss)}


# Functions that Keras calls for each execution.


class FunctionsAroundKeras(Own):
    """Wraps the functions that Keras makes."""

    def make_train_function(self, force=False):
        super().make_train_function(force=force)
        self.train_function = self._around(self.train_function)

    def make_test_function(self, force=False):
        super().make_test_function(force=force)
        self.test_function = self._around(self.test_function)

    def make_predict_function(self, force=False):
        super().make_predict_function(force=force)
        self.predict_function = self._around(self.predict_function)

    def _around(self, made: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda given: made(given)


class OwnFunctions(Own):
    """Makes the functions of training and evaluation itself."""

    def make_train_function(self, force=False):
        self.train_function = self._of_step(self.train_step)

    def make_test_function(self, force=False):
        self.test_function = self._of_step(self.test_step)

    def _of_step(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        strategy = self.distribute_strategy

        @tf.function
        def once(batch):
            logs = strategy.run(step, args=(batch,))
            return {name: strategy.experimental_local_results(value)[0] for name, value in logs.items()}

        return lambda iterator: once(next(iterator))


class DecoratedInOwnFunctions(OwnFunctions, Decorated):
    """Gives its decorated steps to `run` itself."""


# Losses.


def one_number(y, predicted):
    return tf.reduce_mean((y - predicted) ** 2)


def one_per_example(y, predicted):
    return tf.reduce_mean(tf.abs(y - predicted), -1)


class OneNumber(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return tf.reduce_mean((y_true - y_pred) ** 2)


class Penalty(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


class Called(keras.Model):
    """Model whose layers are built by its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))


class Masked(keras.layers.Layer):
    """Multiplies only some of the rows by a large kernel."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(3, 16384), name="kernel")

    def call(self, rows: Any) -> Any:
        mask = rows[:, 0] > 0.5
        product = tf.matmul(tf.boolean_mask(rows, mask), self.kernel)
        return tf.scatter_nd(tf.where(mask), product, [tf.shape(rows, tf.int64)[0], 16384])


class Places(keras.layers.Layer):
    """Embeds ids and their places, as transformers do: each replica looks up the same rows of places."""

    def __init__(self) -> None:
        super().__init__()
        self.ids, self.places = keras.layers.Embedding(5, 3), keras.layers.Embedding(4, 3)

    def call(self, ids):
        return self.ids(ids) + self.places(tf.range(tf.shape(ids)[-1]))


class Endpoint(keras.layers.Layer):
    """Takes the targets as an input and adds the loss, in place of `compile(loss=...)`."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = keras.losses.MeanSquaredError()

    def call(self, predicted, targets):
        self.add_loss(self.loss_fn(targets, predicted))
        return predicted


class Rows(keras.Model):
    """Multiplies rows with a kernel, be they ragged or sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = self.add_weight(shape=(5, 1), initializer=keras.initializers.RandomNormal(seed=3), name="k")

    def call(self, x: Any) -> Any:
        if isinstance(x, tf.SparseTensor):
            return tf.sparse.sparse_dense_matmul(x, tf.convert_to_tensor(self.kernel))
        return tf.matmul(x.to_tensor(shape=(None, 5)), tf.convert_to_tensor(self.kernel))


class Total(keras.metrics.Metric):
    """Shows its variable."""

    def __init__(self) -> None:
        super().__init__(name="total")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(y_pred))

    def result(self):
        return self.total


class Combined(Total):
    """A metric whose state is no sum: what `combine` makes of it and the targets."""

    def __init__(self, combine: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> None:
        super().__init__()
        self.combine = combine

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign(self.combine(tf.convert_to_tensor(self.total), y_true))

    def result(self):
        return tf.convert_to_tensor(self.total)


class MeanOfBatch(keras.metrics.Mean):
    """Mean over the batches of one number for each."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(tf.reduce_mean(tf.abs(y_true - y_pred)))


class AroundMean(keras.metrics.Metric):
    """Keeps such a mean within itself."""

    def __init__(self) -> None:
        super().__init__(name="around")
        self.mean = keras.metrics.Mean()

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.mean.update_state(one_number(y_true, y_pred))

    def result(self):
        return 2 * self.mean.result()

    def reset_state(self):
        self.mean.reset_state()
