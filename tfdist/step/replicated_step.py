# SPDX-License-Identifier: Apache-2.0
"""Runs a Keras step on all replicas of a synchronous strategy.

A step is a bound `train_step` or `test_step` of a Keras model; any other function runs unchanged. Around it:

- no side effect runs before the input batch arrives;
- optimizers are built before anything is traced, so that slots are not created inside a loop;
- each replica's gradients are weighted by its share of the global batch, so that their sum is the gradient of the mean
  over all examples; a replica without examples contributes nothing;
- the optimizer patches put clipping, accumulation and loss scaling after the sum over replicas;
- the logs are those of the whole global batch, in one reduction for all of them; in Keras' own step of one replica per
  worker it is the reduction of the gradients, and the update follows it;
- statistics of layers, such as BatchNormalization, and weights that the step assigns itself are averaged, so that
  they are equal on all replicas.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import model_parallel
from tfdist.compat import patching
from tfdist.compat.keras import models, optimizers
from tfdist.compat.keras.scope import check_made_in_scope
from tfdist.compat.tensorflow import replicas
from tfdist.passes import splitting
from tfdist.passes.shares import Shares, Sum
from tfdist.step import empty_parts, gradients, losses, one_replica, rehearsal, scope, step_times, write_order
from tfdist.step import logs as logs_of_metrics

# One trace at a time: `losses.counted_as_one` sets an attribute of the strategy, and two threads may fit two
# models.
_TRACING = threading.RLock()
TRAIN, TEST = "train_step", "test_step"
# Set on tensors that are the same on all replicas already.
REDUCED = "_tfdist_reduced"


def model_of(function: Any) -> keras.Model | None:
    """Returns the model of a Keras step; None for any other function."""
    model = getattr(function, "__self__", None)
    is_step = models.is_trainer(model) and getattr(function, "__name__", "") in (TRAIN, TEST)
    return model if is_step else None


def is_train_step(function: Any) -> bool:
    """Returns True for the `train_step` of a Keras model."""
    return model_of(function) is not None and function.__name__ == TRAIN


def run_step(
    strategy: Any,
    run: Callable[[Any, Any], Any],
    step: Any,
    data: Any,
    sum_over_workers: Sum,
    shares_of: Callable[[list[Any]], Shares | None] | None = None,
    sum_gradients: optimizers.SumGradients | None = None,
    times: step_times.Step | None = None,
) -> Any:
    """Runs a Keras step on all replicas.

    Args:
      strategy: the strategy.
      run: runs a step on data as the stock strategy does and returns its logs per replica.
      step: a bound `train_step` or `test_step`, of a model that `check_model` accepts; for the first, after `prepare`.
      data: the step's argument: distributed values, or a value for every replica.
      sum_over_workers: sums tensors over all workers.
      shares_of: returns the shares of the batch that this process' replicas have these parts of, None if they are
        equal; by default the workers sum their numbers of examples.
      sum_gradients: sums gradients over all replicas, in any context; as they are, by default.
      times: takes the times of a train step.

    Returns:
      The logs, equal on all replicas and workers.
    """
    model, training = step.__self__, step.__name__ == TRAIN
    parts = _local(strategy, data)
    with write_order.writes_after_inputs(parts):
        batches = [*parts.values()]
        # No single weight of a gradient is right for sums and means: each replica counts its copy of a batch then.
        counts_once = not losses.has_both_kinds(model)
        given = strategy, data, batches, sum_over_workers, counts_once
        shares = shares_of(batches) if shares_of else Shares.of(*given)
        if times and shares and not shares_of and replicas.has_other_workers(strategy):
            times.start_computing(shares.total)
        with _TRACING, losses.counted_as_one(strategy, step) as has_own_loss:
            weights = losses.LossWeights(model, shares, strategy.num_replicas_in_sync, has_own_loss)
            weigh, finish = _before_sum(strategy, weights, batches), _after_sum(strategy, weights, batches)
            postponed = None
            if training and _updates_last(strategy, step):
                # Sparse gradients are summed there.
                handed_in = times.handing_in(weigh) if times else weigh
                postponed = optimizers.Postponed(model.optimizer, handed_in, finish)
            sum_up = times.summing(sum_gradients) if times else sum_gradients
            patches = _patches(model, postponed, weigh, sum_up, finish) if training else contextlib.nullcontext()
            told = logs_of_metrics.MetricResults([metric for metric in model.metrics if one_replica.counts(metric)])
            written = _WrittenWeights(model)
            noticed = losses.noticed(model, strategy.num_replicas_in_sync)
            with (
                patches,
                optimizers.patched_attributes([*weights.of_losses(), *told.changes(), *written.changes(), *noticed]),
                _filled(strategy, step, data, parts, weights) as given,
            ):
                logs = run(*given)
        kept = [*models.statistics_of(model), *written.found] if training else []
        return _Results(strategy, shares, sum_over_workers, told, sum_gradients, times).merge(logs, kept, postponed)


def _patches(model: keras.Model, postponed: Any, *given: Any) -> contextlib.AbstractContextManager:
    if postponed:
        return optimizers.patched_attributes([postponed.change])
    return optimizers.patched(optimizers.optimizers_of(model), *given)


def _before_sum(strategy: Any, weights: losses.LossWeights, batches: Sequence[Any]) -> Any:
    """Returns what a replica does with its gradients before they are summed; None if they are summed as they are."""
    transforms, weigh, shares = gradients.of(strategy), weights.transform, weights.shares
    if not transforms.has(*gradients.ON_REPLICA):
        return weigh and (lambda given, *_: weigh(given))

    def on_replica(given: Sequence[Any], optimizer: Any, variables: Sequence[Any]) -> Sequence[Any]:
        replica = replicas.current()
        rows = splitting.rows(batches[replica])
        given = transforms.on_replica(
            optimizer,
            given,
            variables,
            weights.unit,
            is_only=False,
            counts=None if shares is None else shares.rows[replica] > 0,
            contributors=weights.num_replicas,
            examples=rows if shares is None else shares.rows[replica],
        )
        return weigh(given) if weigh else given

    return on_replica


def _after_sum(strategy: Any, weights: losses.LossWeights, batches: Sequence[Any]) -> Any:
    """Returns what is done with the sums of gradients before the update; None for nothing."""
    transforms, shares, count = gradients.of(strategy), weights.shares, weights.num_replicas
    if not transforms.has(gradients.UPDATE):
        return None

    def examples() -> Any:
        rows = splitting.rows(batches[0])
        return shares.total if shares else rows if rows is None else rows * count

    def at_update(sums: Sequence[Any], optimizer: Any, variables: Sequence[Any]) -> Sequence[Any]:
        is_only = tf.distribute.in_cross_replica_context()
        about = {"contributors": count, "examples": examples}
        return transforms.at_update(optimizer, sums, variables, is_only=is_only, **about)

    return at_update


def _updates_last(strategy: Any, step: Any) -> bool:
    """Returns True if an update after the step is the same, and saves a reduction over the workers.

    After `optimizer.apply`, Keras' own step updates the metrics only. A metric of the user's may read a weight.
    """
    is_one_per_worker = replicas.has_other_workers(strategy) and len(strategy.extended.worker_devices) == 1
    return is_one_per_worker and rehearsal.has_keras_metrics_only(step.__self__)


def run_prediction(strategy: Any, run: Callable[[Any], Any], data: Any) -> Any:
    """Runs Keras' step of `predict` on all replicas, some of which may have no examples."""
    parts = _local(strategy, data)
    if not _may_be_empty(strategy, data, [*parts.values()]):
        return run(data)
    rows = [splitting.rows(part) for part in parts.values()]
    results = run(_distributed(data, empty_parts.filled_on_devices(parts)))
    by_replica = [
        empty_parts.only_with_examples(*each) for each in zip(rows, _local(strategy, results).values(), strict=True)
    ]
    return _distributed(results, by_replica)


