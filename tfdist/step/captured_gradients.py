# SPDX-License-Identifier: Apache-2.0
"""Captured calls of `optimizer.apply` in a traced step: their gradients are kept, and nothing is applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat.keras import optimizers
from tfdist.compat.tensorflow import graphs
from tfdist.compat.tensorflow.variables import LocalVariable
from tfdist.step.recording import Recording


@dataclasses.dataclass
class Applied:
    """A call of `optimizer.apply`."""

    optimizer: Any
    variables: list[Any]
    # For each variable: True if it has a gradient.
    present: list[bool]
    # Within a conditional: 1 if the branch was taken.
    flag: LocalVariable | None = None
    # The gradients that are not None; within a conditional, the variables that carry them out of it.
    kept: list[Any] = dataclasses.field(default_factory=list)

    def trained(self) -> list[Any]:
        """Returns the variables that have a gradient."""
        return [variable for variable, is_present in zip(self.variables, self.present, strict=True) if is_present]

    def gradients(self) -> list[Any]:
        """Returns the gradients as tensors of the graph of the step."""
        return [each.read_value() if isinstance(each, LocalVariable) else each for each in self.kept]


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
        applied = Applied(optimizer, variables, [gradient is not None for gradient in grads])
        present = [(gradient, v) for gradient, v in zip(grads, variables, strict=True) if gradient is not None]
        if scope.is_at_the_top():
            applied.kept = [gradient for gradient, _ in present]
        else:
            _keep(applied, present, scope)
        calls.append(applied)
        scope.applied(optimizer, variables)
        return optimizer.iterations

    return apply


def _keep(applied: Applied, gradients: Sequence[tuple[Any, Any]], scope: Recording) -> None:
    """Carries the gradients of an `apply` out of its conditional or function."""
    if graphs.in_loop():
        raise ValueError(
            "policies: a train_step must not call optimizer.apply inside of a loop, because an update is made once per "
            "step; sum the gradients in the loop and call it afterwards. Received: optimizer "
            f"{applied.optimizer.name!r}"
        )
    with scope.at_the_top():
        applied.flag = LocalVariable(tf.constant(0.0))
        applied.kept = [LocalVariable(tf.zeros(variable.shape, gradient.dtype)) for gradient, variable in gradients]
    applied.flag.assign(1.0, read_value=False)
    for kept, (gradient, _) in zip(applied.kept, gradients, strict=True):
        kept.assign(tf.convert_to_tensor(gradient), read_value=False)


def apply_if(condition: tf.Tensor, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Applies the gradients if the condition holds."""

    def apply() -> tf.Tensor:
        optimizer.apply(gradients, variables)
        return tf.constant(True)

    tf.cond(condition, apply, lambda: tf.constant(False))
