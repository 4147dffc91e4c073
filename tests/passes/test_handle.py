# SPDX-License-Identifier: Apache-2.0
"""Handles of batches, their kinds, and the end of an iterator."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import tensorflow as tf

from tfdist.passes import handle as handles

SPEC = tf.TensorSpec([None, 2], tf.float32)


class Engine:
    """Stands for an engine: something that can be kept weakly."""


class Counted(handles.HandleIterator):
    """Gives a handle so many times."""

    def __init__(self, handle: Any, count: int) -> None:
        super().__init__()
        self._handles = iter([handle] * count)

    def next_handle(self) -> Any:
        return next(self._handles, None)


def test_kind_is_the_same_object_and_keeps_no_engine():
    engine = Engine()
    kind = handles.kind_of(engine, SPEC)
    assert handles.kind_of(engine, SPEC) is kind
    assert handles.kind_of(engine, SPEC, "other") is not kind
    del engine
    gc.collect()
    assert kind.engine_of() is None


def test_iterator_ends_as_those_of_tensorflow_do():
    iterator = Counted(handles.BatchHandle(handles.kind_of(Engine(), SPEC), None), 2)
    iterator.get_next()
    assert len(list(iterator)) == 1
    with pytest.raises(tf.errors.OutOfRangeError):
        iterator.get_next()


def test_handle_can_not_be_unpacked():
    engine = Engine()
    with pytest.raises(ValueError, match="a batch that is unpacked"):
        _x, _y = handles.BatchHandle(handles.kind_of(engine, SPEC), None)
