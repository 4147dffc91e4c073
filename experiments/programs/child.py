# SPDX-License-Identifier: Apache-2.0
"""Runs one converted program under one strategy: child.py KIND PROGRAM RESULT.

Writes the losses that `fit` showed, or that the program printed if it calls no `fit`, and the seconds, of the clock and
of CPUs, from its first call of `fit` to the end of the first step.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import itertools
import json
import os
import pathlib
import random
import re
import sys
import time
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("MPLBACKEND", "Agg")

import keras
import numpy as np
import stand_ins
import tensorflow as tf

import tfdist

_DEVICES = {"stock": 2, "mirrored": 2}
_MAX_STEPS = 6
_SEED = 1


def main() -> None:
    """Runs the program that the command line names."""
    kind, program, result = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    keras.config.set_max_steps_per_epoch(_MAX_STEPS)
    worker = tfdist.Cluster.from_environment().task.index if kind == "multi" else 0
    if kind == "multi" and os.environ.get("TFDIST_PROGRAMS_OWN"):
        own = pathlib.Path(f"worker_{worker}")
        own.mkdir(exist_ok=True)
        os.chdir(own)
    text = program.read_text()
    is_own_cluster = kind in ("ps", "backup") and "__strategy__(cluster_resolver" in text
    strategy = None if is_own_cluster else _strategy(kind)
    # Devices can't be changed any more; a program that makes two of its own finds two.
    tf.config.set_logical_device_configuration = lambda *args, **kwargs: None
    builtins.__strategy__ = functools.partial(_strategy, kind) if is_own_cluster else lambda *args, **kwargs: strategy
    builtins.__some__ = _some
    random.seed(_SEED)
    keras.utils.set_random_seed(_SEED)
    stand_ins.install()
    shown: dict[str, Any] = {"losses": [], "first_step_secs": None, "first_step_cpu_secs": None}
    printed: list[float] = []
    _record_losses(shown["losses"])
    _record_printed(printed)
    _record_first_step(shown)
    # Programs for several workers look at it.
    alone = {"cluster": {"worker": ["localhost:1"]}, "task": {"type": "worker", "index": 0}}
    os.environ.setdefault("TF_CONFIG", json.dumps(alone))
    if "captcha_images" in text:
        stand_ins.captchas(pathlib.Path("captcha_images_v2"))
    if "creditcard.csv" in text:
        stand_ins.credit_cards()
    if "glob.glob('aclImdb/" in text:
        stand_ins.film_reviews()
    sys.path.insert(0, str(program.parent))
    sys.argv = [str(program)]
    code = compile(text, str(program), "exec")
    is_in_scope = strategy is not None and os.environ.get("TFDIST_PROGRAMS_SCOPE")
    try:
        with strategy.scope() if is_in_scope else contextlib.nullcontext():
            exec(code, {"__name__": "__main__", "__file__": str(program)})
    finally:
        if worker == 0:
            shown["losses"] = shown["losses"] or printed
            result.write_text(json.dumps(shown))


def _strategy(kind: str, *args: Any, **kwargs: Any) -> Any:
    if kind in _DEVICES:
        devices = [tf.config.LogicalDeviceConfiguration()] * _DEVICES[kind]
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
        names = [f"CPU:{index}" for index in range(_DEVICES[kind])]
        return (tf.distribute if kind == "stock" else tfdist).MirroredStrategy(names)
    if kind == "multi":
        return tfdist.MultiWorkerMirroredStrategy()
    if kind == "ps":
        return tfdist.ParameterServerStrategy(*args, **kwargs)
    if kind == "backup":
        return tfdist.ParameterServerStrategy(*args, policies=[tfdist.BackupWorkers(spares=0)], **kwargs)
    return tf.distribute.get_strategy()


def _some(data: Any) -> Any:
    """The first steps of a data set, or anything else as it is."""
    return itertools.islice(data, _MAX_STEPS) if hasattr(data, "element_spec") else data


def _record_losses(losses: list[float]) -> None:
    """Adds the losses of all epochs of all calls of `fit`, as they are shown."""
    on_epoch_end = keras.callbacks.History.on_epoch_end

    def record(self: Any, epoch: int, logs: Any = None) -> None:
        on_epoch_end(self, epoch, logs)
        values = [value for name, value in (logs or {}).items() if "loss" in name and not name.startswith("val_")]
        if values:
            losses.append(float(np.mean(values[0])))

    keras.callbacks.History.on_epoch_end = record


def _record_printed(losses: list[float]) -> None:
    """Adds the last number of each line about a loss that the program prints."""
    stock = print

    def recording(*values: Any, **options: Any) -> None:
        stock(*values, **options)
        for line in " ".join(map(str, values)).splitlines():
            numbers = re.findall(r"-?\d+\.\d+(?:e-?\d+)?", line) if "loss" in line.lower() else []
            losses.extend(map(float, numbers[-1:]))

    builtins.print = recording


def _record_first_step(shown: dict[str, Any]) -> None:
    """Measures the time from the first call of `fit` to the end of its first step."""
    fit, on_train_batch_end, began = keras.Model.fit, keras.callbacks.CallbackList.on_train_batch_end, list[float]()

    def timed_fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        began.extend([time.monotonic(), time.process_time()])
        return fit(self, *args, **kwargs)

    def timed_end(self: Any, batch: int, logs: Any = None) -> None:
        if shown["first_step_secs"] is None and began:
            # A step may still be running: its logs are there when it is done.
            tf.nest.map_structure(np.asarray, logs)
            shown["first_step_secs"] = round(time.monotonic() - began[0], 2)
            shown["first_step_cpu_secs"] = round(time.process_time() - began[1], 2)
        on_train_batch_end(self, batch, logs)

    keras.Model.fit, keras.callbacks.CallbackList.on_train_batch_end = timed_fit, timed_end


if __name__ == "__main__":
    main()
