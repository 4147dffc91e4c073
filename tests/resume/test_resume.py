# SPDX-License-Identifier: Apache-2.0
"""An interrupted training comes to the same weights, bit for bit, as one that was not interrupted."""

from __future__ import annotations

import functools
import gc
import os
import pathlib
import re
import signal
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cutting_off import CutOff, CutOffError

import tfdist
from tfdist.compat.keras import calls

pytestmark = pytest.mark.timeout(300)

X = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
Y = X[:, :1] * 2
EPOCHS = 4


class Numbers(keras.callbacks.Callback):
    """Keeps the numbers of the steps that Keras tells callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append((self.epoch, batch))


class Unbuilt(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.drop, self.last = keras.layers.Dense(8), keras.layers.Dropout(0.3), keras.layers.Dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.last(self.drop(self.hidden(x), training=training))


def _model(built: bool = True, steps_per_execution: int = 1, optimizer: Any = None, **kwargs: Any) -> keras.Model:
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)]) if built else Unbuilt()
    optimizer = optimizer or keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=steps_per_execution, **kwargs)
    return model


def _data(kind: str) -> dict[str, Any]:
    if kind == "arrays":
        return {"x": X, "y": Y, "batch_size": 8}
    shuffled = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(96, seed=3).batch(8)
    return {
        "shuffled": {"x": shuffled},
        "endless": {"x": shuffled.repeat(), "steps_per_epoch": 7},
        "of unknown length": {"x": shuffled.filter(lambda x, y: True)},
        "twice": {"x": shuffled.unbatch().shuffle(20, seed=4).batch(8)},
        "twice, of known length": {"x": shuffled.shuffle(5, seed=4)},
    }[kind]


def _fit(
    model: keras.Model, kind: str, callbacks: list[Any], epochs: int = EPOCHS, **kwargs: Any
) -> dict[str, list[float]]:
    return model.fit(**_data(kind), epochs=epochs, verbose=0, callbacks=callbacks, **kwargs).history


def _weights(model: keras.Model) -> list[np.ndarray]:
    return [*model.get_weights(), *(np.asarray(variable) for variable in model.optimizer.variables)]


def _assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for value, each in zip(found, expected, strict=True):
        np.testing.assert_array_equal(value, each)


def _assert_resumed(
    directory: pathlib.Path, model: Callable[[], keras.Model], kind: str, save_freq: int, after: int, **options: Any
) -> None:
    """Compares the weights of a resumed training, and its logs of whole epochs, with one that was not cut off."""
    uninterrupted = model()
    history = _fit(uninterrupted, kind, [], **options)
    with pytest.raises(CutOffError):
        _fit(model(), kind, [tfdist.callbacks.Resume(directory, save_freq), CutOff(after)], **options)
    resumed = model()
    found = _fit(resumed, kind, [tfdist.callbacks.Resume(directory, save_freq)], **options)
    _assert_equal(_weights(resumed), _weights(uninterrupted))
    assert found.keys() == history.keys()
    for name, values in found.items():
        np.testing.assert_allclose(values, history[name][-len(values) :], rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "steps_per_execution", "save_freq", "after"),
    [
        # At the end of an epoch, which comes as one step more where the length is not known.
        ("of unknown length", 1, 1, 12),
        # Iterators that `fit` makes and never reads let the second shuffle draw an order, and not the first.
        ("twice, of known length", 1, 5, 17),
        pytest.param("twice", 1, 5, 17, marks=pytest.mark.slow),
        pytest.param("endless", 3, 7, 7, marks=pytest.mark.slow),
    ],
)
def test_it_goes_on_as_if_nothing_had_happened(
    tmp_path: pathlib.Path, kind: str, steps_per_execution: int, save_freq: int, after: int
):
    model = functools.partial(_model, steps_per_execution=steps_per_execution)
    _assert_resumed(tmp_path, model, kind, save_freq, after)


@pytest.mark.parametrize(
    "change",
    [
        {"built": False, "optimizer": lambda: keras.optimizers.Adam(0.01)},
        pytest.param({"run_eagerly": True}, marks=pytest.mark.slow),
    ],
    ids=["unbuilt, Adam", "eager"],
)
def test_all_that_the_next_step_depends_on_is_kept(tmp_path: pathlib.Path, change: dict[str, Any]):
    def model() -> keras.Model:
        made: dict[str, Any] = {name: value() if callable(value) else value for name, value in change.items()}
        return _model(**made)

    _assert_resumed(tmp_path, model, "arrays", 5, 17, epochs=2, validation_data=(X, Y))


def test_a_training_that_has_ended_is_not_repeated(tmp_path: pathlib.Path):
    first = _model()
    _fit(first, "shuffled", [tfdist.callbacks.Resume(tmp_path, "epoch")])
    again, numbers = _model(), Numbers()
    _fit(again, "shuffled", [tfdist.callbacks.Resume(tmp_path, "epoch"), numbers])
    assert numbers.seen == []
    _assert_equal(_weights(again), _weights(first))
    # More epochs go on from there; and a fit without the callback begins where it always does.
    again.fit(**_data("shuffled"), epochs=EPOCHS + 1, verbose=0, callbacks=[tfdist.callbacks.Resume(tmp_path), numbers])
    assert numbers.seen == [(EPOCHS, step) for step in range(12)]
    numbers.seen.clear()
    again.fit(**_data("shuffled"), epochs=1, verbose=0, callbacks=[numbers])
    assert numbers.seen == [(0, step) for step in range(12)]


def test_the_end_of_an_early_stop_is_saved(tmp_path: pathlib.Path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 4

    model = _model()
    _fit(model, "shuffled", [tfdist.callbacks.Resume(tmp_path, 1000), Stop()])
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000005"]


class Signal(keras.callbacks.Callback):
    def __init__(self, after: int, times: int = 1, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.left, self.times, self.number = after, times, number

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if not self.left:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


def test_a_signal_saves_and_ends_the_program_with_75(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture):
    after = 17
    before = signal.getsignal(signal.SIGTERM)
    uninterrupted = _model()
    history = _fit(uninterrupted, "arrays", [])
    with pytest.raises(SystemExit) as ended:
        _fit(_model(), "arrays", [tfdist.callbacks.Resume(tmp_path, "epoch"), Signal(after)])
    assert ended.value.code == 75
    assert signal.getsignal(signal.SIGTERM) == before
    line = f"tfdist: SIGTERM: step {after} is saved in {re.escape(str(tmp_path))}; ending with code 75"
    assert re.search(line, capfd.readouterr().err)
    model = _model()
    resumed = _fit(model, "arrays", [tfdist.callbacks.Resume(tmp_path, "epoch")])
    _assert_equal(_weights(model), _weights(uninterrupted))
    for name, values in resumed.items():
        np.testing.assert_allclose(values, history[name][-len(values) :], rtol=1e-6)


@pytest.mark.slow
def test_after_fit_a_signal_does_what_it_did_before(tmp_path: pathlib.Path):
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        resume = tfdist.callbacks.Resume(tmp_path, signals=[signal.SIGUSR1])
        with pytest.raises(CutOffError):
            _fit(_model(), "arrays", [resume, CutOff(3)])
        # fit was left without a word to its callbacks.
        os.kill(os.getpid(), signal.SIGUSR1)
        assert received == [signal.SIGUSR1]
        with pytest.raises(SystemExit):
            _fit(_model(), "arrays", [resume, Signal(2, times=2, number=signal.SIGUSR1)])
        # The second one has its usual effect.
        assert received == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_another_model_or_other_data_are_refused(tmp_path: pathlib.Path):
    with pytest.raises(CutOffError):
        _fit(_model(), "arrays", [tfdist.callbacks.Resume(tmp_path, 5), CutOff(7)])
    with pytest.raises(ValueError, match=r"has a checkpoint of another model .* give Resume another directory"):
        _fit(_model(optimizer=keras.optimizers.Adam(0.1)), "arrays", [tfdist.callbacks.Resume(tmp_path)])
    with pytest.raises(ValueError, match=r"a fit over 12 batches per pass; .* Received: 24 batches"):
        _model().fit(X, Y, batch_size=4, verbose=0, callbacks=[tfdist.callbacks.Resume(tmp_path)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"directory": ""}, "directory"),
        ({"directory": "gs://bucket/run"}, "path of a file system"),
        ({"save_freq": 0}, "save_freq"),
        ({"save_freq": -5}, "save_freq"),
        ({"save_freq": 2.5}, "save_freq"),
        ({"save_freq": True}, "save_freq"),
        ({"save_freq": "batch"}, "save_freq"),
        ({"max_to_keep": 0}, "max_to_keep"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path: pathlib.Path, arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=f"{message}.*Received: "):
        tfdist.callbacks.Resume(**{"directory": tmp_path, **arguments})


def test_it_wants_a_fit_that_is_running(tmp_path: pathlib.Path):
    resume = tfdist.callbacks.Resume(tmp_path)
    resume.set_model(_model())
    with pytest.raises(RuntimeError, match="needs a running fit"):
        resume.on_train_begin()


@pytest.mark.slow
def test_one_iterator_that_ends_with_the_epoch_is_gone_on_with(tmp_path: pathlib.Path):
    """Keras has made the next epoch's iterator by then."""

    def fit(callbacks: list[Any]) -> keras.Model:
        model = _model()
        model.fit(**_data("shuffled"), steps_per_epoch=12, epochs=3, verbose=0, callbacks=callbacks)
        return model

    calm = fit([])
    with pytest.raises(CutOffError):
        fit([tfdist.callbacks.Resume(tmp_path, "epoch"), CutOff(15)])
    _assert_equal(_weights(fit([tfdist.callbacks.Resume(tmp_path)])), _weights(calm))


