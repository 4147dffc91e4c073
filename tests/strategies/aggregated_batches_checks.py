# SPDX-License-Identifier: Apache-2.0
"""Updates from parts of a batch, where all workers count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
import training
from aggregated_cluster import compiled
from parameter_server_cluster import BATCH, STEPS, X, Y, dataset

import tfdist
from tfdist.engines import rounds


def test_a_generator_is_fed_whole_where_each_worker_has_all_data(
    cluster: Any, with_policies: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster._engine, "data_sharding", "replicate")
    signature = tf.TensorSpec([6], tf.float32), tf.TensorSpec([1], tf.float32)
    data = tf.data.Dataset.from_generator(lambda: zip(X, Y, strict=True), output_signature=signature)
    models = [compiled(tf.distribute.get_strategy()), compiled(with_policies(tfdist.BackupWorkers(spares=0)))]
    for model in models:
        model.fit(data.batch(BATCH, drop_remainder=True), verbose=0)
    training.assert_close(*(model.get_weights() for model in models))


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
