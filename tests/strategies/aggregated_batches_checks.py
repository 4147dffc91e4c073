# SPDX-License-Identifier: Apache-2.0
"""Updates from parts of a batch, where all workers count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from aggregated_cluster import BATCH, IDS, STEPS, X, Y, compiled, layers

import tfdist
from tfdist.engines import rounds


def embedding(num_rows: int) -> keras.Model:
    numbers, ids = keras.Input((6,)), keras.Input((3,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(num_rows, 4)(ids))
    joined = keras.layers.Concatenate()([keras.layers.Dense(8, "relu")(numbers), rows])
    return keras.Model([numbers, ids], [keras.layers.Dense(1, name="a")(joined), keras.layers.Dense(1, name="b")(rows)])


def test_rows_of_an_embedding_are_gathered_where_the_table_is(strategy: Any) -> None:
    # A small table would travel whole, with the other small variables.
    model = compiled(strategy, lambda: embedding(num_rows=5000), metrics=[["mae"], ["mse"]])
    model.fit([X, IDS], [Y, Y], batch_size=BATCH, verbose=0)
    (step,) = vars(model.train_function)["_tfdist_traced"].values()
    operations = step._template.weight.graph.get_operations()
    gathered = [
        op for op in operations if op.type == "GatherV2" and "embedding" in op.name and "gradient" not in op.name
    ]
    table = next(v for v in model.trainable_variables if "embedding" in v.path)
    assert gathered
    assert all(op.device == table.value.device for op in gathered)
    # What travels back is rows as well: indices and values, as many as were looked up.
    gradient = step._template.gradients[[v.path for v in step._step.variables()].index(table.path)]
    assert isinstance(gradient, tf.IndexedSlices)


def dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


def test_workers_see_the_end_of_unknown_length_without_an_error(
    with_policies: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[BaseException] = []
    read = rounds.RoundStep.contribute_next

    def reading(self: rounds.RoundStep, iterator: Any) -> Any:
        try:
            return read(self, iterator)
        except tf.errors.OutOfRangeError as error:
            # TensorFlow would warn that it can't delete the results.
            errors.append(error)
            raise

    monkeypatch.setattr(rounds.RoundStep, "contribute_next", reading)
    for policy in (tfdist.BackupWorkers(spares=0), tfdist.SoftSync(updates=4)):
        model = compiled(with_policies(policy), layers, "sgd")
        batches = dataset().filter(lambda x, y: True)
        model.fit(batches, epochs=2, verbose=0)
        assert int(model.optimizer.iterations.numpy()) == 2 * STEPS
    assert not errors
