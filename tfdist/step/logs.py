# SPDX-License-Identifier: Apache-2.0
"""Computes the logs of a step of several replicas from the counts of their metrics.

A result of a metric in a replica's logs is that of the replica's own examples. The result for all is computed anew from
the counts of all replicas. A log is recognised by its tensor and not by its name, since a step may return a result
under any key, or compute with it:

    {"loss": self.total_loss_tracker.result(), "twice": 2 * self.mean.result()}
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class MetricResults:
    """Finds results of metrics in a step's logs, and computes them anew.

    Args:
      metrics: Keras metrics.
    """

    def __init__(self, metrics: Sequence[Any]) -> None:
        self._metrics = list(metrics)
        # By tensor id: the tensor (held so that the id is not reused), the metric, and the index in its result.
        self._results: dict[int, tuple[Any, Any, int]] = {}

    @property
    def counters(self) -> list[Any]:
        """Variables of the metrics whose results are in the logs."""
        told = {id(metric) for _, metric, _ in self._results.values()}
        return [v for metric in self._metrics if id(metric) in told for v in metric.variables]

    def changes(self) -> list[tuple[Any, str, Any]]:
        """Returns patches that remember the results, for `optimizers.patched_attributes`."""
        return [(metric, "result", self._remembering(metric)) for metric in self._metrics]

    def formula(self, leaf: Any) -> Formula | None:
        """Returns a leaf of the logs as a function of results, if it is computed from any in the traced graph."""
        if not tf.is_symbolic_tensor(leaf):
            return None
        found = Formula(leaf, [tensor for tensor, _, _ in self._results.values() if tf.is_symbolic_tensor(tensor)])
        return found if found.counts else None

    def keep(self, logs: Sequence[Any]) -> None:
        """Keeps only the results in these logs, of the first replica."""
        ids = {id(leaf) for leaf in logs}
        self._results = {key: found for key, found in self._results.items() if key in ids}

    def has(self, leaf: Any) -> bool:
        """Returns True if a leaf of the logs is a result of a metric."""
        return id(leaf) in self._results

    def after(self, leaf: Any) -> Any:
        """Returns the current result of the leaf's metric."""
        _, metric, index = self._results[id(leaf)]
        # The result may be a variable itself.
        return tf.convert_to_tensor(tf.nest.flatten(metric.result())[index])

    def _remembering(self, metric: Any) -> Callable[[], Any]:
        result_of = metric.result

        def result() -> Any:
            # A result that is a plain number or a variable becomes a tensor of its own.
            result = tf.nest.map_structure(tf.convert_to_tensor, result_of())
            for index, leaf in enumerate(tf.nest.flatten(result)):
                self._results[id(leaf)] = leaf, metric, index
            return result

        return result