def _may_be_empty(strategy: Any, data: Any, parts: Sequence[Any]) -> bool:
    """Returns True if a replica may have no examples."""
    return strategy.num_replicas_in_sync > 1 and _is_divided(data, len(parts)) and empty_parts.may_occur(parts)


@contextlib.contextmanager
def _filled(
    strategy: Any, step: Any, data: Any, parts: dict[str, Any], weights: losses.LossWeights
) -> Iterator[tuple[Any, Any]]:
    """Yields the step and its data with an example on every replica; counts of what does not count are removed."""
    shares, may_be_empty = weights.shares, _may_be_empty(strategy, data, [*parts.values()])
    if shares is None or not (may_be_empty or shares.holders is not None):
        yield step, data
        return
    counted = [
        one_replica.copies_of(variable)
        for variable in empty_parts.counted_by(step.__self__, weights.trackers_of_sums())
    ]
    kept = [empty_parts.Kept(each[replica] for each in counted) for replica in range(len(parts))]
    if may_be_empty:
        data = _distributed(data, empty_parts.filled_on_devices(parts))
        yield empty_parts.without_terms(step, shares.rows), data
    else:
        yield step, data
    for before, rows in zip(kept, shares.rows, strict=True):
        before.restore_unless(rows)


def _is_divided(data: Any, num_parts: int) -> bool:
    """Returns False if each replica has all examples; the only replica of a worker has plain tensors."""
    leaves = tf.nest.flatten(data)
    is_distributed = [isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves]
    is_known = all(each or tf.is_tensor(leaf) for each, leaf in zip(is_distributed, leaves, strict=True))
    return is_known and (num_parts == 1 or any(is_distributed))


