# SPDX-License-Identifier: Apache-2.0
"""Lookup of rows of a variable in shards, and the gradient of what was looked up.

    worker                                       parameter servers
      ids, each once, by shard            -->      gather the rows
      rows in the order of the ids        <--
      gradients of equal ids added up              (later: an update of these rows, `shard_updates`)

All servers are asked at the same time, and those of several tables as well: a step waits for one round trip.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def looked_up(handles: Sequence[tf.Tensor], shards: Sequence[Any], ids: Any, name: str) -> tf.Tensor:
    """Returns rows, with a gradient with respect to each handle that is a `tf.IndexedSlices` with each id once.

    Args:
      handles: stand for the variable.
      shards: the variables on the parameter servers, [rows of the shard, ...].
      ids: integers of any shape.
      name: of the variable, for the error of an id out of range.

    Returns:
      The rows, of shape ids.shape + shards[0].shape[1:].
    """
    ids = tf.convert_to_tensor(ids)

    @tf.custom_gradient
    def gather(*handles: tf.Tensor) -> Any:
        unique, positions = _unique(ids, shards, name)
        rows = _gather(shards, unique)

        def gradient(upstream: tf.Tensor) -> tf.IndexedSlices:
            flat = tf.reshape(upstream, [-1, *rows.shape[1:]])
            added = tf.math.unsorted_segment_sum(flat, positions, tf.size(unique))
            whole = tf.constant([sum(_sizes(shards)), *rows.shape[1:]], unique.dtype)
            return [tf.IndexedSlices(added, unique, whole)] * len(handles)

        return _repeated(rows, positions, ids), gradient

    found = gather(*handles)
    found.set_shape(ids.shape.concatenate(shards[0].shape[1:]))
    return found


def merged(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up the values of equal indices."""
    if tf.is_symbolic_tensor(slices.indices) and slices.indices.op.type == "Identity":
        source = slices.indices.op.inputs[0]
        if source.op.type == "Unique" and source.value_index == 0:
            return slices
    found = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, found.idx, tf.size(found.y))
    return tf.IndexedSlices(values, found.y, slices.dense_shape)


def split(slices: tf.IndexedSlices, sizes: Sequence[int]) -> list[tf.IndexedSlices]:
    """Returns the slices of each shard, with indices within the shard; `sizes` are the shards' rows."""
    if len(sizes) == 1:
        return [slices]
    shard, within = _places(slices.indices, sizes)
    count = len(sizes)
    indices = tf.dynamic_partition(within, shard, count)
    values = tf.dynamic_partition(slices.values, shard, count)
    rest = slices.values.shape[1:]
    shapes = [tf.constant([size, *rest], within.dtype) for size in sizes]
    return [tf.IndexedSlices(*each) for each in zip(values, indices, shapes, strict=True)]


def _unique(ids: tf.Tensor, shards: Sequence[Any], name: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the different ids, int64, and the place of each id among them, int32; raises if one is out of range."""
    found = tf.unique(tf.cast(tf.reshape(ids, [-1]), tf.int64))
    with tf.control_dependencies([_in_range(found.y, sum(_sizes(shards)), name)]):
        return tf.identity(found.y), found.idx


def _sizes(shards: Sequence[Any]) -> list[int]:
    return [shard.shape[0] for shard in shards]


def _places(ids: tf.Tensor, sizes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the shard of each id, int32, and its row there."""
    ids = tf.cast(ids, tf.int64)
    firsts = tf.constant([0, *itertools.accumulate(sizes[:-1])], tf.int64)
    shard = tf.searchsorted(firsts, ids, side="right") - 1
    return shard, ids - tf.gather(firsts, shard)


def _gather(shards: Sequence[Any], ids: tf.Tensor) -> tf.Tensor:
    """Gathers the rows of different ids on the servers of their shards."""
    shard, within = _places(ids, _sizes(shards))
    asked = tf.dynamic_partition(within, shard, len(shards))
    places = tf.dynamic_partition(tf.range(tf.size(ids)), shard, len(shards))
    rows = []
    for variable, each in zip(shards, asked, strict=True):
        with tf.device(variable.device):
            rows.append(tf.raw_ops.ResourceGather(resource=variable.handle, indices=each, dtype=variable.dtype))
    found = tf.dynamic_stitch(places, rows)
    found.set_shape([None, *shards[0].shape[1:]])
    return found


def _repeated(rows: tf.Tensor, positions: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Returns a row for each of the ids, in their shape, from the rows of the different ids."""
    return tf.reshape(tf.gather(rows, positions), tf.concat([tf.shape(ids), rows.shape[1:]], 0))


def _in_range(ids: tf.Tensor, count: int, name: str) -> Any:
    """Checks the ids before they are sent; a server would name the row of its shard."""
    wrong = tf.boolean_mask(ids, (ids < 0) | (ids >= count))
    # One string, because TensorFlow puts each tensor of the message in brackets of its own.
    received = tf.strings.reduce_join(tf.strings.as_string(wrong[:5]), separator=", ")
    allowed = f"[0, {count}), in Keras' layers and keras.ops in [{-count}, {count})"
    text = tf.strings.join([f"{name}: ids must be in {allowed}. Received: ", received])
    return tf.debugging.Assert(tf.equal(tf.size(wrong), 0), [text], summarize=1)
