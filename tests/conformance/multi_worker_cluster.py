# SPDX-License-Identifier: Apache-2.0
"""Fixtures of two workers that run the same checks: a plugin of the pytest of each of them."""

from __future__ import annotations

import itertools
import os
import pathlib
import pickle
import random
import re
from collections.abc import Callable
from typing import Any

import child_pytest
import numpy as np
import pytest
import tensorflow as tf
from conformance import on_one_device
from waiting import wait_until

import tfdist
from tfdist.strategies import _multi_worker_cluster


def pytest_configure() -> None:
    """Gives each worker one device, where other tests have several."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()])


@pytest.fixture(scope="session")
def started() -> tuple[tfdist.MultiWorkerMirroredStrategy, list[float]]:
    """A process has one strategy; and the random numbers that are drawn first."""
    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout_secs=60)
    return strategy, [random.random(), float(np.random.random()), float(tf.random.uniform([]))]


@pytest.fixture
def first_draws(started: tuple[Any, list[float]]) -> list[float]:
    return started[1]


@pytest.fixture
def strategy(started: tuple[tfdist.MultiWorkerMirroredStrategy, Any]) -> tfdist.MultiWorkerMirroredStrategy:
    """Without a policy."""
    return started[0]


@pytest.fixture
def both(tmp_path: pathlib.Path) -> Callable[[Any], list[Any]]:
    """Gives the other worker a value; returns that of the chief and that of the other."""
    counts = itertools.count()

    def exchange(value: Any) -> list[Any]:
        number = next(counts)
        paths = [tmp_path / f"{number} of {index}" for index in range(2)]
        mine = paths[tfdist.Cluster.from_environment().task.index]
        mine.with_suffix(".new").write_bytes(pickle.dumps(value))
        mine.with_suffix(".new").rename(mine)
        wait_until(lambda: all(path.exists() for path in paths), 200)
        return [pickle.loads(path.read_bytes()) for path in paths]

    return exchange


@pytest.fixture(autouse=True)
def has_the_seeds_of_all(strategy: Any) -> None:
    """Each test's end forgets them."""
    _multi_worker_cluster.share_random_state(strategy.distribution.agreement)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest) -> pathlib.Path:
    """The same directory for both workers."""
    name = f"{request.cls.__name__ if request.cls else ''} {request.node.name}"
    path = pathlib.Path(os.environ[child_pytest.SHARED]) / re.sub(r"\W+", "-", name)
    path.mkdir(exist_ok=True)
    return path


def of_one_device(case: str, found: Any, directory: pathlib.Path) -> Any:
    """The numbers of one device, which the chief finds; the other worker has those of the chief, to the last bit."""
    path = directory / "of the chief"
    if tfdist.Cluster.from_environment().task.index == 0:
        one = on_one_device(case)
        path.with_suffix(".new").write_bytes(pickle.dumps((one, found)))
        path.with_suffix(".new").rename(path)
        return one
    wait_until(path.exists, 200)
    one, of_chief = pickle.loads(path.read_bytes())
    tf.nest.map_structure(np.testing.assert_array_equal, of_chief, found)
    return one
