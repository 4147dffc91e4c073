# SPDX-License-Identifier: Apache-2.0
"""Refuses, before anything trains, what a `ParameterServerStrategy` or its processes can't use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat.keras.scope import check_made_in_scope
from tfdist.compat.keras.sharding import in_shards
from tfdist.compat.tensorflow import variables
from tfdist.step import scope
from tfdist.step.step import Step


def check_scope(strategy: tf.distribute.Strategy, step: Step) -> None:
    """Raises ValueError for a model that was made outside of the strategy's scope, or its optimizer built there.

    Such variables are the chief's own: workers would overwrite each other's counts in them.
    """
    if step.kind not in ("train", "test"):
        return
    model = step.model
    scope.take_over(strategy, model)
    check_made_in_scope(strategy, (*model.variables, *model.metrics_variables))


def check_shards(step: Step) -> None:
    """Raises ValueError for a step that trains variables in shards untraced: their gradients would be lost."""
    if step.kind != "train":
        return
    for variable in step.model.trainable_variables:
        if in_shards(variable) is not None:
            raise ValueError(
                "run_eagerly=True can't train variables in shards, such as variable_partitioner has made of "
                f"{variable.path!r}. Compile with run_eagerly=False, or build the strategy without it. "
                "Received: run_eagerly=True"
            )


def check_graph(step: Step, traced: Any) -> None:
    """Raises ValueError if `traced`, the concrete function of a step, uses a data set that was made outside of it."""
    fn = step.function
    name = {"predict": "predict_step"}.get(step.kind, getattr(fn, "__name__", str(fn)))
    if any(captured.dtype == tf.variant for captured in traced.captured_inputs):
        raise ValueError(
            f"ParameterServerStrategy: {name} uses a tf.data.Dataset that was made outside of it, where no "
            "worker reads; give it to fit, evaluate or predict together with the other data "
            f"(tf.data.Dataset.zip((data, others))), or make it within {name}. Received: a captured tf.data.Dataset"
        )


def check_colocation(strategy: Any) -> None:
    """Makes optimizers of the strategy refuse to make slots for a variable that was made outside of the scope."""

    def checking(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def colocate_vars_with(variable: Any) -> Any:
            # A partitioned one has parts of the strategy's.
            if isinstance(variable, tf.Variable) and not hasattr(variable, "variables"):
                check_made_in_scope(strategy, [variable])
            return stock(variable)

        return colocate_vars_with

    variables.replace_colocation(strategy, checking)
