# SPDX-License-Identifier: Apache-2.0
"""The average of parameters after every step: that of synchronous SGD, whose step is linear in the gradient."""

from __future__ import annotations

from conformance import Conformance

# Parameters are averaged behind them: they are as without a policy.
LIKE_OTHERS = frozenset(
    {
        "test_batch_of_several_first_dimensions_is_refused",
        "test_callbacks_stop_schedule_save_and_restore",
        "test_evaluate_after_an_own_step_counts_no_empty_replica",
        "test_evaluate_and_predict_see_every_example_once",
        "test_exception_in_the_model_keeps_its_message",
        "test_exception_in_the_step_keeps_its_type",
        "test_metric_variable_of_aggregation_mean_is_read",
        "test_model_compiled_again_trains_as_compiled_last",
        "test_policies_that_are_none_are_refused",
        "test_steps_on_single_batches",
        "test_xla_is_refused_where_it_cannot_be",
    }
)

# A policy changes neither which calls are refused nor which logs a step returns: `TestMirrored` and
# `TestBackupWorkers` have both.
AS_WITHOUT_POLICY = frozenset(
    {
        "test_calls_within_callbacks_work",
        "test_own_train_step_keeps_its_logs",
        "test_second_thread_is_refused_during_a_fit",
    }
)


class AveragingEveryStep(Conformance):
    only = frozenset(
        {
            *("sgd", "steps_per_execution", "run_eagerly", "validation_split", "steps_per_epoch", "sample_weight"),
            *(
                "fewer examples than replicas",
                "one example left",
                "batches of one size",
                "sum loss",
                "sum loss, eagerly",
                "class weights",
            ),
            *("unknown length", "unknown length, steps_per_execution", "unknown length, whole executions"),
            *(
                "from Python",
                "interrupted and resumed",
                "embedding",
                "embedding, steps_per_execution",
                "dicts",
                "ragged",
                "sparse",
            ),
            *("step mean_by_hand, one over", "step of_keras, one over"),
        }
    )
    logs_within = 0.1
    # Logs of a step of its own are means of what replicas return, not the sum that its metric holds.
    test_every_batch_of_a_generator_is_used_once = None
    slow_tests = LIKE_OTHERS
