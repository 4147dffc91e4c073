# SPDX-License-Identifier: Apache-2.0
"""The staleness experiment: staleness of about n, simulated and on real processes, and that it says what fell short."""

from __future__ import annotations

import importlib
import json
import pathlib
from types import ModuleType
from typing import Any

import pytest

from tfdist.planning.simulation import simulate_policy
from tfdist.policies import SoftSync
from tfdist.policies.asynchronous import Asynchronous
from tfdist.testing import Delays

pytestmark = pytest.mark.slow

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "staleness"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
SETTING = {"num_workers": 8, "mean_secs": 0.05, "seed": 1}


@pytest.fixture
def softsync_runs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("softsync_runs")


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_without_overhead_these_delays_make_gradients_about_n_updates_stale(softsync_runs: ModuleType, n: int) -> None:
    policy = Asynchronous(soft_sync=SoftSync(8 // n))
    updates = simulate_policy(policy, Delays.from_json(softsync_runs.delays(SETTING)).secs, 500, 8).updates
    staleness = [each for update in updates for each in update.staleness]
    low, high = EXPECTED["mean_staleness_over_n_within"]
    assert low * n <= sum(staleness) / len(staleness) <= high * n
    assert sum(each > 2 * n for each in staleness) / len(staleness) < 0.01


def _row(accuracy: float = 0.98, staleness: float = 8.0, loss: float = 0.1) -> dict[str, Any]:
    return {"mean_staleness": staleness, "validation_accuracy": accuracy, "loss": loss}


def test_what_falls_short_is_named(softsync_runs: ModuleType) -> None:
    good = {"synchronous": _row(), "n-8-fixed": _row(0.1), "n-8-inverse": _row(0.975)}
    assert softsync_runs.missed(good, [8], EXPECTED) == []
    bad = {"synchronous": _row(), "n-8-fixed": _row(0.9, 1.0), "n-8-inverse": _row(0.96)}
    fresh, trains, inaccurate = softsync_runs.missed(bad, [8], EXPECTED)
    assert fresh.startswith("n-8-fixed: a mean staleness of 1.00")
    assert trains.startswith("n-8-fixed: only 8.0% less accurate than synchronous")
    assert inaccurate.startswith("n-8-inverse: 2.0% less accurate than synchronous")
    (not_finite,) = softsync_runs.missed({"synchronous": _row(), "n-8-inverse": _row(loss=float("nan"))}, [8], EXPECTED)
    assert not_finite.startswith("n-8-inverse")


@pytest.mark.processes
def test_four_workers_of_their_own_processes_are_about_n_updates_stale(
    softsync_runs: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    tiny = {
        "num_workers": 4,
        "minibatch": 16,
        "learning_rate": 0.05,
        "epochs": 1,
        "gradients_per_epoch": 120,
        "seed": 1,
    }
    run = softsync_runs.Run(4, "inverse")
    assert softsync_runs.train(run, [4], tiny | {"mean_secs": 0.1}, tmp_path) is None
    row = softsync_runs.summarize(run, tmp_path)
    assert row["updates"] == 120
    # On a busy machine workers wait for each other, and their gradients are fresher: at the extreme (N - 1) / 2.
    low, high = 0.35, EXPECTED["mean_staleness_over_n_within"][1]
    assert low * run.n <= row["mean_staleness"] <= high * run.n
