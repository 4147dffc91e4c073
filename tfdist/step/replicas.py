# SPDX-License-Identifier: Apache-2.0
"""Steps of the replicas of a process: the order of writes, parts without examples, and checks of models."""

from __future__ import annotations

import contextlib
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
from tfdist.step import one_replica, scope

# Set on tensors that are the same on all replicas already.
REDUCED = "_tfdist_reduced"


def run_prediction(
    strategy: Any, run: Callable[[Callable[..., Any], Any], Any], function: Callable[..., Any], data: Any
) -> Any:
    """Runs Keras' step of `predict` on all replicas that have examples; the others return no rows."""
    parts = by_device(strategy, data)
    if may_be_empty(strategy, data, [*parts.values()]):
        function = unless_empty(function)
    return run(function, data)


def may_be_empty(strategy: Any, data: Any, parts: Sequence[Any]) -> bool:
    """Returns True if a replica may have no examples."""
    return strategy.num_replicas_in_sync > 1 and _is_divided(data, len(parts)) and may_lack_examples(parts)


def _is_divided(data: Any, num_parts: int) -> bool:
    """Returns False if each replica has all examples; the only replica of a worker has plain tensors."""
    leaves = tf.nest.flatten(data)
    is_distributed = [isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves]
    is_known = all(each or tf.is_tensor(leaf) for each, leaf in zip(is_distributed, leaves, strict=True))
    return is_known and (num_parts == 1 or any(is_distributed))


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


def by_device(strategy: Any, data: Any) -> dict[str, Any]:
    """Returns the part of a step's argument for each device of this process, by the device's name."""
    devices = strategy.extended.worker_devices
    return {device: part_of_replica(strategy, data, replica) for replica, device in enumerate(devices)}


def part_of_replica(strategy: Any, data: Any, replica: int) -> Any:
    """Returns what a replica of this process has of a structure of distributed and other values."""

    def pick(leaf: Any) -> Any:
        is_distributed = isinstance(leaf, tf.distribute.DistributedValues)
        return strategy.experimental_local_results(leaf)[replica] if is_distributed else leaf

    return tf.nest.map_structure(pick, data)


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


def shape_of_any_size(tensor: tf.Tensor) -> tf.TensorShape:
    """Returns the shape of a tensor as one of any number of rows, if it is known to have none.

    Keras takes an axis of no examples for one that it may squeeze, and an LSTM can't be traced.
    """
    return tf.TensorShape([None, *tensor.shape[1:]]) if _has_no_rows(tensor) else tensor.shape


def _has_no_rows(leaf: Any) -> bool:
    return tf.is_tensor(leaf) and bool(leaf.shape.rank) and leaf.shape[0] == 0


def _of_any_size(leaf: Any) -> Any:
    return tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=shape_of_any_size(leaf)) if _has_no_rows(leaf) else leaf


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
            results.append(predict(tf.nest.map_structure(_of_any_size, batch, expand_composites=True)))
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
