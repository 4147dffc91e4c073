# SPDX-License-Identifier: Apache-2.0
"""Gives a step of `strategy.run` to the engine: which batch it gets, and whether its result is waited for."""

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
    """Queues a step, or makes it, as its kind wants; returns its flat result.

    Args:
      engine: the engine whose workers make it.
      kind: see `keras_steps.classify`.
      program: the traced step.
      tensors: what it takes beside the batch.
      batch: the batch that it takes; None if that, or parts of several, are among the tensors.
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
    """Returns the predictions for the next batch; those for the ones after it are under way meanwhile."""
    ahead = iterator.started
    with contextlib.suppress(tf.errors.OutOfRangeError):
        while len(ahead) < engine.window:
            ahead.append(engine.start(program, iterator.next_local_batch(), iterator))
    if not ahead:
        raise tf.errors.OutOfRangeError(None, None, "End of sequence")
    iterator.redeem()
    return engine.wait_for(ahead.popleft())
