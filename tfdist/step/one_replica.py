# SPDX-License-Identifier: Apache-2.0
"""Traces a distributed model's step, or an update, as on one device, on one replica's copies.

A Keras variable holds a `tf.Variable`, or one that TensorFlow distributes: a copy for each device. While a step is
traced here, each Keras variable of the model holds the copy of one replica instead, and TensorFlow's default strategy
is current. So the step is that of one device: no loss is divided, no gradient is reduced, and it writes to that copy
alone. The engine that trains this way decides about the other copies.

All engines of replicas with copies update so, from the sum of gradients or from a replica's own: `apply_alone`. So
clipping, accumulation, loss scaling and moving averages are Keras' own, which need no meeting of replicas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.keras import placement, scope
from tfdist.compat.keras.optimizers import (
    optimizers_of,
    parts_of,
    patched_attributes,
    patches_of_strategy,
    trained_by,
    without_all_reduce,
)
from tfdist.compat.tensorflow import graphs, replicas, variables
from tfdist.passes.shares import Sum
from tfdist.step import contribution
from tfdist.transport import buckets


@contextlib.contextmanager
def alone(model: keras.Model, strategy: Any, index: int = 0, is_of_all: bool = False) -> Iterator[None]:
    """Within this block the model is one of a single device: what is traced reads and writes one replica's copies.

    Args:
      model: a built model, whose optimizers are built, of a strategy with copies on devices.
      strategy: the strategy.
      index: the replica, among those of this process.
      is_of_all: True if each replica makes this step, so that seeds of random numbers are moved into the scope.
    """
    trained = [variable for each in _optimizers(model) if each.built for variable in trained_by(each)]
    with _on_copies(strategy, index, [*variables_of(model), *trained], optimizers_of(model), is_of_all):
        yield


def apply_alone(
    strategy: Any, index: int, optimizer: Any, apply: Callable[..., Any], gradients: Sequence[Any], given: Sequence[Any]
) -> Any:
    """Updates one replica's copies as a single device does; in any context, in a graph or eagerly.

    Args:
      strategy: a strategy with copies on devices.
      index: the replica, among those of this process.
      optimizer: a Keras optimizer, which is built.
      apply: its `apply`.
      gradients: what it is given, on the device of the replica.
      given: the variable of each, of Keras or TensorFlow.
    """
    of_optimizer = [variable for part in parts_of(optimizer) for variable in part.variables]
    updated = [*of_optimizer, *trained_by(optimizer), *given]
    of_keras = [variable for variable in updated if isinstance(variable, keras.Variable)]
    given = [v if isinstance(v, keras.Variable) else _copy(getattr(v, "values", [v]), index) for v in given]
    with _on_copies(strategy, index, of_keras, [optimizer]):
        return apply(gradients, given)


@contextlib.contextmanager
def _on_copies(
    strategy: Any, index: int, keras_variables: Sequence[Any], optimizers: Sequence[Any], is_of_all: bool = False
) -> Iterator[None]:
    default = replicas.default_strategy()
    unique = {id(variable): variable for variable in keras_variables}.values()
    changes = [variables.with_tf_variable(each, _copy(copies_of(each), index)) for each in unique]
    for optimizer in optimizers:
        changes += [patches_of_strategy(part, default) for part in parts_of(optimizer)]
        # The sum over one replica, for which TensorFlow would keep the graph for ever; see
        # `optimizers.sum_over_replicas`.
        changes += without_all_reduce(optimizer)
    with (
        patched_attributes(changes),
        tf.device(strategy.extended.worker_devices[index]),
        placement.following(strategy),
        LoneReplica(strategy, index, is_of_all),
    ):
        yield


def apply_to_copies(strategy: Any) -> Callable[[Any, Sequence[Any], Sequence[Any]], None]:
    """Returns what updates all copies in this process alike, from an optimizer, gradients and their variables."""

    def apply(optimizer: Any, gradients: Sequence[Any], given: Sequence[Any]) -> None:
        for index in range(len(strategy.extended.worker_devices)):
            apply_alone(strategy, index, optimizer, optimizer.apply, gradients, given)

    return apply


def _copy(copies: Sequence[Any], index: int) -> Any:
    """Returns a replica's copy; a variable that was made outside of the scope has one."""
    return copies[index if len(copies) > 1 else 0]


