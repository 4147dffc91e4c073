# SPDX-License-Identifier: Apache-2.0
"""One embedded cluster for all checks of `aggregated_*checks.py`, and what they have in common. A pytest plugin."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import changed_policies
import keras
import numpy as np
import pytest
import training

import tfdist
from tfdist.coordination import delay_hook

NUM_WORKERS = 4
# After a worker was stopped and went on, TensorFlow's answers may take the chief a minute or two.
STALL_SECS = 200
# 12 full batches of 16 and one of 11, which four workers can't share evenly.
BATCH = 16
COUNT = 203
STEPS = 13
RANDOM = np.random.default_rng(0)
X = RANDOM.random((COUNT, 6), np.float32)
Y = X.sum(1, keepdims=True)
IDS = RANDOM.integers(0, 50, (COUNT, 3))


@pytest.fixture(scope="session")
def cluster() -> tfdist.ParameterServerStrategy:
    return tfdist.ParameterServerStrategy(
        num_workers=NUM_WORKERS, num_ps=2, policies=[tfdist.BackupWorkers(spares=0)], stall_timeout_secs=STALL_SECS
    )


@pytest.fixture
def with_policies(cluster: tfdist.ParameterServerStrategy) -> Callable[..., tfdist.ParameterServerStrategy]:
    return functools.partial(changed_policies.under, cluster, NUM_WORKERS, STALL_SECS)


@pytest.fixture
def with_spares(with_policies: Callable[..., Any]) -> Callable[[int], tfdist.ParameterServerStrategy]:
    """The same with so many spares."""
    return lambda spares: with_policies(tfdist.BackupWorkers(spares=spares))


@pytest.fixture
def strategy(with_spares: Callable[[int], tfdist.ParameterServerStrategy]) -> tfdist.ParameterServerStrategy:
    """Every worker counts."""
    return with_spares(0)


class Straggler:
    """Holds up one worker's contributions until it is released.

    Attributes:
      held: set while a contribution is held up.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._released = threading.Event()
        self.held = threading.Event()

    def __call__(self, replica: int, attempt: int) -> None:
        if replica == self._worker and not self._released.is_set():
            self.held.set()
            self._released.wait(50)

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def straggler() -> Iterator[Straggler]:
    """The last worker."""
    made = Straggler(NUM_WORKERS - 1)
    delay_hook.clear()
    delay_hook.set_hook(made)
    yield made
    made.release()
    delay_hook.uninstall(made)


def layers() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])


def compiled(strategy: Any, make: Callable[[], keras.Model] = layers, optimizer: Any = "sgd", **options: Any) -> Any:
    return training.compiled(strategy, make, optimizer, **options)
