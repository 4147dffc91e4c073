# SPDX-License-Identifier: Apache-2.0
"""What of a model is in a checkpoint, how it is read, and how a model is given it again."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.engines import alone, tap


def built_of(model: keras.Model) -> list[list[int] | None]:
    """For each optimizer, which of the model's trainable variables it has; None if it was not built."""
    numbers = {id(variable): index for index, variable in enumerate(model.trainable_variables)}
    return [
        [numbers[id(variable)] for variable in _moved_by(optimizer) if id(variable) in numbers]
        if optimizer.built
        else None
        for optimizer in tap.optimizers_of(model)
    ]


def _moved_by(optimizer: Any) -> list[Any]:
    return getattr(optimizer, "inner_optimizer", optimizer)._trainable_variables


def variables_of(model: keras.Model) -> list[Any]:
    """All that the next step depends on, in the same order in every run: of the model, its optimizers and policies."""
    metrics = {id(variable) for variable in metrics_of(model)}
    policies = policies_of(model)
    found = [*alone.variables_of(model), *(policies.variables(model) if policies is not None else [])]
    return [variable for variable in found if id(variable) not in metrics]


def metrics_of(model: keras.Model) -> list[Any]:
    """The variables of its metrics, each once."""
    found = [*model.metrics_variables, *(variable for metric in model.metrics for variable in metric.variables)]
    return list({id(variable): variable for variable in found}.values())


def described(variables: Sequence[Any]) -> list[list[Any]]:
    """For each its path, shape and dtype, as JSON has them."""
    return [[variable.path, list(variable.shape), str(variable.dtype)] for variable in variables]


def to_array(variable: Any) -> np.ndarray:
    """Its value, of its shape and dtype."""
    return np.asarray(tf.convert_to_tensor(variable.value))


def assign(model: keras.Model, variables: Sequence[Any], arrays: Sequence[np.ndarray], agreement: Any) -> None:
    """Gives variables their values, on all workers those that the chief has read."""
    with model.distribute_strategy.scope():
        if agreement is None or agreement.is_chief:
            for variable, array in zip(variables, arrays, strict=True):
                # NumPy reads a type that it does not know, such as bfloat16, as raw bytes.
                kind = to_array(variable).dtype
                variable.assign(array.view(kind) if array.dtype.kind == "V" else array)
        if agreement is not None:
            model.distribute_strategy._copy_from_chief(variables)


def count_of(metric: Any, is_ahead: bool) -> np.ndarray:
    """The value of a metric's variable: what all replicas have counted, or only the first one, while it is alone."""
    return np.asarray(tf.convert_to_tensor(alone.copies_of(metric)[0])) if is_ahead else to_array(metric)


def assign_metrics(model: keras.Model, arrays: Sequence[np.ndarray], agreement: Any) -> None:
    """Gives metrics what they had counted. The sum over all replicas counts, so the first one gets it all."""
    pairs = list(itertools.zip_longest(metrics_of(model), arrays))
    is_first = agreement is None or agreement.is_chief
    with model.distribute_strategy.scope():
        for metric, array in pairs:
            if alone.is_counter(metric):
                for index, copy in enumerate(alone.copies_of(metric)):
                    copy.assign(array if is_first and not index else tf.zeros_like(copy))
    others = [(metric, array) for metric, array in pairs if not alone.is_counter(metric)]
    assign(model, [metric for metric, _ in others], [array for _, array in others], agreement)


def policies_of(model: keras.Model) -> Any:
    """What a tfdist strategy has of its policies to be saved; None of another strategy."""
    return getattr(model.distribute_strategy, "_policies_to_save", None)


def build(model: keras.Model, optimizers: Sequence[Sequence[int] | None], element_spec: Any) -> None:
    """Makes the variables that a checkpoint has values for, as the first step would.

    Args:
      model: the compiled model.
      optimizers: what `built_of` said when the checkpoint was written.
      element_spec: what a batch of the data is.
    """
    with model.distribute_strategy.scope():
        if not model.built:
            _build_symbolically(model, element_spec)
        for optimizer, indices in zip(tap.optimizers_of(model), optimizers, strict=False):
            if not optimizer.built and indices is not None:
                optimizer.build([model.trainable_variables[index] for index in indices])
        # It would build the optimizer too, for all variables. A train_step of the user's own may do without it,
        # and without `call` or `compute_metrics`.
        if model.optimizer.built:
            with contextlib.suppress(Exception):
                _build_symbolically(model, element_spec)


def _build_symbolically(model: keras.Model, element_spec: Any) -> None:
    # An optional is Keras' way to say None.
    without = lambda spec: None if isinstance(spec, tf.OptionalSpec) else spec  # noqa: E731
    model._symbolic_build(data_batch=tf.nest.map_structure(without, element_spec))
