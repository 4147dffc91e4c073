# SPDX-License-Identifier: Apache-2.0
"""The engine without a policy, and of loops of the user's own: all replicas make each step together, in one graph.

How an update flows, on each worker:

    tf.data        this worker's part of the batch, and the number of examples in all parts together
    step           forward, backward; gradients weighed by examples; counts of the metrics
    one sum        gradients, counts, logs and statistics of all replicas
    update         the optimizer, from the sums; the same on all replicas

What can be known without asking is not asked: where all workers are known to read the same batches, each knows the size
of a batch, and in which step the data end. `fit` then reads `Timed` elements. Where that is not known, such as for data
of unknown length, TensorFlow's own iterator asks the others.

Around the step, a bound `train_step` or `test_step` of a Keras model:

- no side effect runs before the input batch arrives;
- gradients of a replica are weighted by its share of the global batch; without examples it contributes nothing;
- the logs are those of the global batch, in one reduction for all of them; in Keras' own step of one replica per worker
  it is the reduction of the gradients, and the update follows it;
- statistics of layers, such as BatchNormalization, and weights that the step assigns itself are averaged.

Gradients are summed where the step calls `optimizer.apply`, and each replica goes on with the updated weights. So a
step may read them, and replicas may gather from each other. The engines of policies record instead what a step does
(`split.SplitTrainStep`), since they may drop it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.keras import models, optimizers
from tfdist.compat.keras.calls import Call
from tfdist.compat.keras.optimizers import SumGradients
from tfdist.compat.keras.scope import check_made_in_scope
from tfdist.compat.tensorflow import collectives, replicas
from tfdist.engines.base import Engine
from tfdist.passes import splitting
from tfdist.passes.handle import DistributedDataset
from tfdist.passes.shares import Shares, Sum, examples_of_others
from tfdist.step import contribution, gradients, losses, one_replica, recording, rehearsal, step_times, trials
from tfdist.step import logs as logs_of_metrics
from tfdist.step.replicas import (
    by_device,
    counted_by,
    filled_on_devices,
    mark_reduced,
    may_be_empty,
    part_of_replica,
    restored_unless,
    without_terms,
    writes_after_inputs,
)
from tfdist.step.step import Step


class SynchronousEngine(Engine):
    """Makes steps of all replicas.

    Args:
      strategy: the strategy.
      run_stock: runs a function on all replicas as the stock strategy does; given the function, its arguments, and
        `model`, that of a step.
      sum_over_workers: sums tensors over all workers; `in_step=True` in a step of `fit` that all workers trace alike.
      sum_gradients: returns what sums gradients over all replicas, or None to sum them as they are; given the same.

    Attributes:
      times: takes the times of train steps; None with a policy that decides about updates.
    """

    def __init__(
        self,
        strategy: Any,
        run_stock: Callable[..., Any],
        sum_over_workers: Callable[..., list[tf.Tensor]],
        sum_gradients: Callable[[bool], SumGradients | None],
    ) -> None:
        self._strategy, self._run_stock = strategy, run_stock
        self._sum_over_workers, self._sum_gradients = sum_over_workers, sum_gradients
        self.times: step_times.StepClock | None = None

    def distribute(self, own: tf.data.Dataset, whole: Callable[[], Any]) -> DistributedDataset:
        """Returns a data set for `fit` of this worker's only replica, of parts with the examples of their batches.

        Args:
          own: of which all workers read the parts of the same batches.
          whole: makes the one that other loops read.
        """
        return DistributedDataset(self, step_times.timed(own), whole)

    def open(self, dataset: DistributedDataset, fit: Call | None) -> Any:
        """See `Engine.open`."""
        clock: Any = self.times
        return clock.open(dataset, fit)

    def run(self, step: Step, handle: step_times.Timed) -> Any:
        """Makes a step of `fit` from an element of a data set of this engine; in a graph or eagerly. See `step`."""
        (part, total), count = handle.given, replicas.count(self._strategy)
        # `splitting.cut` says the size of parts only if all have it; a part without a graph has the size of its own.
        is_even = not tf.executing_eagerly() and splitting.static_size(part) is not None

        def shares_of(parts: list[Any]) -> Shares | None:
            return None if is_even else Shares.of_batches(parts, lambda rows: (total, total < count), count)

        limits = tf.stack([handle.called, handle.got])
        return self.step(step, self.batch_of(handle), shares_of=shares_of, limits=limits)

    def batch_of(self, timed: step_times.Timed) -> Any:
        """Returns the batch of an element of a data set of this engine, for any function of replicas."""
        return replicas.values_of_replicas([timed.given[0]], always_wrap=False)

    def step(
        self,
        step: Step,
        data: Any,
        options: Any = None,
        shares_of: Callable[[list[Any]], Shares | None] | None = None,
        limits: Any = None,
    ) -> Any:
        """Runs a bound `train_step` or `test_step` on all replicas.

        Args:
          step: the step, after `build_optimizer`, of a model that `check_model` accepts.
          data: its argument: distributed values, or a value for every replica.
          options: of `tf.distribute.Strategy.run`.
          shares_of: in `fit`, returns the shares of these parts of this process' replicas in the batch, None if they
            are equal. By default the workers sum their numbers of examples.
          limits: see `StepClock.begin`.

        Returns:
          The logs, equal on all replicas and workers.
        """
        strategy, model, training, in_fit = self._strategy, step.model, step.kind == "train", shares_of is not None
        # The engine of a warmup phase counts its updates itself.
        times = self.times if training and not strategy.distribution.is_warming() else None
        timed = times.begin(limits) if times else None
        sums = trials.sums_in(strategy, step, part_of_replica(strategy, data, 0), replicas.count(strategy))
        sum_over_workers = functools.partial(self._sum_over_workers, in_step=in_fit)
        sum_gradients = self._sum_gradients(in_fit)
        parts = by_device(strategy, data)
        with writes_after_inputs(parts):
            batches = [*parts.values()]
            shares = shares_of(batches) if shares_of else Shares.of(strategy, data, batches, sum_over_workers)
            if timed and shares and not in_fit and replicas.has_other_workers(strategy):
                timed.start_computing(shares.total)
            with losses.counted_as_one(strategy):
                weights = _Weights(shares, replicas.count(strategy), training and _scales_its_loss(step), sums)
                weigh, finish = _before_sum(strategy, weights, batches), _after_sum(strategy, weights, batches)
                last = None
                is_one_per_worker = replicas.has_other_workers(strategy) and len(strategy.extended.worker_devices) == 1
                # An update after the step is the same, and saves a reduction: behind `optimizer.apply` Keras' own step
                # updates the metrics alone. A metric of the user's may read a weight.
                if training and is_one_per_worker and rehearsal.has_keras_metrics_only(model):
                    # Sparse gradients are summed there.
                    handed_in = timed.handing_in(weigh) if timed else weigh
                    last = _Update(strategy, model.optimizer, handed_in, None, finish)
                sum_up = (timed.summing(sum_gradients) if timed else sum_gradients) or optimizers.sum_given
                of_model = optimizers.optimizers_of(model) if training and not last else []
                updates = [last] if last else [_Update(strategy, each, weigh, sum_up, finish) for each in of_model]
                told = logs_of_metrics.MetricResults([metric for metric in model.metrics if one_replica.counts(metric)])
                noting_writes, written = _noting_writes(model)
                checked = recording.check_counts(model) if replicas.count(strategy) > 1 else []
                changes = [(each.optimizer, "apply", each.apply) for each in updates]
                changes += [*weights.of_losses(model), *told.changes(), *noting_writes, *checked]
                with (
                    optimizers.patched_attributes(changes),
                    _filled(strategy, step, data, parts, shares, sum_over_workers) as (function, given),
                ):
                    logs = self._run_stock(function, (given,), options=options, model=model)
            kept = [*models.statistics_of(model), *written.values()] if training else []
            results = _Results(strategy, shares, sum_over_workers, told, sum_gradients, timed, sums)
            return results.merge(logs, kept, last)


class _Update:
    """Stands for `apply` of an optimizer: sums the replicas' gradients, and updates each copy by the sum.

    Each update is that of a single device, which clips, accumulates, scales and averages what it is given.

    Args:
      strategy: the strategy.
      optimizer: a Keras optimizer.
      weigh: called in replica context with this replica's gradients before they are summed; None for nothing.
      sum_up: sums them. None for an update that is made after the step, with the sums of `gradients`.
      finish: called with the sums; None for nothing.

    Attributes:
      optimizer: the same.
      gradients: where `sum_up` is None, the gradients, weighed; a sparse one is summed over the replicas already. None
        where there is no gradient.
      variables: likewise, the variable of each.
    """

    def __init__(
        self,
        strategy: Any,
        optimizer: Any,
        weigh: optimizers.Transform | None,
        sum_up: optimizers.SumGradients | None,
        finish: optimizers.Transform | None,
    ) -> None:
        self._strategy, self.optimizer = strategy, optimizer
        self._weigh, self._sum_up, self._finish = weigh, sum_up, finish
        self._stock = optimizer.apply
        self.gradients: list[Any] = []
        self.variables: list[Any] = []

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """See `keras.optimizers.Optimizer.apply`."""
        if tf.distribute.in_cross_replica_context():
            return self._stock(grads, trainable_variables)
        if not self.optimizer.built:
            self.optimizer.build(trainable_variables)
        grads = list(grads)
        variables = list(optimizers.trained_by(self.optimizer) if trainable_variables is None else trainable_variables)
        if len(grads) != len(variables) and (trainable_variables is None or not grads):
            return self._stock(grads)  # An error, or nothing.
        check_made_in_scope(self._strategy, variables)
        for gradient, variable in zip(grads, variables, strict=False):
            if isinstance(gradient, tf.Tensor):
                gradient.set_shape(variable.shape)  # Not known by the gradients of some operations on rows.
        weighed = list(self._weigh(grads, self.optimizer, variables)) if self._weigh else grads
        if self._sum_up is not None:
            # The other replicas may come to their next call of `apply` meanwhile.
            self._update(replicas.current(), self._sum_up(self.optimizer, weighed, variables), variables)
            return None
        self.variables = variables
        is_sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in weighed]
        rows = [gradient if sparse else None for gradient, sparse in zip(weighed, is_sparse, strict=True)]
        sums = optimizers.sum_over_replicas(rows)
        self.gradients = [total if sparse else g for g, total, sparse in zip(weighed, sums, is_sparse, strict=True)]
        return None

    def update(self, sums: Sequence[Any]) -> None:
        """Makes the update of this process' only replica, in cross-replica context, from the sums of `gradients`."""
        self._update(0, sums, self.variables)

    def _update(self, index: int, sums: Sequence[Any], variables: Sequence[Any]) -> None:
        sums = self._finish(sums, self.optimizer, variables) if self._finish else sums
        one_replica.apply_alone(self._strategy, index, self.optimizer, self._stock, list(sums), variables)


