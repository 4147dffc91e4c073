# SPDX-License-Identifier: Apache-2.0
"""Calls of Keras' loops are open from their beginning to their end, and know what they were called with."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import trainer
from overlapping import in_thread

import tfdist
from tfdist.compat.keras import calls, fit

pytestmark = [pytest.mark.devices, pytest.mark.timeout(120)]

X = np.ones((8, 3), np.float32)
Y = X[:, :1]


class Watch(keras.callbacks.Callback):
    """Does something at the first batch of `fit`."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self._act = act

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not batch:
            self._act()


class OwnFit(keras.Sequential):
    """Model with a `fit` of its own, around Keras'."""

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        return super().fit(*args, verbose=0, **kwargs)


@pytest.fixture(scope="module")
def strategy() -> Any:
    return tfdist.MirroredStrategy(["CPU:0"])


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    assert not calls._open


def _model(strategy: Any, kind: Any = keras.Sequential) -> keras.Model:
    with strategy.scope():
        model = kind([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def _kinds() -> list[str]:
    return [call.kind for call in calls._open[threading.get_ident()]]


def test_calls_nest_and_each_knows_its_model(strategy: Any):
    outer, inner, seen = _model(strategy), _model(strategy), []

    def look() -> None:
        call = calls.current()
        assert call is not None
        seen.append((_kinds(), call.model is inner, calls.fit_of(outer) is not None, calls.iterating_fit() is call))

    class Look(keras.callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            look()

    watch = Watch(lambda: inner.evaluate(X, Y, verbose=0, callbacks=[Look()]))
    outer.fit(X, Y, verbose=0, callbacks=[watch, Watch(look)])
    assert seen == [(["fit", "evaluate"], True, True, False), (["fit"], False, True, True)]


def test_fit_knows_its_callbacks_and_its_epochs(strategy: Any):
    model, seen = _model(strategy, OwnFit), []

    def look() -> None:
        fit = calls.fit_of(model)
        assert fit is not None
        seen.append((watch in fit.callbacks.callbacks, fit.epochs is not None))

    watch = Watch(look)
    model.fit(X, Y, callbacks=[watch], validation_data=(X, Y))
    assert seen == [(True, True)]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_call_that_raises_is_closed(strategy: Any, error: type[BaseException]):
    model = _model(strategy)

    def fail() -> None:
        raise error

    with pytest.raises(error):
        model.fit(X, Y, verbose=0, callbacks=[Watch(fail)])
    assert calls.current() is None
    assert model.predict(X, verbose=0).shape == (8, 1)


def test_calls_are_those_of_their_thread(strategy: Any):
    model, seen = _model(strategy), []

    def look() -> None:
        in_thread(lambda: seen.append((calls.current(), calls.name(main))))

    main = threading.current_thread()
    model.fit(X, Y, verbose=0, callbacks=[Watch(look)])
    assert seen == [(None, "model.fit")]


def test_the_strategy_explains_an_error_of_an_operation_once(strategy: Any, monkeypatch: pytest.MonkeyPatch):
    outer, inner, asked = _model(strategy), _model(strategy), []

    def explained(self: Any, error: Exception) -> Exception:
        asked.append(error)
        return tf.errors.UnavailableError(None, None, "the server is lost")

    class Fail(keras.callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            raise tf.errors.AbortedError(None, None, "many lines")

    monkeypatch.setattr(type(strategy), "explained", explained)
    watch = Watch(lambda: inner.evaluate(X, Y, verbose=0, callbacks=[Fail()]))
    with pytest.raises(tf.errors.UnavailableError, match="the server is lost"):
        outer.fit(X, Y, verbose=0, callbacks=[watch])
    assert [error.message for error in asked] == ["many lines"]


def test_listeners_that_are_gone_are_left_out_by_calls_within_a_call():
    class Owner:
        def __init__(self) -> None:
            self.heard = 0

        def hear(self) -> None:
            self.heard += 1
            if self.heard == 1:
                # As another thread does in the meantime.
                listeners.call()

    listeners, owner = calls.Listeners(), Owner()
    listeners.add(owner.hear)
    listeners.add(Owner().hear)
    listeners.call()
    assert owner.heard == 2


def test_a_function_put_in_place_of_fit_is_a_fit_and_gets_what_was_given(
    strategy: Any, monkeypatch: pytest.MonkeyPatch
):
    kinds, given, stock = list[str](), list[Any](), inspect.unwrap(keras.Model.fit)

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        given.append((len(args), sorted(kwargs)))
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(calls.TRAINER, "fit", timed)
    calls.follow()
    model = _model(strategy)
    model.fit(X, Y, verbose=0, callbacks=[Watch(lambda: kinds.extend(_kinds()))])
    assert kinds == ["fit"] and given == [(2, ["callbacks", "verbose"])]


def test_a_function_put_in_place_of_make_train_function_is_known(strategy: Any, monkeypatch: pytest.MonkeyPatch):
    asked, stock = list[str](), inspect.unwrap(keras.Model.make_train_function)

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(calls.TRAINER, "make_train_function", timed)
    calls.ask_strategies("train")
    monkeypatch.setattr(type(strategy), "function_of", lambda self, model, kind, made: asked.append(kind) or made)
    _model(strategy).fit(X, Y, verbose=0)
    assert asked == ["train"]


@pytest.mark.parametrize("begun", [0, 1])
def test_a_pass_of_a_job_may_have_more_batches_than_the_first(begun: int):
    lengths = iter([2, 3, 1])
    data = tf.data.Dataset.from_generator(lambda: range(next(lengths)), output_signature=tf.TensorSpec([], tf.int64))
    epochs = trainer.TFEpochIterator(tf.distribute.get_strategy(), data.batch(1))
    fit.take_any_length(epochs)
    if begun:
        fit.EpochIterator(epochs).begin_within_epoch(begun, begun, lambda: None)
    counts = [0, 0, 0]
    for number in range(3):
        with pytest.warns(UserWarning, match="ran out of data"), epochs.catch_stop_iteration():
            for _, _, batches in epochs:
                next(batches)
                counts[number] += 1
    assert counts == [2, 3, 1]
