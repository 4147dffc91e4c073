# SPDX-License-Identifier: Apache-2.0
"""Loops under MirroredStrategy, and models whose variables a first call makes, are as on one device.

Files are run at a time: these cases have one of their own.
"""

from __future__ import annotations

import pytest
from cases import IN_LOOPS
from conformance import Numbers, pytest_generate_tests  # noqa: F401

import tfdist

pytestmark = pytest.mark.devices


class TestMirroredLoops(Numbers):
    only = IN_LOOPS
    # `TestMultiWorker` and `TestAsynchronous` have loops that read data in other ways, and that write files.
    quick = frozenset(
        {
            *("first call, step without call", "first call, loop", "no run, optimizer alone"),
            "no run, in scope, graph, loss scale",
            *("loop, for_outside_of_a_graph", "loop, batches_unpacked_by_the_caller", "loop, optional_in_a_graph"),
            *("loop, results_of_replicas", "loop, values_from_a_function"),
            "loop, optimizers_made_outside_of_the_scope",
        }
    )

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls, cpus: list[str]) -> tfdist.MirroredStrategy:
        return tfdist.MirroredStrategy(cpus[:2])
