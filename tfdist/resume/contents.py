# SPDX-License-Identifier: Apache-2.0
"""Variables of a model that are in a checkpoint: their list, their values, and how these are assigned again."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import keras_variables, optimizer_patches, optimizer_variables, symbolic_build
from tfdist.policies.saved_state import SavedState
from tfdist.resume.array_files import Rows
from tfdist.runtime import row_blocks
from tfdist.step import copies, one_replica


def built_of(model: keras.Model) -> list[list[int] | None]:
    """Returns, for each optimizer, the indices of its variables in `model.trainable_variables`; None if not built."""
    numbers = {id(variable): index for index, variable in enumerate(model.trainable_variables)}
    return [
        [numbers[id(variable)] for variable in optimizer_variables.trained_by(optimizer) if id(variable) in numbers]
        if optimizer.built
        else None
        for optimizer in optimizer_patches.optimizers_of(model)
    ]


def variables_of(model: keras.Model) -> list[Any]:
    """Returns the variables of the model, its optimizers and policies, without metrics, in the same order each run."""
    metrics = {id(variable) for variable in metrics_of(model)}
    found = [*one_replica.variables_of(model), *saved_state_of(model).variables(model)]
    return [variable for variable in found if id(variable) not in metrics]


def metrics_of(model: keras.Model) -> list[Any]:
    """Returns the variables of the model's metrics, each once."""
    found = [*model.metrics_variables, *(variable for metric in model.metrics for variable in metric.variables)]
    return list({id(variable): variable for variable in found}.values())


def described(variables: Sequence[Any]) -> list[list[Any]]:
    """Returns [path, shape, dtype] of each variable, as JSON data."""
    return [[variable.path, list(variable.shape), str(variable.dtype)] for variable in variables]


def to_array(variable: Any) -> np.ndarray:
    """Returns the variable's value, with its shape and dtype."""
    return np.asarray(tf.convert_to_tensor(variable.value))


def to_save(variable: Any) -> np.ndarray | Rows:
    """Returns the variable's value; that of a table in shards is read from its servers as it is written."""
    table = _in_shards(variable)
    if table is None:
        return to_array(variable)
    shape, dtype = tuple(table.shape), np.dtype(table.dtype.as_numpy_dtype)
    return Rows(shape, dtype, lambda: (table.read_rows(*each) for each in row_blocks.ranges(shape, dtype.itemsize)))


def assign(model: keras.Model, variables: Sequence[Any], arrays: Sequence[np.ndarray | Rows], agreement: Any) -> None:
    """Assigns `arrays` to the variables, on all workers; the chief broadcasts its values."""
    with model.distribute_strategy.scope():
        if agreement is None or agreement.is_chief:
            for variable, array in zip(variables, arrays, strict=True):
                _assign(variable, array)
        if agreement is not None:
            model.distribute_strategy.distribution.broadcast(variables)


def _assign(variable: Any, array: np.ndarray | Rows) -> None:
    table = _in_shards(variable)
    if table is not None and isinstance(array, Rows):
        first = 0
        for block in array.blocks():
            table.write_rows(first, _as_kind(block, table.dtype.as_numpy_dtype))
            first += len(block)
    else:
        whole = np.asarray(array)
        variable.assign(_as_kind(whole, to_array(variable).dtype) if whole.dtype.kind == "V" else whole)


def _as_kind(array: np.ndarray, kind: Any) -> np.ndarray:
    # NumPy reads a dtype that it doesn't know, such as bfloat16, as raw bytes.
    return array.view(kind) if array.dtype.kind == "V" else array


def _in_shards(variable: Any) -> Any:
    """Returns the TensorFlow variable if it is in shards, else None."""
    found = keras_variables.tf_variable(variable)
    return found if hasattr(found, "read_rows") else None


def count_of(metric: Any, is_ahead: bool) -> np.ndarray:
    """Returns the value of a metric's variable over all replicas; of the first replica if `is_ahead` (warmup)."""
    return np.asarray(tf.convert_to_tensor(copies.copies_of(metric)[0])) if is_ahead else to_array(metric)


def assign_metrics(model: keras.Model, arrays: Sequence[np.ndarray], agreement: Any) -> None:
    """Assigns restored values to the metrics. Replicas' counts are summed, so the first replica gets the whole sum."""
    pairs = list(itertools.zip_longest(metrics_of(model), arrays))
    is_first = agreement is None or agreement.is_chief
    with model.distribute_strategy.scope():
        for metric, array in pairs:
            if copies.is_counter(metric):
                for index, copy in enumerate(copies.copies_of(metric)):
                    copy.assign(array if is_first and not index else tf.zeros_like(copy))
    others = [(metric, array) for metric, array in pairs if not copies.is_counter(metric)]
    assign(model, [metric for metric, _ in others], [array for _, array in others], agreement)


def distribution_of(model: keras.Model) -> Any:
    """Returns the `tfdist.strategies.distribution.Distribution` of the model's strategy; None if it is a stock one."""
    return getattr(model.distribute_strategy, "distribution", None)


def saved_state_of(model: keras.Model) -> SavedState:
    """Returns the state that the model's strategy has to save; none if it is no strategy of tfdist."""
    distribution = distribution_of(model)
    return SavedState() if distribution is None else distribution.saved_state


def build(model: keras.Model, optimizers: Sequence[Sequence[int] | None], element_spec: Any) -> None:
    """Creates the variables for which a checkpoint has values, as the first step would.

    Args:
      model: the compiled model.
      optimizers: result of `built_of` when the checkpoint was written.
      element_spec: structure of `tf.TypeSpec`s of a batch.
    """
    with model.distribute_strategy.scope():
        if not model.built:
            _build_symbolically(model, element_spec)
        for optimizer, indices in zip(optimizer_patches.optimizers_of(model), optimizers, strict=False):
            if not optimizer.built and indices is not None:
                optimizer.build([model.trainable_variables[index] for index in indices])
        # For the metrics. Only with a built optimizer, because it would build the optimizer for all variables. A user's
        # own train_step may need none of this, and the model may lack `call` or `compute_metrics`.
        if model.optimizer.built:
            with contextlib.suppress(Exception):
                _build_symbolically(model, element_spec)


def _build_symbolically(model: keras.Model, element_spec: Any) -> None:
    # Keras represents None as an optional.
    without = lambda spec: None if isinstance(spec, tf.OptionalSpec) else spec  # noqa: E731
    symbolic_build.by_keras(model, tf.nest.map_structure(without, element_spec))
