# SPDX-License-Identifier: Apache-2.0
"""Looking at threads never collects garbage: CPython would hold the list of threads meanwhile."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import pytest

from tfdist.coordination import stalls


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_threads_are_looked_at(monkeypatch: pytest.MonkeyPatch, enabled: bool):
    stock, states = sys._current_frames, []

    def look() -> dict[int, Any]:
        states.append(gc.isenabled())
        return stock()

    monkeypatch.setattr(sys, "_current_frames", look)
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        found = stalls.by_thread()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
    assert states == [False]
    assert threading.get_ident() not in found
