# SPDX-License-Identifier: Apache-2.0
"""A short real training on an embedded cluster of four workers, which writes its update log for the screenshots.

The policies note what the engine tells them, so the log has the engine's own times.
"""

from __future__ import annotations

import pathlib
import time

from absl import app, flags

import tfdist
from tfdist import testing, update_log
from tfdist.policies.asynchronous import Asynchronous
from tfdist.policies.base import Arrival, Update

_POLICY = flags.DEFINE_enum("policy", "backup_workers", ["backup_workers", "soft_sync"], "what is trained with")
_LOGDIR = flags.DEFINE_string("logdir", None, "run directory of the log", required=True)
_STEPS = flags.DEFINE_integer("steps", 500, "number of updates")
_WORKERS = 4


class _Recorded:
    """Beside a policy: writes each update to a log."""

    log: update_log.LogWriter
    origin: float

    def _prepare(self) -> None:
        self._starts: dict[int, tuple[float, float]] = {}
        self._idle: dict[int, float] = {}
        self._arrived: dict[int, tuple[int, float, float, float]] = {}
        self._rows: list[update_log.ContributionRecord] = []
        self._open = 0.0

    def opened(self, time: float) -> None:
        super().opened(time)
        self._open = time

    def started(self, replica: int, time: float) -> int:
        step = super().started(replica, time)
        self._starts[replica] = (time, time - self._idle.pop(replica, time))
        return step

    def arrived(self, replica: int, local_step: int, time: float) -> Arrival:
        arrival = super().arrived(replica, local_step, time)
        start, held = self._starts.pop(replica, (time, 0.0))
        self._idle[replica] = time
        if arrival.accepted:
            self._arrived[arrival.number] = (replica, start, time, held)
        else:
            self._rows.append(update_log.ContributionRecord(replica, start, time, 1, arrival.staleness, 0.0, held))
        return arrival

    def lost(self, replica: int, time: float) -> None:
        super().lost(replica, time)
        self._idle.pop(replica, None)
        if replica in self._starts:
            start, held = self._starts.pop(replica)
            self._rows.append(update_log.ContributionRecord(replica, start, time, 2, 0, 0.0, held))
        self.log.event(update_log.EventKind.LOST, f"worker:{replica} was lost", replica, time)

    def recovered(self, replica: int, time: float) -> None:
        super().recovered(replica, time)
        self.log.event(update_log.EventKind.RETURNED, f"worker:{replica} is back", replica, time)

    def updated(self, time: float, **options: bool) -> Update:
        update = super().updated(time, **options)
        for number, staleness, weight in zip(update.numbers, update.staleness, update.weights, strict=True):
            replica, start, arrival, held = self._arrived.pop(number)
            self._rows.append(update_log.ContributionRecord(replica, start, arrival, 0, staleness, weight, held))
        rows, self._rows = self._rows, []
        examples = 32 * len(update.numbers)
        self.log.add(update_log.UpdateRecord(update.step, time, time - self._open, update.wait_secs, examples, 0, rows))
        return update


class _BackupWorkers(_Recorded, tfdist.BackupWorkers):
    pass


class _SoftSync(_Recorded, Asynchronous):
    pass


def main(argv: list[str]) -> None:
    del argv
    import keras
    import numpy as np
    import tensorflow as tf

    is_backup = _POLICY.value == "backup_workers"
    names = tuple(f"worker:{worker}" for worker in range(_WORKERS))
    if is_backup:
        policy, shown = _BackupWorkers(spares=1), "BackupWorkers(spares=1)"
    else:
        policy = _SoftSync(tfdist.SoftSync(updates=2), tfdist.StalenessScaling())
        shown = "SoftSync(updates=2), StalenessScaling()"
    policy._prepare()
    header = update_log.Header(
        _POLICY.value, "chief:0", names, "ParameterServerStrategy", (shown,), time.time() - time.monotonic()
    )
    policy.log = update_log.LogWriter(str(pathlib.Path(_LOGDIR.value) / "policy" / "updates"), header)
    strategy = tfdist.ParameterServerStrategy(num_workers=_WORKERS, num_ps=1, policies=[policy])
    with strategy.scope():
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.default_rng(0)
    data = tf.data.Dataset.from_tensor_slices((random.normal(size=(4096, 32)), random.integers(0, 10, 4096)))
    delays = {"*": testing.lognormal(mean=0.06, s=0.4), "worker:3": testing.lognormal(mean=0.12, s=0.5)}
    faults = [testing.Faults([(_STEPS.value // 2, "kill", "worker:1")])] if is_backup else []
    with testing.Delays(delays, seed=1):
        model.fit(data.repeat().batch(32), steps_per_epoch=_STEPS.value, epochs=1, verbose=2, callbacks=faults)
    policy.log.close()


if __name__ == "__main__":
    app.run(main)
