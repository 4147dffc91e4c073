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

from tfdist.compat import scratch_trace
from tfdist.engines import finding, model_losses, sharing


def are_refused(model: keras.Model | None) -> bool:
    """Whether a model may fail on a batch of no examples; the other layers of Keras are known not to.

    Not so for one with a loss that is a sum over the examples: it would count the example that is filled in.
    """
    if model is None:
        return True
    if any(model_losses.is_sum(loss) for loss in model_losses.losses(model)):
        return False
    return any(
        isinstance(layer, keras.layers.RNN | keras.layers.TimeDistributed | keras.layers.Bidirectional)
        or not finding.is_of_keras(type(layer))
        for layer in scratch_trace.layers_of(model)
    )


def may_occur(parts: Sequence[Any]) -> bool:
    """Whether one of these parts of a batch can be without examples, as far as the shapes tell."""
    sizes = {sharing.static_size(part) for part in parts}
    return bool(sizes & {0, None}) and all(sharing.rows(part) is not None for part in parts)


def filled(part: Any, example_of: Any = None) -> Any:
    """The part itself, or one example if it has none.

    Args:
      part: a replica's part of a batch; ragged and sparse tensors are left as they are.
      example_of: a part of the same batch that has an example; zeros without.
    """
    leaves = tf.nest.flatten(part)
    dense = [index for index, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor) and leaf.shape.rank]
    rows = sharing.rows(part)
    if not dense or rows is None or (sharing.static_size(part) or 0) > 0:
        return part
    sources = tf.nest.flatten(part if example_of is None else example_of)

    def example() -> list[tf.Tensor]:
        return [_first(sources[index], leaves[index], is_copied=example_of is not None) for index in dense]

    def itself() -> list[tf.Tensor]:
        return [tf.identity(leaves[index]) for index in dense]

    chosen = tf.cond(rows > 0, itself, example)
    for index, leaf in zip(dense, [chosen] if isinstance(chosen, tf.Tensor) else chosen, strict=True):
        leaves[index] = tf.ensure_shape(leaf, [None, *leaves[index].shape[1:]])
    return tf.nest.pack_sequence_as(part, leaves)


def _first(source: tf.Tensor, leaf: tf.Tensor, is_copied: bool) -> tf.Tensor:
    if is_copied:
        return source[:1]
    shape = tf.concat([[1], tf.shape(leaf)[1:]], 0)
    return tf.zeros(shape, leaf.dtype)


def only_with_examples(rows: tf.Tensor, result: Any) -> Any:
    """What a replica computed for each of its examples, or nothing if it has none."""

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
