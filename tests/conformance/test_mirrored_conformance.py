# SPDX-License-Identifier: Apache-2.0
"""MirroredStrategy without a policy is as one device; `test_mirrored_loops_conformance.py` has its other cases."""

from __future__ import annotations

import pytest
from cases import CASES
from conformance import Conformance, pytest_generate_tests  # noqa: F401
from mirrored_cases import IN_LOOPS, SLOW

import tfdist

pytestmark = pytest.mark.devices


class TestMirrored(Conformance):
    is_exclusive = False
    only = frozenset(CASES) - IN_LOOPS
    slow = SLOW - IN_LOOPS

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls, cpus: list[str]) -> tfdist.MirroredStrategy:
        return tfdist.MirroredStrategy(cpus[:2])