@dataclasses.dataclass(frozen=True)
class _Weights:
    """Weights of the replicas' gradients and losses, by which their sums are those of the global batch.

    Attributes:
      shares: the replicas' shares of the batch; None if they are known to be equal.
      num_replicas: replicas on all workers.
      weigh_loss: True if all gradients are those of what `optimizer.scale_loss` returns: the loss is weighted there.
      sums: optimizers of which gradients are sums over the examples, which are not weighted.
    """

    shares: Shares | None
    num_replicas: int
    weigh_loss: bool
    sums: losses.Sums

    def share(self) -> Any:
        """Returns the replica's share of the batch."""
        return self.shares.of_replica(replicas.current()) if self.shares else 1 / self.num_replicas

    def unit(self, optimizer: Any) -> Any:
        """Returns the factor from a replica's gradient to that of a device which has the replica's examples alone."""
        if not self.weigh_loss and id(optimizer) not in self.sums.optimizers:
            return 1
        return tf.math.reciprocal_no_nan(self.share()) if self.shares else self.num_replicas

    def of_losses(self, model: keras.Model) -> list[tuple[Any, str, Any]]:
        """Returns the patches of losses and their metrics."""
        if self.num_replicas == 1:
            return []
        return losses.patches(
            model, self.share, weighs_loss=self.weigh_loss, sums=self.sums, gather=self._examples_of_all
        )

    def _examples_of_all(self, own: tf.Tensor) -> tf.Tensor:
        """Returns the examples of all replicas, in their order; the gradient is that of this replica's own."""
        context: Any = tf.distribute.get_replica_context()
        # Not a stand-in.
        own = own[: self.shares.rows[replicas.current()]] if self.shares else own
        count, gather = tf.shape(own)[:1], lambda each: context.all_gather(each, 0)
        counts, every = gather(count), collectives.gather_any(gather, lambda each: (each,), tf.stop_gradient(own))
        begin = tf.reduce_sum(counts[: context.replica_id_in_sync_group])
        return tf.concat([every[:begin], own, every[begin + count[0] :]], 0)

    def weigh(self, given: Sequence[Any], optimizer: Any) -> Sequence[Any]:
        """Weights a replica's gradients for the sum over replicas."""
        if not self.weigh_loss and id(optimizer) not in self.sums.optimizers:
            return [None if each is None else contribution.times(each, self.share()) for each in given]
        factor = self.shares.rows[replicas.current()] > 0 if self.shares else 1.0
        return [None if each is None else contribution.times(each, factor) for each in given]


