# SPDX-License-Identifier: Apache-2.0
"""Records the variable writes of a train step while it is traced, and holds them back.

A write of a Keras variable becomes a tensor in the scope's mapping. This is impossible if the write is in a
conditional, a loop or a function. It is also impossible if a gradient with respect to the variable is taken later, or
if the step uses more of the variable than its value. Such a variable is replaced by a `LocalVariable` on the replica, a
stand-in, from the step's first operation on. So a trace that finds such variables is discarded, and the step is traced
again (`Findings`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist import _log
from tfdist.compat.keras import models, optimizers
from tfdist.compat.tensorflow import variables
from tfdist.compat.tensorflow.variables import LocalVariable


class TraceAgain(Exception):  # noqa: N818, it is no error
    """The step must be traced again, with the new findings."""


class Findings:
    """Findings of earlier traces of a step, which the next trace uses.

    Attributes:
      stand_ins: the variables that need a stand-in, by id.
      states: metrics' variables that are declared as sums, but are written otherwise, by id.
      late_reads: paths of the weights that the last trace reads after their update.
    """

    def __init__(self) -> None:
        self.stand_ins: dict[int, Any] = {}
        self.states: dict[int, Any] = {}
        self.late_reads: list[str] = []
        self._is_new = self._has_warned = False

    def ask_for_stand_in(self, variable: Any) -> None:
        """Raises `TraceAgain` to trace the step with a stand-in for a variable, unless it has one."""
        self._ask(self.stand_ins, variable)

    def ask_for_state(self, variable: Any) -> None:
        """Raises `TraceAgain` to trace the step with a metric's variable that is no sum, unless it is known."""
        self._ask(self.states, variable)

    def _ask(self, known: dict[int, Any], variable: Any) -> None:
        if id(variable) not in known:
            known[id(variable)], self._is_new = variable, True
            raise TraceAgain("policies: the step is traced again, with what the last trace has found")

    def settled(self, trace: Callable[[], Any]) -> Any:
        """Calls `trace` until a trace finds nothing new; returns its result."""
        while True:
            self._is_new = False
            try:
                traced = trace()
            except Exception:
                # A tensor in place of a variable may cause the error; and Keras or AutoGraph may wrap `TraceAgain`.
                if not self._is_new:
                    raise
            else:
                self._warn()
                return traced

    def _warn(self) -> None:
        if self.late_reads and not self._has_warned:
            self._has_warned = True
            _log.say(message(self.late_reads))


class Write(NamedTuple):
    """A variable's new value.

    Attributes:
      variable: a Keras variable.
      value: a tensor of the graph of the step.
      position: number of calls of `optimizer.apply` before the write.
    """

    variable: Any
    value: tf.Tensor
    position: int


