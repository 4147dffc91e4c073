# SPDX-License-Identifier: Apache-2.0
"""The graph that averages the replicas of a model, and the counters that decide when.

A file of its own beside the engine, `averaging`: this is what a step traces, that is what drives the passes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.compat.keras import models
from tfdist.compat.keras.optimizers import (
    SumGradients,
    averages_of,
    iterations_of,
    learning_rate_of,
    optimizers_of,
    parts_of,
    patched_attributes,
    sums_of,
    trained_by,
)
from tfdist.compat.tensorflow import graphs, replicas
from tfdist.passes import splitting
from tfdist.passes.shares import ReplicaPart, Sum
from tfdist.policies.parameter_averaging import ParameterAveraging
from tfdist.step import contribution, losses, one_replica, step_times
from tfdist.step.one_replica import copies_of
from tfdist.step.replicas import counted_by, filled_on_devices, may_lack_examples, restored_unless
from tfdist.step.step import Step
from tfdist.transport import buckets


class Count(NamedTuple):
    """Counters of a model's training, int64; they hold no reference to the model.

    Attributes:
      alone: steps since the last average.
      steps: steps that each replica has made.
      bytes_sent: bytes that this worker has sent over the network; each other worker has sent as many.
    """

    alone: tf.Variable
    steps: tf.Variable
    bytes_sent: tf.Variable


class Average:
    """Averages the variables of a model's replicas.

    Args:
      strategy: the strategy.
      policy: says when, and what becomes of the optimizers' slots.
      sum_over_workers: sums tensors over all workers, in cross-replica context.
      times: takes the times of the steps.
      sum_differences: returns a function that sums over all workers the change of an optimizer's parameters since the
        last average; None to sum parameters as they are. Called while an average is traced.
      model: a Keras model, whose optimizers were built.

    Attributes:
      count: what was done so far.
    """

    def __init__(
        self,
        strategy: Any,
        policy: ParameterAveraging,
        sum_over_workers: Sum,
        times: step_times.StepClock,
        sum_differences: Callable[[], SumGradients | None] | None,
        model: keras.Model,
    ) -> None:
        self._strategy = strategy
        self._model = model
        self._policy = policy
        self._sum_over_workers = sum_over_workers
        self._num_workers = replicas.worker_count(strategy)
        self._times = times
        self._sum_differences = sum_differences
        self._optimizers = optimizers_of(model)
        self._state = sort_state(model, policy.optimizer_state)
        self.count = graphs.call_outside(lambda: Count(*(_zeros([], tf.int64) for _ in range(3))))
        make_outer = None if policy.outer == "mean" else policy.make_outer
        is_needed = make_outer or sum_differences
        self._last_average = LastAverage(strategy, self._state.parameters, make_outer) if is_needed else None
        # Results of the last step, times the shares of its replicas, unless metrics have them; and the logs to show.
        self._last: list[tf.Variable] = []
        self._shown: list[tf.Variable] = []
        self._counters: list[Any] | None = None
        self._structure: Any = None
        self._synchronize: Callable[[bool], Any] | None = None
        self._finish = tf.function(self._average_local, autograph=False)

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
        outer = None if self._last_average is None else self._last_average.outer
        return [] if outer is None else outer.variables

    def step(self, step: Step, parts: Sequence[ReplicaPart], times: step_times.TimedStep, sums: losses.Sums) -> Any:
        """Makes a step on each replica of this worker, and averages if it is time; in cross-replica context.

        Args:
          step: see `step_alone`.
          parts: likewise.
          times: takes the times of this step.
          sums: see `step_alone`.

        Returns:
          The logs: of all steps so far on one worker; on several, of those up to the last average.
        """
        if self._last_average is not None:
            tf.cond(tf.equal(self.count.alone, 0), self._last_average.remember, _nothing)
        results = step_alone(self._strategy, step, parts, times.hand_in, sums)
        times.keep(results)
        counters = _counters(self._model) if step.is_of_keras else None
        if [id(each) for each in counters or []] != [id(each) for each in self._counters or []]:
            # `compile` has brought other metrics.
            self._synchronize = None
        self._counters, self._structure = counters, results[0]
        last = [] if self._counters is not None else _mean(results, parts, self._strategy.num_replicas_in_sync)
        self.count.steps.assign_add(1)
        self.count.alone.assign_add(1)
        if self._num_workers > 1:
            self._make_logs(last)
            for variable, value in zip(self._last, last, strict=True):
                variable.assign(value)
        if self._policy.every_steps == 1:
            self._average()
        else:
            tf.cond(self.count.alone >= self._policy.every_steps, self._average, _nothing)
        if self._num_workers == 1:
            return self._logs(self._counts() or last)
        return tf.nest.pack_sequence_as(self._structure, [tf.identity(variable) for variable in self._shown])

    def synchronize(self, is_interrupted: bool = False) -> None:
        """Averages if a step was made since the last average; outside of a graph.

        Parameters are summed as they are: somebody may have set them since the last average.

        Args:
          is_interrupted: True after a `fit` that has raised: the program may have set weights since, which an outer
            optimizer would move.
        """
        if self.is_synchronized:
            return
        synchronize = self._synchronize = self._synchronize or tf.function(
            lambda with_outer: self._average(as_they_are=True, with_outer=with_outer), autograph=False
        )
        synchronize(not is_interrupted)

    def finish(self) -> None:
        """Averages the state that is not averaged in between; outside of a graph."""
        if self._state.local:
            self._finish()

    def shown(self) -> dict[str, float]:
        """The logs of the last average, if they are plain numbers that no metric keeps; on several workers only."""
        if self._counters is not None or not isinstance(self._structure, dict) or not self._shown:
            return {}
        names = [name for name, leaf in self._structure.items() if not tf.nest.is_nested(leaf)]
        logs = tf.nest.pack_sequence_as(self._structure, self._shown)
        return {name: float(logs[name].numpy()) for name in names if logs[name].shape.rank == 0}

    # Traced code.

    def _average(self, as_they_are: bool = False, with_outer: bool = True) -> tf.Tensor:
        """Makes the average, and renews the logs to show."""
        averaged, count = self._state.averaged, len(self._state.parameters)
        logs = (self._counts() or [tf.identity(variable) for variable in self._last]) if self._shown else []
        own = self._own_sums(averaged)
        period = step_times.Period(self._times, [*own, *logs])
        sum_differences = None if as_they_are or self._sum_differences is None else self._sum_differences()
        sums, last = list[tf.Tensor](), self._last_average
        if last is not None and sum_differences is not None:
            sums = self._sum_by_differences(sum_differences, own[:count], last)
        sums += buckets.sum_in_buckets([*own[len(sums) :], *logs, *period.vector], self._sum_over_workers)
        period.end(sums[len(own) + len(logs) :], sums)
        means = [_divided(total, self._strategy.num_replicas_in_sync) for total in sums[: len(averaged)]]
        if last is not None and last.outer is not None and with_outer:
            means[:count] = last.moved(means[:count])
        for variable, mean in zip(averaged, means, strict=True):
            one_replica.assign_all(variable, mean)
        for variable, value in self._state.reset:
            one_replica.assign_all(variable, tf.fill(variable.shape, tf.cast(value, variable.dtype)))
        if self._shown:
            found = sums[len(averaged) : len(averaged) + len(logs)]
            for variable, value in zip(self._shown, tf.nest.flatten(self._logs(found)), strict=True):
                variable.assign(tf.cast(value, variable.dtype))
        self.count.alone.assign(0)
        self._count_bytes([*own, *logs])
        return tf.constant(0)

    def _sum_by_differences(
        self, sum_differences: SumGradients, own: Sequence[tf.Tensor], last: LastAverage
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
                trained = trained_by(optimizer) if optimizer.built else ()
                # A parameter of two optimizers is summed once.
                chosen = [(positions.pop(id(each)), each) for each in trained if id(each) in positions]
                differences = [own[index] - num_own * begun[index] for index, _ in chosen]
                totals = sum_differences(optimizer, differences, [each for _, each in chosen])
                for (index, _), total in zip(chosen, totals, strict=True):
                    sums[index] = num_all * begun[index] + total
        return sums

    def _average_local(self) -> None:
        sums = buckets.sum_in_buckets(self._own_sums(self._state.local), self._sum_over_workers)
        for variable, total in zip(self._state.local, sums, strict=True):
            one_replica.assign_all(variable, _divided(total, self._strategy.num_replicas_in_sync))
        self._count_bytes(self._state.local)

    def _own_sums(self, variables: Sequence[Any]) -> list[tf.Tensor]:
        """The sums over this worker's replicas."""
        with tf.device(self._strategy.extended.worker_devices[0]):
            return [one_replica.own_sum(variable) for variable in variables]

    def _count_bytes(self, tensors: Sequence[Any]) -> None:
        size = sum(tf.TensorShape(each.shape).num_elements() * tf.as_dtype(each.dtype).size for each in tensors)
        # In a ring each worker passes on all parts but one, twice: to add them up, and to hand out the sums.
        self.count.bytes_sent.assign_add(2 * size * (self._num_workers - 1) // self._num_workers)

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
        likes = [(leaf.shape, leaf.dtype) for leaf in tf.nest.flatten(self._structure)]
        if [(variable.shape, variable.dtype) for variable in self._shown] == likes and len(self._last) == len(last):
            return
        shapes = [(tensor.shape, tensor.dtype) for tensor in last]
        self._shown, self._last = graphs.call_outside(
            lambda: [[_zeros(*like) for like in each] for each in (likes, shapes)]
        )
        self._synchronize = None


def _zeros(shape: Any, dtype: tf.DType) -> tf.Variable:
    with tf.device("/device:CPU:0"):
        return tf.Variable(tf.zeros(shape, dtype), trainable=False)


def _nothing() -> tf.Tensor:
    return tf.constant(0)


def _mean(results: Sequence[Any], parts: Sequence[ReplicaPart], num_replicas: int) -> list[tf.Tensor]:
    """Returns the terms that this worker adds to the mean of the results over all replicas, flat."""
    shares = [losses.share_of_batch(part.batch, part.total, num_replicas) for part in parts]
    # Without examples a result may be NaN; no share of it is nothing.
    return [
        tf.add_n(
            [contribution.times(tf.cast(leaf, tf.float32), share) for leaf, share in zip(leaves, shares, strict=True)]
        )
        for leaves in zip(*map(tf.nest.flatten, results), strict=True)
    ]


def _divided(total: tf.Tensor, count: int) -> tf.Tensor:
    return total / tf.cast(count, total.dtype) if total.dtype.is_floating else total // count


def _counters(model: keras.Model) -> list[Any] | None:
    """The variables in which the model's metrics count, or None if sums over the replicas are not what they mean."""
    metrics = [metric for metric in model.metrics if metric.variables]
    return (
        [v for metric in metrics for v in metric.variables]
        if metrics and all(map(one_replica.counts, metrics))
        else None
    )


# A Keras train step that each replica makes alone: it updates its own copies of all variables, and nobody else's.
#
# The user's `train_step` runs as it is, once for each replica of this worker, all in one graph. Within it
#
# - `merge_call` and `all_gather`, in which replicas would meet, are refused;
# - `all_reduce` gives what it would give if all replicas had this one's value;
# - a gradient counts as if it was that of the global batch: times the number of replicas, if Keras has divided the
#   loss by it, and times this replica's share of the batch where that is uneven. So the mean of what all replicas come
#   to in one step of SGD is what synchronous SGD comes to.


def step_alone(
    strategy: Any, step: Step, parts: Sequence[ReplicaPart], hand_in: Callable[..., None], sums: losses.Sums
) -> list[Any]:
    """Makes a step on each replica of this worker; in cross-replica context, in a graph or eagerly.

    Args:
      strategy: the strategy.
      step: a model's `train_step`, whose optimizers were built.
      parts: what each of its replicas trains on.
      hand_in: called with the gradients of each replica of this worker, and its index, `replica`.
      sums: the numbers that are sums over the examples in a user's step.

    Returns:
      What each step returns, in tensors.

    Raises:
      ValueError: an optimizer was not built, or the step needs the other replicas.
    """
    model, count = step.model, replicas.count(strategy)
    batches, counted, results = [part.batch for part in parts], list[Any](), []
    if may_lack_examples(batches):
        batches = filled_on_devices(dict(zip(strategy.extended.worker_devices, batches, strict=True)))
        counted = [*models.statistics_of(model), *counted_by(model)]
    for index, part in enumerate(parts):
        share = functools.partial(losses.share_of_batch, part.batch, part.total, count)
        with (
            one_replica.alone(model, strategy, index, is_of_all=True),
            # Without examples, metrics and statistics stay as they are.
            restored_unless(splitting.rows(part.batch), [each.value for each in counted]),
        ):
            results.append(_step(step, batches[index], share, count, functools.partial(hand_in, replica=index), sums))
    return results


def _step(
    step: Step, batch: Any, share: Callable[[], Any], count: int, hand_in: Callable[[Any], None], sums: losses.Sums
) -> Any:
    # The gradient of this replica alone, as that of the global batch.
    factor = share() * count
    changed = losses.patches(step.model, share, sums=sums, may_differ=True)
    changed += one_replica.without_others(step.name, count)
    for optimizer in optimizers_of(step.model):
        scale = losses.whole(factor, share) if id(optimizer) in sums.optimizers else factor
        changed.append((optimizer, "apply", _scaled(optimizer, scale, hand_in)))
    with patched_attributes(changed):
        logs = step.function(batch)
        leaves = [
            losses.whole(leaf, share) if index in sums.logs else leaf
            for index, leaf in enumerate(map(tf.convert_to_tensor, tf.nest.flatten(logs)))
        ]
        return tf.nest.pack_sequence_as(logs, leaves)


def _scaled(optimizer: Any, factor: tf.Tensor | float, hand_in: Callable[[Any], None]) -> Callable[..., Any]:
    apply = optimizer.apply

    def scaled(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        if not optimizer.built:
            raise ValueError(
                f"policies: the optimizer {optimizer.name!r} must have its variables before a step is traced; call "
                "optimizer.build(variables) after the model is built. Received: an optimizer that was not built"
            )
        hand_in(grads)
        return apply([g if g is None else contribution.times(g, factor) for g in grads], trainable_variables)

    return scaled


# Sorts the variables of a model and its optimizers: what is averaged, stays a replica's own, or begins anew.


@dataclasses.dataclass(frozen=True)
class AveragedVariables:
    """Keras variables of a model and its optimizers, by what an average does to them.

    Attributes:
      parameters: the variables that optimizers update.
      averaged: all that are averaged, the parameters first.
      local: variables that are averaged only when training ends, so that all replicas continue alike.
      reset: variables that are set to a value, each with that value.
    """

    parameters: list[Any]
    averaged: list[Any]
    local: list[Any]
    reset: list[tuple[Any, float]]


def sort_state(model: keras.Model, optimizer_state: str) -> AveragedVariables:
    """Sorts a model's variables.

    Besides the parameters, statistics of layers are always averaged. So are the optimizers' moving averages of
    parameters, accumulated gradients, and the state of loss scaling. `iterations` are the same on all replicas, because
    each counts its steps; with loss scaling, which leaves some out, they are averaged.

    Args:
      model: its optimizers were built.
      optimizer_state: what becomes of the optimizers' slots.
    """
    optimizers = optimizers_of(model)
    parts = [part for optimizer in optimizers for part in parts_of(optimizer)]
    scaling = [part for part in parts if hasattr(part, "inner_optimizer")]
    inner = [part for part in parts if not hasattr(part, "inner_optimizer")]
    parameters = _unique([v for each in inner if each.built for v in trained_by(each)])
    others = models.statistics_of(model)
    slots: list[Any] = []
    for each in scaling:
        own = _identities(each.inner_optimizer.variables)
        others += [variable for variable in each.variables if id(variable) not in own]
        others += [iterations_of(part) for part in parts_of(each)[1:]]
    for each in inner:
        # Parameters, or sums of gradients.
        kept = [*averages_of(each), *sums_of(each)]
        others += kept
        special = _identities([*kept, iterations_of(each), learning_rate_of(each), *parameters])
        slots += [variable for variable in each.variables if id(variable) not in special]
    slots = [slot for slot in slots if tf.as_dtype(slot.dtype).is_floating]
    if optimizer_state == "average":
        others += slots
    local = slots if optimizer_state == "local" else []
    reset = _reset(inner, slots) if optimizer_state == "reset" else []
    return AveragedVariables(parameters, _unique([*parameters, *others]), local, reset)


def _reset(optimizers: Sequence[Any], slots: Sequence[Any]) -> list[tuple[Any, float]]:
    """The slots with what a new optimizer has in them, which for some is not zero."""
    wanted = _identities(slots)
    pairs: list[tuple[Any, float]] = []
    for optimizer in optimizers:
        values = graphs.call_outside(_initial, optimizer)
        if len(values) != len(optimizer.variables):
            raise ValueError(
                "ParameterAveraging(optimizer_state='reset'): what this optimizer begins with can't be found out; use "
                f"'average' or 'local'. Received: optimizer={optimizer!r}"
            )
        pairs += [(v, x) for v, x in zip(optimizer.variables, values, strict=True) if id(v) in wanted]
    return pairs


def _initial(optimizer: Any) -> list[float]:
    """Returns the value of each variable of a new optimizer of this kind, the same for all of its elements."""
    new = type(optimizer).from_config(optimizer.get_config())
    variables = [
        keras.Variable(tf.zeros([1] * len(each.shape), each.dtype), dtype=each.dtype, name=each.name)
        for each in trained_by(optimizer)
    ]
    new.build(variables)
    return [float(tf.reshape(tf.convert_to_tensor(variable), [-1])[0]) for variable in new.variables]


def _identities(variables: Iterable[Any]) -> set[int]:
    return {id(variable) for variable in variables}


def _unique(variables: Iterable[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


# The outer optimizer of parameter averaging: it is given how far the replicas came on average, as a gradient.
#
# Source: Douillard et al. 2023, DiLoCo, arXiv 2311.08105, algorithm 1, lines 12 to 14:
# theta(t) = OuterOpt(theta(t-1), theta(t-1) - mean of theta(t)).


class LastAverage:
    """The parameters at the last average, and what moves them on. Every worker has the same, which computes the same.

    Args:
      strategy: the strategy.
      parameters: Keras variables.
      make_outer: makes a Keras optimizer; None without an outer optimizer.

    Attributes:
      device: where the values are.
      values: Keras variables, one for each parameter.
      outer: the outer optimizer, or None.
    """

    def __init__(self, strategy: Any, parameters: Sequence[Any], make_outer: Callable[[], Any] | None) -> None:
        self._strategy = strategy
        self._parameters = parameters
        self.device = strategy.extended.worker_devices[0]
        self.values, self.outer = graphs.call_outside(self._made, make_outer)

    def _made(self, make_outer: Callable[[], Any] | None) -> tuple[list[Any], Any]:
        with tf.device(self.device):
            values = [
                keras.Variable(tf.convert_to_tensor(copies_of(parameter)[0]), dtype=parameter.dtype)
                for parameter in self._parameters
            ]
            outer = None if make_outer is None else make_outer()
            if outer is not None:
                outer.build(values)
        return values, outer

    def remember(self) -> tf.Tensor:
        """Takes the parameters as they are now for those of the last average."""
        with tf.device(self.device):
            for last, parameter in zip(self.values, self._parameters, strict=True):
                last.value.assign(copies_of(parameter)[0])
        return tf.constant(0)

    def moved(self, means: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """From the means of the parameters to the new parameters of all replicas, by the outer optimizer."""
        with tf.device(self.device):
            differences = [each.value - mean for each, mean in zip(self.values, means, strict=True)]
            one_replica.apply_alone(self._strategy, 0, self.outer, self.outer.apply, differences, self.values)
            return [tf.convert_to_tensor(each) for each in self.values]
