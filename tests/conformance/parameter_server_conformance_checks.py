# SPDX-License-Identifier: Apache-2.0
"""Asynchronous ParameterServerStrategy is as one device where no steps overlap. Run by `test_parameter_server.py`.

All examples are one batch, or all batches are alike: workers take them in any order.
"""

from __future__ import annotations

from collections.abc import Iterator

import guide_loops
import pytest
from cases import LOOPS
from conformance import Conformance, pytest_generate_tests  # noqa: F401
from training import SETTINGS

_SYNCHRONOUS = {
    f"loop, {name}"
    for name in (
        *guide_loops.SAVING,
        "for_outside_of_a_graph",
        "gradient_penalty",
        "gradients_clipped_after_their_sum",
        "metrics_and_evaluation_within_the_loop",
        "next_until_the_end",
        "seed_generators_made_outside_of_the_scope",
        "two_optimizers_and_a_persistent_tape",
        "weights_set_within_the_loop",
    )
}


class TestAsynchronous(Conformance):
    # Seed generators must be made in the scope. Each worker accumulates gradients of its own, and has any batches.
    left_out = LOOPS - _SYNCHRONOUS | {
        *("first call, seeds from outside", "accumulation, clipnorm, ema", "loss scale, accumulation"),
        *("order of the data", "parts of two sizes"),
        # Servers take no batch in a `tf.function`.
        *("own functions", "own functions, step decorated", "first call, loop"),
    }
    # A step is that of one device here: these are about where its variables are, and how its results come back.
    # Suites on devices have the other numbers, and `TestAggregated` what happens to parts of a batch.
    quick = frozenset({"sparse", "metric that shows its variable", "loop, metrics_and_evaluation_within_the_loop"})
    # `parameter_server_*checks.py` count what is read, and have callbacks, errors and own steps.
    quick_tests = frozenset({"test_exception_in_the_step_keeps_its_type", "test_steps_on_single_batches"})
    # Batches are not divided.
    test_batch_of_several_first_dimensions_is_refused = None
    # Logs that are no metrics are those of any step; `parameter_server_inputs_checks.py` counts in metrics.
    test_every_batch_of_a_generator_is_used_once = None

    @pytest.fixture(autouse=True)
    def order_does_not_matter(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(SETTINGS, "in_one_batch", True)
        guide_loops.same_batches(monkeypatch)
        yield
