# SPDX-License-Identifier: Apache-2.0
"""`make test` leaves no case out: see "What runs when" in tests/README.md."""

from __future__ import annotations

import importlib
import pathlib

from cases import CASES, SLOW
from conformance import Numbers


def test_each_case_is_quick_under_a_strategy_or_slow() -> None:
    suites = {
        found
        for path in pathlib.Path(__file__).parent.glob("*_conformance*.py")
        for found in vars(importlib.import_module(path.stem)).values()
        if isinstance(found, type) and issubclass(found, Numbers) and found.__name__.startswith("Test")
    }
    assert len(suites) > 8
    assert {case for suite in suites for case, marks in suite.cases().items() if not marks} == set(CASES) - SLOW
