# SPDX-License-Identifier: Apache-2.0
"""The warmup phases of the mirrored strategies: the peers that a phase has, and what it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.data import replica_batches
from tfdist.data.shares import Sum
from tfdist.engines.multi_worker.agreement import Agreement
from tfdist.engines.warmup import data as warmup_data
from tfdist.engines.warmup.engine import Peers, WarmupEngine
from tfdist.policies.warmup import Warmup
from tfdist.step import copies
from tfdist.strategies.distribution import Distribution
from tfdist.telemetry.report import Recorder


def on_devices(strategy: Any, warmup: Warmup | None, recorder: Recorder) -> WarmupEngine | None:
    """The phase of a `MirroredStrategy`, if there is one: one process, which knows all."""
    peers = Peers(
        replicas=range(strategy.num_replicas_in_sync),
        exchange=lambda word: [word],
        from_first=lambda value: value(),
        give=copies.broadcast_here,
    )
    return warmup and WarmupEngine(strategy, warmup, peers, recorder.record)


def on_workers(
    strategy: Any, warmup: Warmup | None, distribution: Distribution, agreement: Agreement
) -> WarmupEngine | None:
    """The phase of a `MultiWorkerMirroredStrategy`, if there is one: one replica for each worker."""
    what = "the end of the warmup phase" if agreement.is_chief else f"{agreement.tasks[0]}'s warmup phase"
    peers = Peers(
        replicas=[agreement.tasks.index(agreement.task)],
        exchange=lambda word: list(agreement.gather(word, what).values()),
        from_first=lambda value: agreement.from_chief(value, what),
        give=distribution.broadcast,
    )
    return warmup and WarmupEngine(strategy, warmup, peers, distribution.recorder.record)


def with_batches(phase: WarmupEngine | None, whole: Any, dataset: Any, options: Any) -> Any:
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
    if isinstance(whole, replica_batches.ReplicaDataset):
        return phase.distribute(whole, lambda: warmup_data.ReplicaSource(whole))
    tuples = warmup_data.parts_of(dataset, len(phase.replicas))
    return phase.distribute(whole, lambda: warmup_data.PartSource(tuples, list, tuples.element_spec[0]))


def with_own(phase: WarmupEngine | None, whole: Any, make: Callable[[], tf.data.Dataset]) -> Any:
    """The same for a data set that gives the parts of one process' replicas in turn."""
    if phase is None or not tf.executing_eagerly():
        return whole
    if isinstance(whole, replica_batches.ReplicaDataset):
        return phase.distribute(whole, lambda: warmup_data.ReplicaSource(whole))
    parts, group = make(), len(phase.replicas)
    return phase.distribute(whole, lambda: warmup_data.PartSource(parts, list, parts.element_spec, group=group))


def with_worker(
    phase: WarmupEngine | None,
    whole: Any,
    pairs: tf.data.Dataset,
    engine: Any,
    sum_over_workers: Sum | None = None,
) -> Any:
    """The same for a worker of one replica.

    Args:
      phase: the phase.
      whole: what the strategy makes of the data set without a warmup.
      pairs: this worker's parts, and the sizes of the whole batches.
      engine: goes on with a pass after the phase, if there is a policy for it.
      sum_over_workers: sums over all workers; needed if they may have different numbers of batches.
    """
    if phase is None:
        return whole

    def have_all(has_next: bool) -> bool:
        (missing,) = sum_over_workers([tf.constant(0 if has_next else 1, tf.int64)]) if sum_over_workers else [0]
        return int(missing) == 0

    agree, rest, spec = have_all if sum_over_workers else None, engine and engine.rest, pairs.element_spec[0]
    return phase.distribute(whole, lambda: warmup_data.PartSource(pairs, lambda pair: [pair[0]], spec, agree, rest))