def _before_sum(strategy: Any, weights: _Weights, batches: Sequence[Any]) -> Any:
    """Returns what a replica does with its gradients before they are summed; None if they are summed as they are."""
    transforms, shares = gradients.transforms_of(strategy), weights.shares
    is_weighed = weights.num_replicas > 1 and (shares is not None or not weights.weigh_loss)

    def before(given: Sequence[Any], optimizer: Any, variables: Sequence[Any]) -> Sequence[Any]:
        if transforms.has(*gradients.ON_REPLICA):
            replica = replicas.current()
            rows: Any = splitting.rows(batches[replica]) if shares is None else shares.rows[replica]
            about = {"contributors": weights.num_replicas, "examples": rows}
            about |= {"counts": None if shares is None else rows > 0, "is_only": False}
            given = transforms.on_replica(optimizer, given, variables, weights.unit(optimizer), **about)
        return weights.weigh(given, optimizer) if is_weighed else given

    return before if is_weighed or transforms.has(*gradients.ON_REPLICA) else None


def _after_sum(strategy: Any, weights: _Weights, batches: Sequence[Any]) -> Any:
    """Returns what is done with the sums of gradients before the update; None for nothing."""
    transforms, shares, count = gradients.transforms_of(strategy), weights.shares, weights.num_replicas

    def examples() -> Any:
        rows = splitting.rows(batches[0])
        return shares.total if shares else rows if rows is None else rows * count

    def after(sums: Sequence[Any], optimizer: Any, variables: Sequence[Any]) -> Sequence[Any]:
        about = {"contributors": count, "examples": examples, "is_only": tf.distribute.in_cross_replica_context()}
        return transforms.at_update(optimizer, sums, variables, **about)

    return after if transforms.has(gradients.UPDATE) else None


