# SPDX-License-Identifier: Apache-2.0
"""Experiments that compare runs say what fell short, and short runs of them do on real processes what they say."""

from __future__ import annotations

import copy
import importlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.slow

EXPERIMENTS = pathlib.Path(__file__).resolve().parents[2] / "experiments"
Load = Callable[[str, str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Imports a module of an experiment."""

    def imported(experiment: str, module: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(EXPERIMENTS / experiment))
        return importlib.import_module(module)

    return imported


def expected_of(experiment: str) -> dict[str, Any]:
    return json.loads((EXPERIMENTS / experiment / "expected.json").read_text())


# Backup workers.


def _contestant(updates_per_sec: float, accuracy: float = 0.9) -> dict[str, Any]:
    return {"updates_per_sec": updates_per_sec, "validation_accuracy": accuracy}


def test_backup_workers_that_fall_short_are_named(load: Load) -> None:
    contest, expected = load("backup_workers", "contest"), expected_of("backup_workers")
    assert expected.keys() == contest.STRATEGIES.keys()
    summary = {
        "parameter_server-spares-0": _contestant(2.0),
        "parameter_server-spares-1": _contestant(16.0),
        "multi_worker-spares-0": _contestant(2.0),
        "multi_worker-spares-1": _contestant(3.0, 0.5),
    }
    slow, inaccurate = contest.missed(summary, expected, 1)
    assert slow.startswith("multi_worker: 1.5 times")
    assert inaccurate.startswith("multi_worker: a validation accuracy of 50.0%")
    assert contest.missed(dict(list(summary.items())[:2]), expected, 1) == []


# Digits.


def _epoch(epoch: int, accuracy: float = 0.9) -> dict[str, float]:
    times = {"epoch": epoch, "seconds": epoch * 2.0, "updates": 56, "updates_per_sec": 40.0 + epoch}
    return {**times, "loss": 1.0 / epoch, "val_accuracy": accuracy}


def test_a_strategy_below_its_expected_accuracy_is_named(load: Load) -> None:
    compare = load("digits", "compare")
    assert expected_of("digits").keys() == compare.STRATEGIES.keys()
    summary = {"mirrored": compare.summarize([_epoch(1, 0.99)]), "multi_worker": compare.summarize([_epoch(1, 0.95)])}
    (problem,) = compare.missed(summary)
    assert problem.startswith("multi_worker reached a validation accuracy of 95.00%")


def test_the_first_epoch_does_not_count_for_the_speed(load: Load) -> None:
    summary = load("digits", "compare").summarize([_epoch(1), _epoch(2), _epoch(3), _epoch(4, 0.98)])
    assert summary == {"seconds": 8.0, "updates": 224, "updates_per_sec": 43.0, "validation_accuracy": 0.98}


@pytest.mark.processes
def test_a_run_that_fails_is_shown_and_makes_the_comparison_fail(tmp_path: pathlib.Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import pathlib, compare\n"
        "compare.STRATEGIES = {'one_device': 'one device'}\n"
        "sys.exit(compare.compare(pathlib.Path(sys.argv[2]), 1, ['--epochs=none']))"
    )
    command = [sys.executable, "-c", program, str(EXPERIMENTS / "digits"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "FAILED: one_device ended with exit code 1" in done.stderr
    assert "flag --epochs=none" in done.stdout


# Sparse models.


def test_published_runs_are_as_the_page_says(load: Load, tmp_path: pathlib.Path) -> None:
    chart, folder = load("sparse", "sparse_chart"), EXPERIMENTS / "sparse"
    published = json.loads((folder / "published.json").read_text())
    assert chart.misses(published) == []
    assert {1, 2, 4, 8} == set(chart.rates(published["sparse"]))
    # What the page shows is what the file has.
    assert chart.table(published) in (folder / "README.md").read_text()
    assert chart.save(tmp_path / "sparse.png", published).stat().st_size > 10_000
    worse = copy.deepcopy(published)
    worse["sparse"]["runs"]["8"]["steps_per_sec"] = [1.0]
    worse["dense"]["runs"]["8"]["steps_per_sec"] = [100.0]
    missed = [text.split(":")[0] for text in chart.misses(worse)]
    assert missed[:3] == ["sparse", "dense", "sparse, 8 workers"] and "dense, 8 workers" in missed


def test_ids_follow_a_zipf_law(load: Load) -> None:
    data = load("sparse", "recommender_data")
    ids = data.zipf(np.random.default_rng(0), 1000, (200_000,), 1.05)
    counts = np.sort(np.bincount(ids, minlength=1000))[::-1]
    weights = np.arange(1, 1001) ** -1.05
    np.testing.assert_allclose(counts[:20] / len(ids), weights[:20] / weights.sum(), rtol=0.1)
    features, clicks = data.visits(100)
    assert features["recent"].shape == (100, 8) and set(np.unique(clicks)) == {0.0, 1.0}


# Staleness.


def _softsync(accuracy: float = 0.98, staleness: float = 8.0, loss: float = 0.1) -> dict[str, Any]:
    return {"mean_staleness": staleness, "validation_accuracy": accuracy, "loss": loss}


def test_staleness_that_falls_short_is_named(load: Load) -> None:
    runs, expected = load("staleness", "softsync_runs"), expected_of("staleness")
    good = {"synchronous": _softsync(), "n-8-fixed": _softsync(0.1), "n-8-inverse": _softsync(0.975)}
    assert runs.missed(good, [8], expected) == []
    bad = {"synchronous": _softsync(), "n-8-fixed": _softsync(0.9, 1.0), "n-8-inverse": _softsync(0.96)}
    fresh, trains, inaccurate = runs.missed(bad, [8], expected)
    assert fresh.startswith("n-8-fixed: a mean staleness of 1.00")
    assert trains.startswith("n-8-fixed: only 8.0% less accurate than synchronous")
    assert inaccurate.startswith("n-8-inverse: 2.0% less accurate than synchronous")
    endless = {"synchronous": _softsync(), "n-8-inverse": _softsync(loss=float("nan"))}
    (not_finite,) = runs.missed(endless, [8], expected)
    assert not_finite.startswith("n-8-inverse")


@pytest.mark.processes
def test_four_workers_of_their_own_processes_are_about_n_updates_stale(load: Load, tmp_path: pathlib.Path) -> None:
    softsync_runs = load("staleness", "softsync_runs")
    tiny = {"num_workers": 4, "minibatch": 16, "learning_rate": 0.05, "epochs": 1}
    tiny |= {"gradients_per_epoch": 120, "seed": 1, "mean_secs": 0.1}
    run = softsync_runs.Run(4, "inverse")
    assert softsync_runs.train(run, [4], tiny, tmp_path) is None
    row = softsync_runs.summarize(run, tmp_path)
    assert row["updates"] == 120
    # On a busy machine workers wait for each other, and their gradients are fresher: at the extreme (N - 1) / 2.
    low, high = 0.35, expected_of("staleness")["mean_staleness_over_n_within"][1]
    assert low * run.n <= row["mean_staleness"] <= high * run.n


# Synchronous and asynchronous training.


def _points(seconds: list[float], examples: list[float], losses: list[float]) -> list[dict[str, float]]:
    return [
        {"seconds": each_seconds, "examples": each_examples, "val_loss": loss}
        for each_seconds, each_examples, loss in zip(seconds, examples, losses, strict=True)
    ]


def test_the_winners_are_found_where_the_shortest_run_ends(load: Load) -> None:
    races = load("sync_vs_async", "races")
    fast = _points([0, 1, 2, 3], [0, 100, 200, 300], [2.0, 1.5, 1.0, 0.9])
    thrifty = _points([0, 2, 4], [0, 50, 150], [2.0, 1.2, 0.5])
    found = races.winners({"asynchronous": fast, "synchronous": thrifty})
    in_time, by_examples = found["seconds"], found["examples"]
    assert in_time.pop("losses") == {"asynchronous": 0.9, "synchronous": 1.2}
    assert by_examples.pop("losses") == {"asynchronous": 1.5, "synchronous": 0.5}
    assert in_time == {"where": 3, "winner": "asynchronous"}
    assert by_examples == {"where": 150, "winner": "synchronous"}
    line = races.row(races.Race(4, "even"), {"asynchronous": fast, "synchronous": thrifty}, list(races.METHODS))
    assert line.split()[:2] == ["4", "even"]
    assert line.split()[-4:] == ["asynchronous", "synchronous,", "after", "150"]


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_the_quick_flags_train_and_compare_on_real_processes(tmp_path: pathlib.Path) -> None:
    folder = EXPERIMENTS / "sync_vs_async"
    command = [sys.executable, str(folder / "run.py"), f"--flagfile={folder / 'quick.flags'}"]
    done = subprocess.run([*command, f"--output_dir={tmp_path}"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.keys() == {"2-uneven"}
    assert summary["2-uneven"]["points"].keys() == {"asynchronous", "averaged"}
    assert (tmp_path / "uneven.png").exists()
    assert "asynchronous" in (tmp_path / "table.txt").read_text()
