# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests that drive the engine as Keras does."""

from __future__ import annotations

import pytest

from tfdist.passes import worker_pass


@pytest.fixture
def as_in_keras_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes passes take the caller for Keras, whose loop finds the end of the data by a step."""
    monkeypatch.setattr(worker_pass.calls, "current", lambda: worker_pass.calls.Call(None, "fit"))
