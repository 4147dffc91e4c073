# SPDX-License-Identifier: Apache-2.0
"""Handles of batches: through graphs, loops and tf.data, and what the registry keeps."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist.passes import handle as handles
from tfdist.passes.handle import registry

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


def test_handles_with_a_content_share_one_trace():
    engine, traces = Engine(), []

    @tf.function
    def content_of(handle: handles.ContentHandle) -> Any:
        traces.append(handle.engine)
        return handle.content

    kind, other = (registry.kind(engine, SPEC, form, SPEC) for form in ("", "other"))
    for number in (1.0, 2.0):
        np.testing.assert_array_equal(content_of(kind.handle(tf.fill([1, 2], number))), [[number, number]])
    assert traces == [engine]
    # Another form is another type, and traced by itself.
    content_of(other.handle(tf.zeros([1, 2])))
    assert len(traces) == 2


def test_handle_carries_any_batch_through_tf_data_and_a_loop():
    batch = {
        "dense": tf.reshape(tf.range(12.0), [6, 2]),
        "ragged": tf.ragged.constant([[1], [2, 3], [], [4], [5], [6]]),
        "none": None,
    }
    plain = tf.data.Dataset.from_tensor_slices({"dense": batch["dense"], "ragged": batch["ragged"]}).batch(2)
    plain = plain.map(lambda element: {**element, "none": tf.experimental.Optional.empty(SPEC)})
    engine = Engine()
    kind = registry.kind(engine, plain.element_spec, "whole", plain.element_spec)
    dataset = plain.map(tf.autograph.experimental.do_not_convert(kind.handle)).prefetch(1)

    @tf.function
    def sums(iterator: Any) -> Any:
        total = tf.constant(0.0)
        for _ in tf.range(3):
            content = handles.without_optionals(iterator.get_next().content)
            assert content["none"] is None
            total += tf.reduce_sum(content["dense"]) + tf.cast(tf.reduce_sum(content["ragged"]), tf.float32)
        return total

    assert float(sums(iter(dataset))) == 66 + 21
    np.testing.assert_array_equal(next(iter(dataset)).content["dense"], [[0, 1], [2, 3]])


def test_registry_keeps_no_engine():
    engine = Engine()
    kind = registry.kind(engine, SPEC)
    assert registry.kind(engine, SPEC) is kind
    del engine
    gc.collect()
    assert kind.engine_of() is None
    registry.kind(Engine(), SPEC)
    with pytest.raises(KeyError):
        registry.kind_of(kind.number)


def test_iterator_end_tells_an_empty_execution_from_a_partial_one():
    engine = Engine()
    iterator = Counted(registry.kind(engine, (), content_spec=()).handle(()), 3)
    assert len(list(zip(range(2), iterator, strict=False))) == 2
    # Keras takes StopIteration for the end of an execution, and OutOfRangeError for the end of the data.
    assert len(list(zip(range(2), iterator, strict=False))) == 1
    with pytest.raises(tf.errors.OutOfRangeError):
        list(zip(range(2), iterator, strict=False))


def test_handle_can_not_be_unpacked():
    engine = Engine()
    with pytest.raises(TypeError, match="give it whole to"):
        _x, _y = registry.kind(engine, (), content_spec=()).handle(())
