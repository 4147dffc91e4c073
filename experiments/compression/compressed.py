# SPDX-License-Identifier: Apache-2.0
"""One training run with compressed updates: a user's program. Only the codec differs between runs."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import compression_runs
import keras
import numpy as np
import tensorflow as tf

import tfdist

# The data and the convolutional net of experiments/digits.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "digits"))
import train as digits

_MOMENTUM = 0.9


def train(run: compression_runs.Run, setting: Mapping[str, Any], run_dir: pathlib.Path) -> None:
    """Trains once; writes `epochs.jsonl` and `run.json` to `run_dir`."""
    keras.utils.set_random_seed(setting["seed"])
    codec, epochs = run.codec, setting["epochs"]
    strategy = tfdist.MultiWorkerMirroredStrategy(policies=policies(codec, setting["warmup_epochs"]))
    training, held_out = digits.load_data(setting["batch_size"], setting["seed"])
    with strategy.scope():
        model = digits.make_model() if run.net == "digits" else make_dense()
        decay = keras.optimizers.schedules.CosineDecay(setting["learning_rate"], epochs * len(training))
        model.compile(
            # TopK applies the momentum itself; a second momentum would multiply it.
            optimizer=keras.optimizers.SGD(decay, momentum=0.0 if codec.kind == "TopK" else _MOMENTUM),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    cluster = tfdist.Cluster.from_environment()
    is_chief = cluster is None or cluster.is_chief
    callbacks = [BytesLog(run_dir / "epochs.jsonl", strategy)] if is_chief else []
    model.fit(training, epochs=epochs, validation_data=with_shifts(held_out), callbacks=callbacks, verbose=0)
    if is_chief:
        # Written last: a run is complete once this file exists.
        found = {"codec": codec.title, "setting": dict(setting), "parameters": model.count_params()}
        (run_dir / "run.json").write_text(json.dumps(found, indent=1) + "\n")


def policies(codec: compression_runs.Codec, warmup_epochs: int) -> list[tfdist.policies.Policy]:
    """Returns the policies of a run; Strom too starts with fewer workers."""
    warmup = [tfdist.Warmup(epochs=warmup_epochs)] if warmup_epochs else []
    return [*warmup, tfdist.Compression(make_codec(codec))] if codec.kind else warmup


def make_codec(codec: compression_runs.Codec) -> Any:
    return getattr(tfdist.compression, codec.kind)(**codec.arguments)


def make_dense() -> keras.Model:
    """Returns a net of 14.6 M parameters, as many as Strom's."""
    hidden = [keras.layers.Dense(units, activation="relu") for units in compression_runs.DENSE_UNITS[1:-1]]
    last = keras.layers.Dense(compression_runs.DENSE_UNITS[-1])
    return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *hidden, last])


def with_shifts(held_out: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the held-out digits and their shifts: one digit of 360 would be 0.28 points of accuracy."""
    x, y = (np.concatenate(part) for part in zip(*held_out.as_numpy_iterator(), strict=True))
    return tf.data.Dataset.from_tensor_slices((digits.with_shifts(x), np.tile(y, 5))).batch(len(x))


class BytesLog(digits.EpochLog):
    """Adds to each line the bytes that a worker sent in the updates of the epoch, without validation."""

    def __init__(self, path: pathlib.Path, strategy: tfdist.MultiWorkerMirroredStrategy):
        super().__init__(path)
        self._strategy = strategy

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._before = self._bytes_sent()

    def on_test_begin(self, logs: dict | None = None) -> None:
        super().on_test_begin(logs)
        self._sent = self._bytes_sent() - self._before

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        super().on_epoch_end(epoch, (logs or {}) | {"bytes": self._sent})

    def _bytes_sent(self) -> float:
        """Returns the mean over the workers, whose messages differ in length."""
        sent = self._strategy.report().message_bytes.values()
        return sum(sent) / len(sent)
