# SPDX-License-Identifier: Apache-2.0
"""What the mirrored strategies give their warmup phase: whom it trains with, and what it reads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.engines import quorum, threaded_data, warming, warming_data
from tfdist.policies.base import Aggregation
from tfdist.policies.warmup import Warmup
from tfdist.strategies import _common, steps
from tfdist.strategies import agreement as agreements
from tfdist.telemetry.report import Recorder


class WarmingSteps(_common.KerasSteps):
    """Mixed into a strategy: `KerasSteps`, and the turns of a warmup phase."""

    _warming: warming.Warming | None = None
    # What decides about each update after the phase.
    _aggregation: Aggregation | None = None
    # How many gradients the last update was made of, where the decision is made elsewhere.
    _num_contributed = 0

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """See `KerasSteps.run`."""
        if self._warming is None or len(args) != 1 or not isinstance(args[0], warming_data.Turn):
            return super().run(fn, args, kwargs, options)
        return tf.nest.map_structure(steps._mark, self._warming.run(fn, args[0], super().run))

    @property
    def replicas_to_aggregate(self) -> int:
        """How many replicas' gradients an update is made of, as things are: 1 while one replica warms up alone."""
        if self._warming is not None and not self._warming.is_over:
            return self._warming.num_taking_part
        if self._aggregation is None:
            return self.num_replicas_in_sync
        return self._num_contributed or self._aggregation.replicas_to_aggregate


def on_devices(strategy: Any, warmup: Warmup | None, recorder: Recorder) -> warming.Warming | None:
    """The phase of a `MirroredStrategy`, if there is one: one process, which knows all."""
    if warmup is None:
        return None
    company = warming.Company(
        replicas=range(strategy.num_replicas_in_sync),
        exchange=lambda word: [word],
        from_first=lambda value: value(),
        give=warming.give_copies,
    )
    return warming.Warming(strategy, warmup, company, functools.partial(_prepare, strategy), recorder.record)


def on_workers(
    strategy: Any, warmup: Warmup | None, recorder: Recorder, agreement: agreements.Agreement
) -> warming.Warming | None:
    """The phase of a `MultiWorkerMirroredStrategy`, if there is one: one replica for each worker."""
    if warmup is None:
        return None
    first = agreement.tasks[0]
    what = "the end of the warmup phase" if agreement.is_chief else f"{first}'s warmup phase"
    company = warming.Company(
        replicas=[agreement.tasks.index(agreement.task)],
        exchange=lambda word: list(agreement.gather(word, what).values()),
        from_first=lambda value: agreement.from_chief(value, what),
        give=lambda variables: warming.give_over_workers(variables, agreement.is_chief, strategy._sum_over_workers),
    )
    return warming.Warming(strategy, warmup, company, functools.partial(_prepare, strategy), recorder.record)


def _prepare(strategy: Any, model: keras.Model) -> None:
    steps._check_xla(strategy, model)
    steps.prepare(strategy, model)


def with_batches(phase: warming.Warming | None, whole: Any, dataset: Any, options: Any) -> Any:
    """`whole`, beginning with the phase if there is one: a data set of batches that one process' replicas share.

    Args:
      phase: the phase.
      whole: what the strategy makes of the data set without a warmup.
      dataset: yields global batches.
      options: as for `experimental_distribute_dataset`.

    Raises:
      ValueError: there are options, which nothing but TensorFlow's own data sets obey.
    """
    if phase is None or whole is dataset or not tf.executing_eagerly():
        return whole
    if options is not None or not isinstance(dataset, tf.data.Dataset):
        raise ValueError(
            "experimental_distribute_dataset: with a warmup phase it takes a tf.data.Dataset and no options; leave "
            f"them away. Received: dataset={dataset!r}, options={options!r}"
        )
    if isinstance(whole, threaded_data.ReplicaDataset):
        return phase.dataset(whole, lambda: warming_data.ReplicaSource(whole))
    tuples = warming_data.parts_of(dataset, len(phase.replicas))
    return phase.dataset(whole, lambda: warming_data.TensorSource(tuples, list, tuples.element_spec[0]))


def with_own(phase: warming.Warming | None, whole: Any, make: Callable[[], tf.data.Dataset]) -> Any:
    """The same for a data set that gives the parts of one process' replicas in turn."""
    if phase is None or not tf.executing_eagerly():
        return whole
    if isinstance(whole, threaded_data.ReplicaDataset):
        return phase.dataset(whole, lambda: warming_data.ReplicaSource(whole))
    parts, group = make(), len(phase.replicas)
    return phase.dataset(whole, lambda: warming_data.TensorSource(parts, list, parts.element_spec, group=group))


def with_worker(
    phase: warming.Warming | None,
    whole: Any,
    pairs: tf.data.Dataset,
    engine: quorum.QuorumEngine | None,
    sum_over_workers: warming.Sum | None = None,
) -> Any:
    """The same for a worker of one replica.

    Args:
      phase: the phase.
      whole: what the strategy makes of the data set without a warmup.
      pairs: this worker's parts, as for a `QuorumDataset`.
      engine: makes the updates after the phase, if it does.
      sum_over_workers: sums over all workers; needed if they may have different numbers of batches.
    """
    if phase is None or not tf.executing_eagerly():
        return whole

    def have_all(has_next: bool) -> bool:
        (missing,) = sum_over_workers([tf.constant(0 if has_next else 1, tf.int64)]) if sum_over_workers else [0]
        return int(missing) == 0

    agree, spec = have_all if sum_over_workers else None, pairs.element_spec[0]
    return phase.dataset(whole, lambda: warming_data.TensorSource(pairs, lambda pair: [pair[0]], spec, agree, engine))
