# SPDX-License-Identifier: Apache-2.0
"""What is trained under a strategy and on one device, by name: functions of a strategy that return numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import own_models
import tensorflow as tf
import training
from training import OPTIMIZERS, RANDOM, X, Y

LAYERS = keras.layers
CASES: dict[str, Callable[[Any], Any]] = {}
BOTH = ["evaluate", "predict"]


def _add(name: str, optimizer: Callable[[], Any], **options: Any) -> None:
    CASES[name] = lambda strategy: training.trained(strategy, optimizer, **dict(options))


def _case(name: str, *arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a function of a strategy and these arguments. Nothing starts TensorFlow's runtime before it is called."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        CASES[name] = lambda strategy: function(strategy, *arguments)
        return function

    return add


# Optimizers.

_add("sgd", lambda: OPTIMIZERS.SGD(0.1))
_add("adam", lambda: OPTIMIZERS.Adam(0.01))
_add("global_clipnorm", lambda: OPTIMIZERS.SGD(0.1, global_clipnorm=0.01))
_add("decay, ema", lambda: OPTIMIZERS.AdamW(0.01, weight_decay=0.1, use_ema=True, clipvalue=0.01))
_add("ema overwrites", lambda: OPTIMIZERS.SGD(0.1, use_ema=True, ema_overwrite_frequency=5))
_add(
    "accumulation, clipnorm, ema",
    lambda: OPTIMIZERS.SGD(0.1, clipnorm=0.05, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=3),
)
_add("loss scale", lambda: OPTIMIZERS.LossScaleOptimizer(OPTIMIZERS.Adam(0.01, clipnorm=0.1)))
_add(
    "loss scale, accumulation",
    lambda: OPTIMIZERS.LossScaleOptimizer(OPTIMIZERS.SGD(0.1, gradient_accumulation_steps=2)),
)

# Ways to fit.

_adam = functools.partial(_add, optimizer=lambda: OPTIMIZERS.Adam(0.01))
_adam("steps_per_execution", steps_per_execution=4, calls=BOTH)
_adam("run_eagerly", run_eagerly=True, calls=BOTH)
_adam("validation_split", fit={"validation_split": 0.2})
_adam("steps_per_epoch", fit={"steps_per_epoch": 3})
_adam("sample_weight", fit={"sample_weight": np.linspace(0, 2, 45, dtype=np.float32)})
_adam("fewer examples than replicas", fit={"batch_size": 1, "epochs": 1}, calls=BOTH)
_adam("batches of one size", fit={"batch_size": 9}, calls=BOTH)
_adam("sum loss", loss=keras.losses.MeanSquaredError(reduction="sum"), calls=BOTH)

# Models and data.

_add(
    "class weights",
    lambda: OPTIMIZERS.SGD(0.1),
    model=lambda: keras.Sequential([keras.Input((3,)), LAYERS.Dense(1, "sigmoid")]),
    data=(X, RANDOM.integers(0, 2, (45,))),
    loss="binary_crossentropy",
    metrics=["accuracy", "auc"],
    fit={"class_weight": {0: 1.0, 1: 3.0}},
    calls=BOTH,
)


def _embedding() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), LAYERS.Embedding(5, 3), LAYERS.Flatten(), LAYERS.Dense(1)])


_rows = {"model": _embedding, "data": (RANDOM.integers(0, 5, (45, 4)), Y)}
_add("embedding", lambda: OPTIMIZERS.SGD(0.1), **_rows)
# Within one execution of several steps, the last batch has fewer rows than those before.
_add("embedding, steps_per_execution", lambda: OPTIMIZERS.SGD(0.1), steps_per_execution=4, **_rows)
_add("embedding, clipnorm", lambda: OPTIMIZERS.Adam(0.01, clipnorm=0.1), steps_per_execution=4, **_rows)
_adam(
    "dicts",
    model=training.two_ends,
    data=(
        {"first": X, "second": RANDOM.random((45, 2), np.float32)},
        {"sum": Y, "kind": RANDOM.integers(0, 4, (45,))},
    ),
    loss={"sum": "mse", "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
    metrics={"sum": ["mae"], "kind": ["accuracy"]},
    calls=BOTH,
)


def _constrained() -> keras.Model:
    first = LAYERS.Dense(4, kernel_regularizer="l2", kernel_constraint="non_neg")
    return keras.Sequential([keras.Input((3,)), first, LAYERS.Dense(1)])


_add("constraint", lambda: OPTIMIZERS.SGD(0.1), model=_constrained)
_add(
    "constraint, sum loss",
    lambda: OPTIMIZERS.SGD(0.01),
    model=_constrained,
    loss=keras.losses.MeanSquaredError(reduction="sum"),
)


def _recurrent() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), LAYERS.Reshape((3, 1)), LAYERS.LSTM(2), LAYERS.Dense(1)])


_add(
    "recurrent, built from one example",
    lambda: OPTIMIZERS.SGD(0.1),
    model=_recurrent,
    data=(X[:5], Y[:5]),
    fit={"batch_size": 1, "epochs": 1},
)

# The last batch of 4 has one example, for two replicas.
SEQUENCES = RANDOM.random((9, 5, 2), np.float32)


@_case("LSTM", lambda: LAYERS.LSTM(3))
@_case("GRU, both directions", lambda: LAYERS.Bidirectional(LAYERS.GRU(3, return_sequences=True)))
@_case("ConvLSTM", lambda: keras.Sequential([LAYERS.Reshape((5, 2, 1)), LAYERS.ConvLSTM1D(2, 1)]))
def _sequences(strategy: Any, recurrent: Callable[[], Any]) -> list[Any]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5, 2)), recurrent(), LAYERS.Flatten(), LAYERS.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
    x, y = SEQUENCES, Y[:9]
    fit = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, validation_data=(x[:5], y[:5]))
    return [
        fit.history,
        model.evaluate(x[:1], y[:1], verbose=0),
        model.predict(x[:1], verbose=0),
        model.get_weights(),
    ]


LENGTHS = [3, 1, 5, 2, 4, 1, 2, 5, 3, 2]
RAGGED = [RANDOM.random(length).tolist() for length in LENGTHS]


@_case("ragged", "ragged")
@_case("sparse", "sparse")
def _not_dense(strategy: Any, kind: str) -> Any:
    ragged = tf.ragged.constant(RAGGED, tf.float32)
    rows = ragged if kind == "ragged" else ragged.to_sparse()
    with strategy.scope():
        model = own_models.Rows()
        model.compile(OPTIMIZERS.SGD(0.1), "mse", metrics=["mae"])
    history = model.fit(tf.data.Dataset.from_tensor_slices((rows, Y[:10])).batch(4), epochs=2, verbose=0).history
    return model.get_weights(), history


# Steps of their own.

_sgd = functools.partial(_add, optimizer=lambda: OPTIMIZERS.SGD(0.1))
_own = functools.partial(_sgd, metrics=None)
SIZES = {"one over": 8, "fewer examples than replicas": 1}
for _words, _size in SIZES.items():
    _fit = {"batch_size": _size, "epochs": 1}
    for _step in (own_models.mean_by_hand, own_models.of_keras, own_models.of_both, own_models.average_by_tensorflow):
        _options: dict[str, Any] = {}
        if _step is own_models.average_by_tensorflow and _size == 8:
            # It divides by the size of the batch that a replica has, times their number.
            _options["data"] = (X[:40], Y[:40])
        _own(f"step {_step.__name__}, {_words}", model=own_models.stepping(_step), fit=_fit, **_options)
    _own(f"step tracked, {_words}", model=own_models.stepping(own_models.tracked), fit=_fit)
_own("step decorated", model=own_models.Decorated, fit={"epochs": 1})
_own("step that assigns", model=own_models.stepping(own_models.by_hand), fit={"epochs": 1})
_adam("own compute_loss", model=own_models.OwnLoss, calls=["evaluate"])

# Losses of users' code, and penalties.

_LOSSES = {
    "one number": own_models.one_number,
    "one number, tf.function": tf.function(own_models.one_number),
    "one per example": own_models.one_per_example,
    "one number of a class": own_models.OneNumber(),
}
for _words, _size in SIZES.items():
    for _name, _loss in _LOSSES.items():
        _sgd(f"loss {_name}, {_words}", loss=_loss, fit={"batch_size": _size, "epochs": 1}, calls=["evaluate"])


@_case("loss beside one of Keras")
def _two_losses(strategy: Any) -> list[Any]:
    data = tf.data.Dataset.from_tensor_slices((X, (Y, 2 * Y))).batch(8)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        inputs = keras.Input((3,))
        model = keras.Model(inputs, [LAYERS.Dense(1, name="one")(inputs), LAYERS.Dense(1, name="other")(inputs)])
        model.compile(OPTIMIZERS.SGD(0.1), [own_models.one_number, "mae"], loss_weights=[1.0, 0.5])
    history = model.fit(data, epochs=2, verbose=0).history
    return [history, model.get_weights(), model.evaluate(data, verbose=0)]


def _penalized() -> keras.Model:
    first = LAYERS.Dense(8, activity_regularizer="l2", kernel_regularizer="l1")
    return keras.Sequential([keras.Input((3,)), first, own_models.Penalty(), LAYERS.Dense(1)])


for _reduction in ("sum", "sum_over_batch_size"):
    for _count, _words in ((45, "uneven"), (41, "one example left")):
        _add(
            f"penalties, {_reduction}, {_words}",
            lambda: OPTIMIZERS.SGD(0.01),
            model=_penalized,
            loss=keras.losses.MeanSquaredError(reduction=_reduction),
            data=(X[:_count], Y[:_count]),
            fit={"epochs": 1},
            calls=["evaluate"],
        )


@_case("losses of layers alone", False)
@_case("losses of layers alone, eagerly", True)
def _added_losses(strategy: Any, run_eagerly: bool) -> list[Any]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        x, targets = keras.Input((3,), name="x"), keras.Input((1,), name="targets")
        model = keras.Model([x, targets], own_models.Endpoint()(LAYERS.Dense(1)(x), targets))
        model.compile(OPTIMIZERS.Adam(0.01), run_eagerly=run_eagerly)
    data = {"x": X[:40], "targets": Y[:40]}
    history = model.fit(data, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return [history, model.evaluate(data, batch_size=8, verbose=0), model.get_weights()]
