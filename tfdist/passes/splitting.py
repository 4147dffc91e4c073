# SPDX-License-Identifier: Apache-2.0
"""Splitting of a global batch into the replicas' parts.

Components of a batch may have different numbers of examples, such as 40 unlabelled and 20 labelled, if the replicas
divide each evenly.

The batch that the user's data set yields is the global batch. Of its n examples, part p of P has the indices from
n*p//P up to n*(p+1)//P. So parts differ by one example at most, and every example is in exactly one part. Every replica
takes part in every step, even with an empty part. TensorFlow's own rebatching fills the first parts completely, so that
a small last batch leaves whole workers without a step.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat.tensorflow import inputs

_KERAS_SHUFFLED = tf.data.experimental.ExternalStatePolicy.IGNORE
# Batches whose order changes between epochs when the composition of the batches can't.
_SHUFFLE_BATCHES = 64
_TENSORS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)
_REMEDY = "repeat what is the same for all examples with tf.repeat, or keep it in the model"
_UNEVEN = (
    "dataset: the components of a batch have different numbers of examples, and can't be divided among replicas, "
    f"because not all of them divide evenly; {_REMEDY}. Received examples:"
)


def deal(
    dataset: tf.data.Dataset,
    parts: Sequence[int | tf.Tensor],
    num_parts: int,
    mapped: Callable[..., tf.data.Dataset] | None = None,
    with_totals: bool = False,
) -> tf.data.Dataset:
    """The parts with these indices of each batch of `dataset`, one after the other.

    Args:
      dataset: yields global batches; all workers must see the same ones in the same order.
      parts: indices of the parts to keep, in the order in which they are to come.
      num_parts: into how many parts each batch is cut.
      mapped: a method in place of `dataset.map`, which also takes no function.
      with_totals: True for pairs of a part and the number of examples in the whole batch, an int64 scalar.

    Raises:
      ValueError: the elements are not batches.
    """
    check_batched(dataset.element_spec, num_parts)
    is_tuple = type(dataset.element_spec) is tuple

    def shares(*element: Any) -> Any:
        batch = element if is_tuple else element[0]
        pieces = [cut(batch, part, num_parts) for part in parts]
        if with_totals:
            pieces = [(piece, rows(batch)) for piece in pieces]
        if len(pieces) == 1:
            return pieces[0]
        return functools.reduce(tf.data.Dataset.concatenate, map(tf.data.Dataset.from_tensors, pieces))

    if len(parts) == 1:
        transform = mapped or dataset.map
    else:
        transform = (mapped() if mapped else dataset).flat_map
    return _with_cardinality(in_order(transform(shares)), dataset, len(parts))


def with_end_marked(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set of (element, int8 [1]), of which the last one is (element, int8 [0]); it reads one ahead.

    A shape arrives with the answer of a remote function, and its reader sees the end without a round trip. To read on
    until `OutOfRangeError` makes TensorFlow log a warning: it deletes the outputs of the function, which never existed.
    """
    spec = dataset.element_spec
    is_tuple, flat = isinstance(spec, tuple), tf.nest.flatten(spec, expand_composites=True)

    def wrapped(*element: Any) -> tf.Tensor:
        components = tf.nest.flatten(element if is_tuple else element[0], expand_composites=True)
        return tf.raw_ops.OptionalFromValue(components=components)

    def paired(before: tf.Tensor, found: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return found, (before, tf.raw_ops.OptionalHasValue(optional=found))

    def marked(optional: tf.Tensor, has_next: tf.Tensor) -> tuple[Any, tf.Tensor]:
        dtypes, shapes = [each.dtype for each in flat], [each.shape for each in flat]
        found = tf.raw_ops.OptionalGetValue(optional=optional, output_types=dtypes, output_shapes=shapes)
        batch = tf.nest.pack_sequence_as(spec, found, expand_composites=True)
        return batch, tf.zeros([tf.cast(has_next, tf.int32)], tf.int8)

    end = tf.data.Dataset.from_tensors(0).map(lambda _: tf.raw_ops.OptionalNone())
    optionals = inputs.mapped_inline(dataset, wrapped).concatenate(end)
    pairs = optionals.scan(tf.raw_ops.OptionalNone(), paired).skip(1)
    return inputs.mapped_inline(pairs, marked)


def not_read_ahead(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the data set without the buffer that tf.data adds at its end, by which a repetition would begin early.

    Each repetition of a shuffle draws an order.
    """
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return dataset.with_options(options)


def in_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The data set, in one order: workers that read the same batches in different ones would take overlapping parts."""
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


def is_shuffled_by_keras(dataset: Any) -> bool:
    """Checks for the shuffle that Keras adds to arrays, and to nothing else."""
    is_dataset = isinstance(dataset, tf.data.Dataset)
    return is_dataset and dataset.options().experimental_external_state_policy == _KERAS_SHUFFLED


def reorder_batches(dataset: tf.data.Dataset, seed: int) -> tf.data.Dataset:
    """Changes the order of the batches from epoch to epoch if Keras shuffled the data; else the data set as it is.

    With a global seed, Keras' shuffle of arrays repeats one permutation in every epoch.
    """
    if not is_shuffled_by_keras(dataset):
        return dataset
    return dataset.shuffle(_SHUFFLE_BATCHES, seed=seed, reshuffle_each_iteration=True)


def static_size(batch: Any) -> int | None:
    """The number of examples in a batch (or in its spec) if it is known without running anything."""
    first = _first(batch)
    return None if first is None else tf.TensorShape(first.shape).as_list()[0]


def has_even_parts(element_spec: Any, num_parts: int) -> bool:
    """Returns True if the shapes of such a batch say how many examples each of its parts has, as those of `cut` do."""
    size = static_size(element_spec)
    return size is not None and size % num_parts == 0 and isinstance(_first(element_spec), tf.TensorSpec)


def rows(batch: Any) -> tf.Tensor | None:
    """The number of examples in a batch, int64; None if nothing in it has a batch dimension."""
    first = _first(batch)
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int64)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int64)
    return tf.shape(first, out_type=tf.int64)[0] if isinstance(first, tf.Tensor) else None