def _scales_its_loss(step: Step) -> bool:
    """Returns True if each loss of a train step passes `optimizer.scale_loss`.

    Keras' own step does it; to weigh its loss saves a pass over the gradients. With loss scaling other steps have to do
    it, too, and a loss that is weighed there becomes no larger than that of one device, so float16 holds its gradient.
    """
    optimizer = step.model.optimizer
    is_scaling = hasattr(optimizer, "inner_optimizer") and optimizers.optimizers_of(step.model) == [optimizer]
    return step.is_of_keras or is_scaling


@contextlib.contextmanager
def _filled(
    strategy: Any, step: Step, data: Any, parts: dict[str, Any], shares: Shares | None, sum_over_workers: Sum
) -> Iterator[tuple[Any, Any]]:
    """Yields the step and its data with an example on every replica; counts of what does not count are removed."""
    is_filled = may_be_empty(strategy, data, [*parts.values()])
    if shares is None or not (is_filled or shares.may_repeat):
        yield step.function, data
        return
    function = step.function
    if is_filled:
        others = examples_of_others(strategy, shares, [*parts.values()], sum_over_workers)
        function, data = without_terms(function, shares.rows), _distributed(data, filled_on_devices(parts, others))
    counted = [one_replica.copies_of(variable) for variable in counted_by(step.model)]
    with contextlib.ExitStack() as stack:
        for replica, rows in enumerate(shares.rows):
            stack.enter_context(restored_unless(rows, [each[replica] for each in counted]))
        yield function, data


def _distributed(like: Any, parts: Sequence[Any]) -> Any:
    """Returns a structure like `like`, of distributed values with these parts."""
    flat = [list(values) for values in zip(*(tf.nest.flatten(part) for part in parts), strict=True)]
    leaves = [replicas.values_of_replicas(values) if len(values) > 1 else values[0] for values in flat]
    return tf.nest.pack_sequence_as(like, leaves)


def _noting_writes(model: keras.Model) -> tuple[list[tuple[Any, str, Any]], dict[int, Any]]:
    """Returns patches that note which trainable weights a step assigns itself, and these weights, by id.

    Without a reduction each replica would keep a value of its own. Optimizers bypass the patches.
    """
    found: dict[int, Any] = {}

    def noting(weight: Any) -> Callable[[Any], Any]:
        assign_to = weight.assign

        def assign(value: Any) -> Any:
            # A constraint is part of the update, which all replicas make alike.
            if not isinstance(tf.distribute.get_replica_context(), one_replica.LoneReplica):
                found[id(weight)] = weight
            return assign_to(value)

        return assign

    weights = [weight for weight in model.trainable_variables if one_replica.is_mirrored(weight)]
    return [(weight, "assign", noting(weight)) for weight in weights], found


