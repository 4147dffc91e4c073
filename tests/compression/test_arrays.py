# SPDX-License-Identifier: Apache-2.0
"""Arrays of codecs: sums a chunk at a time, positions beyond 32 bits."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.compression import LocalTransport, Threshold, gathered

LARGE = 1 << 18

pytestmark = pytest.mark.devices


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


def found_in(values: np.ndarray, bound: float, first: int = 0) -> list[int] | None:
    out, entries = np.empty_like(values), np.empty(values.size, np.int64)
    count = gathered.compute_and_find(
        out, lambda chunk: np.multiply(values[chunk], 2, out=out[chunk]), bound, entries, first
    )
    return None if count is None else entries[:count].tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_each_value_that_is_not_finite_is_found(bad: float):
    size = 2 * gathered.CHUNK + 5
    for index in (0, gathered.CHUNK, size - 1):
        values = np.zeros(size, np.float32)
        values[index] = bad
        assert found_in(values, gathered.LARGEST) is None


def test_entries_of_all_chunks_are_found_in_order():
    values = np.zeros(2 * gathered.CHUNK + 5, np.float32)
    positions = np.array([0, 7, gathered.CHUNK, 2 * gathered.CHUNK + 4])
    values[positions] = [1, -1, 2, -2]
    assert found_in(values, 1.0) == (2 * positions + [0, 1, 0, 1]).tolist()
    assert found_in(values, 2.0) == (2 * positions[2:] + [0, 1]).tolist()


def test_positions_beyond_32_bits_are_exact():
    first = 2**40 + 1
    entries = np.array(found_in(np.array([0, 2, -3, 0], np.float32), 1.0, first))
    assert entries.tolist() == [2 * (first + 1), 2 * (first + 2) + 1]