def check_batched(element_spec: Any, num_parts: int) -> None:
    """Raises ValueError unless the elements are batches."""
    specs = [spec for spec in tf.nest.flatten(element_spec) if hasattr(spec, "shape")]
    if not specs or any(tf.TensorShape(spec.shape).rank == 0 for spec in specs):
        raise ValueError(
            f"dataset: its elements have no batch dimension to divide among {num_parts} replicas; "
            f"call .batch(global_batch_size) on it. Received: element_spec={element_spec}"
        )
    if num_parts > 1 and any(tf.TensorShape(spec.shape).rank is None for spec in specs):
        raise ValueError(
            "dataset: components of its elements have an unknown number of axes, and can't be divided among "
            f"{num_parts} replicas; say it with tensor.set_shape([...]) in the function that computes them, or with "
            f"output_signature in from_generator. Received: element_spec={element_spec}"
        )
    sizes = [size for size in map(_static_rows, specs) if size is not None]
    # A size that is fixed, beside others that are open, is that of a table, for example.
    if num_parts > 1 and not _can_be_divided(sizes, num_parts, is_fixed=len(sizes) == len(specs)):
        raise ValueError(
            f"dataset: components of its elements have different batch sizes, and can't be divided evenly among "
            f"{num_parts} replicas; {_REMEDY}. Received: batch sizes {sorted(set(sizes))}, element_spec={element_spec}"
        )


def _can_be_divided(sizes: Sequence[int], num_parts: int, is_fixed: bool = True) -> bool:
    return len(set(sizes)) <= 1 or (is_fixed and not any(size % num_parts for size in sizes))


def has_one_size(element_spec: Any) -> bool:
    """Returns True unless components of a batch are known to have different numbers of examples."""
    sizes = {_static_rows(spec) for spec in tf.nest.flatten(element_spec) if hasattr(spec, "shape")}
    return len(sizes - {None}) <= 1


def _static_rows(leaf: Any) -> int | None:
    shape = tf.TensorShape(leaf.shape)
    return shape.as_list()[0] if shape.rank else None


