# SPDX-License-Identifier: Apache-2.0
"""Calls of Keras within the scope of MultiWorkerMirroredStrategy, by two workers."""

from __future__ import annotations

import pathlib

import process_cluster
import pytest

pytestmark = pytest.mark.processes

RESTORING = """
strategy = tfdist.MultiWorkerMirroredStrategy()
x, y = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)

class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise RuntimeError("stop")

with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    backup = lambda: keras.callbacks.BackupAndRestore(shared / "backup")
    try:
        model.fit(x, y, epochs=3, verbose=0, callbacks=[backup(), Stop()])
    except RuntimeError:
        report("epochs", model.fit(x, y, epochs=3, verbose=0, callbacks=[backup()]).epoch)
    report("iterations", int(model.optimizer.iterations))
    own = x * (index + 1)
    found = model.predict_on_batch(own)
    report("predictions", len(found))
    report("difference", float(np.abs(found - (own @ model.get_weights()[0] + model.get_weights()[1])).max()))
    try:
        model.optimizer.apply([tf.ones_like(v) for v in model.trainable_variables], model.trainable_variables)
    except RuntimeError as error:
        report("refused", str(error))
"""


def test_fit_in_scope_restores_and_predicts_once(tmp_path: pathlib.Path):
    for found in process_cluster.run(RESTORING, tmp_path):
        assert found.pop("difference") < 1e-6
        assert "Call it in a step" in found.pop("refused")
        assert found == {"epochs": [2], "iterations": 3, "predictions": 8}
