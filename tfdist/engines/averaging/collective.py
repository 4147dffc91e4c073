# SPDX-License-Identifier: Apache-2.0
"""The graph that averages the replicas of a model, and the counters that decide when."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import fresh_threads, optimizer_patches, optimizer_variables
from tfdist.data.shares import Sum
from tfdist.engines.averaging import slots as averaging_slots
from tfdist.engines.averaging.outer_optimizer import LastAverage, Outer
from tfdist.policies.parameter_averaging import ParameterAveraging
from tfdist.step import copies
from tfdist.transport import buckets


@dataclasses.dataclass(eq=False)
class Count:
    """Counters of a model's training; they hold no reference to the model.

    Attributes:
      alone: steps since the last average.
      steps: steps that each replica has made.
      averages: averages made.
      bytes_each: bytes that a worker sends over the network for an average.
      bytes_more: bytes that it has sent besides.
    """

    alone: tf.Variable
    steps: tf.Variable
    averages: tf.Variable
    bytes_each: int = 0
    bytes_more: int = 0

    @property
    def bytes_sent(self) -> int:
        """Bytes that this worker has sent; each other worker has sent as many."""
        return int(self.averages.numpy()) * self.bytes_each + self.bytes_more


class Average:
    """Averages the variables of a model's replicas.

    Args:
      strategy: the strategy.
      model: a Keras model, whose optimizers were built.
      policy: says when, and what becomes of the optimizers' slots.
      sum_over_workers: sums tensors over all workers, in cross-replica context.
      num_workers: on how many the replicas are.
      sum_differences: returns what sums over all workers how far the parameters of an optimizer came since the last
        average, or None to sum parameters as they are; asked while an average is traced.

    Attributes:
      count: what was done so far.
    """

    def __init__(
        self,
        strategy: Any,
        model: keras.Model,
        policy: ParameterAveraging,
        sum_over_workers: Sum,
        num_workers: int,
        sum_differences: Callable[[], optimizer_patches.SumGradients | None] | None = None,
    ) -> None:
        self._strategy = strategy
        self._model = model
        self._policy = policy
        self._sum_over_workers = sum_over_workers
        self._num_workers = num_workers
        self._sum_differences = sum_differences
        self._optimizers = optimizer_patches.optimizers_of(model)
        self._state = averaging_slots.state(model, policy.optimizer_state)
        self.count = fresh_threads.call(lambda: Count(_counter(), _counter(), _counter()))
        self._last_average = self._outer = None
        if policy.outer != "mean" or sum_differences:
            self._last_average = LastAverage(strategy, self._state.parameters)
            if policy.outer != "mean":
                self._outer = Outer(strategy, policy.make_outer, self._last_average)
        # What the last step returned, times the shares of its replicas, unless metrics tell it; and the logs to show.
        self._last: list[tf.Variable] = []
        self._shown: list[tf.Variable] = []
        self._counters: list[Any] | None = None
        self._structure: Any = None
        self._synchronize: Callable[[], Any] | None = None
        self._finish: Callable[[], Any] | None = None

    def is_of(self, optimizers: Sequence[Any]) -> bool:
        """Returns True if it averages for these optimizers: `compile` may have brought others."""
        return [id(each) for each in optimizers] == [id(each) for each in self._optimizers]

    @property
    def is_synchronized(self) -> bool:
        """True if no step was made since the last average; outside of a graph."""
        return not int(self.count.alone.numpy())

    @property
    def variables(self) -> list[Any]:
        """The outer optimizer's Keras variables, if there is one."""
        return self._outer.variables if self._outer is not None else []

    def begin_step(self) -> None:
        """To be called, in cross-replica context, before the replicas make a step alone."""
        if self._last_average is not None:
            tf.cond(tf.equal(self.count.alone, 0), self._last_average.remember, _nothing)

    def end_step(self, results: Sequence[Any], shares: Sequence[Any], is_stock: bool) -> Any:
        """To be called after it. Averages if it is time.

        Args:
          results: what the step returned on each replica of this worker.
          shares: the part of the batch that each of them had.
          is_stock: True if the results are those of the model's metrics.

        Returns:
          The logs: of all steps so far on one worker; on several, of those up to the last average.
        """
        counters = _counters(self._model) if is_stock else None
        if [id(each) for each in counters or []] != [id(each) for each in self._counters or []]:
            # `compile` has brought other metrics.
            self._synchronize = None
        self._counters, self._structure = counters, results[0]
        last = [] if self._counters is not None else _mean(results, shares)
        self.count.steps.assign_add(1)
        self.count.alone.assign_add(1)
        if self._num_workers == 1:
            self._average_if_due(lambda: self._average([]))
            return self._logs(self._counts() or last)
        self._make_logs(last)
        for variable, value in zip(self._last, last, strict=True):
            variable.assign(value)
        self._average_if_due(lambda: self._average(self._shown))
        return tf.nest.pack_sequence_as(self._structure, [tf.identity(variable) for variable in self._shown])

    def _average_if_due(self, average: Callable[[], tf.Tensor]) -> None:
        if self._policy.every_steps == 1:
            average()
        else:
            tf.cond(self.count.alone >= self._policy.every_steps, average, _nothing)

    def synchronize(self) -> None:
        """Averages if a step was made since the last average; outside of a graph.

        Parameters are summed as they are: somebody may have set them since the last average.
        """
        if self.is_synchronized:
            return
        synchronize = self._synchronize = self._synchronize or tf.function(
            lambda: self._average(self._shown, as_they_are=True), autograph=False
        )
        synchronize()

    def finish(self) -> None:
        """Averages what is not averaged in between; outside of a graph."""
        if self._state.local:
            finish = self._finish = self._finish or tf.function(self._average_local, autograph=False)
            finish()
            self.count.bytes_more += self._bytes_of(self._state.local)

    def shown(self) -> dict[str, float]:
        """The logs of the last average, if they are plain numbers that no metric keeps; on several workers only."""
        if self._counters is not None or not isinstance(self._structure, dict) or not self._shown:
            return {}
        names = [name for name, leaf in self._structure.items() if not tf.nest.is_nested(leaf)]
        logs = tf.nest.pack_sequence_as(self._structure, self._shown)
        return {name: float(logs[name].numpy()) for name in names if logs[name].shape.rank == 0}

    # What is traced.

    def _average(self, shown: Sequence[tf.Variable], as_they_are: bool = False) -> tf.Tensor:
        """Makes the average; `shown` are the logs to renew."""
        averaged, count = self._state.averaged, len(self._state.parameters)
        logs = (self._counts() or [tf.identity(variable) for variable in self._last]) if shown else []
        own = [self._own_sum(variable) for variable in averaged]
        self.count.bytes_each = self._bytes_of([*own, *logs])
        sum_differences = None if as_they_are or self._sum_differences is None else self._sum_differences()
        if self._last_average is not None and sum_differences is not None:
            sums = self._sum_by_differences(sum_differences, own[:count], self._last_average)
            sums += buckets.sum_in_buckets([*own[count:], *logs], self._sum_over_workers)
        else:
            sums = buckets.sum_in_buckets([*own, *logs], self._sum_over_workers)
        means = [_divided(total, self._strategy.num_replicas_in_sync) for total in sums[: len(averaged)]]
        if self._outer is not None:
            means[:count] = self._outer.move(means[:count])
        for variable, mean in zip(averaged, means, strict=True):
            copies.assign_all(variable, mean)
        for variable, value in self._state.reset:
            copies.assign_all(variable, tf.fill(variable.shape, tf.cast(value, variable.dtype)))
        if shown:
            for variable, value in zip(shown, tf.nest.flatten(self._logs(sums[len(averaged) :])), strict=True):
                variable.assign(tf.cast(value, variable.dtype))
        self.count.alone.assign(0)
        self.count.averages.assign_add(1)
        return tf.constant(0)

    def _sum_by_differences(
        self, sum_differences: optimizer_patches.SumGradients, own: Sequence[tf.Tensor], last: LastAverage
    ) -> list[tf.Tensor]:
        """Returns the sums of the parameters over all replicas: of the last average, and of what became different.

        Source: Basu et al. 2019, Qsparse-local-SGD, arXiv 1906.02367, algorithm 1.

        Args:
          sum_differences: sums the differences of an optimizer's parameters.
          own: the sums over this worker's replicas.
          last: the parameters that all have begun with.
        """
        num_own, num_all = len(self._strategy.extended.worker_devices), self._strategy.num_replicas_in_sync
        sums: list[Any] = [None] * len(own)
        with tf.device(last.device):
            begun = [tf.convert_to_tensor(each) for each in last.values]
            positions = {id(parameter): index for index, parameter in enumerate(self._state.parameters)}
            for optimizer in self._optimizers:
                trained = optimizer_variables.trained_by(optimizer) if optimizer.built else ()
                # A parameter of two optimizers is summed once.
                chosen = [(positions.pop(id(each)), each) for each in trained if id(each) in positions]
                differences = [own[index] - num_own * begun[index] for index, _ in chosen]
                totals = sum_differences(optimizer, differences, [each for _, each in chosen])
                for (index, _), total in zip(chosen, totals, strict=True):
                    sums[index] = num_all * begun[index] + total
        return sums

    def _average_local(self) -> tf.Tensor:
        sums = buckets.sum_in_buckets(
            [self._own_sum(variable) for variable in self._state.local], self._sum_over_workers
        )
        for variable, total in zip(self._state.local, sums, strict=True):
            copies.assign_all(variable, _divided(total, self._strategy.num_replicas_in_sync))
        return tf.constant(0)

    def _own_sum(self, variable: Any) -> tf.Tensor:
        """The sum over this worker's replicas."""
        with tf.device(self._strategy.extended.worker_devices[0]):
            return copies.own_sum(variable)

    def _bytes_of(self, tensors: Sequence[Any]) -> int:
        size = sum(tf.TensorShape(each.shape).num_elements() * tf.as_dtype(each.dtype).size for each in tensors)
        # In a ring each worker passes on all parts but one, twice: to add them up, and to hand out the sums.
        return 2 * size * (self._num_workers - 1) // self._num_workers

    def _counts(self) -> list[tf.Tensor]:
        """Returns the counts of the metrics on this worker."""
        return [tf.add_n([tf.convert_to_tensor(c) for c in counter.value.values]) for counter in self._counters or []]

    def _logs(self, values: Sequence[tf.Tensor]) -> Any:
        """The logs, from counts or means over all replicas."""
        if self._counters is None:
            return tf.nest.pack_sequence_as(self._structure, list(values))
        with keras.StatelessScope(state_mapping=list(zip(self._counters, values, strict=True))):
            return self._model.get_metrics_result()

    def _make_logs(self, last: Sequence[tf.Tensor]) -> None:
        """Makes the variables of the logs, once it is known what they look like."""
        likes = [(leaf.shape, leaf.dtype) for leaf in map(tf.convert_to_tensor, tf.nest.flatten(self._structure))]
        if [(variable.shape, variable.dtype) for variable in self._shown] == likes and len(self._last) == len(last):
            return
        shapes = [(tensor.shape, tensor.dtype) for tensor in last]
        self._shown, self._last = fresh_threads.call(
            lambda: [[_zeros(*like) for like in each] for each in (likes, shapes)]
        )
        self._synchronize = None


