# SPDX-License-Identifier: Apache-2.0
"""Runs one converted program under one strategy, and writes the losses that it showed: child.py KIND PROGRAM RESULT."""

from __future__ import annotations

import builtins
import json
import os
import pathlib
import random
import sys
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("MPLBACKEND", "Agg")

import keras
import numpy as np
import stand_ins
import tensorflow as tf

import tfdist

KINDS = ("one", "stock", "mirrored", "multi", "ps", "backup")
_DEVICES = {"stock": 2, "mirrored": 2}
_MAX_STEPS = 12
_SEED = 1


def main() -> None:
    """Runs the program that the command line names."""
    kind, program, result = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    keras.config.set_max_steps_per_epoch(_MAX_STEPS)
    if kind == "multi":
        # Programs make directories and files of fixed names, as each worker does on a machine of its own.
        own = pathlib.Path(f"worker_{tfdist.Cluster.from_environment().task.index}")
        own.mkdir(exist_ok=True)
        os.chdir(own)
    strategy = _strategy(kind)
    # Devices can't be changed any more; a program that makes two of its own finds two.
    tf.config.set_logical_device_configuration = lambda *args, **kwargs: None
    builtins.__strategy__ = lambda: strategy
    random.seed(_SEED)
    keras.utils.set_random_seed(_SEED)
    stand_ins.install()
    losses = _recorded()
    text = program.read_text()
    if "captcha_images" in text:
        stand_ins.captchas(pathlib.Path("captcha_images_v2"))
    sys.path.insert(0, str(program.parent))
    sys.argv = [str(program)]
    code = compile(text, str(program), "exec")
    try:
        exec(code, {"__name__": "__main__", "__file__": str(program)})
    finally:
        if kind != "multi" or tfdist.Cluster.from_environment().task.index == 0:
            result.write_text(json.dumps(losses))


def _strategy(kind: str) -> Any:
    if kind in _DEVICES:
        devices = [tf.config.LogicalDeviceConfiguration()] * _DEVICES[kind]
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
        names = [f"CPU:{index}" for index in range(_DEVICES[kind])]
        return (tf.distribute if kind == "stock" else tfdist).MirroredStrategy(names)
    if kind == "multi":
        return tfdist.MultiWorkerMirroredStrategy()
    if kind == "ps":
        return tfdist.ParameterServerStrategy()
    if kind == "backup":
        return tfdist.ParameterServerStrategy(policies=[tfdist.BackupWorkers(spares=0)])
    return tf.distribute.get_strategy()


def _recorded() -> list[float]:
    """The losses of all epochs of all calls of `fit`, as they are shown, in a list that grows."""
    losses: list[float] = []
    on_epoch_end = keras.callbacks.History.on_epoch_end

    def record(self: Any, epoch: int, logs: Any = None) -> None:
        on_epoch_end(self, epoch, logs)
        values = [value for name, value in (logs or {}).items() if "loss" in name and not name.startswith("val_")]
        if values:
            losses.append(float(np.mean(values[0])))

    keras.callbacks.History.on_epoch_end = record
    return losses


if __name__ == "__main__":
    main()
