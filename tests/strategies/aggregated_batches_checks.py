# SPDX-License-Identifier: Apache-2.0
"""Updates from parts of a batch, where all workers count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from aggregated_cluster import compiled
from parameter_server_cluster import STEPS, dataset

import tfdist
from tfdist.engines import rounds


def test_workers_see_the_end_of_unknown_length_without_an_error(
    with_policies: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[BaseException] = []
    read = rounds.RoundStep.contribute_next

    def reading(self: rounds.RoundStep, iterator: Any, worker: int) -> Any:
        try:
            return read(self, iterator, worker)
        except tf.errors.OutOfRangeError as error:
            # TensorFlow would warn that it can't delete the results.
            errors.append(error)
            raise

    monkeypatch.setattr(rounds.RoundStep, "contribute_next", reading)
    for policy in (tfdist.BackupWorkers(spares=0), tfdist.SoftSync(updates=4)):
        model = compiled(with_policies(policy))
        batches = dataset().filter(lambda x, y: True)
        model.fit(batches, epochs=2, verbose=0)
        assert int(model.optimizer.iterations.numpy()) == 2 * STEPS
    assert not errors