class LoneReplica(tf.distribute.ReplicaContext):
    """The replica context of a replica that is a single device: TensorFlow's default strategy is current.

    Args:
      strategy: the strategy of the replica.
      index: the replica, among those of this process.
      is_of_all: see `alone`.
    """

    def __init__(self, strategy: Any, index: int, is_of_all: bool) -> None:
        super().__init__(replicas.default_strategy(), replicas.in_sync_group(strategy, index))
        self.replica_of, self.index, self.is_of_all = strategy, index, is_of_all


def trace(strategy: tf.distribute.Strategy, function: Callable[..., Any], specs: Sequence[Any]) -> Callable[..., Any]:
    """The concrete function of `function` for arguments of these specs, traced in the strategy's scope."""
    traced, generator = tf.function(function, autograph=False), scope.global_seed()

    def in_scope() -> Callable[..., Any]:
        scope.adopt_global_seed(generator)
        with strategy.scope():
            return traced.get_concrete_function(*specs)

    # The caller may be tracing a function of its own.
    return graphs.call_outside(in_scope)


@contextlib.contextmanager
def replica_on(strategy: tf.distribute.Strategy, device: str) -> Iterator[None]:
    """Within this block, what is traced is the one replica of a step, on this device.

    A plain replica context, which unlike the threads of the stock `run` also holds inside of conditionals.
    """
    with tf.device(device), placement.following(strategy), OneReplica(strategy, 0):
        yield


