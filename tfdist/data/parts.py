# SPDX-License-Identifier: Apache-2.0
"""Data sets of one worker's part of each batch, with the number of examples in all parts together."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.data import splitting


def part_of(dataset: tf.data.Dataset, part: int, num_parts: int) -> tf.data.Dataset:
    """Returns a data set of a worker's part of each batch, with the size of the whole batch."""
    is_tuple = isinstance(dataset.element_spec, tuple)

    def take(*element: Any) -> tuple[Any, tf.Tensor]:
        batch = element if is_tuple else element[0]
        return splitting.cut(batch, part, num_parts), tf.cast(splitting.rows(batch), tf.int64)

    return splitting.in_order(dataset.map(tf.autograph.experimental.do_not_convert(take))).prefetch(1)


def without_total(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a data set like `part_of` for a worker's own data; the size of the whole batch is unknown."""
    is_tuple = isinstance(dataset.element_spec, tuple)
    pair = tf.autograph.experimental.do_not_convert(lambda *element: (element if is_tuple else element[0], ()))
    return splitting.in_order(dataset.map(pair)).prefetch(1)
