# SPDX-License-Identifier: Apache-2.0
"""Small variables travel together between parameter servers and a worker, while a Keras step is traced.

What costs time for a bias or a scale is not its bytes but the round trip. So a step reads all small variables of a
parameter server as one vector, and sends their gradients back as one. A model of 40 small layers trains more than
twice as fast so. With them go the factors that a large gradient is sent as (`factors`), if they are small.

    parameter server                 worker
      read, concatenate     -->      split, compute, concatenate the gradients
      split, update         <--
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import (
    flat_layers,
    keras_variables,
    optimizer_patches,
    optimizer_variables,
    placed_layers,
    replica_parts,
)
from tfdist.engines.parameter_server.coordinated_variable import CoordinatedVariable
from tfdist.engines.parameter_server.transfer import factors as factoring
from tfdist.engines.parameter_server.transfer.bundles import Bundles, is_small

# A larger one may be a table of which a step needs a few rows: these are gathered where it is, if it is not read ahead.
_MOST_ELEMENTS_READ = 1 << 14


@contextlib.contextmanager
def travel_together(model: keras.Model, worker: str, most_rows: Callable[[int, int], int]) -> Iterator[None]:
    """Within this block, a train step of `model` reads small weights, and sends their gradients, together.

    Args:
      model: a model that is built.
      worker: the device that the step is traced for.
      most_rows: see `factors.of`.
    """
    optimizers = optimizer_patches.optimizers_of(model)
    found = [part for optimizer in optimizers for part in optimizer_variables.parts_of(optimizer)]
    optimizers = {id(each): each for each in found if hasattr(each, optimizer_patches.UPDATE)}.values()
    updates = [(each, optimizer_patches.UPDATE, _update(each, worker, most_rows)) for each in optimizers]
    with read_together(model, worker), optimizer_patches.attributes(updates):
        yield


@contextlib.contextmanager
def read_together(model: keras.Model, worker: str) -> Iterator[None]:
    """Within this block, the step of `model` that is traced finds its small weights read already.

    A variable that the step has written is read anew, and so is one that is read within a conditional, a loop or an
    update of its own.

    Args:
      model: a model that is built.
      worker: the device that the step is traced for.
    """
    groups = _small_weights(model, worker)
    with _read_ahead([pair for (_, _, reader), group in groups.items() for pair in _read(group, reader)]):
        yield


@contextlib.contextmanager
def read_rounded(model: keras.Model, worker: str, dtype: tf.DType) -> Iterator[None]:
    """Within this block, the step of `model` that is traced reads its trainable weights rounded to `dtype`.

    They are rounded on their parameter servers, small ones together, and have their own dtype again on the worker.
    Embedding tables are not rounded, because a step reads single rows of them; nor are partitioned variables.

    Args:
      model: a model that is built.
      worker: the device that the step is traced for.
      dtype: `tf.float16` or `tf.bfloat16`.
    """
    tables = {
        id(layer.embeddings) for layer in flat_layers.layers_of(model) if isinstance(layer, keras.layers.Embedding)
    }
    weights = [weight for weight in model.trainable_weights if id(weight) not in tables]
    rounded = [_own(weight) for weight in weights]
    groups: dict[Any, list[CoordinatedVariable]] = collections.defaultdict(list)
    for variable in rounded:
        if variable is not None and variable.dtype.size > dtype.size:
            groups[variable.device, variable.dtype].append(variable)
    chosen = {id(variable) for group in groups.values() for variable in group}
    small = _small_weights(model, worker).values()
    others = [[each for each in group if id(each) not in chosen] for group in small]
    pairs = [pair for group in others if group for pair in _read(group, worker)]
    pairs += [pair for group in groups.values() for pair in _read(group, worker, dtype)]
    with _read_ahead(pairs):
        yield


@contextlib.contextmanager
def _read_ahead(ahead: Sequence[tuple[CoordinatedVariable, tf.Tensor]]) -> Iterator[None]:
    for variable, value in ahead:
        variable.read_ahead(value)
    try:
        yield
    finally:
        for variable, _ in ahead:
            variable.read_ahead(None)


def _small_weights(model: keras.Model, worker: str) -> dict[tuple[str, tf.DType, str], list[CoordinatedVariable]]:
    """Returns groups of two or more small variables of one parameter server and dtype that one device reads."""
    groups: dict[Any, list[CoordinatedVariable]] = collections.defaultdict(list)
    for weight in model.weights:
        variable = _own(weight)
        if variable is not None and is_small(variable, _MOST_ELEMENTS_READ):
            groups[variable.device, variable.dtype, placed_layers.reader_of(weight, worker)].append(variable)
    return {key: group for key, group in groups.items() if len(group) > 1}


def _own(weight: Any) -> CoordinatedVariable | None:
    """Returns the floating-point variable of a weight that is on one parameter server, or None."""
    variable = keras_variables.tf_variable(weight)
    # Not a subclass: a partitioned variable is on several parameter servers.
    is_own = type(variable) is CoordinatedVariable and variable.dtype.is_floating
    return variable if is_own else None


def _read(
    group: Sequence[CoordinatedVariable], worker: str, sent_dtype: tf.DType | None = None
) -> Iterator[tuple[CoordinatedVariable, tf.Tensor]]:
    dtype = group[0].dtype
    bundles = Bundles([tf.TensorSpec(each.shape, sent_dtype or dtype) for each in group], [worker] * len(group))
    with tf.device(group[0].device):
        packed = bundles.pack([tf.cast(each.read_value(), sent_dtype or dtype) for each in group])
    values = bundles.unpack(packed)
    with tf.device(worker):
        return zip(group, [tf.cast(value, dtype) for value in values], strict=True)


def _update(optimizer: Any, worker: str, most_rows: Callable[[int, int], int]) -> Callable[..., None]:
    original = getattr(optimizer, optimizer_patches.UPDATE)

    def update(distribution: Any, grads_and_vars: Sequence[tuple[Any, Any]], learning_rate: Any) -> None:
        pairs = list(grads_and_vars)
        dense = [
            index
            for index, (gradient, variable) in enumerate(pairs)
            if isinstance(gradient, tf.Tensor) and type(variable) is CoordinatedVariable
        ]
        devices = [pairs[index][1].device for index in dense]
        gradients = _sent([pairs[index][0] for index in dense], devices, worker, most_rows)
        for index, gradient in zip(dense, gradients, strict=True):
            pairs[index] = gradient, pairs[index][1]
        original(distribution, pairs, learning_rate)

    return update


def _sent(
    gradients: Sequence[tf.Tensor], devices: Sequence[str], worker: str, most_rows: Callable[[int, int], int]
) -> list[tf.Tensor]:
    """The gradients as they are on these devices, or on the worker, where each of them is sent by itself."""
    factors = [factoring.of(gradient, most_rows) for gradient in gradients]
    # A worker may span several devices.
    homes = [home or worker for home in replica_parts.homes_of(tf.distribute.get_strategy(), gradients)]
    parts = []
    for each, gradient, home in zip(factors, gradients, homes, strict=True):
        with tf.device(home):
            parts.append(each.sent() if each else [gradient])
    flat = [part for each in parts for part in each]
    destinations, origins = (
        [device for each, device in zip(parts, given, strict=True) for _ in each] for given in (devices, homes)
    )
    bundles = Bundles(flat, destinations, origins)
    packed = bundles.pack(flat)
    arrived, received = iter(bundles.unpack(packed)), []
    for each, sent, device in zip(factors, parts, devices, strict=True):
        tensors = [next(arrived) for _ in sent]
        with tf.device(device):
            received.append(each.received(*tensors) if each else tensors[0])
    return received
