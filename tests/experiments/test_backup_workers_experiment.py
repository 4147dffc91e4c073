# SPDX-License-Identifier: Apache-2.0
"""The backup workers experiment: the delays it asks for, and that it says what fell short."""

from __future__ import annotations

import importlib
import json
import pathlib
from types import ModuleType
from typing import Any

import pytest

from tfdist.testing import Delays

pytestmark = pytest.mark.slow

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "backup_workers"
SETTING = {"num_workers": 4, "spares": 1, "mean_secs": 0.05, "slowdown": 10.0, "updates": 20, "seed": 3}


@pytest.fixture
def contest(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("contest")


def _row(updates_per_sec: float, accuracy: float = 0.9) -> dict[str, Any]:
    return {"updates_per_sec": updates_per_sec, "validation_accuracy": accuracy}


def test_the_last_worker_is_ten_times_as_slow(contest: ModuleType) -> None:
    delays = Delays.from_json(contest.delays(SETTING))
    means = [sum(delays.secs(replica, attempt) for attempt in range(2000)) / 2000 for replica in range(4)]
    assert means == pytest.approx([0.05, 0.05, 0.05, 0.5], rel=0.03)


def test_what_falls_short_is_named(contest: ModuleType) -> None:
    expected = json.loads((FOLDER / "expected.json").read_text())
    assert expected.keys() == contest.STRATEGIES.keys()
    summary = {
        "parameter_server-spares-0": _row(2.0),
        "parameter_server-spares-1": _row(16.0),
        "multi_worker-spares-0": _row(2.0),
        "multi_worker-spares-1": _row(3.0, 0.5),
    }
    slow, inaccurate = contest.missed(summary, expected, 1)
    assert slow.startswith("multi_worker: 1.5 times")
    assert inaccurate.startswith("multi_worker: a validation accuracy of 50.0%")
    assert contest.missed(dict(list(summary.items())[:2]), expected, 1) == []
