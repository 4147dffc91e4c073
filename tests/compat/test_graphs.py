# SPDX-License-Identifier: Apache-2.0
"""Graphs of functions: which collectives they have, and exceptions of Python that they call."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist.compat.tensorflow import graphs
from tfdist.compat.tensorflow.context import collectives_of

pytestmark = pytest.mark.devices

LONG = """Graph execution error:

Detected at node Assert/Assert defined at (most recent call last):
  File "/usr/lib/python3.11/threading.py", line 1002, in _bootstrap

  File "/home/me/train.py", line 16, in train_step

  File "/home/me/.venv/lib/python3.11/site-packages/keras/src/layers/layer.py", line 941, in __call__

Detected at node Assert/Assert defined at (most recent call last):
<stack traces unavailable>
"""
NODE = "\n\t [[{{node Assert/Assert}}]]"
GRPC = "\nAdditional GRPC error information from remote target /job:worker/replica:0/task:0:\n:UNKNOWN:Error {grpc..."
MINE = '\n  File "/home/me/train.py", line 16, in train_step'


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (LONG + "assertion failed: [my own message]" + NODE + GRPC, "assertion failed: [my own message]" + MINE),
        (LONG + "two\nlines" + NODE, "two\nlines" + MINE),
        (
            LONG
            + f"2 root error(s) found.\n  (0) INVALID_ARGUMENT:  mine{NODE}\n  (1) CANCELLED:  not mine\n0 success",
            "mine" + MINE,
        ),
        ("my own message", "my own message"),
        ("my own message" + NODE + GRPC, "my own message"),
        ("", ""),
        (LONG, LONG),
    ],
    ids=["remote", "lines", "several errors", "short", "no frames", "empty", "nothing said"],
)
def test_what_the_operation_said_comes_first_and_where_the_user_defined_it(message: str, told: str) -> None:
    found = graphs.told_briefly(message)
    assert found == told


def test_a_function_lives_as_long_as_a_graph_that_calls_it() -> None:
    class Model:
        """Stands for what a step refers to."""

    def used() -> weakref.ref[Model]:
        model = Model()
        inner = tf.function(
            lambda: graphs.call_on_arrays(lambda *given: [np.float32(model is not None)], [], [tf.float32])[0]
        )
        assert float(tf.function(lambda: inner() + 1)()) == 2
        gc.collect()
        # The graph within which it was traced is gone.
        assert float(tf.function(lambda: inner() + 2)()) == 3
        return weakref.ref(model)

    left = used()
    gc.collect()
    assert left() is None


def test_collectives_of_a_function_are_counted_in_functions_that_it_calls() -> None:
    common: Any = {"group_size": 2, "group_key": 1, "instance_key": 1, "ordering_token": []}

    def reduced(x: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.CollectiveReduceV2(input=x, merge_op="Add", final_op="Id", **common)

    def gathered(x: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.CollectiveGatherV2(input=x, **common)

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.cond(tf.reduce_sum(reduced(x)) > 0, lambda: gathered(x), lambda: reduced(x))

    graph = step.get_concrete_function(tf.TensorSpec([2])).graph
    assert collectives_of(graph) == "1 gather, 2 sums"
    assert collectives_of(tf.function(tf.abs).get_concrete_function(tf.TensorSpec([2])).graph) == ""