def _counter() -> tf.Variable:
    with tf.device("/device:CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False)


def _zeros(shape: Any, dtype: tf.DType) -> tf.Variable:
    with tf.device("/device:CPU:0"):
        return tf.Variable(tf.zeros(shape, dtype), trainable=False)


def _nothing() -> tf.Tensor:
    return tf.constant(0)


def _mean(results: Sequence[Any], shares: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the terms that this worker adds to the mean of the results over all replicas, flat."""
    flat = [[tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(result)] for result in results]
    return [
        tf.add_n(
            [
                # Without examples a result may be NaN; no share of it is nothing.
                tf.math.multiply_no_nan(tf.cast(leaf, tf.float32), tf.cast(share, tf.float32))
                for leaf, share in zip(leaves, shares, strict=True)
            ]
        )
        for leaves in zip(*flat, strict=True)
    ]


def _divided(total: tf.Tensor, count: int) -> tf.Tensor:
    return total / tf.cast(count, total.dtype) if total.dtype.is_floating else total // count


def _counters(model: keras.Model) -> list[Any] | None:
    """The variables in which the model's metrics count, or None if sums over the replicas are not what they mean."""
    metrics = [metric for metric in model.metrics if metric.variables]
    return [v for metric in metrics for v in metric.variables] if metrics and all(map(copies.counts, metrics)) else None
