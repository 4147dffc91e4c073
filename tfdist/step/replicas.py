# SPDX-License-Identifier: Apache-2.0
"""Runs a Keras step on all replicas of a synchronous strategy.

A step is a bound `train_step` or `test_step` of a Keras model; any other function runs unchanged. Around it:

- no side effect runs before the input batch arrives;
- optimizers are built before anything is traced, so that slots are not created inside a loop;
- each replica's gradients are weighted by its share of the global batch, so their sum is the gradient of the mean over
  all examples; a replica without examples contributes nothing;
- each replica updates its copies from the sum over replicas, as a single device does: so clipping, accumulation and
  loss scaling follow the sum;
- the logs are those of the whole global batch, in one reduction for all of them; in Keras' own step of one replica per
  worker it is the reduction of the gradients, and the update follows it;
- statistics of layers, such as BatchNormalization, and weights that the step assigns itself are averaged, so that
  they are equal on all replicas.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import _log, model_parallel
from tfdist.compat import patching
from tfdist.compat.keras import calls, models, optimizers
from tfdist.compat.keras.scope import check_made_in_scope
from tfdist.compat.tensorflow import graphs, inputs, replicas
from tfdist.passes import splitting
from tfdist.passes.shares import Shares, Sum, examples_of_others
from tfdist.step import gradients, losses, one_replica, recording, rehearsal, scope, step_times
from tfdist.step import logs as logs_of_metrics
from tfdist.step.contribution import times
from tfdist.step.step import Step
from tfdist.transport import gathers

# Set on tensors that are the same on all replicas already.
REDUCED = "_tfdist_reduced"


def run_step(
    strategy: Any,
    run: Callable[[Any, Any], Any],
    step: Step,
    data: Any,
    sum_over_workers: Sum,
    shares_of: Callable[[list[Any]], Shares | None] | None = None,
    sum_gradients: optimizers.SumGradients | None = None,
    times: step_times.TimedStep | None = None,
    sums: losses.Sums = losses.NO_SUMS,
) -> Any:
    """Runs a Keras step on all replicas.

    Args:
      strategy: the strategy.
      run: runs a step on data as the stock strategy does and returns its logs per replica.
      step: a bound `train_step`, after `build_optimizer`, or `test_step`, of a model that `check_model` accepts.
      data: the step's argument: distributed values, or a value for every replica.
      sum_over_workers: sums tensors over all workers.
      shares_of: returns the shares of these parts of this process' replicas in the batch, None if they are equal. By
        default the workers sum their numbers of examples.
      sum_gradients: sums gradients over all replicas, in any context; as they are, by default.
      times: takes the times of a train step.
      sums: the numbers that are sums over the examples in a user's step.

    Returns:
      The logs, equal on all replicas and workers.
    """
    model, training = step.model, step.kind == "train"
    parts = _by_device(strategy, data)
    with writes_after_inputs(parts):
        batches = [*parts.values()]
        shares = shares_of(batches) if shares_of else Shares.of(strategy, data, batches, sum_over_workers)
        if times and shares and not shares_of and replicas.has_other_workers(strategy):
            times.start_computing(shares.total)
        with losses.counted_as_one(strategy):
            weights = _Weights(shares, strategy.num_replicas_in_sync, training and _scales_its_loss(step), sums)
            weigh, finish = _before_sum(strategy, weights, batches), _after_sum(strategy, weights, batches)
            last = None
            is_one_per_worker = replicas.has_other_workers(strategy) and len(strategy.extended.worker_devices) == 1
            # An update after the step is the same, and saves a reduction: behind `optimizer.apply` Keras' own step
            # updates the metrics alone. A metric of the user's may read a weight.
            if training and is_one_per_worker and rehearsal.has_keras_metrics_only(model):
                # Sparse gradients are summed there.
                handed_in = times.handing_in(weigh) if times else weigh
                last = _Update(strategy, model.optimizer, handed_in, None, finish)
            sum_up = (times.summing(sum_gradients) if times else sum_gradients) or optimizers.sum_given
            of_model = optimizers.optimizers_of(model) if training and not last else []
            updates = [last] if last else [_Update(strategy, each, weigh, sum_up, finish) for each in of_model]
            told = logs_of_metrics.MetricResults([metric for metric in model.metrics if one_replica.counts(metric)])
            noting_writes, written = _noting_writes(model)
            checked = recording.check_counts(model) if strategy.num_replicas_in_sync > 1 else []
            changes = [(each.optimizer, "apply", each.apply) for each in updates]
            changes += [*weights.of_losses(model), *told.changes(), *noting_writes, *checked]
            with (
                optimizers.patched_attributes(changes),
                _filled(strategy, step, data, parts, shares, sum_over_workers) as given,
            ):
                logs = run(*given)
        kept = [*models.statistics_of(model), *written.values()] if training else []
        return _Results(strategy, shares, sum_over_workers, told, sum_gradients, times, sums).merge(logs, kept, last)


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
        counts, every = gather(count), gathers.gather(gather, lambda each: (each,), tf.stop_gradient(own))
        begin = tf.reduce_sum(counts[: context.replica_id_in_sync_group])
        return tf.concat([every[:begin], own, every[begin + count[0] :]], 0)

    def weigh(self, given: Sequence[Any], optimizer: Any) -> Sequence[Any]:
        """Weights a replica's gradients for the sum over replicas."""
        if not self.weigh_loss and id(optimizer) not in self.sums.optimizers:
            return [None if each is None else times(each, self.share()) for each in given]
        factor = self.shares.rows[replicas.current()] > 0 if self.shares else 1.0
        return [None if each is None else times(each, factor) for each in given]


