# SPDX-License-Identifier: Apache-2.0
"""Loops under MirroredStrategy, and models whose variables a first call makes, are as on one device.

Files are run at a time: these cases have one of their own.
"""

from __future__ import annotations

import pytest
from cases import IN_LOOPS, REPEATED
from conformance import Numbers, pytest_generate_tests  # noqa: F401

import tfdist

pytestmark = pytest.mark.devices

# `TestMultiWorker` and `TestAsynchronous` read data in these ways and write these files.
_SLOW_LOOPS = {
    f"loop, {name}"
    for name in (
        *("iterator_as_an_argument", "next_until_the_end", "optional_outside_of_a_graph", "data_sets_from_a_function"),
        *("models_saved", "models_exported", "signature_of_the_data_set"),
        *("data_set_as_an_argument", "iterator_made_in_a_graph"),
        # `TestSpanningDevices` has these.
        *("gradient_penalty", "checkpoints"),
    )
}


class TestMirroredLoops(Numbers):
    only = IN_LOOPS
    slow = (REPEATED & IN_LOOPS) | _SLOW_LOOPS

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls, cpus: list[str]) -> tfdist.MirroredStrategy:
        return tfdist.MirroredStrategy(cpus[:2])
