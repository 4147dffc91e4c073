# SPDX-License-Identifier: Apache-2.0
"""A replica to which no example of a batch falls: it computes with one that is no example, and nothing of it counts.

Kernels and gradients of recurrent layers fail on a batch of no examples, and a function of a user's may. The replica
can't be left out either, since replicas wait for each other. So such a part is filled with one example: a copy of
another replica's where this process has one, else zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import compiled_losses, flat_layers
from tfdist.data import splitting
from tfdist.step import model_losses, used_objects

# Layers of Keras that fail on a batch of no examples, or that call code of others.
_MAY_FAIL = (
    keras.layers.RNN,
    keras.layers.TimeDistributed,
    keras.layers.Bidirectional,
    keras.layers.Lambda,
    keras.layers.TFSMLayer,
    keras.layers.JaxLayer,
    keras.layers.FlaxLayer,
    keras.layers.TorchModuleWrapper,
)


def are_refused(model: keras.Model) -> bool:
    """Returns True if a step with losses must fill empty parts, because a layer may fail on a batch of no examples.

    False if a loss is a sum over the examples: it would count the filled-in example.
    """
    has_sum = any(model_losses.is_sum(loss) for loss in compiled_losses.losses(model))
    return not has_sum and are_refused_by_layers(model)


def are_refused_by_layers(model: keras.Model | None) -> bool:
    """Returns True if a layer of the model may fail on a batch of no examples; None is an unknown model."""
    return model is None or any(
        isinstance(layer, _MAY_FAIL) or not used_objects.is_of_keras(type(layer))
        for layer in flat_layers.layers_of(model)
    )


def may_occur(parts: Sequence[Any]) -> bool:
    """Returns True if, by the static shapes, one of these parts of a batch may have no examples."""
    sizes = {splitting.static_size(part) for part in parts}
    return bool(sizes & {0, None}) and all(splitting.rows(part) is not None for part in parts)


def filled(part: Any, example_of: Any) -> Any:
    """The part itself, or one example if it has none.

    Args:
      part: a replica's part of a batch; ragged and sparse tensors are left as they are.
      example_of: a part of the same batch, whose first example is copied; zeros if it is empty too.
    """
    leaves = tf.nest.flatten(part)
    dense = [index for index, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor) and leaf.shape.rank]
    rows = splitting.rows(part)
    if not dense or rows is None or (splitting.static_size(part) or 0) > 0:
        return part
    sources = tf.nest.flatten(example_of)

    def example() -> list[tf.Tensor]:
        return [_first(sources[index]) for index in dense]

    def itself() -> list[tf.Tensor]:
        return [tf.identity(leaves[index]) for index in dense]

    chosen = tf.cond(rows > 0, itself, example)
    for index, leaf in zip(dense, [chosen] if isinstance(chosen, tf.Tensor) else chosen, strict=True):
        leaves[index] = tf.ensure_shape(leaf, [None, *leaves[index].shape[1:]])
    return tf.nest.pack_sequence_as(part, leaves)


def _first(source: tf.Tensor) -> tf.Tensor:
    zeros = tf.zeros(tf.concat([[1], tf.shape(source)[1:]], 0), source.dtype)
    return tf.concat([source[:1], zeros], 0)[:1]


def only_with_examples(rows: tf.Tensor, result: Any) -> Any:
    """Returns a replica's result, with no rows if the replica has no examples."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
            return leaf
        count = tf.where(rows > 0, tf.shape(leaf, out_type=tf.int64)[0], tf.zeros([], tf.int64))
        return leaf[:count]

    return tf.nest.map_structure(cut, result)


class Kept:
    """The values of variables on a replica before a step.

    Args:
      copies: the variables of that replica's device.
    """

    def __init__(self, copies: Iterable[tf.Variable]) -> None:
        self._before = []
        for copy in copies:
            with tf.device(copy.device):
                self._before.append((copy, tf.identity(copy.read_value())))

    def restore_unless(self, rows: tf.Tensor) -> None:
        """Gives the variables these values again if the replica had no examples."""
        for copy, value in self._before:
            with tf.device(copy.device):
                copy.assign(tf.where(rows > 0, copy.read_value(), value))
