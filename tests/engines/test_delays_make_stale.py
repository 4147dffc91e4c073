# SPDX-License-Identifier: Apache-2.0
"""A delay under a policy of asynchronous training makes a gradient old, and not only late."""

from __future__ import annotations

import itertools
import types
from typing import Any

import pytest

from tfdist.coordination import delay_hook
from tfdist.engines.streams import StreamEngine

pytestmark = pytest.mark.devices


@pytest.mark.parametrize("from_chief", [False, True])
def test_the_variables_are_read_before_the_delay_and_the_gradient_is_sent_after_it(
    monkeypatch: pytest.MonkeyPatch, from_chief: bool
) -> None:
    events: list[str] = []

    def note(event: str, result: Any = None) -> Any:
        return lambda *arguments: events.append(event) or result

    monkeypatch.setattr(delay_hook, "installed", note("delay"))
    compute, computed = (
        ("contribute_from", ["a gradient"]) if from_chief else ("contribute_next", (["a gradient"], 0.0, False))
    )
    step = types.SimpleNamespace(**{compute: note("read and compute", computed), "push": note("send")})
    feed = types.SimpleNamespace(from_chief=from_chief, take=note("take", "a batch"), used=note("used"))
    engine = types.SimpleNamespace(
        _attempts=[itertools.count()],
        _runner=types.SimpleNamespace(is_wanted=note("is wanted", True), hand_over=note("hand over")),
    )
    StreamEngine._contribute_from(engine, feed, None, step, 0, 7)  # type: ignore[arg-type]
    assert events == ["take", "read and compute", "delay", "is wanted", "send", "hand over", "used"]
