# SPDX-License-Identifier: Apache-2.0
"""The cases of MirroredStrategy that are slow, and those that have a file of their own: files are run at a time."""

from __future__ import annotations

from cases import CASES, LOOPS, SCALED_AGAIN, SIZES

# Loops, and variables that a first call makes.
IN_LOOPS = LOOPS | {name for name in CASES if name.startswith(("first call", "no run"))}

# They show again what others show: two sizes, or two kinds, at a time are enough for each kind of code.
SLOW = frozenset(
    {
        *("fewer examples than replicas", "batches of one size", "constraint", "constraint, sum loss"),
        *("GRU, both directions", "penalties, sum, one example left", "penalties, sum_over_batch_size, uneven"),
        *(f"step {step}, fewer examples than replicas" for step in ("of_keras", "of_both")),
        *(
            f"loss {loss}, fewer examples than replicas"
            for loss in ("one number, tf.function", "one per example", "one number of a class")
        ),
        *("one example left", "unknown length, whole executions", "sum loss, eagerly"),
        *("sum loss, even parts", "dicts, even parts"),
        # Parts of other optimizers, executions and layers in this list.
        *("sgd", "ema overwrites", "loss scale", "embedding, steps_per_execution", "ConvLSTM"),
        *(f"step tracked by other names, {size}" for size in (*SIZES, "even parts")),
        *("unknown length", "embedding", "recurrent, built from one example", "step of_both, one over"),
        *("first call, loop, built", "first call, loop, by name", "first call, no run, eager"),
        *(f"step {step}, fewer examples than replicas" for step in ("tracked", "average_by_tensorflow")),
        *("no run, in scope, graph", "no run, in scope, eager", "no run, out of it, graph"),
        # Adam is in "embedding, clipnorm", the same losses are there in a graph, weights of classes come as
        # "sample_weight", and the data are split before they come to a strategy.
        *("adam", "losses of layers alone, eagerly", "class weights", "validation_split"),
        *SCALED_AGAIN,
    }
)

# `TestMultiWorker` and `TestAsynchronous` read data in these ways and write these files.
SLOW_LOOPS = frozenset(
    f"loop, {name}"
    for name in (
        *("iterator_as_an_argument", "next_until_the_end", "optional_outside_of_a_graph", "data_sets_from_a_function"),
        *("models_saved", "models_exported", "saved_models", "signature_of_the_data_set"),
        *("data_set_as_an_argument", "iterator_made_in_a_graph"),
    )
)
