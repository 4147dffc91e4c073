# SPDX-License-Identifier: Apache-2.0
"""A short real training with `tfdist.callbacks.Telemetry`, for screenshots.

Policies train on an embedded cluster of four workers. `synchronous` trains without one, on the workers that
`tfdist launch local` has started; the input of the second one is slow.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from absl import app, flags

import tfdist
from tfdist import testing

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf

_POLICY = flags.DEFINE_enum(
    "policy", "backup_workers", ["backup_workers", "soft_sync", "synchronous"], "what is trained with"
)
_LOGDIR = flags.DEFINE_string("logdir", None, "run directory of Telemetry", required=True)
_STEPS = flags.DEFINE_integer("steps", 600, "number of updates")
_WORKERS, _EPOCHS = 4, 3


def main(argv: list[str]) -> None:
    del argv
    import keras

    strategy, slow = _strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    delays = {"*": testing.lognormal(mean=0.06, s=0.4), "worker:3": testing.lognormal(mean=0.12, s=0.5)}
    callbacks = [tfdist.callbacks.Telemetry(_LOGDIR.value)]
    if _POLICY.value == "backup_workers":
        callbacks.append(testing.Faults([(_STEPS.value // 2, "kill", "worker:1")]))
    if _POLICY.value == "synchronous":
        callbacks.append(keras.callbacks.ModelCheckpoint(f"{_LOGDIR.value}/model.keras"))
    train, validation = _data(slow)
    with testing.Delays(delays, seed=1) if _POLICY.value != "synchronous" else contextlib.nullcontext():
        model.fit(train, epochs=_EPOCHS, validation_data=validation, verbose=2, callbacks=callbacks)
    print(strategy.report())


def _strategy() -> tuple[tfdist.Strategy, bool]:
    """Returns the strategy, and True if the input of this process is to be slow."""
    if _POLICY.value == "synchronous":
        strategy = tfdist.MultiWorkerMirroredStrategy()
        return strategy, strategy.distribution.task == "worker:1"
    if _POLICY.value == "backup_workers":
        policies = [tfdist.BackupWorkers(spares=1)]
    else:
        policies = [tfdist.SoftSync(updates=2), tfdist.StalenessScaling()]
    return tfdist.ParameterServerStrategy(num_workers=_WORKERS, num_ps=1, policies=policies), False


def _data(slow: bool) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(0)
    x = random.normal(size=(4096, 32))
    y = (x @ random.normal(size=(32, 10))).argmax(axis=1)
    train, validation = (
        tf.data.Dataset.from_tensor_slices((x[part], y[part])) for part in (slice(3072), slice(3072, None))
    )

    def read(batch: np.ndarray) -> np.ndarray:
        time.sleep(0.1 if slow else 0.0)
        return batch

    train = train.repeat().batch(32, drop_remainder=True).take(_STEPS.value // _EPOCHS)
    train = train.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(read, [x], tf.float64), (None, 32)), y))
    return train, validation.batch(32)


if __name__ == "__main__":
    app.run(main)
