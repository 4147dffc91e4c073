# SPDX-License-Identifier: Apache-2.0
"""Exceptions of Python that a graph calls keep their type where they can, and have short messages."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist.compat.tensorflow import graphs

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


@pytest.mark.parametrize(
    ("raised", "arrives"),
    [
        (tf.errors.InvalidArgumentError, tf.errors.InvalidArgumentError),
        (tf.errors.OutOfRangeError, tf.errors.OutOfRangeError),
        (tf.errors.ResourceExhaustedError, tf.errors.ResourceExhaustedError),
        (tf.errors.UnimplementedError, tf.errors.UnimplementedError),
        (tf.errors.UnavailableError, tf.errors.UnknownError),
    ],
)
def test_errors_keep_their_type_where_there_is_one_in_python(raised: type, arrives: type) -> None:
    def fail() -> list:
        raise raised(None, None, LONG + "my own message" + NODE)

    function = tf.function(lambda: graphs.call_python(fail, [], [tf.float32]), autograph=False)
    with pytest.raises(arrives) as caught:
        function()
    if raised is not tf.errors.OutOfRangeError:
        lines = caught.value.message.splitlines()
        first = next(index for index, line in enumerate(lines) if line.endswith("my own message"))
        assert first <= 3, "no frames of this library and of Keras before it"
        assert "train.py" in lines[first + 1]


def test_values_go_in_and_come_out() -> None:
    function = tf.function(lambda x: graphs.call_python(lambda y: [y.numpy() + 1, y.numpy() * 2], [x], [x.dtype] * 2))
    assert [float(value) for value in function(tf.constant(3.0))] == [4.0, 6.0]
    assert tf.function(lambda: graphs.call_python(list, [], []))() == []


@pytest.mark.parametrize("call", [graphs.call_python, graphs.call_on_arrays])
def test_a_function_lives_as_long_as_a_graph_that_calls_it(call: Any) -> None:
    class Model:
        """Stands for what a step refers to."""

    def used() -> weakref.ref[Model]:
        model = Model()
        inner = tf.function(lambda: call(lambda *given: [np.float32(model is not None)], [], [tf.float32])[0])
        assert float(tf.function(lambda: inner() + 1)()) == 2
        gc.collect()
        # The graph within which it was traced is gone.
        assert float(tf.function(lambda: inner() + 2)()) == 3
        return weakref.ref(model)

    left = used()
    gc.collect()
    assert left() is None
