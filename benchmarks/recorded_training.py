# SPDX-License-Identifier: Apache-2.0
"""A short real training on an embedded cluster of four workers, with `tfdist.callbacks.Telemetry`, for screenshots."""

from __future__ import annotations

from absl import app, flags

import tfdist
from tfdist import testing

_POLICY = flags.DEFINE_enum("policy", "backup_workers", ["backup_workers", "soft_sync"], "what is trained with")
_LOGDIR = flags.DEFINE_string("logdir", None, "run directory of Telemetry", required=True)
_STEPS = flags.DEFINE_integer("steps", 600, "number of updates")
_WORKERS = 4


def main(argv: list[str]) -> None:
    del argv
    import keras
    import numpy as np
    import tensorflow as tf

    is_backup = _POLICY.value == "backup_workers"
    policies = (
        [tfdist.BackupWorkers(spares=1)] if is_backup else [tfdist.SoftSync(updates=2), tfdist.StalenessScaling()]
    )
    strategy = tfdist.ParameterServerStrategy(num_workers=_WORKERS, num_ps=1, policies=policies)
    with strategy.scope():
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.default_rng(0)
    data = tf.data.Dataset.from_tensor_slices((random.normal(size=(4096, 32)), random.integers(0, 10, 4096)))
    delays = {"*": testing.lognormal(mean=0.06, s=0.4), "worker:3": testing.lognormal(mean=0.12, s=0.5)}
    callbacks = [tfdist.callbacks.Telemetry(_LOGDIR.value)]
    if is_backup:
        callbacks.append(testing.Faults([(_STEPS.value // 2, "kill", "worker:1")]))
    with testing.Delays(delays, seed=1):
        model.fit(data.repeat().batch(32), steps_per_epoch=_STEPS.value, epochs=1, verbose=2, callbacks=callbacks)
    print(strategy.report())


if __name__ == "__main__":
    app.run(main)