class Recording(models.ReadingScope):
    """Scope that holds writes back, and records them.

    Args:
      starts: (variable, tensor) of the variables that don't begin with their own value.
      findings: results of earlier traces of the step.
    """

    def __init__(self, starts: Sequence[tuple[Any, tf.Tensor]], findings: Findings) -> None:
        # Without `collect_losses` the losses that layers add would be ignored.
        super().__init__(starts, collect_losses=True, initialize_variables=False)
        self.graph: Any = tf.compat.v1.get_default_graph()
        self.num_applied = 0
        self._findings = findings
        self._touched: dict[int, Any] = {}
        self._writes: list[Write] = []
        self._updated: dict[int, Any] = {}
        # For each call of `optimizer.apply` the number of operations before it, and the variables.
        self._calls: list[tuple[int, Sequence[Any]]] = []
        for variable in findings.stand_ins.values():
            value = tf.convert_to_tensor(self.state_mapping.pop(id(variable), variables.tf_variable(variable)))
            self.state_mapping[id(variable)] = LocalVariable(value, trainable=bool(variable.trainable))

    def add_update(self, update: tuple[Any, Any]) -> None:
        """See `keras.StatelessScope`."""
        variable, value = update
        stand_in = self.state_mapping.get(id(variable))
        is_stand_in = isinstance(stand_in, LocalVariable)
        if id(variable) in self._updated:
            raise ValueError(
                "policies: a train_step must not write weights after optimizer.apply, because their update is made "
                "later, from the gradients of several replicas; use a constraint (kernel_constraint=...), or write "
                f"them before apply or in a callback's on_train_batch_end. Received: a write of {variable.path!r}"
            )
        if not is_stand_in and (variable.trainable or not self.is_at_the_top()):
            self._findings.ask_for_stand_in(variable)
        self._touched[id(variable)] = variable
        if is_stand_in:
            stand_in.assign(tf.cast(value, stand_in.dtype), read_value=False)
        else:
            super().add_update(update)

    def is_at_the_top(self) -> bool:
        """True outside of conditionals, loops and functions of the traced step."""
        return tf.compat.v1.get_default_graph() is self.graph

    def applied(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Notes that the optimizer updates these variables here; earlier writes are assigned before the update."""
        self._note_writes()
        self.num_applied += 1
        self._updated.update({id(variable): variable for variable in variables})
        self._calls.append((len(self.graph.get_operations()), variables))
        parts = optimizers.parts_of(optimizer)
        rates = {id(optimizers.learning_rate_of(part)) for part in parts}
        for variable in (*variables, *(variable for part in parts for variable in part.variables)):
            if id(variable) not in rates:
                self.state_mapping.pop(id(variable), None)
        if len(parts) == 1:
            # The only result of the update that is known before it.
            counted = tf.convert_to_tensor(optimizer.iterations)
            self.state_mapping[id(optimizer.iterations)] = counted + tf.ones([], counted.dtype)

    def writes(self) -> list[Write]:
        """Returns all writes, after the step was traced."""
        late = [variable for count, of in self._calls for variable in read_since(count, of)]
        self._findings.late_reads = list(dict.fromkeys(variable.path for variable in late))
        self._note_writes()
        return self._writes

    def _note_writes(self) -> None:
        """Notes the variables that may have been written since the last call, all stand-ins included."""
        stand_ins = self._findings.stand_ins.items()
        written = {key: v for key, v in stand_ins if isinstance(self.state_mapping.get(key), LocalVariable)}
        touched, self._touched = self._touched, {}
        for variable in {**touched, **written}.values():
            value = tf.convert_to_tensor(self.get_current_value(variable))
            self._writes.append(Write(variable, value, self.num_applied))


# Captured calls of `optimizer.apply` in a traced step: their gradients are kept, and nothing is applied.


@dataclasses.dataclass
class Applied:
    """A call of `optimizer.apply`."""

    optimizer: Any
    variables: list[Any]
    # For each variable: True if it has a gradient.
    present: list[bool]
    # Those that are not None.
    gradients: list[Any]
    # True if they are not weighted by examples: of losses that are sums, where the examples of the batch aren't known.
    are_sums: bool = False

    def trained(self) -> list[Any]:
        """Returns the variables that have a gradient."""
        return [variable for variable, is_present in zip(self.variables, self.present, strict=True) if is_present]


def capture(optimizer: Any, calls: list[Applied], scope: Recording) -> Callable[..., Any]:
    """Returns a replacement of `optimizer.apply` that appends the call to `calls`."""

    def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        grads = list(grads)
        variables = list(optimizers.trained_by(optimizer) if trainable_variables is None else trainable_variables)
        if not optimizer.built:
            raise ValueError(
                f"policies: the optimizer {optimizer.name!r} must have its variables before a step is traced; call "
                "optimizer.build(variables) after the model is built. Received: an optimizer that was not built"
            )
        if not scope.is_at_the_top():
            raise ValueError(
                "policies: a train_step must not call optimizer.apply inside of a conditional, a loop or a "
                "tf.function, because an update is made once per step, from several replicas; compute the gradients "
                f"there, and call it afterwards. Received: optimizer {optimizer.name!r}"
            )
        present = [gradient is not None for gradient in grads]
        calls.append(Applied(optimizer, variables, present, [each for each in grads if each is not None]))
        scope.applied(optimizer, variables)
        return optimizer.iterations

    return apply


# Weights that a train step reads after it has called `optimizer.apply`, found in the graph of the step.
#
# Under policies the update is made after the step, so such a read gives the values before the update. Gradient
# functions use a variable's handle without a read, so reads are detected by the traced operations.


_NO_READS = frozenset({"VariableShape", "VarIsInitializedOp"})


def message(paths: Sequence[str]) -> str:
    """Returns a warning about such reads."""
    others = f" and {len(paths) - 1} others" if len(paths) > 1 else ""
    return (
        "policies: after optimizer.apply this train_step reads weights as they were before the update, which "
        "is made later from several replicas' gradients; to have the updated ones, train without a policy, or read "
        f"them in a callback's on_train_batch_end. Received: a read of {paths[0]!r}{others}"
    )


def read_since(count: int, variables: Sequence[Any]) -> list[Any]:
    """Returns those of these Keras variables that the graph that is being traced reads after so many operations."""
    graph: Any = tf.compat.v1.get_default_graph()
    operations = [operation for operation in graph.get_operations()[count:] if operation.type not in _NO_READS]
    inputs = {tensor.name for operation in operations for tensor in operation.inputs}
    captured = [outside for outside, inside in graph.captures if inside.name in inputs]
    return [
        variable
        for variable in variables
        if any(outside is each for outside in captured for each in _handles(variable))
        or getattr(_read_ahead(variable), "name", None) in inputs
    ]


def _read_ahead(variable: Any) -> tf.Tensor | None:
    """Returns the tensor that reads of a variable of a parameter server copy in this trace, if there is one."""
    return getattr(variables.tf_variable(variable), "ahead", None)


def _handles(variable: Any) -> list[Any]:
    """Returns the handles of a Keras variable's copies."""
    value = variables.tf_variable(variable)
    copies = getattr(value, "values", None) or [value]
    return [copy.handle for copy in copies if hasattr(copy, "handle")]


# Classification of a variable's write by the traced graph: addition, maximum, minimum, or another.


ADDITION, MAXIMUM, MINIMUM, OTHER = "addition", "maximum", "minimum", "other"

_COPIES = frozenset({"Identity", "Snapshot", "EnsureShape", "StopGradient"})
_ADDITIONS = frozenset({"AddV2", "Add"})
_EXTREMES = {"Maximum": MAXIMUM, "Minimum": MINIMUM}
_SCATTERS = frozenset({"TensorScatterAdd", "TensorScatterSub"})


def refuse_state(variable: Any) -> ValueError:
    """Returns the error about a metric's variable that is no sum over the examples."""
    return ValueError(
        "metrics=[...]: each replica counts its own examples, and the counts are added up; update a metric's variable "
        "as assign(variable + x), outside of conditionals, or on parameter servers with a policy as a maximum or "
        "minimum; a variable made by add_variable(aggregation='mean') has the mean over the replicas. "
        f"Received: variable {variable.path!r}, which is no sum"
    )


def check_counts(model: Any) -> list[tuple[Any, str, Any]]:
    """Returns patches by which a step is refused whose metrics write something else than sums.

    Raises:
      ValueError: from `assign` of such a variable, while the step is traced.
    """
    counts = [variable for variable in model.metrics_variables if variable.aggregation == "sum"]
    return [(variable, "assign", _checked(variable)) for variable in counts]


def _checked(variable: Any) -> Callable[[Any], Any]:
    assign_to = variable.assign

    def assign(value: Any) -> Any:
        if tf.is_symbolic_tensor(value) and value.graph is tf.compat.v1.get_default_graph():
            static = tf.get_static_value(value)
            is_reset = static is not None and not static.any()
            if not is_reset and kind(value, *_values_read(variable)) != ADDITION:
                raise refuse_state(variable)
        return assign_to(value)

    return assign


def _values_read(variable: Any) -> list[tf.Tensor]:
    """Returns what the graph that is being traced reads of a variable's copies."""
    graph: Any = tf.compat.v1.get_default_graph()
    handles = [*_handles(variable)]
    inside = {each.name for outside, each in graph.captures if any(outside is handle for handle in handles)}
    reads = [each for each in graph.get_operations() if each.type == "ReadVariableOp" and each.inputs[0].name in inside]
    return [each.outputs[0] for each in reads]


def kind(value: tf.Tensor, *starts: tf.Tensor) -> str:
    """Returns the kind of change from a variable's value to a new one, by tensors of one graph.

    Args:
      value: the new value.
      *starts: `start`, the variable's value, in one or more tensors.

    Returns:
      ADDITION: `start + x`; MAXIMUM, MINIMUM: of `start` and `x`, where x does not depend on `start`; else OTHER.
    """
    if any(value is start for start in starts):
        return ADDITION
    if not depends(value, starts):
        return OTHER
    operation = value.op
    first, *rest = operation.inputs
    if operation.type in _COPIES:
        return kind(first, *starts)
    if operation.type in _ADDITIONS and depends(rest[0], starts):
        first, rest = rest[0], [first]
    if operation.type in _ADDITIONS | {"Sub"} | _SCATTERS and not any(depends(each, starts) for each in rest):
        return ADDITION if kind(first, *starts) == ADDITION else OTHER
    if operation.type in _EXTREMES:
        return _extreme(_EXTREMES[operation.type], list(operation.inputs), starts)
    if operation.type in ("SelectV2", "Select") and not depends(first, starts):
        kinds = {kind(each, *starts) for each in rest}
        return kinds.pop() if len(kinds) == 1 else OTHER
    return OTHER


def _extreme(which: str, inputs: list[tf.Tensor], starts: Sequence[tf.Tensor]) -> str:
    dependent = [each for each in inputs if depends(each, starts)]
    if len(dependent) == 1 and (_is_copy(dependent[0], starts) or kind(dependent[0], *starts) == which):
        return which
    return OTHER


def _is_copy(value: tf.Tensor, starts: Sequence[tf.Tensor]) -> bool:
    """Returns True if `value` is `start`, or `start + 0`, which is the usual read of a Keras variable."""
    while not any(value is start for start in starts):
        first, *rest = value.op.inputs
        zero = tf.get_static_value(rest[0]) if rest and value.op.type in _ADDITIONS else None
        if value.op.type not in _COPIES and (zero is None or zero.any()):
            return False
        value = first
    return True


def depends(value: tf.Tensor, starts: Iterable[tf.Tensor]) -> bool:
    """Returns True if `value` is computed from any of `starts`."""
    wanted = {start.ref() for start in starts}
    found, to_do = {value.op}, [value]
    while to_do:
        tensor = to_do.pop()
        if tensor.ref() in wanted:
            return True
        for each in tensor.op.inputs:
            if each.ref() in wanted:
                return True
            if each.op not in found:
                found.add(each.op)
                to_do.append(each)
    return False