def test_what_callbacks_remember_of_a_metric_is_kept(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]):
    """A worse model than the best one before the restart is not taken for the best."""

    def fit(epochs: int, *others: keras.callbacks.Callback) -> list[Any]:
        best = keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", "loss", save_best_only=True)
        waiting = keras.callbacks.ReduceLROnPlateau("loss", patience=100)
        # From the third epoch on the model becomes worse.
        rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 1e-4 if epoch < 2 else 0.5)
        resume = tfdist.callbacks.Resume(tmp_path / "steps")
        _fit(_model(), "arrays", [rates, best, waiting, *others, resume], epochs=epochs)
        return [best.best, waiting.best, waiting.wait]

    with pytest.raises(CutOffError):
        fit(4, CutOff(3 * 12 + 1))
    kept = (tmp_path / "best.keras").read_bytes()
    best, waiting_best, waited = fit(4)
    assert (tmp_path / "best.keras").read_bytes() == kept
    assert best == waiting_best
    assert waited == 2
    # After a training that has ended, only the best model is remembered, as by the same objects in Keras.
    best_again, _, waited = fit(5)
    assert (best_again, waited) == (best, 0)
    assert (tmp_path / "best.keras").read_bytes() == kept
    assert "begins anew" not in capfd.readouterr().err


