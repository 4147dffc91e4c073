# SPDX-License-Identifier: Apache-2.0
"""A preempted worker waits for the chief's checkpoint as long as the chief answers."""

from __future__ import annotations

import pytest

from tfdist.resume import preemption


class _Channel:
    """Channel of a worker whose chief has decided on the last step, and never says that it has saved."""

    is_chief = False
    task = "worker:1"
    tasks = ("worker:0", "worker:1")

    def __init__(self, fate: str | Exception):
        self.fate = fate
        self.published: list[str] = []

    def publish(self, key: str, value: str) -> bool:
        self.published.append(key)
        return True

    def gather(self, value, what):
        raise NotImplementedError

    def receive(self, key: str, timeout_secs: float) -> str | None:
        return "7 worker:1" if key.endswith("last") else None

    def lost(self) -> dict[str, str]:
        if isinstance(self.fate, Exception):
            raise self.fate
        return {"worker:0": self.fate}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "fate", ["killed", ConnectionError("worker:0 has not answered for 10 s")], ids=["lost", "stopped"]
)
def test_saved_with_a_chief_that_is_gone_ends_the_wait(fate: str | Exception):
    said: list[str] = []
    channel = _Channel(fate)
    together = preemption.Together(channel, "fit", end=lambda: None, say=said.append)
    try:
        together.saved()
    finally:
        together.close()
    (line,) = said
    assert "worker:0" in line
    # Nothing is stored any more: storing has no time limit.
    assert not [key for key in channel.published if "ending" in key]
