# SPDX-License-Identifier: Apache-2.0
"""Keras' own steps are recognised as Keras hands them in; a Keras that hands in something else fails here, loudly."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.step.step import Step, check_for_workers

pytestmark = pytest.mark.devices

X, Y = np.ones((4, 3), np.float32), np.ones((4, 1), np.float32)


class Recorder:
    """Stands in for a strategy: notes what Keras gives to `run`, and runs it."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self._strategy = tf.distribute.get_strategy()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def run(self, fn: Callable[..., Any], args: tuple = (), kwargs: Any = None) -> Any:
        self.kinds.append(Step(fn).kind)
        return self._strategy.run(fn, args, kwargs)


def model(**compiled: Any) -> keras.Model:
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    made.compile(**{"optimizer": "sgd", "loss": "mse", **compiled})
    return made


class Own(keras.Model):
    """A model with steps of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)

    def test_step(self, data: Any) -> Any:
        return super().test_step(data)

    def predict_step(self, data: Any) -> Any:
        return super().predict_step(data)


def own() -> keras.Model:
    made = Own()
    made.compile("sgd", "mse")
    return made


MODELS = {
    "sequential": model,
    "own steps": own,
    "several steps per execution": functools.partial(model, steps_per_execution=2),
    "eager": functools.partial(model, run_eagerly=True),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_what_keras_hands_in_is_recognised(make: Callable[[], keras.Model]) -> None:
    recorder = Recorder()
    made = make()
    made._distribute_strategy = recorder
    made.fit(X, Y, batch_size=2, verbose=0)
    assert set(recorder.kinds) == {"train"}
    recorder.kinds.clear()
    made.evaluate(X, Y, batch_size=2, verbose=0)
    assert set(recorder.kinds) == {"test"}
    recorder.kinds.clear()
    made.predict(X, batch_size=2, verbose=0)
    assert set(recorder.kinds) == {"predict"}


def test_the_methods_of_a_model_are_told_apart() -> None:
    made = model()
    assert Step(made.train_step).kind == "train"
    assert Step(made.test_step).kind == "test"
    assert Step(made.get_weights).kind == "other"
    assert Step(tf.autograph.experimental.do_not_convert(made.train_step)).kind == "train"


def train_step(data: Any) -> Any:
    return data


class NoModel:
    def train_step(self, data: Any) -> Any:
        return data


@pytest.mark.parametrize(
    "fn",
    [train_step, NoModel().train_step, functools.partial(train_step, 1), lambda data: data, len, "not a function"],
    ids=["function", "method", "partial", "lambda", "built in", "text"],
)
def test_any_other_function_is_run_as_any_other(fn: Any) -> None:
    assert Step(fn).kind == "other"


# What can't hold.


def test_compiling_with_xla_is_refused_for_each_step_of_a_model() -> None:
    compiled = model(jit_compile=True)
    for fn in (compiled.train_step, compiled.test_step):
        with pytest.raises(ValueError, match="jit_compile=True cannot hold"):
            check_for_workers(Step(fn), asynchronous=True)
    check_for_workers(Step(tf.function(train_step)), asynchronous=True)


def test_gradient_accumulation_with_loss_scaling_is_refused_in_one_line() -> None:
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=4))
    with pytest.raises(ValueError, match="Received: gradient_accumulation_steps=4") as raised:
        check_for_workers(Step(model(optimizer=optimizer).train_step), asynchronous=True)
    assert "\n" not in str(raised.value)


def test_gradient_accumulation_is_not_refused_otherwise() -> None:
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=4)
    accumulating, scaled = model(optimizer=optimizer), model(optimizer=keras.optimizers.LossScaleOptimizer(optimizer))
    for step in (accumulating.train_step, scaled.test_step):
        check_for_workers(Step(step), asynchronous=True)
    check_for_workers(Step(scaled.train_step), asynchronous=False)
    assert accumulating.optimizer.built and scaled.optimizer.built


def test_the_optimizer_makes_its_variables_before_a_step_is_traced() -> None:
    made = model(optimizer="adam")
    assert not made.optimizer.built
    check_for_workers(Step(made.train_step), asynchronous=True)
    assert made.optimizer.built
    assert len(made.optimizer.variables) > 2


def test_a_model_without_an_optimizer_passes() -> None:
    made = model()
    made.optimizer = None
    check_for_workers(Step(made.train_step), asynchronous=True)