def _first(batch: Any) -> Any:
    for leaf in tf.nest.flatten(batch):
        rank = tf.TensorShape(leaf.shape).rank if hasattr(leaf, "shape") else 0
        if rank is None or rank > 0:
            return leaf
    return None


def cut(batch: Any, part: int | tf.Tensor, num_parts: int) -> Any:
    """Part number `part` (a Python integer or int64 scalar) of `num_parts` of a batch."""
    if isinstance(num_parts, int) and num_parts == 1:
        return batch
    totals = iter(_checked_rows(batch, num_parts))

    def cut_one(leaf: Any) -> Any:
        if not isinstance(leaf, _TENSORS):
            return leaf  # an empty Optional: Keras' way to say None
        total, size = next(totals), _static_rows(leaf)
        # All pieces must have one type: a size is part of it only if all of them have it.
        known = size // num_parts if size is not None and size % num_parts == 0 else None
        return _rows_of(leaf, total * part // num_parts, total * (part + 1) // num_parts, known)

    return tf.nest.map_structure(cut_one, batch)


def _rows_of(leaf: Any, start: Any, stop: Any, known: int | None) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        begin = tf.concat([[start], tf.zeros([leaf.shape.rank - 1], tf.int64)], 0)
        extent = tf.concat([[stop - start], leaf.dense_shape[1:]], 0)
        piece = tf.sparse.slice(leaf, begin, extent)
        # A slice has no static shape, by which Keras builds layers. Data sets take it from the operations.
        static = [tf.constant(size, tf.int64) if size else None for size in leaf.shape.as_list()]
        sizes = [piece.dense_shape[axis] if not axis or size is None else size for axis, size in enumerate(static)]
        return tf.SparseTensor(piece.indices, piece.values, tf.stack(sizes))
    piece = leaf[start:stop]
    if not isinstance(piece, tf.RaggedTensor):
        return _with_size(piece, known)
    # TensorFlow infers the size of a slice, which other pieces may not have.
    splits = _with_size(piece.row_splits, None if known is None else known + 1)
    return tf.RaggedTensor.from_row_splits(piece.values, splits, validate=False)


def _checked_rows(batch: Any, num_parts: int) -> list[tf.Tensor | int]:
    """The number of examples of each tensor in a batch, once it is known that they can be divided."""
    tensors = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, _TENSORS)]
    known = [size for leaf in tensors if (size := _static_rows(leaf)) is not None]
    if len(known) == len(tensors) and _can_be_divided(known, num_parts):
        return [*known]
    counted = [leaf for leaf in tensors if tf.TensorShape(leaf.shape).rank != 0]
    counts: list[Any] = [rows(leaf) for leaf in counted]
    if len(counts) > 1 and tf.executing_eagerly():
        sizes = [int(count) for count in counts]
        if not _can_be_divided(sizes, num_parts):
            raise ValueError(f"{_UNEVEN} {sizes}")
    elif len(counts) > 1:
        stacked = tf.stack(counts)
        can_be_divided = tf.reduce_all(stacked == counts[0])
        if len({size is None for size in map(_static_rows, counted)}) == 1:
            can_be_divided |= tf.reduce_all(stacked % num_parts == 0)
        with tf.control_dependencies([tf.debugging.Assert(can_be_divided, [_UNEVEN, stacked])]):
            counts = [tf.identity(count) for count in counts]
    found = iter(counts)
    return [next(found) if tf.TensorShape(leaf.shape).rank != 0 else counts[0] for leaf in tensors]


def explain(error: tf.errors.InvalidArgumentError) -> ValueError | None:
    """Returns an error of one line if TensorFlow's is about a batch that can't be cut, else None."""
    counts = re.search(r"different numbers of examples.*Received examples:\] \[([\d ]+)\]", str(error))
    return ValueError(f"{_UNEVEN} {[int(count) for count in counts[1].split()]}") if counts else None


def flat(batch: Any) -> list[tf.Tensor]:
    """Returns the tensors of a batch, components of ragged and sparse ones included; its None have no place."""
    return [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None]


