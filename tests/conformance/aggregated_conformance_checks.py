# SPDX-License-Identifier: Apache-2.0
"""ParameterServerStrategy whose four workers all count is as one device. Run by `test_parameter_server_policies.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import own_models
import pytest
from cases import LOOPS, TRANSFORMS
from conformance import Conformance, Numbers, pytest_generate_tests  # noqa: F401
from training import SETTINGS, assert_close, with_uneven_pipelines

_LOOPS_OF_FIRST_CALLS = frozenset(f"first call, loop{words}" for words in ("", ", built", ", by name"))


class TestAggregated(Conformance):
    # Steps of custom loops are those of one worker: the next class.
    # Logs of losses that are sums count each worker's part of a batch alike.
    # Gradients of four workers are added up in the order of arrival, so that no bit repeats.
    left_out = (
        LOOPS
        | _LOOPS_OF_FIRST_CALLS
        | {"sum loss", *TRANSFORMS[2:]}
        # Seed generators must be made in the scope.
        | {"first call, seeds from outside"}
    )
    quick = frozenset(
        {
            *("global_clipnorm", "accumulation, clipnorm, ema", "embedding, clipnorm", TRANSFORMS[1]),
            # `TestBackupWorkers` on devices splits the step in the same way, with masks and slices.
            *("steps_per_execution", "unknown length", "interrupted and resumed", "ragged", "no batches"),
            *("order of the data and of a part for validation", "embedding, places"),
            *("loss scale, accumulation", "order of the data", "parts of two sizes, unknown"),
            *("step decorated", "own functions, step decorated"),
            # Logs of parts of different sizes.
            *("dicts", "step tracked by other names, one over", "metrics of one number, one over"),
            "sparse inputs, clipvalue",
            # With validation data.
            "first call, optimizer of its own",
        }
    )
    # `evaluate` reads whole batches. `aggregated_overlap_checks.py` has the calls that overlap.
    slow_tests = frozenset(
        {
            "test_calls_within_callbacks_work",
            "test_evaluate_after_an_own_step_counts_no_empty_replica",
            "test_metric_variable_of_aggregation_mean_is_read",
            "test_model_compiled_again_trains_as_compiled_last",
            "test_second_thread_is_refused_during_a_fit",
        }
    )
    # One device reads its weights after the update, a contribution those before.
    logs_within = 0.1

    def test_own_pipelines_of_uneven_parts_count_by_their_examples(self, strategy: Any) -> None:
        assert_close(*with_uneven_pipelines(strategy, own_models.one_number))


class TestLoopsBesideAPolicy(Numbers):
    only = _LOOPS_OF_FIRST_CALLS
    slow = frozenset({"first call, loop, built", "first call, loop, by name"})

    @pytest.fixture(autouse=True)
    def order_does_not_matter(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(SETTINGS, "in_one_batch", True)
        yield
