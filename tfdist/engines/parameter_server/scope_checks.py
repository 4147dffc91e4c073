# SPDX-License-Identifier: Apache-2.0
"""Refuses, before anything trains, variables that were made outside of the scope of a `ParameterServerStrategy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat import colocation, creation_lines, keras_variables
from tfdist.engines.parameter_server.coordinated_variable import CoordinatedVariable
from tfdist.step.keras_steps import classify


def check_scope(fn: Callable[..., Any]) -> None:
    """Refuses a model that has variables of the chief's own, in which workers would overwrite each other's counts.

    Raises:
      ValueError: The model, its optimizer or one of its metrics was made outside of the strategy's scope.
    """
    if classify(fn) not in ("train", "test"):
        return
    model: Any = getattr(fn, "__self__", None)
    for variable in (*model.variables, *model.metrics_variables, *getattr(model.optimizer, "variables", ())):
        if not isinstance(keras_variables.tf_variable(variable), CoordinatedVariable):
            raise ValueError(_outside(variable.path, variable))


def check_shards(fn: Callable[..., Any], has_shards: Callable[[Any], bool]) -> None:
    """Refuses to train variables in shards untraced, where their gradients would be lost.

    Raises:
      ValueError: The model has such a variable.
    """
    if classify(fn) != "train":
        return
    for variable in getattr(fn, "__self__", None).trainable_variables:  # type: ignore[union-attr]
        if has_shards(keras_variables.tf_variable(variable)):
            raise ValueError(
                "run_eagerly=True can't train variables in shards, such as variable_partitioner has made of "
                f"{variable.path!r}. Compile with run_eagerly=False, or build the strategy without it. "
                "Received: run_eagerly=True"
            )


def check_colocation(strategy: Any) -> None:
    """Makes optimizers of the strategy refuse to make slots for a variable that was made outside of the scope."""
    colocation.replace(strategy, _checking)


def _checking(colocate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def colocate_vars_with(variable: Any) -> Any:
        # A partitioned one has parts of the strategy's.
        is_whole = isinstance(variable, tf.Variable) and not hasattr(variable, "variables")
        if is_whole and keras_variables.strategy_of(variable) is None:
            raise ValueError(_outside(variable.name, variable))
        return colocate(variable)

    return colocate_vars_with


def _outside(name: str, variable: Any) -> str:
    line = creation_lines.of(variable)
    return (
        "The model, its optimizer and its metrics must be made in the scope of ParameterServerStrategy. Put "
        "the lines that make them, and model.compile, under `with strategy.scope():`. "
        f"Received: variable {name!r}, made outside of it{f' at {line}' if line else ''}"
    )
