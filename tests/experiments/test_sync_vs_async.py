# SPDX-License-Identifier: Apache-2.0
"""The experiment sync_vs_async: who competes, who wins, and a short run of it on real processes."""

from __future__ import annotations

import importlib
import json
import pathlib
import subprocess
import sys
from types import ModuleType

import pytest

from tfdist.testing import Delays

pytestmark = pytest.mark.slow

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "sync_vs_async"


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("races")


def _points(seconds: list[float], examples: list[float], losses: list[float]) -> list[dict[str, float]]:
    return [
        {"seconds": each_seconds, "examples": each_examples, "val_loss": loss}
        for each_seconds, each_examples, loss in zip(seconds, examples, losses, strict=True)
    ]


@pytest.mark.parametrize(("speeds", "last"), [("even", 0.1), ("uneven", 1.0)])
def test_the_last_worker_is_slower_where_they_are_uneven(races: ModuleType, speeds: str, last: float) -> None:
    setting = {"mean_secs": 0.1, "slowdown": 10.0, "seed": 1}
    delays = Delays.from_json(races.delays(races.Race(3, speeds), setting))
    means = [sum(delays.secs(worker, attempt) for attempt in range(2000)) / 2000 for worker in range(3)]
    assert means == pytest.approx([0.1, 0.1, last], rel=0.03)


def test_the_winners_are_found_where_the_shortest_run_ends(races: ModuleType) -> None:
    fast = _points([0, 1, 2, 3], [0, 100, 200, 300], [2.0, 1.5, 1.0, 0.9])
    thrifty = _points([0, 2, 4], [0, 50, 150], [2.0, 1.2, 0.5])
    found = races.winners({"asynchronous": fast, "synchronous": thrifty})
    assert found["seconds"] == {
        "where": 3,
        "losses": {"asynchronous": 0.9, "synchronous": 1.2},
        "winner": "asynchronous",
    }
    assert found["examples"] == {
        "where": 150,
        "losses": {"asynchronous": 1.5, "synchronous": 0.5},
        "winner": "synchronous",
    }
    line = races.row(races.Race(4, "even"), {"asynchronous": fast, "synchronous": thrifty}, list(races.METHODS))
    assert line.split()[:2] == ["4", "even"]
    assert line.split()[-4:] == ["asynchronous", "synchronous,", "after", "150"]


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_the_quick_flags_train_and_compare_on_real_processes(tmp_path: pathlib.Path) -> None:
    flagfile = f"--flagfile={FOLDER / 'quick.flags'}"
    command = [sys.executable, str(FOLDER / "run.py"), flagfile, f"--output_dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.keys() == {"2-uneven"}
    points = summary["2-uneven"]["points"]
    assert points.keys() == {"asynchronous", "averaged"}
    # Who waits for nobody uses more examples in the time than who waits for the slow one.
    rates = {name: run[-1]["examples"] / max(run[-1]["seconds"], 1e-9) for name, run in points.items()}
    assert rates["asynchronous"] > rates["averaged"]
    assert (tmp_path / "uneven.png").exists()
    assert "asynchronous" in (tmp_path / "table.txt").read_text()