def test_averages_in_the_model_are_swapped_back(tmp_path: pathlib.Path):
    def fit(*others: keras.callbacks.Callback) -> list[np.ndarray]:
        model = _model()
        model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9), "mse")
        _fit(model, "arrays", [keras.callbacks.SwapEMAWeights(swap_on_epoch=True), *others])
        return _weights(model)

    with pytest.raises(CutOffError):
        fit(CutOff(12 + 1), tfdist.callbacks.Resume(tmp_path))
    _assert_equal(fit(tfdist.callbacks.Resume(tmp_path)), fit())


@pytest.mark.slow  # `test_what_callbacks_remember_of_a_metric_is_kept` has callbacks that are resumed.
def test_early_stopping_says_that_its_weights_are_gone(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]):
    def fit(*others: keras.callbacks.Callback) -> None:
        stop = keras.callbacks.EarlyStopping("loss", patience=100, restore_best_weights=True)
        _fit(_model(), "arrays", [stop, *others, tfdist.callbacks.Resume(tmp_path)])

    with pytest.raises(CutOffError):
        fit(CutOff(15))
    fit()
    assert "EarlyStopping(restore_best_weights=True) begins anew" in capfd.readouterr().err


@pytest.mark.slow
def test_a_fit_that_was_looked_up_before_the_callback_was_made_is_known(tmp_path: pathlib.Path):
    # As in `model.fit(x, y, callbacks=[Resume("checkpoints")])`, where nothing else of tfdist was used before.
    def fit(epochs: int, *others: Any) -> dict[str, list[float]]:
        calls.follow()
        early = vars(calls.TRAINER)["fit"].__wrapped__.__get__(_model())
        callbacks = [tfdist.callbacks.Resume(tmp_path), *others]
        return early(X, Y, validation_data=(X, Y), epochs=epochs, callbacks=callbacks, verbose=0).history

    assert len(fit(1)["val_loss"]) == 1
    assert not calls._open
    with pytest.raises(CutOffError):
        fit(4, CutOff(5))
    gc.collect()
    assert not calls._open
    assert len(fit(4)["val_loss"]) == 2
