# SPDX-License-Identifier: Apache-2.0
"""Workers that are killed all the time: does training go on, end, and learn the same?

`measure` runs this file twice, in processes of their own: with a SIGKILL every 10 s, and without, for as many updates.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import child
from absl import app, flags

NUM_WORKERS = 4
EVERY_SECS = 10.0
MOST_GAP_SECS = 5.0
# Stands for the time that an accelerator computes, and makes a few thousand updates of the two minutes.
_STEP_SECS = 0.02
_STEPS_PER_EPOCH = 50
_EXAMPLES = 4096
_LIMIT_SECS = 600.0
_LEAST_AWAY_SECS = 1.0

FLAGS = flags.FLAGS


def measure(secs: float, progress: Callable[[str], None]) -> dict[str, Any]:
    """Trains with kills for so many seconds, then without for as many updates.

    Returns:
      "killed" and "undisturbed", each what `_train` returns.
    """
    progress(f"deaths: {secs:.0f} s with kills")
    killed = child.result(__file__, [f"--train_secs={secs}", f"--every_secs={EVERY_SECS}"], _LIMIT_SECS)
    progress(f"deaths: {killed['updates']} updates without")
    undisturbed = child.result(__file__, [f"--train_updates={killed['updates']}"], _LIMIT_SECS)
    return {"killed": killed, "undisturbed": undisturbed}


def summary(report: dict[str, Any]) -> str:
    """A few lines for people."""
    killed, undisturbed = report["killed"], report["undisturbed"]
    is_met = killed["longest_gap_secs"] <= MOST_GAP_SECS and killed["updates"] == killed["iterations"]
    return (
        f"deaths: {NUM_WORKERS} workers, 1 spare, {killed['kills']} kills in {killed['secs']:.0f} s"
        f"{'' if is_met else '  MISSED'}\n"
        f"  longest gap between updates {killed['longest_gap_secs']:.2f} s (target <= {MOST_GAP_SECS:.0f} s); "
        f"without kills {undisturbed['longest_gap_secs']:.2f} s\n"
        f"  a killed worker is back after {_span(killed['away_secs'])} s; while two are away, nothing goes on\n"
        f"  updates {killed['updates']}, optimizer.iterations {killed['iterations']} (target: equal)\n"
        f"  loss {killed['loss_before']:.4f} -> {killed['loss_after']:.4f}; without kills "
        f"{undisturbed['loss_before']:.4f} -> {undisturbed['loss_after']:.4f}"
    )


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}" if values else "?"


def _train() -> dict[str, Any]:
    import tfdist

    strategy = tfdist.ParameterServerStrategy(num_workers=NUM_WORKERS, policies=[tfdist.BackupWorkers(spares=1)])
    import keras
    import numpy as np
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(_EXAMPLES, 10)).astype("float32")
    y = np.sin(x.sum(axis=1, keepdims=True))
    with strategy.scope():
        model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(_EXAMPLES, seed=0).repeat().batch(32 * NUM_WORKERS)

    class Watch(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []
            self.losses: list[float] = []

        def on_train_begin(self, logs: Any = None) -> None:
            self.times.append(time.monotonic())

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.times.append(time.monotonic())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.losses.append(float(logs["loss"]))
            if FLAGS.train_secs and self.times[-1] - self.times[0] >= FLAGS.train_secs:
                self.model.stop_training = True

    def loss() -> float:
        return float(np.mean((model.predict(x, batch_size=_EXAMPLES, verbose=0) - y) ** 2))

    loss_before = loss()
    watch = Watch()
    epochs = FLAGS.train_updates // _STEPS_PER_EPOCH if FLAGS.train_updates else 10**6

    class Starts(tfdist.testing.Delays):
        """Notes when each worker begins a contribution."""

        times: ClassVar[dict[int, list[float]]] = {worker: [] for worker in range(NUM_WORKERS)}

        def secs(self, replica: int, attempt: int) -> float:
            self.times[replica].append(time.monotonic())
            return super().secs(replica, attempt)

    with Starts(tfdist.testing.constant(_STEP_SECS)), _Killer(tfdist.testing.kill, strategy) as killer:
        model.fit(data, steps_per_epoch=_STEPS_PER_EPOCH, epochs=epochs, callbacks=[watch], verbose=0)
    gaps = [after - before for before, after in itertools.pairwise(watch.times)]
    return {
        "secs": watch.times[-1] - watch.times[0],
        "updates": len(gaps),
        "iterations": int(model.optimizer.iterations.numpy()),
        "kills": len(killer.kills),
        # A worker whose training ended before it came back is not among them.
        "away_secs": [secs for kill in killer.kills if (secs := _away_secs(Starts.times, *kill)) is not None],
        # The first update's includes tracing.
        "first_gap_secs": gaps[0],
        "longest_gap_secs": max(gaps[1:]),
        "longest_gaps_secs": sorted(gaps[1:], reverse=True)[:50],
        "loss_before": loss_before,
        "loss_after": loss(),
        "loss_by_epoch": watch.losses,
        "report": str(strategy.report()),
    }


def _away_secs(starts: Mapping[int, Sequence[float]], killed_at: float, worker: int) -> float | None:
    """The longest pause of a worker after it was killed; None if it did not come back before the end.

    Args:
      starts: when each worker began its contributions.
      killed_at: when this one was killed.
      worker: its number.
    """
    # Until it is killed again.
    near = [each for each in starts[worker] if -1 < each - killed_at < (NUM_WORKERS - 1) * FLAGS.every_secs]
    longest = max((after - before for before, after in itertools.pairwise(near)), default=0.0)
    # What the chief began with it before the chief noticed gives pauses too.
    return longest if longest > _LEAST_AWAY_SECS else None


class _Killer:
    """Ends one worker after another, for as long as the block runs."""

    def __init__(self, kill: Callable[[Any, str], bool], strategy: Any):
        # Time and worker of each.
        self.kills: list[tuple[float, int]] = []
        self._kill = kill
        self._strategy = strategy
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        for number in itertools.count():
            if self._over.wait(FLAGS.every_secs):
                return
            worker = number % NUM_WORKERS
            now = time.monotonic()
            # One that is not back yet can't be killed.
            if self._kill(self._strategy, f"worker:{worker}"):
                self.kills.append((now, worker))

    def __enter__(self) -> _Killer:
        if FLAGS.every_secs:
            self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._over.set()
        if FLAGS.every_secs:
            self._thread.join()


def _main(argv: list[str]) -> None:
    result = _train()
    with open(FLAGS.result, "w") as output:  # noqa: PTH123, a path and no more
        json.dump(result, output)


if __name__ == "__main__":
    flags.DEFINE_float("train_secs", 0.0, "How long to train, or 0.")
    flags.DEFINE_integer("train_updates", 0, "How many updates to make, or 0.")
    flags.DEFINE_float("every_secs", 0.0, "How often to kill a worker; 0 for never.")
    flags.DEFINE_string("result", None, "File to write the result to.", required=True)
    app.run(_main)
