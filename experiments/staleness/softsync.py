# SPDX-License-Identifier: Apache-2.0
"""One training run: what a user of tfdist writes, less the delays, which come from the environment."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import keras

import tfdist

# The data and the net of experiments/digits.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "digits"))
import train as digits


def policies(n: int, rule: str, num_workers: int) -> list[tfdist.policies.Policy]:
    """n-softsync of so many workers; n=0 is synchronous training."""
    if n == 0:
        return [tfdist.BackupWorkers(spares=0)]
    soft_sync = tfdist.SoftSync(updates=num_workers // n)
    return [soft_sync, tfdist.StalenessScaling("inverse")] if rule == "inverse" else [soft_sync]


def train(n: int, rule: str, setting: Mapping[str, Any], run_dir: pathlib.Path) -> None:
    """Trains once; `epochs.jsonl` and `report.json` go to `run_dir`.

    Each gradient is of `minibatch` examples, whatever n is, as published: an update of c gradients is one batch for
    Keras, of c times as many.
    """
    keras.utils.set_random_seed(setting["seed"])
    num_workers, minibatch = setting["num_workers"], setting["minibatch"]
    strategy = tfdist.ParameterServerStrategy(policies=policies(n, rule, num_workers), num_workers=num_workers)
    gradients = num_workers // n if n else num_workers
    training, validation = digits.load_data(minibatch * gradients, setting["seed"])
    steps = min(setting["gradients_per_epoch"] // gradients or 1, len(training))
    with strategy.scope():
        model = digits.make_model()
        decay = keras.optimizers.schedules.CosineDecay(setting["learning_rate"], setting["epochs"] * steps)
        model.compile(
            optimizer=keras.optimizers.SGD(decay),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(
        # One flow without end: between epochs no worker waits for the others.
        training.repeat(),
        steps_per_epoch=steps,
        epochs=setting["epochs"],
        validation_data=validation,
        callbacks=[digits.EpochLog(run_dir / "epochs.jsonl")],
        verbose=0,
    )
    report = strategy.report()
    counts = {"updates": report.updates, "accepted": report.accepted, "dropped": report.dropped}
    (run_dir / "report.json").write_text(json.dumps(counts | {"staleness": report.staleness}) + "\n")