def _before_sum(strategy: Any, weights: _Weights, batches: Sequence[Any]) -> Any:
    """Returns what a replica does with its gradients before they are summed; None if they are summed as they are."""
    transforms, shares = gradients.transforms_of(strategy), weights.shares
    is_weighed = weights.num_replicas > 1 and (shares is not None or not weights.weigh_loss)
    if not transforms.has(*gradients.ON_REPLICA):
        return (lambda given, optimizer, _: weights.weigh(given, optimizer)) if is_weighed else None

    def on_replica(given: Sequence[Any], optimizer: Any, variables: Sequence[Any]) -> Sequence[Any]:
        replica = replicas.current()
        rows: Any = splitting.rows(batches[replica]) if shares is None else shares.rows[replica]
        about = {"counts": None if shares is None else rows > 0, "contributors": weights.num_replicas, "examples": rows}
        given = transforms.on_replica(optimizer, given, variables, weights.unit(optimizer), is_only=False, **about)
        return weights.weigh(given, optimizer) if is_weighed else given

    return on_replica


def _after_sum(strategy: Any, weights: _Weights, batches: Sequence[Any]) -> Any:
    """Returns what is done with the sums of gradients before the update; None for nothing."""
    transforms, shares, count = gradients.transforms_of(strategy), weights.shares, weights.num_replicas
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


def _scales_its_loss(step: Step) -> bool:
    """Returns True if each loss of a train step passes `optimizer.scale_loss`.

    Keras' own step does it; to weigh its loss saves a pass over the gradients. With loss scaling other steps have to do
    it, too, and a loss that is weighed there becomes no larger than that of one device, so float16 holds its gradient.
    """
    optimizer = step.model.optimizer
    is_scaling = hasattr(optimizer, "inner_optimizer") and optimizers.optimizers_of(step.model) == [optimizer]
    return step.is_of_keras or is_scaling


def run_prediction(
    strategy: Any, run: Callable[[Callable[..., Any], Any], Any], function: Callable[..., Any], data: Any
) -> Any:
    """Runs Keras' step of `predict` on all replicas that have examples; the others return no rows."""
    parts = _by_device(strategy, data)
    if _may_be_empty(strategy, data, [*parts.values()]):
        function = unless_empty(function)
    return run(function, data)


