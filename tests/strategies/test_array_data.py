# SPDX-License-Identifier: Apache-2.0
"""The end of a pass over arrays does not wait for tf.data's tuning, which has nothing to tune there."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

import tfdist

pytestmark = pytest.mark.devices

X, Y = np.zeros((8, 3), np.float32), np.zeros((8, 1), np.float32)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects for each data set that was iterated over: True for autotuning, False for none, None if not decided."""
    seen = []
    plain = dataset_ops.DatasetV2._apply_debug_options

    def apply(dataset: tf.data.Dataset) -> tf.data.Dataset:
        seen.append(dataset.options().autotune.enabled)
        return plain(dataset)

    monkeypatch.setattr(dataset_ops.DatasetV2, "_apply_debug_options", apply)
    return seen


def fitted(strategy: tf.distribute.Strategy, *data: Any, **options: Any) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(*data, verbose=0, **options)


def test_pipelines_that_keras_makes_of_arrays_are_not_tuned(cpus: list[str], tuned: list[Any]):
    # Those of the devices included.
    strategy = tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.BackupWorkers(0)])
    fitted(strategy, X, Y, batch_size=4, validation_split=0.5)
    assert set(tuned) == {False}


def test_pipelines_of_users_are_tuned_as_they_say(cpus: list[str], tuned: list[Any]):
    fitted(tfdist.MirroredStrategy(cpus[:2]), tf.data.Dataset.from_tensor_slices((X, Y)).batch(4))
    # The pipelines of the two devices hand on what the user's makes.
    assert None in tuned and tuned.count(False) == 2 * tuned.count(None)
