# SPDX-License-Identifier: Apache-2.0
"""One embedded cluster of two workers and two parameter servers for `compressed_*.py`. A pytest plugin."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import changed_policies
import keras
import numpy as np
import pytest
import training

import tfdist

NUM_WORKERS = 2
STALL_SECS = 60
RANDOM = np.random.default_rng(5)
X = RANDOM.normal(size=(256, 8)).astype(np.float32)
Y = (X @ RANDOM.normal(size=(8, 1))).astype(np.float32)


@pytest.fixture(scope="session")
def cluster() -> tfdist.ParameterServerStrategy:
    policies = [tfdist.Compression(tfdist.compression.SignSGD())]
    return tfdist.ParameterServerStrategy(
        num_workers=NUM_WORKERS, num_ps=2, policies=policies, stall_timeout_secs=STALL_SECS
    )


@pytest.fixture
def with_policies(cluster: tfdist.ParameterServerStrategy) -> Callable[..., tfdist.ParameterServerStrategy]:
    return functools.partial(changed_policies.under, cluster, NUM_WORKERS, STALL_SECS)


def layers() -> keras.Model:
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)])


def compiled(strategy: Any, make: Callable[[], keras.Model] = layers, optimizer: Any = "sgd", **options: Any) -> Any:
    return training.compiled(strategy, make, optimizer, **{"metrics": None, **options})


def fit(model: keras.Model, epochs: int = 2, x: np.ndarray = X) -> list[float]:
    """Returns the loss of each epoch."""
    return model.fit(x, Y, batch_size=32, epochs=epochs, shuffle=False, verbose=0).history["loss"]
