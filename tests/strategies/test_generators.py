# SPDX-License-Identifier: Apache-2.0
"""A Python generator's batches are all trained on under MirroredStrategy, also those read to build the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import tfdist
from tfdist.compat import generators

pytestmark = pytest.mark.devices


class Counting(keras.Model):
    """Adds up what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = keras.metrics.Sum(name="seen")
        self.scale = self.add_weight(name="scale")

    def call(self, x: Any) -> Any:
        return x * self.scale

    def _step(self, data: Any) -> Any:
        self.seen.update_state(keras.ops.cast(data[0], "int32"))
        return {"seen": self.seen.result()}

    def train_step(self, data: Any) -> Any:
        return self._step(data)

    def test_step(self, data: Any) -> Any:
        return self._step(data)


def numbers(batches: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for index in range(batches):
        batch = np.arange(4 * index, 4 * index + 4, dtype=np.float32)[:, None]
        yield batch, batch


@pytest.mark.parametrize("policies", [0, 1], ids=["synchronous", "backup workers"])
def test_every_batch_of_a_generator_is_used_once(cpus: list[str], policies: int) -> None:
    strategy = tfdist.MirroredStrategy(cpus[:2], policies=[tfdist.BackupWorkers(spares=0)] * policies)
    with strategy.scope():
        model = Counting()
        model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    history = model.fit(numbers(12), validation_data=numbers(7), verbose=0).history
    assert history == {"seen": [sum(range(48))], "val_seen": [sum(range(28))]}
    assert model.fit(numbers(12), steps_per_epoch=5, epochs=2, verbose=0).history["seen"] == [
        sum(range(20)),
        sum(range(20, 40)),
    ]
    assert model.evaluate(numbers(9), verbose=0, return_dict=True) == {"seen": sum(range(36))}


def test_a_pass_to_build_from_is_given_again_and_no_other() -> None:
    shared = iter(range(8))
    replayed = generators.Replayed(lambda: shared)
    first = replayed()
    assert [next(first) for _ in range(3)] == [0, 1, 2]
    replayed.give_again()
    second = replayed()
    assert next(second) == 0
    assert next(first) == 3  # read ahead by a pass that was left
    assert [next(second) for _ in range(4)] == [1, 2, 3, 4]
    assert list(replayed()) == [5, 6, 7]


def test_a_pass_that_trains_is_not_kept() -> None:
    replayed = generators.Replayed(lambda: iter(range(1000)))
    assert list(replayed()) == list(range(1000))
    assert not replayed._read
