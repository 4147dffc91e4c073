# SPDX-License-Identifier: Apache-2.0
"""Models and optimizers. Run by `test_parameter_server.py`."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from parameter_server_cluster import BATCH, STEPS, Own, X, Y, dataset, dense, fit
from training import assert_close

# What the numbers are worth.


@pytest.mark.slow  # `test_two_halves_are_the_plain_step` scales losses.
def test_mixed_precision(strategy: Any) -> None:
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = dense(strategy)
        losses = fit(model, X, Y, epochs=4)["loss"]
        optimizer = model.optimizer
        assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        skipped = 4 * STEPS - int(optimizer.iterations)
        halved = math.log2(2.0**15 / float(optimizer.dynamic_scale))
        # Two workers that skip at once halve the same scale, so that one halving is lost.
        assert skipped >= halved
        assert (skipped > 0) == (halved > 0)
        assert losses[-1] < losses[0]
        assert model.predict(X, verbose=0).dtype == np.float16
    finally:
        keras.mixed_precision.set_global_policy("float32")


def through_python(x: tf.Tensor, y: tf.Tensor) -> Any:
    return tf.ensure_shape(tf.py_function(lambda x: x, [x], tf.float32), [None, 6]), y


@pytest.mark.parametrize("source", [pytest.param("arrays", marks=pytest.mark.slow), "from Python"])
def test_a_model_with_steps_of_its_own(strategy: Any, source: str) -> None:
    """The logs of the step are no metrics, so Keras takes the last step's for the epoch's."""
    with strategy.scope():
        model = Own()
        model.compile(keras.optimizers.SGD(0.05))
    data, options = (dataset().map(through_python),), {}
    if source == "arrays":
        data, options = (X, Y), {"batch_size": BATCH}
    history = fit(model, *data, epochs=4)
    assert history["tracked"][-1] < history["tracked"][0]
    assert history["batches"] == [STEPS] * 4
    assert all(math.isfinite(loss) for loss in history["raw"])
    assert model.evaluate(*data, verbose=0, return_dict=True, **options)["batches"] == STEPS


def test_logs_of_an_epoch_of_given_steps_are_those_of_all_of_them(strategy: Any) -> None:
    class Logging(keras.Sequential):
        def train_step(self, data: Any) -> dict[str, Any]:
            return {**super().train_step(data), "rate": tf.convert_to_tensor(self.optimizer.learning_rate)}

    with strategy.scope():
        model = Logging([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    history = model.fit(dataset().repeat(), steps_per_epoch=STEPS, epochs=2, verbose=0).history
    assert history["loss"][-1] == pytest.approx(float(model.get_metrics_result()["loss"]))


@pytest.mark.parametrize(
    "steps_per_execution",
    # Within a pass with a remainder. TensorFlow takes more than 32 reads of an iterator in a trace for an endless loop.
    [5, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (2, STEPS, 100))],
)
def test_metrics_of_several_steps_are_those_of_one_device(strategy: Any, steps_per_execution: int) -> None:
    """No step changes a weight, so all steps have the same to count, whichever worker makes them."""
    metrics = lambda: ["mae", keras.metrics.R2Score(), keras.metrics.RootMeanSquaredError()]  # noqa: E731
    none = lambda: keras.optimizers.SGD(0.0)  # noqa: E731
    model = dense(strategy, none, metrics=metrics, steps_per_execution=steps_per_execution)
    alone = dense(tf.distribute.get_strategy(), none, metrics=metrics)
    alone.set_weights(model.get_weights())
    found, expected = (fit(each, X, Y, epochs=2, shuffle=False) for each in (model, alone))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)


def test_single_batches_of_many_sizes_are_traced_twice(strategy: Any) -> None:
    traced = []

    class Noting(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            traced.append(x.shape[0])
            return x

    with strategy.scope():
        model = keras.Sequential([keras.Input((X.shape[1],)), Noting(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    for size in (3, 4, 5, 6):
        assert math.isfinite(model.train_on_batch(X[:size], Y[:size]))
        assert model.predict_on_batch(X[:size]).shape == (size, 1)
        if size == 4:
            before = len(traced)
    assert len(traced) == before
    assert traced[-1] is None


class Looking(keras.Sequential):
    """Looks at values in its step, as one does to find a mistake."""

    def __init__(self) -> None:
        super().__init__([keras.Input((X.shape[1],)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
        self.seen: list[float] = []

    def train_step(self, data: Any) -> Any:
        self.seen.append(float(data[1].numpy().sum()))
        logs = super().train_step(data)
        assert float(logs["loss"]) > 0
        return logs


def test_run_eagerly_is_one_device_and_steps_see_values(strategy: Any) -> None:
    def made() -> Looking:
        model = Looking()
        model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True, steps_per_execution=3)
        return model

    with strategy.scope():
        many = made()
    with tf.distribute.get_strategy().scope():
        alone = made()
    alone.set_weights(many.get_weights())
    found = fit(many, X, Y, validation_data=(X, Y), shuffle=False)
    expected = fit(alone, X, Y, validation_data=(X, Y), shuffle=False)
    assert many.seen == pytest.approx(alone.seen)
    assert int(many.optimizer.iterations) == int(alone.optimizer.iterations) == STEPS
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-4)
    assert_close(alone.get_weights(), many.get_weights())


# What can't hold.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jit_compile": True}, "jit_compile=True cannot hold"),
        (
            {
                "optimizer": lambda: keras.optimizers.LossScaleOptimizer(
                    keras.optimizers.SGD(gradient_accumulation_steps=2)
                )
            },
            "gradient_accumulation_steps",
        ),
    ],
    ids=["jit_compile", "accumulation with loss scaling"],
)
def test_what_can_not_hold_is_refused_before_anything_is_trained(strategy: Any, options: Any, message: str) -> None:
    model = dense(strategy, **options)
    with pytest.raises(ValueError, match=message):
        fit(model, X, Y)
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("call", ["fit", pytest.param("evaluate", marks=pytest.mark.slow)])
def test_data_set_captured_in_a_step_is_refused(strategy: Any, call: str) -> None:
    class Reading(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.others = keras.layers.Dense(1), tf.data.Dataset.range(12).batch(5)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            return {"total": tf.reduce_sum(self(data[0])) + tf.cast(next(iter(self.others))[0], "float32")}

        test_step = train_step

    with strategy.scope():
        model = Reading()
        model.compile("sgd")
    with pytest.raises(ValueError, match=r"_step uses a tf\.data\.Dataset .*zip\(\(data, others\)\)") as raised:
        getattr(model, call)(X, Y, verbose=0)
    assert "\n" not in str(raised.value)
