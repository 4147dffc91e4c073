# SPDX-License-Identifier: Apache-2.0
"""ParameterServerStrategy whose workers span devices is as one device. Run by `test_server_parts.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import spanning
from aggregated_conformance_checks import TestAggregated as _Aggregated
from cases import TRANSFORMS
from conformance import Conformance, pytest_generate_tests  # noqa: F401

import tfdist


class TestServerParts(Conformance):
    """Two workers of two devices each, which all count; layers are placed alternately."""

    # Two workers' dense gradients have one sum in any order.
    left_out = _Aggregated.left_out - {TRANSFORMS[2]}
    logs_within = _Aggregated.logs_within
    # `TestAggregated` on workers of one device.
    repeats = True
    # `TestSpanningDevices` has the others in one process.
    quick = frozenset({TRANSFORMS[0]})
    quick_tests = frozenset({"test_steps_on_single_batches"})

    @pytest.fixture(autouse=True)
    def layers_have_places(
        self, strategy: tfdist.ParameterServerStrategy, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        spanning.place_alternately(strategy, monkeypatch)
        yield
