# SPDX-License-Identifier: Apache-2.0
"""Changes of a state are read off the graph of the step."""

import pytest
import tensorflow as tf

from tfdist.step import recording


@pytest.mark.timeout(60)
def test_a_long_chain_of_additions_is_an_addition() -> None:
    with tf.Graph().as_default():
        start = tf.zeros([])
        value = start
        for _ in range(60):
            value += tf.random.uniform([])
        assert recording.kind(value, start) == recording.ADDITION
