# SPDX-License-Identifier: Apache-2.0
"""Loops under MirroredStrategy, and models whose variables a first call makes, are as on one device."""

from __future__ import annotations

import pytest
from conformance import Numbers, pytest_generate_tests  # noqa: F401
from mirrored_cases import IN_LOOPS, SLOW, SLOW_LOOPS

import tfdist

pytestmark = pytest.mark.devices


class TestMirroredLoops(Numbers):
    only = IN_LOOPS
    slow = (SLOW & IN_LOOPS) | SLOW_LOOPS

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls, cpus: list[str]) -> tfdist.MirroredStrategy:
        return tfdist.MirroredStrategy(cpus[:2])
