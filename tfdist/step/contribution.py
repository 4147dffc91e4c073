# SPDX-License-Identifier: Apache-2.0
"""Contributions of replicas to an update, and their sum."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.compat.tensorflow import replicas


class ReplicaContribution(NamedTuple):
    """Contribution of one replica to an update, or the sum of several. A structure for `tf.nest`; tensors add up.

    Attributes:
      gradients: times `weight`, unless the loss is a sum over examples; one flat list for all optimizers, dense or
        `tf.IndexedSlices`.
      counts: increments of the variables in which metrics count.
      states: the new values of other variables times `weight`: floats (statistics of layers); integers (seeds), int64.
      logs: results of the step other than metrics, times `weight`, float32.
      weight: float32 scalar; the number of examples, or 1 where all replicas are known to have equally many.
      replicas: float32 scalar; 1.
      maxima: states of metrics that are reduced by the maximum instead of the sum.
    """

    gradients: list[Any]
    counts: list[tf.Tensor]
    states: list[tf.Tensor]
    logs: list[tf.Tensor]
    weight: tf.Tensor
    replicas: tf.Tensor
    maxima: Sequence[tf.Tensor] = ()


def nothing(like: ReplicaContribution, maxima: Sequence[tf.Tensor] = ()) -> ReplicaContribution:
    """Returns the contribution of a replica without examples.

    Args:
      like: one of the same structure, dtypes and static shapes, maybe of another graph.
      maxima: see `ReplicaContribution`.
    """

    def none(leaf: Any) -> Any:
        if isinstance(leaf, tf.IndexedSlices):
            shape = leaf.dense_shape
            whole = None if shape is None else tf.constant(tf.get_static_value(shape), shape.dtype)
            return tf.IndexedSlices(none(leaf.values), none(leaf.indices), whole)
        # Only rows have an unknown number, which is 0 here.
        return tf.zeros([size or 0 for size in leaf.shape.as_list()] if leaf.shape.rank else [], leaf.dtype)

    zeros = tf.nest.map_structure(none, like._replace(maxima=()))
    return zeros._replace(replicas=tf.constant(1.0), maxima=tuple(maxima))


class RowsByShard(tf.IndexedSlices):
    """The rows of a gradient, on the devices of the shards of its variable. Also a `tf.IndexedSlices` of all rows.

    The tensors of all rows are operations that don't run unless something depends on them.

    Args:
      pieces: for each shard its rows, with indices within the shard.
      sizes: the number of rows of each shard.
      devices: the device of each shard.
    """

    def __init__(self, pieces: Sequence[tf.IndexedSlices], sizes: Sequence[int], devices: Sequence[str]) -> None:
        firsts = (0, *itertools.accumulate(sizes[:-1]))
        rest, dtype = pieces[0].values.shape[1:], pieces[0].indices.dtype
        super().__init__(
            tf.concat([piece.values for piece in pieces], 0),
            tf.concat([piece.indices + first for piece, first in zip(pieces, firsts, strict=True)], 0),
            tf.constant([sum(sizes), *rest], dtype),
        )
        self.pieces = [
            tf.IndexedSlices(piece.values, piece.indices, tf.constant([size, *rest], dtype))
            for piece, size in zip(pieces, sizes, strict=True)
        ]
        self.sizes, self.devices = tuple(sizes), list(devices)

    def map(self, function: Callable[[tf.IndexedSlices], tf.IndexedSlices]) -> RowsByShard:
        """Returns the rows with a function called for those of each shard, on its device."""
        changed = []
        for piece, device in zip(self.pieces, self.devices, strict=True):
            with tf.device(device):
                changed.append(function(piece))
        return RowsByShard(changed, self.sizes, self.devices)


def add_up(contributions: Sequence[ReplicaContribution], place: Sequence[Any] | None = None) -> ReplicaContribution:
    """Returns the sum of contributions.

    Args:
      contributions: of one step, all of the same structure.
      place: for each gradient the device of the addition; its own device by default.
    """
    if len(contributions) == 1:
        return contributions[0]
    devices = iter(place or [None] * len(contributions[0].gradients))
    gradients = [
        _add_on(next(devices), parts) for parts in zip(*(each.gradients for each in contributions), strict=True)
    ]
    rest = [tf.nest.flatten(each._replace(gradients=[], maxima=())) for each in contributions]
    sums = [tf.add_n(parts) for parts in zip(*rest, strict=True)]
    maxima = [
        functools.reduce(tf.maximum, parts) for parts in zip(*(each.maxima for each in contributions), strict=True)
    ]
    packed = tf.nest.pack_sequence_as(contributions[0]._replace(gradients=[], maxima=()), sums)
    return packed._replace(gradients=gradients, maxima=tuple(maxima))


def weigh(contribution: ReplicaContribution, weight: tf.Tensor, place: Sequence[Any]) -> ReplicaContribution:
    """Multiplies the gradients of a contribution by a weight; counts and states are not changed.

    Args:
      contribution: of one replica.
      weight: float32 scalar.
      place: for each gradient the device of the multiplication.
    """
    gradients = []
    for gradient, device in zip(contribution.gradients, place, strict=True):
        with tf.device(device):
            gradients.append(times(gradient, weight))
    return contribution._replace(gradients=gradients)


def _add_on(device: Any, parts: Sequence[Any]) -> Any:
    with replicas.on_device(device):
        if not isinstance(parts[0], tf.IndexedSlices):
            return tf.add_n(parts)
        values = tf.concat([part.values for part in parts], 0)
        indices = tf.concat([part.indices for part in parts], 0)
        return tf.IndexedSlices(values, indices, parts[0].dense_shape)


def of_shape(gradient: Any, variable: Any) -> Any:
    """Returns a gradient that has its variable's shape, which the gradients of some operations don't say."""
    if not isinstance(gradient, tf.IndexedSlices):
        gradient.set_shape(variable.shape)
        return gradient
    shape = tf.constant(list(variable.shape), gradient.indices.dtype)
    return tf.IndexedSlices(gradient.values, gradient.indices, shape)


def times(gradient: Any, factor: Any) -> Any:
    """Multiplies a gradient by a scalar, in the gradient's dtype; zeros if the scalar is 0, also for NaN."""
    if isinstance(factor, float) and factor == 1.0:
        return gradient
    if isinstance(gradient, RowsByShard):
        return gradient.map(lambda piece: times(piece, factor))
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(times(gradient.values, factor), gradient.indices, gradient.dense_shape)
    if isinstance(factor, float) and factor:
        # As below, but on several elements at once.
        return gradient * tf.cast(factor, gradient.dtype)
    # Without examples a gradient may be NaN; its product with 0 must be 0.
    return tf.math.multiply_no_nan(gradient, tf.cast(factor, gradient.dtype))
