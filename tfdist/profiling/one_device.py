# SPDX-License-Identifier: Apache-2.0
"""Runs a script on one device: tfdist's strategies become a MirroredStrategy of one device within a block."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import tfdist

_NAMES = ("MirroredStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy")
_CLUSTER = "TF_CONFIG"
_GPUS = "CUDA_VISIBLE_DEVICES"


@contextlib.contextmanager
def replacing_strategies(built: list[str]) -> Iterator[None]:
    """Within the block `tfdist.ParameterServerStrategy(...)` and its like need no cluster.

    Args:
      built: gets the text of each strategy that the script builds.
    """
    mirrored = tfdist.MirroredStrategy
    with mock.patch.dict(vars(tfdist), {name: _one_device(name, mirrored, built) for name in _NAMES}):
        yield


def _one_device(name: str, mirrored: Any, built: list[str]) -> type:
    class OneDevice:
        def __new__(cls, *args: Any, policies: Any = (), **kwargs: Any) -> Any:
            built.append(f"{name}(policies={list(policies)!r})")
            return mirrored([_first_device()])

    OneDevice.__name__ = OneDevice.__qualname__ = name
    return OneDevice


def _first_device() -> str:
    import tensorflow as tf

    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Within the block there is no cluster, and one GPU; call it before TensorFlow is imported."""
    before = {name: os.environ.get(name) for name in (_CLUSTER, _GPUS)}
    os.environ.pop(_CLUSTER, None)
    os.environ[_GPUS] = (before[_GPUS] or "0").split(",")[0] if before[_GPUS] != "" else ""
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
