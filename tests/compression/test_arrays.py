# SPDX-License-Identifier: Apache-2.0
"""Memory is used again when nothing refers to it any more, and not before."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf

from tfdist.compression import LocalTransport, Threshold, frames

LARGE = 1 << 18

pytestmark = pytest.mark.devices


def test_arrays_are_aligned_and_of_their_size():
    pool = frames.Pool()
    for size in (0, 1, 17, LARGE, LARGE + 1):
        array = pool.zeros(size)
        assert array.dtype == np.float32 and array.shape == (size,)
        assert not size or array.ctypes.data % 64 == 0
        assert not array.any()


def test_memory_is_used_again_after_the_last_reference():
    pool = frames.Pool()
    first = pool.empty(LARGE)
    address = first.ctypes.data
    second = pool.empty(LARGE)
    assert second.ctypes.data != address
    view = first[5:].reshape(-1, 1)
    del first
    assert pool.empty(LARGE).ctypes.data != address
    del view
    assert pool.empty(LARGE).ctypes.data == address


def test_memory_is_used_again_for_arrays_of_its_size_only():
    pool = frames.Pool()
    address = pool.empty(LARGE).ctypes.data
    assert pool.empty(LARGE + 16).ctypes.data != address
    assert pool.empty(LARGE).ctypes.data == address


def test_threads_do_not_share_memory():
    pool, taken = frames.Pool(), []

    def take() -> None:
        taken.extend(pool.empty(LARGE) for _ in range(50))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({array.ctypes.data for array in taken}) == 200


def test_tensors_of_earlier_steps_keep_their_values():
    """Sums and states that are still referred to must not be written to by later steps."""
    codec, spec = Threshold(0.5), tf.TensorSpec([LARGE], tf.float32)
    step = tf.function(lambda gradient, state: codec.exchange([gradient], state, LocalTransport()), autograph=False)
    state, found = codec.init([spec]), []
    for number in range(1, 6):
        (total,), state = step(tf.fill([LARGE], 0.25 * number), state)
        found.append((total, total.numpy().copy(), state["residual/0"], state["residual/0"].numpy().copy()))
    for total, total_then, residual, residual_then in found:
        np.testing.assert_array_equal(total, total_then)
        np.testing.assert_array_equal(residual, residual_then)
