# SPDX-License-Identifier: Apache-2.0
"""Reading under a multi-worker policy: handles, of which none reads or computes anything."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

from tfdist.engines.quorum import PartIterator


class Engine:
    """Stands for an engine."""


def unreadable() -> Iterator[Any]:
    raise AssertionError("a batch was read")
    yield


@pytest.mark.parametrize(("left", "given"), [(3, 3), (tf.data.INFINITE_CARDINALITY, 10)])
def test_iterator_gives_handles_without_reading(left: int, given: int):
    engine, numbers = Engine(), itertools.count(7)
    unused, iterator = (PartIterator(engine, numbers, unreadable(), tf.TensorSpec([None]), left) for _ in range(2))
    handles = [handle for _, handle in zip(range(10), iterator, strict=False)]
    assert len(handles) == given
    # Keras makes iterators that it never uses.
    assert (unused.number, iterator.number) == (0, 7)
    assert all(handle.engine is engine and handle.of is iterator for handle in handles)
