# SPDX-License-Identifier: Apache-2.0
"""Resume under MirroredStrategy, with and without policies: the same weights as without an interruption."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cutting_off import CutOff, CutOffError

import tfdist

pytestmark = [pytest.mark.devices, pytest.mark.timeout(300)]

X = np.random.default_rng(0).normal(size=(90, 3)).astype("float32")
Y = X[:, :1] * 2
DEVICES = ["CPU:0", "CPU:1"]
EPOCHS = 3


def _outer() -> Any:
    return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)


def _train(policies: list[Any], callbacks: list[Any]) -> tuple[list[np.ndarray], Any]:
    keras.utils.set_random_seed(7)
    strategy = tfdist.MirroredStrategy(DEVICES, policies=policies)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(90, seed=3).batch(8)
    history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    values = [*model.get_weights(), *(np.asarray(variable) for variable in model.optimizer.variables)]
    return values, history.history


@pytest.mark.parametrize(
    ("policies", "save_freq", "after"),
    [
        # What is saved is an average; so a checkpoint is not to come between two of them.
        pytest.param(lambda: [tfdist.ParameterAveraging(3, outer=_outer)], 6, 21, id="outer", marks=pytest.mark.slow),
        pytest.param(lambda: [tfdist.Warmup(epochs=1)], 5, 8, id="epochs"),
    ],
)
def test_it_goes_on_as_if_nothing_had_happened(tmp_path: pathlib.Path, policies: Any, save_freq: Any, after: int):
    calm, history = _train(policies(), [tfdist.callbacks.Resume(tmp_path / "calm", save_freq)])
    with pytest.raises(CutOffError):
        _train(policies(), [tfdist.callbacks.Resume(tmp_path / "cut off", save_freq), CutOff(after)])
    resumed, logs = _train(policies(), [tfdist.callbacks.Resume(tmp_path / "cut off", save_freq)])
    for value, expected in zip(resumed, calm, strict=True):
        np.testing.assert_array_equal(value, expected)
    for name, values in logs.items():
        np.testing.assert_allclose(values, history[name][-len(values) :], rtol=1e-5)


def test_what_auto_has_chosen_is_kept(tmp_path: pathlib.Path):
    policy = tfdist.BackupWorkers("auto", max_spares=1)
    strategy_state = {"spares": 1}
    policy.begin(2, "a test")
    policy.restore(strategy_state)
    assert policy.spares == 1
    assert policy.state() == strategy_state


def test_data_of_the_user_s_own_distribution_go_on_from_a_pass_s_beginning(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture
):
    def train(callbacks: list[Any]) -> None:
        strategy = tfdist.MirroredStrategy(DEVICES)
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        make = lambda context: tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).repeat()  # noqa: E731
        data = strategy.distribute_datasets_from_function(make)
        model.fit(data, epochs=2, steps_per_epoch=10, verbose=0, callbacks=callbacks)

    with pytest.raises(CutOffError):
        train([tfdist.callbacks.Resume(tmp_path, 3), CutOff(5)])
    resume = tfdist.callbacks.Resume(tmp_path, 3)
    train([resume])
    assert resume.step == 20
    assert (
        "can't be begun in the middle; the rest of the epoch is made from its first batches" in capfd.readouterr().err
    )
