# SPDX-License-Identifier: Apache-2.0
"""Refuses, before anything trains, what a step of a `ParameterServerStrategy` uses and a worker can't reach.

That is variables made outside of the scope, and data sets of the chief.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat import colocation, keras_variables, moved_variables
from tfdist.step import scope
from tfdist.step.keras_steps import classify


def check_scope(strategy: tf.distribute.Strategy, fn: Callable[..., Any]) -> None:
    """Refuses a model that has variables of the chief's own, in which workers would overwrite each other's counts.

    Raises:
      ValueError: The model was made outside of the strategy's scope, or its optimizer was built there.
    """
    if classify(fn) not in ("train", "test"):
        return
    model: Any = getattr(fn, "__self__", None)
    scope.take_over(strategy, model)
    moved_variables.check_scope(strategy, (*model.variables, *model.metrics_variables))


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


def check_graph(fn: Callable[..., Any], traced: Any) -> None:
    """Refuses a traced step that workers can't run.

    Args:
      fn: the step, for the message.
      traced: the concrete function that workers will run.

    Raises:
      ValueError: it uses a data set that was made outside of it.
    """
    name = {"predict": "predict_step"}.get(classify(fn), getattr(fn, "__name__", str(fn)))
    if any(captured.dtype == tf.variant for captured in traced.captured_inputs):
        raise ValueError(
            f"ParameterServerStrategy: {name} uses a tf.data.Dataset that was made outside of it, where no "
            "worker reads; give it to fit, evaluate or predict together with the other data "
            f"(tf.data.Dataset.zip((data, others))), or make it within {name}. Received: a captured tf.data.Dataset"
        )


def check_colocation(strategy: Any) -> None:
    """Makes optimizers of the strategy refuse to make slots for a variable that was made outside of the scope."""
    colocation.replace(strategy, lambda stock: _checking(strategy, stock))


def _checking(strategy: Any, colocate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def colocate_vars_with(variable: Any) -> Any:
        # A partitioned one has parts of the strategy's.
        is_whole = isinstance(variable, tf.Variable) and not hasattr(variable, "variables")
        if is_whole:
            moved_variables.check_scope(strategy, [variable])
        return colocate(variable)

    return colocate_vars_with
