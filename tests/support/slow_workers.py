# SPDX-License-Identifier: Apache-2.0
"""Trains with a worker that is slow in one thing, and asks report and page who is slow: they have to agree."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.telemetry import update_log
from tfdist.telemetry.report import Report
from tfdist.watching.tensorboard import plugin

# The first ones, whose input was read beforehand, are not slow; of fewer steps they would be too large a part.
STEPS = 64
_SECS = 0.08
# What the first line says of a step when worker:1 is slow in it, and who is named.
_SAID = {
    "input": ("worker:1 is ", "of its time is input"),
    "step": ("worker:1 is ", "of its time is computing"),
    "sum": ("no worker stands out; ", "of a step is the all-reduce"),
}


def check(strategy: Any, directory: pathlib.Path, index: int, kind: str) -> None:
    """Trains on all workers, of which worker:1 is slow in `kind`, and checks what is said; each worker calls it."""
    found = _trained(strategy, directory, index, kind)
    begin, end = _SAID[kind]
    assert found.in_words.startswith(begin) and found.in_words.endswith(end), f"{kind}: {found}"
    # The step of a small net, from the end of its input on.
    assert found.compute_secs["worker:0"].p50 > 1e-5
    if kind == "sum":
        assert found.slow is None and found.reduce_secs.p50 > 0.6 * _SECS
    else:
        assert found.slow is not None and found.slow.names == ("worker:1",)
        assert found.order[0] == "worker:1"
        assert found.wait["worker:0"].p50 > 0.5 * _SECS > found.wait["worker:1"].p50
    if index:
        return
    timeline = update_log.read_logs(directory)
    assert timeline.num_updates == STEPS
    page = plugin.RecordedJob(timeline)
    assert page.report.in_words == found.in_words
    assert [row["name"] for row in page.table] == found.order


def _trained(strategy: Any, directory: pathlib.Path, index: int, kind: str) -> Report:
    def late(wanted: str) -> Callable[[np.ndarray], np.ndarray]:
        def wait(value: np.ndarray) -> np.ndarray:
            time.sleep(_SECS if index == 1 and kind == wanted else 0.0)
            return value

        return wait

    def slowed(wanted: str, tensor: Any) -> Any:
        is_traced = tf.is_tensor(tensor) and kind == wanted
        waited = tf.numpy_function(late(wanted), [tensor], tensor.dtype) if is_traced else tensor
        return tf.ensure_shape(waited, tensor.shape) if is_traced else tensor

    class Late(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return slowed("step", x)

    stock = strategy._sums.in_step

    def in_step(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.control_dependencies([slowed("sum", tensors[0]), *tensors]):
            return stock([tf.identity(each) for each in tensors])

    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), Late(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    rows = np.random.default_rng(0).random((6, 6), np.float32)
    data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1])).repeat(STEPS).batch(6, drop_remainder=True)
    data = data.map(lambda x, y: (slowed("input", x), y))
    # Of this `fit` alone.
    recorder = strategy.distribution.recorder
    strategy.report()
    recorder.__init__(recorder.names, recorder.is_complete)
    with mock.patch.object(strategy._sums, "in_step", in_step) if kind == "sum" else mock.MagicMock():
        model.fit(data, verbose=0, callbacks=[tfdist.callbacks.Telemetry(directory)])
    found = strategy.report()
    assert found.updates == STEPS
    return found
