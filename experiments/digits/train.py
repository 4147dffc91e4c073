# SPDX-License-Identifier: Apache-2.0
"""One training run: what a user of tfdist writes. The strategy is the only thing that differs between the four runs."""

from __future__ import annotations

import json
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf
from sklearn import datasets, model_selection

import tfdist

VALIDATION_EXAMPLES = 360


def make_strategy(name: str) -> tf.distribute.Strategy:
    if name == "mirrored":
        _split_cpu(2)
        return tfdist.MirroredStrategy(["CPU:0", "CPU:1"])
    if name == "multi_worker":
        return tfdist.MultiWorkerMirroredStrategy()
    if name == "parameter_server":
        return tfdist.ParameterServerStrategy()  # without TF_CONFIG: two workers and a parameter server on this machine
    return tf.distribute.OneDeviceStrategy("CPU:0")


def train(
    strategy_name: str, epochs: int, batch_size: int, learning_rate: float, seed: int, run_dir: pathlib.Path
) -> None:
    """Trains under one strategy; `epochs.jsonl` and TensorBoard's logs go to `run_dir`."""
    keras.utils.set_random_seed(seed)
    strategy = make_strategy(strategy_name)
    training, validation = load_data(batch_size, seed)
    with strategy.scope():
        model = make_model()
        decay = keras.optimizers.schedules.CosineDecay(learning_rate, epochs * len(training))
        model.compile(
            optimizer=keras.optimizers.SGD(decay, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    callbacks = [keras.callbacks.TensorBoard(run_dir / "tensorboard", write_graph=False)]
    cluster = tfdist.Cluster.from_environment()
    if cluster is None or cluster.is_chief:
        callbacks.append(EpochLog(run_dir / "epochs.jsonl"))
    model.fit(training, epochs=epochs, validation_data=validation, callbacks=callbacks, verbose=0)


def load_data(batch_size: int, seed: int) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """1,437 digits to train on, with their shifts, and 360 held out: the same ones whatever the seed."""
    digits = datasets.load_digits()
    images = (digits.images[..., np.newaxis] / 16.0).astype("float32")
    x, x_held_out, y, y_held_out = model_selection.train_test_split(
        images, digits.target, test_size=VALIDATION_EXAMPLES, stratify=digits.target, random_state=0
    )
    x, y = with_shifts(x), np.tile(y, 5)
    training = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=seed)
    validation = tf.data.Dataset.from_tensor_slices((x_held_out, y_held_out))
    # Every update sees a whole batch, so that all strategies make the same number of updates from as many examples.
    return training.batch(batch_size, drop_remainder=True), validation.batch(VALIDATION_EXAMPLES // 2)


def with_shifts(images: np.ndarray) -> np.ndarray:
    """The images, and each of them moved by one pixel up, down, left and right: five times as many."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    size = images.shape[1]
    corners = [(1, 1), (0, 1), (2, 1), (1, 0), (1, 2)]
    return np.concatenate([padded[:, row : row + size, column : column + size] for row, column in corners])


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


class EpochLog(keras.callbacks.Callback):
    """Writes a line of JSON per epoch: Keras' logs, the seconds since training began, and updates per second."""

    def __init__(self, path: pathlib.Path):
        super().__init__()
        self._path = path

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._path.write_text("")
        self._start = time.perf_counter()

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._updates, self._trained = self._iterations(), None
        self._epoch_start = time.perf_counter()

    def on_test_begin(self, logs: dict | None = None) -> None:
        # Fit validates before it ends the epoch; that time is no part of the updates' speed.
        self._trained = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        now = time.perf_counter()
        updates = self._iterations() - self._updates
        row = {"epoch": epoch + 1, "seconds": now - self._start, "updates": updates}
        row["updates_per_sec"] = updates / ((self._trained or now) - self._epoch_start)
        row |= {name: float(value) for name, value in (logs or {}).items()}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _iterations(self) -> int:
        return int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))


def _split_cpu(devices: int) -> None:
    """Makes this machine's CPU look like several devices."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
