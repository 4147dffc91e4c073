# SPDX-License-Identifier: Apache-2.0
"""`make test` leaves no case out: see "What runs when" in tests/README.md."""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Iterator

import pytest
from cases import CASES, REPEATED
from conformance import Numbers

SERVERS = ("aggregated", "parameter_server", "server_parts")


def _suites(of_servers: bool) -> Iterator[type[Numbers]]:
    """The classes of all files of this folder that run cases under parameter servers, or under other strategies."""
    for path in pathlib.Path(__file__).parent.glob("*_conformance*.py"):
        for name, found in vars(importlib.import_module(path.stem)).items():
            is_suite = isinstance(found, type) and issubclass(found, Numbers) and name.startswith("Test")
            if is_suite and path.name.startswith(SERVERS) == of_servers:
                yield found


@pytest.mark.parametrize("of_servers", [False, True], ids=["synchronous", "parameter servers"])
def test_each_case_is_quick_under_a_strategy_of_each_kind(of_servers: bool) -> None:
    is_slow = [suite.cases() for suite in _suites(of_servers)]
    promised = {case for cases in is_slow for case in cases}
    quick = {case for cases in is_slow for case, slow in cases.items() if not slow}
    assert promised - quick - REPEATED == set()
    assert promised == set(CASES) or of_servers