class Formula:
    """A log as a function of counts of metrics, and of tensors that don't depend on these; from a traced step.

    Args:
      log: a tensor of a graph.
      counts: tensors, of this graph and of others.

    Attributes:
      counts: those of `counts` that the log is computed from; empty if it depends on none.
      others: the other arguments: what depends on no count, such as a loss of this batch that a result is added to.
    """

    def __init__(self, log: tf.Tensor, counts: Sequence[tf.Tensor]) -> None:
        self._log = log
        self._operations: dict[str, tf.Operation] = {}
        self.counts: list[tf.Tensor] = []
        self.others: list[tf.Tensor] = []
        known = {each.ref() for each in counts if each.graph is log.graph}
        if log.ref() in known:
            self.counts = [log]
        elif known:
            self._collect(known)
            if any(each.dtype in (tf.resource, tf.variant) for each in self.others):
                # A conditional that reads variables; what it would read is not known here.
                self.counts, self.others = [], []

    def value(self, counts: Sequence[tf.Tensor], others: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the log for these arguments, in the graph that is being traced."""
        given = {
            before.name: tf.cast(after, before.dtype)
            for before, after in zip([*self.counts, *self.others], [*counts, *others], strict=True)
        }
        if self._log.name in given:
            return given[self._log.name]
        source: Any = self._log.graph
        # The graph of the step itself has its functions already; imported ones would take their names.
        library = None if source is tf.compat.v1.get_default_graph() else source.as_graph_def().library
        definition = tf.compat.v1.GraphDef(library=library, versions=source.graph_def_versions)
        for operation in self._operations.values():
            node = definition.node.add()
            node.CopyFrom(operation.node_def)
            # Devices and the order of the step are not those of the place where the log is computed.
            node.device = ""
            node.attr.pop("_class", None)
            inputs = [name for name in node.input if not name.startswith("^")]
            del node.input[:]
            node.input.extend(inputs)
        (found,) = tf.graph_util.import_graph_def(definition, given, return_elements=[self._log.name], name="logs")
        return found

    def _collect(self, known: set[Any]) -> None:
        """Collects the operations between the counts and the log, if it depends on any."""
        dependent, constant = set[str](), set[str]()
        for operation in _behind(self._log, known):
            inputs = operation.inputs
            if any(each.ref() in known or each.op.name in dependent for each in inputs):
                dependent.add(operation.name)
            elif operation.type == "Const" or (
                inputs and not operation.op_def.is_stateful and all(each.op.name in constant for each in inputs)
            ):
                constant.add(operation.name)
        waiting = [self._log.op] if self._log.op.name in dependent else []
        while waiting:
            operation = waiting.pop()
            if operation.name in self._operations:
                continue
            self._operations[operation.name] = operation
            for tensor in operation.inputs:
                if tensor.ref() in known:
                    _add(self.counts, tensor)
                elif tensor.op.name in dependent or tensor.op.name in constant:
                    waiting.append(tensor.op)
                else:
                    _add(self.others, tensor)


def _add(found: list[tf.Tensor], tensor: tf.Tensor) -> None:
    if all(tensor is not each for each in found):
        found.append(tensor)


def _behind(log: tf.Tensor, known: set[Any]) -> list[tf.Operation]:
    """Returns the operations that a tensor is computed from, each after those of its inputs; none behind known ones.

    Without recursion: a model of many layers has longer chains of operations than Python has frames.
    """
    found, seen, waiting = list[tf.Operation](), set[str](), [(log.op, False)]
    while waiting:
        operation, has_inputs = waiting.pop()
        if has_inputs:
            found.append(operation)
        elif operation.name not in seen:
            seen.add(operation.name)
            waiting.append((operation, True))
            waiting += [(each.op, False) for each in operation.inputs if each.ref() not in known]
    return found


# Packing of a step's result into few tensors, for the transfer to Keras' loop.


class Packing:
    """Packs a result into as few tensors as possible, because each costs a round trip: scalars are stacked by dtype.

    `pack` is called while the step is traced, and records the structure for the other methods.

    Attributes:
      dtypes: of the tensors of the result.
      num_outputs: number of tensors that `pack` returns.
    """

    def __init__(self) -> None:
        self._result: Any = None
        self._scalars: dict[tf.DType, list[int]] = {}
        self._shapes: list[tf.TensorShape] = []
        self.dtypes: list[tf.DType] = []
        self.num_outputs = 0

    def pack(self, result: Any) -> list[tf.Tensor]:
        """Packs the tensors of `result`, a structure of tensors, variables and other values."""
        # Of a variable only the value can be sent.
        read = lambda leaf: tf.convert_to_tensor(leaf) if hasattr(leaf, "assign") else leaf  # noqa: E731
        self._result = tf.nest.map_structure(read, result)
        flat = [leaf for leaf in tf.nest.flatten(self._result, expand_composites=True) if tf.is_tensor(leaf)]
        self.dtypes = [tensor.dtype for tensor in flat]
        self._shapes = [tensor.shape for tensor in flat]
        self._scalars = {}
        for position, tensor in enumerate(flat):
            if tensor.shape.rank == 0:
                self._scalars.setdefault(tensor.dtype, []).append(position)
        stacked = [tf.stack([flat[i] for i in positions]) for positions in self._scalars.values()]
        packed = stacked + [tensor for tensor in flat if tensor.shape.rank != 0]
        self.num_outputs = len(packed)
        return packed

    def unpack(self, outputs: Sequence[tf.Tensor]) -> list[np.ndarray]:
        """Fetches the tensors that `pack` returned; returns the values of the flat result, in order."""
        values = [*map(operator.methodcaller("numpy"), outputs)]
        flat: list[Any] = [None] * len(self.dtypes)
        packed = len(self._scalars)
        for vector, positions in zip(values[:packed], self._scalars.values(), strict=True):
            for value, position in zip(vector, positions, strict=True):
                flat[position] = value
        rest = iter(values[packed:])
        return [next(rest) if value is None else value for value in flat]

    def rebuild(self, flat: Sequence[Any]) -> Any:
        """Returns the structure that was packed, with these values for its tensors."""
        tensors = []
        for value, dtype, shape in zip(flat, self.dtypes, self._shapes, strict=True):
            tensor = tf.convert_to_tensor(value, dtype)
            tensor.set_shape(shape) if not tf.executing_eagerly() else None
            tensors.append(tensor)
        supply = iter(tensors)
        flat = tf.nest.flatten(self._result, expand_composites=True)
        leaves = [next(supply) if tf.is_tensor(leaf) else leaf for leaf in flat]
        return tf.nest.pack_sequence_as(self._result, leaves, expand_composites=True)
