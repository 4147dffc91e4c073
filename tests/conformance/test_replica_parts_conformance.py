# SPDX-License-Identifier: Apache-2.0
"""MirroredStrategy whose replicas span devices is as one device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import spanning
from conformance import Conformance, pytest_generate_tests  # noqa: F401

import tfdist

pytestmark = pytest.mark.devices


class TestSpanningDevices(Conformance):
    """Two replicas of two devices each; layers are placed alternately."""

    is_exclusive = False
    repeats = True
    # Where an operation runs depends on the parts of a step: eager, graph and loops, gradients that are dense, sparse
    # and of a loop, sums that an optimizer clips. `TestMirrored` has the others on one device each.
    quick = frozenset({"run_eagerly", "embedding, clipnorm", "loop, gradient_penalty"})
    quick_tests = frozenset()

    @pytest.fixture(scope="class")
    @classmethod
    def strategy(cls, cpus: list[str]) -> Iterator[tfdist.MirroredStrategy]:
        strategy = tfdist.MirroredStrategy(cpus[:4], devices_per_replica=2)
        with pytest.MonkeyPatch.context() as monkeypatch:
            spanning.place_alternately(strategy, monkeypatch)
            yield strategy
