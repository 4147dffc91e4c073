# SPDX-License-Identifier: Apache-2.0
"""Records the variable writes of a train step while it is traced, and holds them back.

A write of a Keras variable becomes a tensor in the scope's mapping. This is impossible if the write is in a
conditional, a loop or a function, if a gradient with respect to the variable is taken later, or if the step uses more
of the variable than its value. Such a variable is replaced by a `LocalVariable` on the replica, a stand-in, from the
step's first operation on. So a trace that finds such variables is discarded, and the step is traced again (`Findings`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist import _log
from tfdist.compat.keras import models, optimizers
from tfdist.compat.tensorflow import variables
from tfdist.compat.tensorflow.variables import LocalVariable
from tfdist.step import late_reads


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

    def needs_stand_in(self, *variables: Any) -> bool:
        """Notes variables that need a stand-in; returns True if one of them is new."""
        return self._note(any(id(each) not in self.stand_ins for each in variables)) and not self.stand_ins.update(
            {id(each): each for each in variables}
        )

    def ask_for_stand_in(self, variable: Any) -> None:
        """Raises `TraceAgain` to trace the step with a stand-in for a variable, unless it has one."""
        if self.needs_stand_in(variable):
            raise TraceAgain(AGAIN)

    def is_state(self, variable: Any) -> bool:
        """Notes a metric's variable that is no sum; returns True if it is new."""
        is_new = self._note(id(variable) not in self.states)
        self.states[id(variable)] = variable
        return is_new

    def _note(self, is_new: bool) -> bool:
        self._is_new |= is_new
        return is_new

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
            _log.say(late_reads.message(self.late_reads))


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


class Recording(models.Reading):
    """Scope that holds writes back, and records them.

    Args:
      starts: (variable, tensor) of the variables that don't begin with their own value.
      findings: results of earlier traces of the step.
    """

    def __init__(self, starts: Sequence[tuple[Any, tf.Tensor]], findings: Findings) -> None:
        # Without `collect_losses` the losses that layers add would be ignored.
        super().__init__(starts, collect_losses=True, initialize_variables=False)
        self.graph = tf.compat.v1.get_default_graph()
        self.num_applied = 0
        self._findings = findings
        self._unwritten = dict(self.state_mapping)
        self._touched: dict[int, Any] = {}
        self._writes: list[Write] = []
        self._updated: dict[int, Any] = {}
        self._held: list[tuple[Any, Any, int]] = []
        self._reads = late_reads.LateReads()
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
        if self.is_at_the_top():
            self._note_writes()
        else:
            # Their values are available only after the conditional.
            self._held += [(v, self.get_current_value(v), self.num_applied) for v in self._take_touched()]
        self.num_applied += 1
        self._updated.update({id(variable): variable for variable in variables})
        self._reads.applied(variables)
        parts = optimizers.parts_of(optimizer)
        rates = {id(optimizers.learning_rate_of(part)) for part in parts}
        for variable in (*variables, *(variable for part in parts for variable in part.variables)):
            if id(variable) not in rates:
                self.state_mapping.pop(id(variable), None)
        if self.is_at_the_top() and len(parts) == 1:
            # The only result of the update that is known before it.
            counted = tf.convert_to_tensor(optimizer.iterations)
            self.state_mapping[id(optimizer.iterations)] = counted + tf.ones([], counted.dtype)

    def writes(self) -> list[Write]:
        """Returns all writes, after the step was traced."""
        self._findings.late_reads = self._reads.paths()
        self._note_writes()
        with self.at_the_top():
            held = [Write(variable, tf.convert_to_tensor(value), position) for variable, value, position in self._held]
        return [*held, *self._writes]

    def _note_writes(self) -> None:
        with self.at_the_top():
            for variable in self._take_touched():
                value = tf.convert_to_tensor(self.get_current_value(variable))
                self._writes.append(Write(variable, value, self.num_applied))

    def _take_touched(self) -> list[Any]:
        """Returns the variables that may have been written since the last call, all stand-ins included."""
        stand_ins = self._findings.stand_ins.items()
        written = {key: v for key, v in stand_ins if isinstance(self.state_mapping.get(key), LocalVariable)}
        touched, self._touched = self._touched, {}
        return list({**touched, **written}.values())

    @contextlib.contextmanager
    def at_the_top(self) -> Iterator[None]:
        """Context in which operations are added to the graph of the step, outside of its conditionals."""
        if self.is_at_the_top():
            yield
            return
        with self.graph.as_default(), tf.control_dependencies(None):
            yield

    def start_of(self, variable: Any) -> tf.Tensor | None:
        """Returns the initial tensor of a variable of `starts`."""
        return self._unwritten.get(id(variable))


AGAIN = "policies: the step is traced again, with a stand-in for a variable that it writes"
