# SPDX-License-Identifier: Apache-2.0
"""One embedded cluster for all checks of `aggregated_*checks.py`, and what they have in common. A pytest plugin."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import changed_policies
import keras
import pytest
import tensorflow as tf
import training
from parameter_server_cluster import COUNT, RANDOM, layers
from waiting import wait_until

import tfdist
from tfdist.compat.tensorflow import coordinator
from tfdist.coordination import delay_hook

NUM_WORKERS = 4
# After a worker was stopped and went on, TensorFlow's answers may take the chief a minute or two.
STALL_SECS = 200
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


@pytest.fixture(autouse=True)
def leaves_nothing_behind(cluster: Any) -> Iterator[None]:
    """In the place of the general check, which would take a worker that was started again for one left behind."""
    yield
    wait_until(lambda: not coordinator.lost_workers(cluster._engine.coordinator), STALL_SECS)


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
    delay_hook.set_hook(made)
    yield made
    made.release()
    delay_hook.uninstall(made)


def compiled(strategy: Any, make: Callable[[], keras.Model] = layers, optimizer: Any = "sgd", **options: Any) -> Any:
    return training.compiled(strategy, make, optimizer, **options)


class Examples(keras.metrics.Metric):
    """Counts examples, and adds up a number that each of them has."""

    def __init__(self) -> None:
        super().__init__(name="examples")
        self.count = self.add_variable((), "zeros", name="count")
        self.sum = self.add_variable((), "zeros", name="sum")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign(self.count + tf.cast(tf.shape(y_true)[0], "float32"))
        self.sum.assign(self.sum + tf.reduce_sum(y_true))

    def result(self) -> Any:
        return {"examples": tf.convert_to_tensor(self.count), "sum": tf.convert_to_tensor(self.sum)}