class OneReplica(tf.distribute.ReplicaContext):
    """The replica context of a step that one replica makes, in which nothing is reduced over replicas.

    The stock one would leave a few operations for it, and a line in the log.
    """

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Returns the reduction of `value`, as tensors."""
        del reduce_op, options
        return _of_equal_values(value, 1)


def _of_equal_values(value: Any, count: int) -> Any:
    """Returns the sum of so many values that equal this one, as tensors."""
    return tf.nest.map_structure(
        lambda leaf: contribution.times(
            leaf if isinstance(leaf, tf.IndexedSlices) else tf.convert_to_tensor(leaf), float(count)
        ),
        value,
    )


def without_others(
    step_name: str, num_replicas: int, say: Callable[[str], None] | None = None
) -> list[tuple[Any, str, Any]]:
    """Returns patches of the current replica context for a step that a replica makes alone.

    Its `all_gather` is refused, since it would silently give the replica's own part, and so is `merge_call` of a
    function of the user's. `all_reduce`, with which a synchronized BatchNormalization works, logs that it is over this
    replica's part. On several workers the stock ones are collectives, for which a contribution would wait for
    stragglers, and without end where one of them makes none.

    Args:
      step_name: the step, for the messages.
      num_replicas: replicas that contribute to an update.
      say: writes a line for the user. Without it `all_reduce` gives what it would if all had this replica's value.
    """
    context: Any = tf.distribute.get_replica_context()
    received = f"Received: {step_name}, {num_replicas} replicas"

    def refuse(call: str) -> ValueError:
        return ValueError(
            "policies: under this policy each replica computes alone, so a train_step can't gather the other replicas' "
            f"parts with {call}(...); train without the policy, or let each worker have whole "
            f"batches under ParameterServerStrategy without a policy. {received}"
        )

    def all_gather(*args: Any, **kwargs: Any) -> Any:
        raise refuse("all_gather")

    def all_reduce(reduce_op: Any, value: Any, options: Any = None) -> Any:
        del options
        if say is None:
            is_sum = str(getattr(reduce_op, "value", reduce_op)).upper() == "SUM"
            return _of_equal_values(value, num_replicas if is_sum else 1)
        say(
            "policies: all_reduce in a train_step, as of BatchNormalization(synchronized=True), is over each "
            f"replica's own part of the batch, because replicas compute alone under this policy. {received}"
        )
        return _of_equal_values(value, 1)

    plain_merge_call = context.merge_call

    def merge_call(merge_fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        # Those of the libraries are of writes to variables.
        module = getattr(getattr(merge_fn, "func", merge_fn), "__module__", "")
        if not str(module).startswith(("tensorflow.", "keras.", "tfdist.")):
            raise refuse("merge_call")
        return plain_merge_call(merge_fn, args=args, kwargs=kwargs)

    return [
        (context, "all_gather", all_gather),
        (context, "all_reduce", all_reduce),
        (context, "merge_call", merge_call),
    ]


def variables_of(model: keras.Model) -> list[Any]:
    """The Keras variables that a step of the model may read or write, each once."""
    variables = [*model.variables, *model.metrics_variables]
    for optimizer in _optimizers(model):
        variables += optimizer.variables
    return list({id(variable): variable for variable in variables}.values())


def zeros_of(function: Callable[[Any], Any], spec: Any) -> Any:
    """Returns zeros in the structure that `function` returns for this structure of specs; it is traced, and not run."""
    outputs = tf.function(function, autograph=False).get_concrete_function(spec).structured_outputs
    return tf.nest.map_structure(lambda each: tf.zeros([size or 0 for size in each.shape], each.dtype), outputs)


def _optimizers(model: keras.Model) -> list[Any]:
    return [part for optimizer in optimizers_of(model) for part in parts_of(optimizer)]


# The copies of a Keras variable on the devices of this process, and how all copies get one value.


def copies_of(variable: Any) -> list[Any]:
    """A Keras variable's copies in this process; only one if it was made outside of the strategy's scope."""
    return list(getattr(variable.value, "values", [variable.value]))


def is_mirrored(variable: Any) -> bool:
    """Returns True if a Keras variable has a copy for each replica."""
    return hasattr(variable.value, "values")


def is_counter(variable: Any) -> bool:
    """Returns True if the value of a Keras variable is the sum of its copies, as for the counts of metrics."""
    return variable.aggregation == "sum"


def counts(metric: Any) -> bool:
    """Returns True if all variables of the metric are sums over the replicas."""
    return bool(metric.variables) and all(is_mirrored(v) and is_counter(v) for v in metric.variables)


def own_sum(variable: Any) -> tf.Tensor:
    """The sum over the copies in this process; int64 of integers."""
    return tf.add_n([_summable(copy) for copy in copies_of(variable)])


def assign_all(variable: Any, value: tf.Tensor) -> None:
    """Gives all copies in this process one value."""
    for copy in copies_of(variable):
        with tf.device(copy.device):
            copy.assign(tf.cast(value, copy.dtype))


def broadcast(variables: Sequence[Any], is_first: bool, sum_over_workers: Sum) -> None:
    """Gives all copies in all workers the value of the first copy in the first one.

    Args:
      variables: Keras variables.
      is_first: whether this worker is the first one.
      sum_over_workers: sums tensors over all workers.
    """
    sizes = [tf.TensorShape(each.shape).num_elements() * tf.as_dtype(each.dtype).size for each in variables]
    for bucket in buckets.grouped(variables, sizes):
        own = [_summable(copies_of(variable)[0]) for variable in bucket]
        sums = sum_over_workers(own if is_first else [tf.zeros_like(value) for value in own])
        # The first copy too: 0 + x may have another sign of zero than x.
        for variable, value in zip(bucket, sums, strict=True):
            assign_all(variable, value)


def _summable(copy: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(copy)
    # Collectives add no unsigned integers and no booleans.
    return value if value.dtype.is_floating or value.dtype.is_complex else tf.cast(value, tf.int64)
