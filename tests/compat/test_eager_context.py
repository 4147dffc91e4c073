# SPDX-License-Identifier: Apache-2.0
"""Facts about TensorFlow's runtime: which of its calls wait for other workers."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.eager import context, execute

from tfdist.compat.tensorflow.context import collective_in, collectives_of


# Names are bytes where TensorFlow has to convert the arguments, as for the first value of a variable.
@pytest.mark.parametrize(
    "name, found", [("CollectiveBcastRecv", True), (b"CollectiveBcastRecv", True), (b"Abs", False)]
)
def test_collective_is_found_by_a_name_of_bytes(name: Any, found: bool) -> None:
    with pytest.raises(tf.errors.OpError) as raised:
        execute.quick_execute(name, 1, [], (), context.context())
    *_, frame = [each for each, _ in traceback.walk_tb(raised.tb) if each.f_code.co_name == "quick_execute"]
    assert collective_in(frame) == ("CollectiveBcastRecv" if found else None)


def test_collectives_of_a_function_are_counted_in_functions_that_it_calls() -> None:
    common: Any = {"group_size": 2, "group_key": 1, "instance_key": 1, "ordering_token": []}

    def reduced(x: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.CollectiveReduceV2(input=x, merge_op="Add", final_op="Id", **common)

    def gathered(x: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.CollectiveGatherV2(input=x, **common)

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.cond(tf.reduce_sum(reduced(x)) > 0, lambda: gathered(x), lambda: reduced(x))

    name = step.get_concrete_function(tf.TensorSpec([2])).function_def.signature.name
    assert collectives_of(name) == "1 gather, 2 sums"
    assert collectives_of("CollectiveReduceV2") == collectives_of("Abs") == ""
