# SPDX-License-Identifier: Apache-2.0
"""One training run: what a user of tfdist writes, less the delays, which come from the environment."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

import tfdist

# The data and the net of experiments/digits.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "digits"))
import train as digits

# Short epochs: after each of them there is a point in the plot.
UPDATES_PER_SEGMENT = 20


def make_strategy(name: str, num_workers: int, spares: int) -> tf.distribute.Strategy:
    policies = [tfdist.BackupWorkers(spares=spares)]
    if name == "multi_worker":
        return tfdist.MultiWorkerMirroredStrategy(policies=policies)
    return tfdist.ParameterServerStrategy(policies=policies, num_workers=num_workers)


def train(strategy_name: str, setting: Mapping[str, Any], run_dir: pathlib.Path) -> None:
    """Trains once; `epochs.jsonl`, `report.txt` and TensorBoard's logs go to `run_dir`."""
    keras.utils.set_random_seed(setting["seed"])
    strategy = make_strategy(strategy_name, setting["num_workers"], setting["spares"])
    training, validation = digits.load_data(setting["batch_size"], setting["seed"])
    with strategy.scope():
        model = digits.make_model()
        model.compile(
            optimizer=keras.optimizers.SGD(setting["learning_rate"], momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    callbacks = [tfdist.callbacks.Telemetry(run_dir / "tensorboard", update_freq=UPDATES_PER_SEGMENT)]
    cluster = tfdist.Cluster.from_environment()
    if cluster is None or cluster.is_chief:
        callbacks.append(digits.EpochLog(run_dir / "epochs.jsonl"))
    model.fit(
        training.repeat(),
        steps_per_epoch=UPDATES_PER_SEGMENT,
        epochs=setting["updates"] // UPDATES_PER_SEGMENT,
        validation_data=validation,
        callbacks=callbacks,
        verbose=0,
    )
    if cluster is None or cluster.is_chief:
        (run_dir / "report.txt").write_text(f"{strategy.report()}\n")
