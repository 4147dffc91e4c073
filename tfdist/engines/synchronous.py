# SPDX-License-Identifier: Apache-2.0
"""The engine of synchronous training on several workers of one device each.

How a step flows, on each worker; nothing of it is Python's:

    tf.data        this worker's part of the batch, and the number of examples in all parts together
    step           forward, backward; gradients weighed by examples; counts of the metrics
    one sum        gradients, counts, logs and statistics of all workers
    update         the optimizer, from the sums; the same on all workers

What can be known without asking is not asked: all workers read the same batches (the strategy has compared the data
sets), so each knows the size of a batch, and in which step the data end. Where that does not hold, such as for data of
unknown length, TensorFlow's own iterator asks the others.

The strategy owns the engine; a pass is an iterator of tf.data's, which Keras owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.compat.tensorflow import replicas
from tfdist.engines.base import Engine
from tfdist.passes import handle as handles
from tfdist.passes import splitting
from tfdist.passes.shares import Shares
from tfdist.step import step_times
from tfdist.step.step import Step

# Makes a Keras step on all replicas: (step, data, shares_of, limits of the read); see `replicas.run_step`, and
# `StepTimes.begin`.
RunStep = Callable[[Any, Any, Callable[[list[Any]], Shares | None], Any], Any]


class SynchronousEngine(Engine):
    """Makes the steps of `fit` on batches whose size every worker knows.

    Args:
      run_step: makes a step.
      num_replicas: replicas on all workers.
      failure: returns the exception of a sum over the workers that has failed, if one has.
      begin_pass: called before a pass of `fit`.
    """

    def __init__(
        self,
        run_step: RunStep,
        num_replicas: int,
        failure: Callable[[], BaseException | None] = lambda: None,
        begin_pass: Callable[[], object] = lambda: None,
    ) -> None:
        self._run_step = run_step
        self._num_replicas = num_replicas
        self._failure = failure
        self._begin_pass = begin_pass

    def raised_in_step(self, error: Exception) -> BaseException | None:
        """See `Engine.raised_in_step`: of a sum in Python, as by MPI."""
        del error
        return self._failure()

    def distribute(
        self, own: tf.data.Dataset, element_spec: Any, whole: Callable[[], Any]
    ) -> handles.DistributedDataset:
        """Makes a data set for `fit` and for others.

        Args:
          own: this worker's part of each batch, with the size of the batch.
          element_spec: of whole batches.
          whole: makes the stock data set.
        """
        size = splitting.static_size(element_spec)
        is_even = size is not None and size % self._num_replicas == 0
        given = handles.in_handles(self, step_times.timed(own), is_even, prefetched=0)
        return handles.DistributedDataset(self, given, whole)

    def open(self, dataset: handles.DistributedDataset, fit: Any) -> Iterator[Any] | None:
        """See `Engine.open`: a pass of `fit`; all others read the stock data set."""
        if fit is None:
            return None
        self._begin_pass()
        return iter(dataset.own)

    def run(self, step: Step, handle: handles.BatchHandle) -> Any:
        """See `Engine.run`."""

        def shares_of(parts: list[Any]) -> Shares | None:
            is_even = handle.kind.form
            return None if is_even else Shares.of_batches(parts, lambda rows: total, self._num_replicas)

        called, (_, total), got = handle.content
        return self._run_step(step, self.batch(handle), shares_of, tf.stack([called, got]))

    def batch(self, handle: handles.BatchHandle) -> Any:
        """This worker's part of the batch, as distributed values."""
        return replicas.values_of_replicas([handles.without_optionals(handle.content[1][0])], always_wrap=False)