@dataclasses.dataclass(frozen=True)
class _Results:
    """Reduction of a step's results and statistics over the replicas."""

    strategy: Any
    shares: Shares | None
    sum_over_workers: Sum
    told: logs_of_metrics.MetricResults
    sum_gradients: optimizers.SumGradients | None
    times: step_times.TimedStep | None
    sums: losses.Sums

    def merge(self, logs: Any, statistics: Sequence[Any], last: _Update | None) -> Any:
        """Averages variables, makes a last update and finds the logs, with one reduction for all of them.

        Args:
          logs: of each replica.
          statistics: Keras variables to be averaged.
          last: the update that is made after the step, or None.

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
        for index, (leaf, each) in enumerate(zip(tf.nest.flatten(logs), formulas, strict=True)):
            if each:
                others += [list(values) for values in zip(*(formula.others for formula in each), strict=True)]
            elif not self.told.has(first[index]):
                is_sum = index in self.sums.logs
                others.append([self._whole(*each) for each in enumerate(local[index])] if is_sum else leaf)
        parts = [tf.add_n([tf.convert_to_tensor(copy) for copy in counter.value.values]) for counter in counters]
        parts += [self._mean_part(value) for value in [*others, *(variable.value for variable in statistics)]]
        gradients = last.gradients if last else []
        # The last layers' gradients are there first. Sparse ones are sums already.
        dense = [index for index, each in enumerate(gradients) if isinstance(each, tf.Tensor)][::-1]
        sums_of_gradients, sums = self._sum_up(last, dense, parts)
        counts, rest = sums[: len(counters)], sums[len(counters) :]
        for variable, mean in zip(statistics, rest[len(others) :], strict=True):
            one_replica.assign_all(variable, mean)
        if last:
            by_index = dict(zip(dense, sums_of_gradients, strict=True))
            last.update([by_index.get(index, each) for index, each in enumerate(gradients)])
        means = iter(rest)
        with keras.StatelessScope(state_mapping=list(zip(counters, counts, strict=True))):
            merged = [self._merged(*each, means) for each in zip(first, formulas, strict=True)]
        return tf.nest.map_structure(mark_reduced, tf.nest.pack_sequence_as(logs, merged))

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
        if self.told.has(leaf):
            return self.told.after(leaf)
        mean, dtype = next(means), tf.convert_to_tensor(leaf).dtype
        return tf.cast(tf.round(mean) if dtype.is_integer else mean, dtype)

    def _sum_up(self, last: _Update | None, dense: list[int], parts: list[Any]) -> tuple[list[Any], list[Any]]:
        """Sums the gradients of these indices, and other tensors; takes the times before and after."""
        gradients = [last.gradients[index] for index in dense]
        given = [*parts, *(self.times.vector([*gradients, *parts]) if self.times else [])]
        if gradients and self.sum_gradients:
            variables = [last.variables[index] for index in dense]
            found = self.sum_gradients(last.optimizer, gradients, variables)
            sums = self.sum_over_workers(given)
        else:
            sums = self.sum_over_workers([*gradients, *given])
            found, sums = sums[: len(gradients)], sums[len(gradients) :]
        if self.times:
            self.times.end(sums[len(parts) :], [*found, *sums])
        return found, sums[: len(parts)]

    def _whole(self, replica: int, value: Any) -> tf.Tensor:
        """Returns an estimate of a sum over the batch, from that over a replica's part."""
        shares, count = self.shares, replicas.count(self.strategy)
        return losses.whole(value, lambda: shares.of_replica(replica) if shares else 1 / count)

    def _mean_part(self, value: Any) -> tf.Tensor:
        """Returns this worker's share of the mean over all replicas, weighted by examples."""
        # A value that is not distributed, such as a Python number, is the same on all replicas.
        values = value if isinstance(value, list) else getattr(value, "values", None)
        values = values or [value] * len(self.strategy.extended.worker_devices)
        return tf.add_n([self._weighted(index, value) for index, value in enumerate(values)])

    def _weighted(self, replica: int, value: Any) -> tf.Tensor:
        value = tf.convert_to_tensor(value)
        value = value if value.dtype.is_floating else tf.cast(value, tf.float64)
        if self.shares is None:
            return value / self.strategy.num_replicas_in_sync
        return tf.math.multiply_no_nan(value, self.shares.of_replica(replica, value.dtype))