def _may_be_empty(strategy: Any, data: Any, parts: Sequence[Any]) -> bool:
    """Returns True if a replica may have no examples."""
    return strategy.num_replicas_in_sync > 1 and _is_divided(data, len(parts)) and may_lack_examples(parts)


@contextlib.contextmanager
def _filled(
    strategy: Any, step: Step, data: Any, parts: dict[str, Any], shares: Shares | None, sum_over_workers: Sum
) -> Iterator[tuple[Any, Any]]:
    """Yields the step and its data with an example on every replica; counts of what does not count are removed."""
    may_be_empty = _may_be_empty(strategy, data, [*parts.values()])
    if shares is None or not (may_be_empty or shares.may_repeat):
        yield step.function, data
        return
    function = step.function
    if may_be_empty:
        others = examples_of_others(strategy, shares, [*parts.values()], sum_over_workers)
        function, data = without_terms(function, shares.rows), _distributed(data, filled_on_devices(parts, others))
    counted = [one_replica.copies_of(variable) for variable in counted_by(step.model)]
    with contextlib.ExitStack() as stack:
        for replica, rows in enumerate(shares.rows):
            stack.enter_context(restored_unless(rows, [each[replica] for each in counted]))
        yield function, data


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
    model_parallel.check_placement(strategy, model)
    devices = strategy.extended.worker_devices
    is_local_gpus = len(devices) == strategy.num_replicas_in_sync and all("GPU" in device for device in devices)
    if model.jit_compile and strategy.num_replicas_in_sync > 1 and not is_local_gpus:
        raise ValueError(
            "compile(jit_compile=True): XLA can't compile a step that runs on several workers or CPU devices; leave it "
            f"at 'auto' or False. Received: jit_compile=True, {strategy.num_replicas_in_sync} replicas, {devices[0]}"
        )


def build_optimizer(strategy: Any, model: keras.Model) -> None:
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


def _by_device(strategy: Any, data: Any) -> dict[str, Any]:
    """Returns the part of a step's argument for each device of this process, by the device's name."""
    devices = strategy.extended.worker_devices
    return {device: part_of_replica(strategy, data, replica) for replica, device in enumerate(devices)}


def part_of_replica(strategy: Any, data: Any, replica: int) -> Any:
    """Returns what a replica of this process has of a structure of distributed and other values."""

    def pick(leaf: Any) -> Any:
        is_distributed = isinstance(leaf, tf.distribute.DistributedValues)
        return strategy.experimental_local_results(leaf)[replica] if is_distributed else leaf

    return tf.nest.map_structure(pick, data)


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


def mark_reduced(value: Any) -> Any:
    """Marks a tensor as the same on all replicas; returns the value."""
    if isinstance(value, tf.Tensor):
        patching.put(value, REDUCED, True)
    return value


# Control dependencies by which a step without an input batch writes to no variable.
#
# If the length of the data is unknown, Keras runs one more step at their end. TensorFlow executes the operations of
# this step that need no input until the iterator raises: `optimizer.iterations` would count a step that ran on no data,
# and a replica that meets the end later than another would count it alone. So every variable write that doesn't depend
# on the input batch is ordered behind it. Reads and constants are not: this would cost a small model a twentieth of its
# time.