def _distributed(like: Any, parts: Sequence[Any]) -> Any:
    """Returns a structure like `like`, of distributed values with these parts."""
    flat = [list(values) for values in zip(*(tf.nest.flatten(part) for part in parts), strict=True)]
    leaves = [replicas.values_of_replicas(values) if len(values) > 1 else values[0] for values in flat]
    return tf.nest.pack_sequence_as(like, leaves)


def check_model(strategy: Any, model: keras.Model) -> None:
    """Raises ValueError if a model can't be trained or evaluated as it was compiled, or has layers without a place.

    What `scope` can move into the scope is moved.
    """
    scope.take_over(strategy, model)
    model_parallel.check(strategy, model)
    devices = strategy.extended.worker_devices
    is_local_gpus = len(devices) == strategy.num_replicas_in_sync and all("GPU" in device for device in devices)
    if model.jit_compile and strategy.num_replicas_in_sync > 1 and not is_local_gpus:
        raise ValueError(
            "compile(jit_compile=True): XLA can't compile a step that runs on several workers or CPU devices; leave it "
            f"at 'auto' or False. Received: jit_compile=True, {strategy.num_replicas_in_sync} replicas, {devices[0]}"
        )


def prepare(strategy: Any, model: keras.Model) -> None:
    """Builds a model's optimizer before its train step is traced.

    Raises:
      ValueError: a weight that Keras' step trains was made outside of the scope.
    """
    # A model's own train_step may apply several optimizers to parts of the model; Keras' one updates all weights.
    optimizer, is_of_keras = model.optimizer, type(model).train_step is keras.Model.train_step
    is_built = optimizer is None or optimizer.built or not model.trainable_variables
    if not is_built or (is_of_keras and strategy.num_replicas_in_sync > 1):
        check_made_in_scope(strategy, model.trainable_variables)
    if is_built:
        return
    with tf.init_scope(), strategy.scope(), optimizers.undone_on_error([optimizer]):
        optimizer.build(model.trainable_variables)


def _local(strategy: Any, data: Any) -> dict[str, Any]:
    """Returns the part of a step's argument for each device of this process, by the device's name."""

    def of_replica(replica: int) -> Any:
        def pick(leaf: Any) -> Any:
            is_distributed = isinstance(leaf, tf.distribute.DistributedValues)
            return strategy.experimental_local_results(leaf)[replica] if is_distributed else leaf

        return tf.nest.map_structure(pick, data)

    return {device: of_replica(replica) for replica, device in enumerate(strategy.extended.worker_devices)}


class _WrittenWeights:
    """Trainable weights that a step assigns itself. Without a reduction each replica would keep a value of its own."""

    def __init__(self, model: keras.Model) -> None:
        self._weights = [weight for weight in model.trainable_variables if hasattr(weight.value, "values")]
        self._found: dict[int, Any] = {}

    @property
    def found(self) -> list[Any]:
        """Keras variables that the traced step assigns."""
        return list(self._found.values())

    def changes(self) -> list[tuple[Any, str, Any]]:
        """Returns patches that record assignments, for `optimizers.patched_attributes`; optimizers bypass them."""
        return [(weight, "assign", self._noting(weight)) for weight in self._weights]

    def _noting(self, weight: Any) -> Callable[[Any], Any]:
        assign_to = weight.assign

        def assign(value: Any) -> Any:
            self._found[id(weight)] = weight
            return assign_to(value)

        return assign


