# SPDX-License-Identifier: Apache-2.0
"""The average of parameters after every step: that of synchronous SGD, whose step is linear in the gradient."""

from __future__ import annotations

from conformance import Conformance


class AveragingEveryStep(Conformance):
    only = frozenset(
        {
            *("steps_per_execution", "run_eagerly", "sample_weight", "sum loss", "sum loss, eagerly"),
            "class weights, validation_split, steps_per_epoch",
            *("unknown length", "unknown length, steps_per_execution", "interrupted and resumed"),
            *("dicts", "ragged", "sparse", "step mean_by_hand, one over", "step of_keras"),
        }
    )
    logs_within = 0.1
    # Logs of a step of its own are means of what replicas return, not the sum that its metric holds.
    test_every_batch_of_a_generator_is_used_once = None
