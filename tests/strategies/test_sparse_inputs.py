# SPDX-License-Identifier: Apache-2.0
"""Ragged and sparse batches train under MirroredStrategy as on one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist

pytestmark = pytest.mark.devices

WIDTH = 5
RNG = np.random.default_rng(0)
LENGTHS = [3, 1, 5, 2, 4, 1, 2, 5, 3, 2]
VALUES = [RNG.random(length).tolist() for length in LENGTHS]
Y = RNG.random((len(LENGTHS), 1)).astype(np.float32)


class Rows(keras.Model):
    """Multiplies rows with a kernel, whatever keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = self.add_weight(shape=(WIDTH, 1), initializer=keras.initializers.RandomNormal(seed=3), name="k")

    def call(self, x: Any) -> Any:
        if isinstance(x, tf.SparseTensor):
            return tf.sparse.sparse_dense_matmul(x, tf.convert_to_tensor(self.kernel))
        return tf.matmul(x.to_tensor(shape=(None, WIDTH)), tf.convert_to_tensor(self.kernel))


def trained(strategy: tf.distribute.Strategy, rows: Any) -> Any:
    with strategy.scope():
        model = Rows()
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    history = model.fit(tf.data.Dataset.from_tensor_slices((rows, Y)).batch(4), epochs=2, verbose=0).history
    return model.get_weights(), history


@pytest.mark.parametrize("policies", [0, 1], ids=["synchronous", "backup workers"])
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_rows_that_are_not_dense_train_as_on_one_device(cpus: list[str], kind: str, policies: int) -> None:
    ragged = tf.ragged.constant(VALUES, dtype=tf.float32)
    rows = ragged if kind == "ragged" else ragged.to_sparse()
    strategy = tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.BackupWorkers(spares=0)] * policies)
    one, many = trained(tf.distribute.get_strategy(), rows), trained(strategy, rows)
    tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, many)
