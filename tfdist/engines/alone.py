# SPDX-License-Identifier: Apache-2.0
"""One replica as if it were the only one: a distributed model's step on the first of this process' copies.

A Keras variable holds a `tf.Variable`, or one that TensorFlow distributes: a copy for each device. While a step is
traced here, each Keras variable of the model holds its first copy instead, and TensorFlow's default strategy is
current. So the step is the one that the model would have on one device: no loss is divided, no gradient is reduced, and
what it writes is written to that copy alone. Whoever trains this way says afterwards what becomes of the other copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from tfdist.engines import tap


@contextlib.contextmanager
def alone(model: keras.Model, device: str) -> Iterator[None]:
    """Within this block the model is one of a single device.

    Args:
      model: a built model, whose optimizers are built, of any strategy with copies on devices.
      device: where its first copies are.
    """
    default = distribute_lib._get_default_strategy()
    changes = [(variable, "_value", copies_of(variable)[0]) for variable in variables_of(model)]
    changes += [(optimizer, "_distribution_strategy", default) for optimizer in _optimizers(model)]
    # The sum over one replica, for which TensorFlow would keep the graph for ever; see `tap.sum_over_replicas`.
    sums = [(optimizer, "_all_reduce_sum_gradients", list) for optimizer in _optimizers(model)]
    with _swapped(changes), tap.attributes(sums), tf.device(device), tf.distribute.ReplicaContext(default, 0):
        yield


def variables_of(model: keras.Model) -> list[Any]:
    """The Keras variables that a step of the model may read or write, each once."""
    variables = [*model.variables, *model.metrics_variables]
    for metric in model.metrics:
        variables += metric.variables
    for optimizer in _optimizers(model):
        variables += optimizer.variables
    return list({id(variable): variable for variable in variables}.values())


def copies_of(variable: Any) -> list[Any]:
    """A Keras variable's copies in this process; only one if it was made outside of the strategy's scope."""
    return list(getattr(variable._value, "values", [variable._value]))


def is_counter(variable: Any) -> bool:
    """Whether its value is the sum over all copies, as with what metrics count."""
    return variable.aggregation == "sum"


def outputs_of(step: Callable[[Any], Any], model: keras.Model, device: str, spec: Any) -> Any:
    """What `step` would return on one device, as zeros; nothing is run.

    Args:
      step: the model's step.
      model: see `alone`.
      device: see `alone`.
      spec: the structure of `tf.TypeSpec`s of a batch.
    """

    def trace(*flat: tf.Tensor) -> Any:
        with alone(model, device):
            return step(without_optionals(tf.nest.pack_sequence_as(spec, flat, expand_composites=True)))

    traced = tf.function(trace, autograph=False)
    outputs = traced.get_concrete_function(*tf.nest.flatten(spec, expand_composites=True)).structured_outputs
    return tf.nest.map_structure(lambda each: tf.zeros([size or 0 for size in each.shape], each.dtype), outputs)


def without_optionals(batch: Any) -> Any:
    """A batch with None where Keras has an empty Optional for it."""
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch)


def _optimizers(model: keras.Model) -> list[Any]:
    optimizers = tap.optimizers_of(model)
    inner = [getattr(optimizer, "inner_optimizer", optimizer) for optimizer in optimizers]
    return list({id(optimizer): optimizer for optimizer in [*optimizers, *inner]}.values())


@contextlib.contextmanager
def _swapped(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Within this block these objects have these attributes, of (object, name, value), instead of those they have."""
    before = [(target, name, getattr(target, name)) for target, name, _ in changes]
    try:
        # Past Keras' own __setattr__, which would track the values.
        for target, name, value in changes:
            object.__setattr__(target, name, value)
        yield
    finally:
        for target, name, value in before:
            object.__setattr__(target, name, value)
