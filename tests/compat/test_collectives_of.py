# SPDX-License-Identifier: Apache-2.0
"""Facts about the graphs of functions: which collectives they have."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.compat.tensorflow.context import collectives_of


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