_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp", "VariableShape"})
# TensorFlow starts operations inside of these functions before all inputs of the call are there.
_OF_FUNCTIONS = frozenset({"PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "Case"})


@contextlib.contextmanager
def writes_after_inputs(data: Mapping[str, Any]) -> Iterator[None]:
    """Orders the variable writes that are traced in this context behind the input batch of their device.

    Outside of a graph the batch has arrived already, and this does nothing.

    Args:
      data: the step's input on each device, by the device's name: structures of the graph's tensors and composites, in
        which anything else is ignored.
    """
    flat = {device: tf.nest.flatten(given, expand_composites=True) for device, given in data.items()}
    leaves = {device: [leaf for leaf in found if tf.is_symbolic_tensor(leaf)] for device, found in flat.items()}
    if tf.executing_eagerly() or not any(leaves.values()):
        yield
        return
    graph: Any = tf.compat.v1.get_default_graph()
    ready = {device: _after(device, tensors) for device, tensors in leaves.items()}
    (first, *_), made = ready.values(), len(graph.get_operations())
    yield
    behind = {*ready.values(), *(tensor.op for tensors in leaves.values() for tensor in tensors)}
    for operation in graph.get_operations()[made:]:
        needs = {*operation.control_inputs, *(tensor.op for tensor in operation.inputs)}
        is_behind = not behind.isdisjoint(needs)
        takes_resource = any(tensor.dtype == tf.resource for tensor in operation.inputs)
        if takes_resource and operation.type not in _READS and (not is_behind or operation.type in _OF_FUNCTIONS):
            graphs.wait_for_operation(operation, ready.get(operation.device, first))
            is_behind = True
        if is_behind:
            behind.add(operation)


def _after(device: str, tensors: list[tf.Tensor]) -> tf.Operation:
    # On the device of the waiting operation: a control dependency between two devices costs a message.
    with tf.device(device), tf.control_dependencies(tensors):
        return tf.no_op()


# Compares the batch size that a stateful RNN was built with to the size that each replica computes with.
#
# A stateful RNN keeps a state for each example of a batch, so its batches have one size. The rule is the same for all
# strategies: the size is that of a replica's part.


_TOLD = "_tfdist_told_of_states"


def check_fixed_sizes(strategy: tf.distribute.Strategy, dataset: Any, num_parts: int, keeps_states: bool) -> None:
    """Checks the data of the call of Keras that is running, before it does anything.

    Args:
      strategy: the strategy.
      dataset: the data set of whole batches.
      num_parts: number of parts that a batch is divided into.
      keeps_states: True if each replica keeps the states of its own examples; otherwise one line says that it does not.

    Raises:
      ValueError: a replica's part has another size than a stateful RNN of the model.
    """
    call = calls.current()
    if call is None or not isinstance(dataset, tf.data.Dataset):
        return
    fixed = {layer.name: size for layer in models.layers_of(call.model) if (size := _size(layer)) is not None}
    if not fixed:
        return
    batch_size = splitting.static_size(dataset.element_spec) or inputs.batch_size(dataset)
    for name, size in fixed.items():
        if batch_size is not None and batch_size != size * num_parts:
            part = f"{batch_size / num_parts:g}"
            raise ValueError(
                f"model.{call.kind}: layer {name!r} is stateful and was built for batches of {size}, but "
                f"{type(strategy).__name__} gives each replica {part} of the {batch_size} examples of a batch; use "
                f"batch_size={size * num_parts}, or build the model with keras.Input(batch_shape=({part}, ...)). "
                f"Received: batch_size={batch_size}, divided by {num_parts}"
            )
    # With parts, a policy decides about updates alone.
    if not keeps_states and (call.trains or num_parts == 1) and not patching.get(call.model, _TOLD):
        patching.put(call.model, _TOLD, True)
        _log.say(
            f"{type(strategy).__name__}: replicas share the states of stateful RNNs here, as means, so the "
            "numbers differ from one device; MirroredStrategy and MultiWorkerMirroredStrategy without a policy keep a "
            f"state for each example. Received: layer {next(iter(fixed))!r}, model {call.model.name!r}"
        )


def _size(layer: Any) -> int | None:
    """Returns the batch size of a stateful RNN that is built, else None."""
    states = getattr(layer, "states", None) if getattr(layer, "stateful", False) else None
    first = next((each for each in tf.nest.flatten(states) if each is not None), None)
    return None if first is None or not getattr(first, "shape", None) else first.shape[0]


# Steps of replicas without an example of the batch: they run on a stand-in example, and its results are left out.
#
# Layers and kernels may fail, or return wrong shapes, on a batch of no examples; oneDNN's convolutions do. The replica
# can't skip the step either, since replicas wait for each other. So an empty part is filled with one example, a copy of
# another replica's: of this process if it has one, else of another worker. Its gradients, logs and statistics have
# weight 0, which also removes NaN. Its metrics are restored after the step, and its terms of sums over replicas are
# zero.


def may_lack_examples(parts: Sequence[Any]) -> bool:
    """Returns True if, by the static shapes, one of these parts of a batch may have no examples."""
    sizes = {splitting.static_size(part) for part in parts}
    return bool(sizes & {0, None}) and all(splitting.rows(part) is not None for part in parts)


def filled(part: Any, sources: Sequence[Any] = ()) -> Any:
    """Returns the part itself, or one example if it has none.

    Args:
      part: a replica's part of a batch.
      sources: other parts of the same batch, or the first example of each; the first one that is not empty is copied.
        If all are empty, the example is zeros.
    """
    rows = splitting.rows(part)
    if rows is None or (splitting.static_size(part) or 0) > 0:
        return part
    leaves = tf.nest.flatten(part)
    chosen = [index for index, leaf in enumerate(leaves) if splitting.has_rows(leaf)]
    candidates = [tf.nest.flatten(source) for source in sources]

    def itself() -> list[Any]:
        return [tf.nest.map_structure(tf.identity, leaves[index], expand_composites=True) for index in chosen]

    def example() -> list[Any]:
        return [_example(leaves[index], [each[index] for each in candidates]) for index in chosen]

    # A list of one is returned as its element.
    results = tf.nest.flatten(tf.cond(rows > 0, itself, example))
    for index, leaf in zip(chosen, results, strict=True):
        if isinstance(leaf, tf.Tensor):
            leaf.set_shape([None, *leaves[index].shape[1:]])
        leaves[index] = leaf
    return tf.nest.pack_sequence_as(part, leaves)


def filled_on_devices(parts: dict[str, Any], others: Sequence[Any] = ()) -> list[Any]:
    """Returns the parts of a process' replicas, by device, each with an example; `others` are of other workers."""
    devices, values = list(parts), list(parts.values())
    sources = []
    # One example is sent to the other devices instead of a whole part. Splitting leaves the last part an example.
    for index in dict.fromkeys((len(values) - 1, 0)) if len(values) > 1 else ():
        with tf.device(devices[index]):
            sources.append(splitting.first_examples(values[index], 1))
    results = []
    for device, part in zip(devices, values, strict=True):
        with tf.device(device):
            results.append(filled(part, [*sources, *others]))
    return results


def unless_empty(predict: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step of `predict` that returns no rows for a batch of no examples, and runs no layer then.

    Only if a result has another axis of unknown size, whose size the other replicas' results must have, layers run on
    a row of zeros.
    """
    predict = graphs.converted(predict)

    @tf.autograph.experimental.do_not_convert
    def on_replica(batch: Any) -> Any:
        results = list[Any]()

        def result_of(batch: Any) -> list[Any]:
            results.append(predict(batch))
            return tf.nest.flatten(results[-1], expand_composites=True)

        def no_rows() -> list[Any]:
            leaves = tf.nest.flatten(results)
            is_known = leaves and all(
                isinstance(leaf, tf.Tensor) and leaf.shape.rank and leaf.shape[1:].is_fully_defined() for leaf in leaves
            )
            if is_known:
                return [tf.zeros([0, *leaf.shape[1:]], leaf.dtype) for leaf in leaves]
            result = predict(filled(batch))
            results.append(splitting.first_examples(result, 0))
            return tf.nest.flatten(results[-1], expand_composites=True)

        rows: Any = splitting.rows(batch)
        found = tf.cond(rows > 0, lambda: result_of(batch), no_rows)
        return tf.nest.pack_sequence_as(results[0], tf.nest.flatten(found), expand_composites=True)

    return on_replica


def _example(leaf: Any, sources: Sequence[Any]) -> Any:
    """Returns the first row of these sources, or zeros; `leaf` has no rows."""
    if isinstance(leaf, tf.SparseTensor):
        rows = tf.sparse.concat(0, [splitting.rows_up_to(source, 1) for source in sources]) if sources else leaf
        one = tf.concat([tf.ones([1], tf.int64), leaf.dense_shape[1:]], 0)
        kept = rows.indices[:, 0] < 1
        return tf.SparseTensor(rows.indices[kept], rows.values[kept], one)
    return tf.concat([*(source[:1] for source in sources), _zeros(leaf)], 0)[:1]


def _zeros(leaf: Any) -> Any:
    """Returns a row of zeros; a ragged one has one zero, since a layer may fail on an empty row, too."""
    if not isinstance(leaf, tf.RaggedTensor):
        return tf.zeros(tf.concat([[1], tf.shape(leaf)[1:]], 0), leaf.dtype)
    return tf.RaggedTensor.from_row_splits(_zeros(leaf.values), tf.constant([0, 1], leaf.row_splits.dtype))


@contextlib.contextmanager
def restored_unless(rows: tf.Tensor, copies: Iterable[tf.Variable]) -> Iterator[None]:
    """Gives the variables of a replica's device the values before this block again if the replica has no examples."""
    before = []
    for copy in copies:
        with tf.device(copy.device):
            before.append((copy, copy.read_value()))
    yield

    def restore() -> tf.Tensor:
        for copy, value in before:
            with tf.device(copy.device):
                copy.assign(value)
        return tf.constant(True)

    if before:
        tf.cond(rows > 0, lambda: tf.constant(False), restore)


def counted_by(model: keras.Model) -> list[Any]:
    """Returns the Keras variables in which each replica counts its own examples.

    Statistics of layers, which are floats, are not among them: they are averaged by the numbers of examples.
    """
    variables = [*model.metrics_variables]
    variables += [
        variable
        for variable in model.non_trainable_variables
        if one_replica.is_counter(variable) and not tf.as_dtype(variable.dtype).is_floating
    ]
    return [variable for variable in {id(v): v for v in variables}.values() if one_replica.is_mirrored(variable)]


def without_terms(step: Callable[..., Any], rows: Sequence[tf.Tensor]) -> Callable[..., Any]:
    """Returns a step in which a replica without examples adds zeros to sums over the replicas, forward and backward.

    Synchronized BatchNormalization and users' losses call `ReplicaContext.all_reduce`, whose gradient calls it again.

    Args:
      step: called in replica context.
      rows: the examples of each replica of this worker.
    """
    if isinstance(step, tf.types.experimental.PolymorphicFunction):
        return step
    step = graphs.converted(step)

    def call(*args: Any) -> Any:
        context = tf.distribute.get_replica_context()
        all_reduce, own = context.all_reduce, rows[replicas.current()]

        def masked(reduce_op: Any, value: Any, options: Any = None) -> Any:
            is_sum = str(getattr(reduce_op, "value", reduce_op)).upper() == "SUM"
            return all_reduce(reduce_op, tf.nest.map_structure(select, value) if is_sum else value, options)

        def select(leaf: Any) -> Any:
            if not tf.is_tensor(leaf) or isinstance(leaf, tf.IndexedSlices):
                return leaf
            value = tf.convert_to_tensor(leaf)
            return tf.where(own > 0, value, tf.zeros_like(value))

        context.all_reduce = masked
        try:
            return step(*args)
        finally:
            del context.all_reduce

    return call
