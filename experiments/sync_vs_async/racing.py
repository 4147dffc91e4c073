# SPDX-License-Identifier: Apache-2.0
"""One training run: what a user of tfdist writes, and a callback that keeps the weights from time to time."""

from __future__ import annotations

import json
import math
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

import tfdist

# The data of experiments/digits.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "digits"))
import train as digits

# How many points a curve has, about.
_POINTS = 12

Setting = Mapping[str, Any]


def make_strategy(method: str, setting: Setting) -> tuple[tf.distribute.Strategy, int]:
    """The strategy, and from how many gradients it makes an update."""
    count = setting["num_workers"]
    if method == "averaged":
        # Each replica takes a step of its own; the mean of all is like one step from all their gradients.
        averaging = tfdist.ParameterAveraging(every_steps=setting["every_steps"])
        return tfdist.MultiWorkerMirroredStrategy(policies=[averaging]), count
    half = max(1, count // 2)
    policies, gradients = {
        "synchronous": ([tfdist.BackupWorkers(spares=0)], count),
        "backup_workers": ([tfdist.BackupWorkers(spares=1)], count - 1),
        "soft_sync": ([tfdist.SoftSync(updates=half), tfdist.StalenessScaling()], half),
        "bounded": ([tfdist.BoundedStaleness(bound=setting["bound"])], 1),
        # What no policy means too, but delays are injected under policies only.
        "asynchronous": ([tfdist.SoftSync(updates=1)], 1),
    }[method]
    return tfdist.ParameterServerStrategy(policies=policies, num_workers=count), gradients


def train(method: str, setting: Setting, delays: str, run_dir: pathlib.Path) -> None:
    """Trains once; `points.jsonl` and `report.txt` go to `run_dir`.

    Args:
      method: a key of `races.METHODS`.
      setting: values of the flags in `races.SETTING`.
      delays: as `tfdist.testing.Delays.to_json` writes them.
      run_dir: where the results go.
    """
    keras.utils.set_random_seed(setting["seed"])
    strategy, gradients = make_strategy(method, setting)
    # Under backup workers the batch is shared among all, and a part of it is dropped.
    parts = setting["num_workers"] if method == "backup_workers" else gradients
    training, validation = digits.load_data(setting["minibatch"] * parts, setting["seed"])
    with strategy.scope():
        model = make_model()
        model.compile(
            # In proportion to an update's examples: then each of them moves the weights as far, whatever the method.
            optimizer=keras.optimizers.SGD(setting["learning_rate"] * gradients),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    points = Points(strategy, setting)
    if method == "averaged":
        late = Late(tfdist.testing.Delays.from_json(delays), strategy.cluster_resolver.task_id or 0)
        every_steps = setting["every_steps"]
        # All workers have to know in advance how far they go: as many periods as the slowest one makes in the time.
        periods = max(1, round(setting["secs"] / late.slowest_secs(setting["num_workers"]) / every_steps))
        model.fit(training.repeat(), steps_per_epoch=every_steps, epochs=periods, callbacks=[late, points], verbose=0)
    else:
        model.fit(training.repeat(), steps_per_epoch=10**6, callbacks=[points], verbose=0)
    rows = points.evaluate(validation)
    cluster = tfdist.Cluster.from_environment()
    if cluster is None or cluster.is_chief:
        (run_dir / "points.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run_dir / "report.txt").write_text(f"{strategy.report()}\n")


def make_model() -> keras.Model:
    """A net that learns in a few hundred gradients: what is compared is who brings them."""
    layers = [keras.layers.Flatten(), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


class Points(keras.callbacks.Callback):
    """Keeps the weights from time to time, to evaluate them when time does not count any more.

    The clock starts with the end of the first step, in which everything is traced. Under a parameter server it ends the
    training; averages are there at the end of an epoch only.
    """

    def __init__(self, strategy: Any, setting: Setting) -> None:
        super().__init__()
        self._strategy, self._setting = strategy, setting
        self._is_averaged = isinstance(strategy, tfdist.MultiWorkerMirroredStrategy)
        self._kept: list[tuple[float, int, list[Any]]] = []
        self._start = math.nan

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._kept.append((0.0, 0, self.model.get_weights()))

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        secs = self._setting["secs"]
        if math.isnan(self._start):
            self._start = time.perf_counter()
        elif not self._is_averaged:
            now = time.perf_counter() - self._start
            if now - self._kept[-1][0] >= secs / _POINTS:
                self._keep()
            self.model.stop_training = now >= secs

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if self._is_averaged:
            self._keep()

    def _keep(self) -> None:
        examples = sum(self._strategy.report().accepted.values()) * self._setting["minibatch"]
        seconds = time.perf_counter() - self._start
        self._kept.append((seconds, examples, self.model.get_weights()))

    def evaluate(self, validation: tf.data.Dataset) -> list[dict[str, float]]:
        """Evaluates the weights that were kept."""
        rows = []
        for seconds, examples, weights in self._kept:
            self.model.set_weights(weights)
            loss, accuracy = self.model.evaluate(validation, verbose=0)
            rows.append({"seconds": seconds, "examples": examples, "val_loss": loss, "val_accuracy": accuracy})
        return rows


class Late(keras.callbacks.Callback):
    """Delays each step of this worker: replicas that train alone send no gradient that could be delayed."""

    def __init__(self, delays: tfdist.testing.Delays, worker: int) -> None:
        super().__init__()
        self._delays, self._worker = delays, worker
        self._attempt = 0

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        time.sleep(self._delays.secs(self._worker, self._attempt))
        self._attempt += 1

    def slowest_secs(self, num_workers: int) -> float:
        """Mean delay of the slowest worker."""
        return max(sum(self._delays.secs(worker, each) for each in range(100)) / 100 for worker in range(num_workers))
