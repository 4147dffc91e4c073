# SPDX-License-Identifier: Apache-2.0
"""Dispatch of a step of `strategy.run` to the engine, with its batch; waits for the result where needed."""

from __future__ import annotations

import contextlib

import numpy as np
import tensorflow as tf

from tfdist.engines.parameter_server.engine import CoordinatedEngine
from tfdist.engines.parameter_server.program import Program
from tfdist.engines.parameter_server.worker_data import Batch, WorkerIterator


def dispatch(
    engine: CoordinatedEngine, kind: str, program: Program, tensors: list[tf.Tensor], batch: Batch | None
) -> list[np.ndarray]:
    """Queues or runs a step, by its kind; returns its flat result.

    Args:
      engine: the engine of the workers.
      kind: see `keras_steps.classify`.
      program: the traced step.
      tensors: arguments besides the batch.
      batch: the batch; None if the batch, or parts of several batches, are among the tensors.
    """
    if batch is None:
        return engine.call(program, tensors, None)
    iterator = batch.iterator
    if kind == "predict":
        return _predict(engine, program, iterator)
    if iterator.feed(False) == "chief":
        batch.on_chief = iterator.next_local_batch()
        tensors = batch.on_chief + tensors
        iterator.redeem()
    if kind in ("train", "test") or not program.dtypes:
        is_last, is_update = iterator.is_last, kind == "train"
        return engine.step(program, tensors, iterator, last=is_last, is_update=is_update, batch=batch)
    return engine.call(program, tensors, iterator, batch)


def _predict(engine: CoordinatedEngine, program: Program, iterator: WorkerIterator) -> list[np.ndarray]:
    """Returns the predictions for the next batch, while steps for later batches are in flight."""
    ahead = iterator.started
    with contextlib.suppress(tf.errors.OutOfRangeError):
        while len(ahead) < engine.window:
            ahead.append(engine.start(program, iterator.next_local_batch(), iterator))
    if not ahead:
        raise tf.errors.OutOfRangeError(None, None, "End of sequence")
    iterator.redeem()
    return engine.wait_for(ahead.popleft())
