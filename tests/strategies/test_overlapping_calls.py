# SPDX-License-Identifier: Apache-2.0
"""Calls of Keras' loops that overlap are refused before they train, unless each keeps its own counts."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from overlapping import during_fit, in_thread

import tfdist
from tfdist.compat.tensorflow import replicas

pytestmark = [pytest.mark.devices, pytest.mark.timeout(300)]

X = np.random.default_rng(0).normal(size=(96, 3)).astype("float32")
Y = X[:, :1]
STEPS = 12
STRATEGIES: dict[str, Callable[[], Any]] = {
    "one worker": tfdist.MultiWorkerMirroredStrategy,
    "none": lambda: tfdist.MirroredStrategy(["CPU:0", "CPU:1"]),
    "warmup": lambda: tfdist.MirroredStrategy(["CPU:0", "CPU:1"], policies=[tfdist.Warmup(steps=6)]),
}


def _model(strategy: Any) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    return model


def _fit(model: keras.Model, **kwargs: Any) -> Callable[..., Any]:
    return functools.partial(model.fit, X, Y, batch_size=8, verbose=0, **kwargs)


def _evaluate(model: keras.Model) -> Callable[[], Any]:
    return functools.partial(model.evaluate, X, Y, batch_size=8, verbose=0)


def _predict(model: keras.Model) -> Callable[[], Any]:
    return functools.partial(model.predict, X, batch_size=8, verbose=0)


def _steps(model: keras.Model) -> int:
    return int(model.optimizer.iterations.numpy())


def test_keys_of_two_threads_are_not_mixed():
    # TensorFlow draws a key for each device in turn; another thread may draw in between.
    keys, drawn = replicas._KeysOfThreads(2), []
    for _ in range(3):
        drawn.append(keys.draw("first"))
        in_thread(lambda: drawn.extend([keys.draw("first"), keys.draw("second")]))
        drawn.append(keys.draw("second"))
    assert drawn[0::4] == drawn[3::4]
    assert drawn[1::4] == drawn[2::4]
    assert len({*drawn}) == 6


# `tests/conformance` has this, and calls within callbacks, for the others.
@pytest.mark.parametrize("name", ["one worker", "warmup"])
def test_second_thread_fitting_a_model_is_refused(name: str):
    model = _model(STRATEGIES[name]())
    meanwhile = during_fit(_fit(model), _fit(model))
    assert meanwhile.error.startswith(f"fit of model {model.name!r} overlaps with another thread's call")
    assert "begin it when the other has ended" in meanwhile.error
    assert "thread 'other' during fit of model" in meanwhile.error
    assert "\n" not in meanwhile.error
    assert _steps(model) == STEPS
    _fit(model)()
    assert _steps(model) == 2 * STEPS


def test_calls_with_counts_of_the_same_model_are_refused():
    model = _model(STRATEGIES["one worker"]())
    for call in (_evaluate(model), lambda: model.train_on_batch(X[:8], Y[:8]), lambda: model.test_on_batch(X, Y)):
        assert "both would write the same metrics" in during_fit(_fit(model), call).error
    assert during_fit(_fit(model), _predict(model)).result.shape == (96, 1)
    assert _steps(model) == 4 * STEPS


@pytest.mark.slow
def test_models_of_several_replicas_are_refused_in_two_threads():
    strategy = STRATEGIES["none"]()
    model, other = _model(strategy), _model(strategy)
    error = during_fit(_fit(model), _fit(other)).error
    assert "TensorFlow's sums over the replicas can hang beside those of another thread" in error
    assert during_fit(_fit(model), _predict(other)).result.shape == (96, 1)
    _fit(other)()
    assert [_steps(model), _steps(other)] == [2 * STEPS, STEPS]


def test_two_models_train_in_two_threads():
    strategy = STRATEGIES["one worker"]()
    models = [_model(strategy), _model(strategy)]
    both = threading.Barrier(2)

    class Wait(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            both.wait(100)

    threads = [threading.Thread(target=_fit(model, epochs=3, callbacks=[Wait()])) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [_steps(model) for model in models] == [3 * STEPS] * 2


def test_other_models_are_refused_under_a_policy():
    strategy = STRATEGIES["warmup"]()
    model, other = _model(strategy), _model(strategy)
    for call in (_fit(other), _evaluate(other), _predict(other)):
        assert "share one engine" in during_fit(_fit(model), call).error
    assert (_steps(model), _steps(other)) == (3 * STEPS, 0)


def test_failed_fit_leaves_nothing_locked():
    model = _model(STRATEGIES["one worker"]())

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise KeyboardInterrupt

    # Its traceback, which is kept, holds the frames of fit.
    with pytest.raises(KeyboardInterrupt) as kept:
        _fit(model, callbacks=[Fails()])()
    meanwhile = during_fit(_fit(_model(model.distribute_strategy)), _fit(model))
    assert not meanwhile.error
    in_thread(_fit(model, callbacks=[Fails()]))
    _fit(model)()
    assert kept.value is not None
    assert _steps(model) == 2 * STEPS + 2


def test_models_that_were_trained_are_freed():
    model = _model(STRATEGIES["none"]())
    _fit(model)()
    during_fit(_fit(model), _fit(model))
    gone = weakref.ref(model)
    del model
    keras.backend.clear_session()
    gc.collect()
    assert gone() is None