def part_spec(element_spec: Any, num_parts: int) -> Any:
    """The structure of `tf.TypeSpec`s that all parts of such a batch have."""

    @tf.function(autograph=False)
    def first(batch: Any) -> Any:
        return cut(batch, tf.constant(0, tf.int64), num_parts)

    return tf.nest.map_structure(tf.type_spec_from_value, first.get_concrete_function(element_spec).structured_outputs)


def empty(batch: Any) -> Any:
    """No example of a batch."""
    none = tf.zeros([], tf.int64)
    return tf.nest.map_structure(
        lambda leaf: _rows_of(leaf, none, none, None) if isinstance(leaf, _TENSORS) else leaf, batch
    )


def any_size(batch: Any) -> Any:
    """The batch, of which the shapes don't say how many examples it has."""

    def forget(leaf: Any) -> Any:
        return _with_size(leaf, None) if isinstance(leaf, tf.Tensor) and leaf.shape.rank else leaf

    return tf.nest.map_structure(forget, batch)


def groups_of(dataset: tf.data.Dataset, count: int) -> tf.data.Dataset:
    """Tuples of `count` successive elements; fewer at the end are left out. It is read once, as a shuffle needs it."""
    if count == 1:
        return tf.data.Dataset.zip((dataset,))
    is_tuple = type(dataset.element_spec) is tuple

    def group(*windows: Any) -> tuple[Any, ...]:
        elements = tf.data.Dataset.zip(windows if is_tuple else windows[0])
        return tuple(elements.skip(index).take(1).get_single_element() for index in range(count))

    return dataset.window(count, drop_remainder=True).map(tf.autograph.experimental.do_not_convert(group))


def _with_size(piece: tf.Tensor, size: int | None) -> tf.Tensor:
    if size is None:
        # Forgets what static slicing found out.
        return tf.raw_ops.PlaceholderWithDefault(input=piece, shape=[None, *piece.shape.as_list()[1:]])
    return tf.ensure_shape(piece, [size, *piece.shape.as_list()[1:]])


def _with_cardinality(dealt: tf.data.Dataset, dataset: tf.data.Dataset, times: int) -> tf.data.Dataset:
    if times == 1 or not tf.executing_eagerly():
        # The size is not known in a graph, and not needed there.
        return dealt
    cardinality = int(dataset.cardinality())
    if cardinality == tf.data.UNKNOWN_CARDINALITY:
        return dealt
    known = cardinality if cardinality == tf.data.INFINITE_CARDINALITY else cardinality * times
    return dealt.apply(tf.data.experimental.assert_cardinality(known))


def joined(*parts: Any) -> Any:
    """Returns the examples of several batches as one batch: of tensors of any kind, or of a number for each batch."""
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, parts)
    return tf.concat(parts, 0) if parts[0].shape.rank != 0 else tf.stack(parts)


def without_total(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set like those of `deal` for a worker's own data; the size of the whole batch is unknown."""
    is_tuple = type(dataset.element_spec) is tuple
    pair = tf.autograph.experimental.do_not_convert(lambda *element: (element if is_tuple else element[0], ()))
    return in_order(dataset.map(pair)).prefetch(1)


def first_examples(part: Any, count: int) -> Any:
    """Returns the first examples of a part, or all if it has fewer."""
    return tf.nest.map_structure(lambda leaf: rows_up_to(leaf, count) if has_rows(leaf) else leaf, part)


def has_rows(leaf: Any) -> bool:
    """Returns True for a tensor of any kind that has an axis of examples."""
    return isinstance(leaf, _TENSORS) and leaf.shape.rank != 0


def rows_up_to(leaf: Any, stop: Any) -> Any:
    """Returns the first `stop` rows of such a tensor, or all if it has fewer."""
    if isinstance(leaf, tf.SparseTensor):
        size = tf.concat([[tf.minimum(tf.cast(stop, tf.int64), leaf.dense_shape[0])], leaf.dense_shape[1:]], 0)
        return tf.sparse.slice(leaf, tf.zeros_like(size), size)
    return leaf[:stop]
