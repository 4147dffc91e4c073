# SPDX-License-Identifier: Apache-2.0
"""The training script, the same for every task of every run: what a user writes, and a log of the steps it makes."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfdist

FLAGS = flags.FLAGS

flags.DEFINE_integer("epochs", 10, "How often as many steps are made as one pass over the data has.", lower_bound=1)
flags.DEFINE_integer("batch_size", 32, "Examples of one update, over all replicas together.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.02, "That SGD with momentum 0.9 starts from; it decays to 0.", lower_bound=0.0)
flags.DEFINE_integer("save_freq", 50, "Steps from one checkpoint to the next.", lower_bound=1)
flags.DEFINE_integer("seed", 1, "Of the initial weights and of the order of the examples.")
flags.DEFINE_string("run_dir", None, "Where checkpoints, the log of steps and the result go.", required=True)


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"enduring.py takes flags only. Received: {' '.join(argv[1:])}")
    keras.utils.set_random_seed(FLAGS.seed)
    strategy = tfdist.strategy_from_flags()
    digits = _digits()
    training, validation = digits.load_data(FLAGS.batch_size, FLAGS.seed)
    steps_per_epoch = len(training)
    with strategy.scope():
        model = digits.make_model()
        decay = keras.optimizers.schedules.CosineDecay(FLAGS.learning_rate, FLAGS.epochs * steps_per_epoch)
        model.compile(
            optimizer=keras.optimizers.SGD(decay, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    run_dir = pathlib.Path(FLAGS.run_dir)
    resume = tfdist.callbacks.Resume(run_dir / "checkpoints", FLAGS.save_freq)
    cluster = tfdist.Cluster.from_environment()
    is_chief = cluster is None or cluster.is_chief
    # The log comes first: a step that is saved was written down before.
    callbacks = [StepLog(run_dir / "steps", resume), resume] if is_chief else [resume]
    # One flow without end: a parameter server's worker that is lost takes no part of a pass with it.
    model.fit(training.repeat(), steps_per_epoch=steps_per_epoch, epochs=FLAGS.epochs, callbacks=callbacks, verbose=0)
    accuracy = _accuracy(model, validation)
    # Five times as many: one digit more or less of 360 says little.
    shifted = _accuracy(model, with_shifts(digits, validation))
    if is_chief:
        iterations = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
        result = {"step": resume.step, "iterations": iterations, "weights": digest(model.get_weights())}
        write_result(run_dir, {**result, "validation_accuracy": accuracy, "shifted_accuracy": shifted})


def with_shifts(digits: Any, data: tf.data.Dataset) -> tf.data.Dataset:
    """Images and labels, and each image moved by one pixel up, down, left and right."""
    x, y = (np.concatenate(part) for part in zip(*data.as_numpy_iterator(), strict=True))
    return tf.data.Dataset.from_tensor_slices((digits.with_shifts(x), np.tile(y, 5))).batch(len(x))


def _accuracy(model: keras.Model, data: tf.data.Dataset) -> float:
    return float(model.evaluate(data, return_dict=True, verbose=0)["accuracy"])


def digest(arrays: Sequence[np.ndarray]) -> str:
    """The same text for the same numbers, to the bit."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def write_result(run_dir: pathlib.Path, result: dict[str, Any]) -> None:
    """Writes `result.json`, whole or not at all: this task may be killed at any time."""
    unfinished = run_dir / ".result.json"
    unfinished.write_text(json.dumps(result) + "\n")
    unfinished.replace(run_dir / "result.json")


class StepLog(keras.callbacks.Callback):
    """Writes a line for each step: the attempt, the number of the step and the time in seconds since 1970.

    Args:
      folder: where the file `attempt_<number>.log` is made.
      resume: counts the steps; it has to come later in the list of callbacks.
    """

    def __init__(self, folder: pathlib.Path, resume: tfdist.callbacks.Resume) -> None:
        super().__init__()
        self._folder, self._resume = folder, resume
        self._attempt = os.environ.get("TFDIST_ATTEMPT", "0")

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = (self._folder / f"attempt_{self._attempt}.log").open("a", encoding="utf-8")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del batch, logs
        self._file.write(f"{self._attempt} {self._resume.step + 1} {time.time():.3f}\n")
        self._file.flush()

    def on_train_end(self, logs: Any = None) -> None:
        del logs
        self._file.close()


def _digits() -> Any:
    """The net and the data of experiments/digits; workers and parameter servers of a chief need neither."""
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "digits"))
    import train

    return train


if __name__ == "__main__":
    tfdist.flags.define_flags()
    app.run(main)