@dataclasses.dataclass(frozen=True)
class _Results:
    """Reduction of a step's results and statistics over the replicas."""

    strategy: Any
    shares: Shares | None
    sum_over_workers: Sum
    told: logs_of_metrics.MetricResults
    sum_gradients: optimizers.SumGradients | None
    times: step_times.Step | None = None

    def merge(self, logs: Any, statistics: Sequence[Any], postponed: Any = None) -> Any:
        """Averages variables, makes a postponed update and finds the logs, with one reduction for all of them.

        Args:
          logs: of each replica.
          statistics: Keras variables to be averaged.
          postponed: an `optimizers.Postponed`, or None.

        Returns:
          The logs of the global batch.
        """
        local = [self.strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(logs)]
        first = [values[0] for values in local]
        # For each leaf, the formula of each replica's value.
        formulas = [None if self.told.has(values[0]) else self._formulas(values) for values in local]
        used = [count for each in formulas if each for count in each[0].counts]
        self.told.keep([*first, *used])
        counters = self.told.counters
        others: list[Any] = []
        for leaf, each in zip(tf.nest.flatten(logs), formulas, strict=True):
            if each:
                others += [list(values) for values in zip(*(formula.others for formula in each), strict=True)]
            elif not self.told.has(self.strategy.experimental_local_results(leaf)[0]):
                others.append(leaf)
        parts = [tf.add_n([tf.convert_to_tensor(copy) for copy in counter.value.values]) for counter in counters]
        parts += [self._mean_part(value) for value in [*others, *(variable.value for variable in statistics)]]
        gradients = postponed.gradients if postponed else []
        # The last layers' gradients are there first. Sparse ones are sums already.
        dense = [index for index, each in enumerate(gradients) if isinstance(each, tf.Tensor)][::-1]
        sums_of_gradients, sums = self._sum_up_timed(postponed, dense, parts)
        counts, rest = sums[: len(counters)], sums[len(counters) :]
        for variable, mean in zip(statistics, rest[len(others) :], strict=True):
            one_replica.assign_all(variable, mean)
        if postponed:
            by_index = dict(zip(dense, sums_of_gradients, strict=True))
            postponed.update(self.strategy, [by_index.get(index, each) for index, each in enumerate(gradients)])
        means = iter(rest)
        with keras.StatelessScope(state_mapping=list(zip(counters, counts, strict=True))):
            merged = [self._merged(*each, means) for each in zip(first, formulas, strict=True)]
        return tf.nest.map_structure(mark, tf.nest.pack_sequence_as(logs, merged))

    def _formulas(self, values: Sequence[Any]) -> list[logs_of_metrics.Formula]:
        """Returns a formula for a log's value on each replica of this worker; none if it uses no result of a metric."""
        found = [self.told.formula(value) for value in values]
        same = {(len(each.counts), len(each.others)) if each else None for each in found}
        return [each for each in found if each] if len(same) == 1 else []

    def _merged(
        self, leaf: Any, formulas: Sequence[logs_of_metrics.Formula] | None, means: Iterator[tf.Tensor]
    ) -> tf.Tensor:
        if formulas:
            results = [self.told.after(count) for count in formulas[0].counts]
            return formulas[0].value(results, [next(means) for _ in formulas[0].others])
        return self.told.after(leaf) if self.told.has(leaf) else _like(next(means), leaf)

    def _sum_up(self, postponed: Any, dense: list[int], parts: list[Any]) -> tuple[list[Any], list[Any]]:
        """Sums the gradients of these indices, and other tensors."""
        gradients = [postponed.gradients[index] for index in dense]
        if gradients and self.sum_gradients:
            variables = [postponed.variables[index] for index in dense]
            return self.sum_gradients(postponed.optimizer, gradients, variables), self.sum_over_workers(parts)
        sums = self.sum_over_workers([*gradients, *parts])
        return sums[: len(gradients)], sums[len(gradients) :]

    def _sum_up_timed(self, postponed: Any, dense: list[int], parts: list[Any]) -> tuple[list[Any], list[Any]]:
        """Does the same, and takes the times before and after."""
        if self.times is None:
            return self._sum_up(postponed, dense, parts)
        vector = self.times.vector([*(postponed.gradients[index] for index in dense), *parts])
        of_gradients, sums = self._sum_up(postponed, dense, [*parts, *vector])
        self.times.end(sums[len(parts) :], [*of_gradients, *sums])
        return of_gradients, sums[: len(parts)]

    def _mean_part(self, value: Any) -> tf.Tensor:
        """Returns this worker's share of the mean over all replicas, weighted by examples."""
        # A value that is not distributed, such as a Python number, is the same on all replicas.
        values = value if isinstance(value, list) else getattr(value, "values", None)
        values = values or [value] * len(self.strategy.extended.worker_devices)
        return tf.add_n([self._weighted(index, value) for index, value in enumerate(values)])

    def _weighted(self, replica: int, value: Any) -> tf.Tensor:
        value = tf.convert_to_tensor(value)
        value = value if value.dtype.is_floating else tf.cast(value, tf.float32)
        if self.shares is None:
            return value / self.strategy.num_replicas_in_sync
        return tf.math.multiply_no_nan(value, self.shares.of_replica(replica, value.dtype))


def _like(mean: tf.Tensor, leaf: Any) -> tf.Tensor:
    return tf.cast(mean, tf.convert_to_tensor(leaf).dtype)


def mark(value: Any) -> Any:
    """Marks a tensor as the same on all replicas; returns the value."""
    if isinstance(value, tf.Tensor):
        patching.put(value, REDUCED, True)
    return value
