# SPDX-License-Identifier: Apache-2.0
"""The compression experiment: counted bytes, expectations, and runs that are trained again."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pathlib
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.slow

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "compression"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())
SETTING = {"epochs": 3, "warmup_epochs": 1, "batch_size": 128, "learning_rate": 0.05, "seed": 1}


@pytest.fixture
def compression_runs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("compression_runs")


def _write(run_dir: pathlib.Path, title: str, bytes_by_epoch: list[float], parameters: int = 1000) -> None:
    run_dir.mkdir()
    rows = [
        {"epoch": epoch, "seconds": 2.0 * epoch, "updates": 10, "bytes": sent, "val_accuracy": 0.9, "val_loss": 0.3}
        for epoch, sent in enumerate(bytes_by_epoch, 1)
    ]
    (run_dir / "epochs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_dir / "run.json").write_text(json.dumps({"codec": title, "setting": SETTING, "parameters": parameters}))


def _row(codec: str, family: str, share: float, accuracy: float, net: str = "dense") -> dict[str, Any]:
    size = share * 58.4e6
    row = {"net": net, "codec": codec, "family": family, "label": "1e-3", "density": "0.001", "updates": 10}
    return row | {"bytes": size, "share": share, "accuracy": accuracy, "loss": 0.1, "seconds": 3.0}


def _summary(half: float = 0.5, share: float = 0.0009, accuracy: float = 0.99) -> dict[str, dict[str, Any]]:
    return {
        "dense-none": _row("uncompressed", "uncompressed", 1.0, 0.994),
        "dense-float16": _row("HalfPrecision(dtype='float16')", "HalfPrecision", half, 0.994),
        "dense-threshold-2e-3": _row("Threshold(max_density=0.0025)", "Threshold, adaptive", share, accuracy),
    }


def test_bytes_counted_after_first_epoch(compression_runs: ModuleType, tmp_path: pathlib.Path) -> None:
    run = compression_runs.Run("digits", "signsgd")
    _write(tmp_path / "run", run.codec.title, [9000.0, 1000.0, 3000.0])
    row = compression_runs.summarize(run, tmp_path / "run")
    assert (row["bytes"], row["share"]) == (200.0, 0.05)
    assert (row["updates"], row["seconds"], row["accuracy"]) == (30, 6.0, 0.9)


def test_reuse_other_setting_or_codec_trains_again(compression_runs: ModuleType, tmp_path: pathlib.Path) -> None:
    run = compression_runs.Run("digits", "signsgd")
    assert not compression_runs.is_complete(run, SETTING, tmp_path / "run")
    _write(tmp_path / "run", run.codec.title, [1.0])
    assert compression_runs.is_complete(run, SETTING, tmp_path / "run")
    assert not compression_runs.is_complete(run, SETTING | {"seed": 2}, tmp_path / "run")
    assert not compression_runs.is_complete(compression_runs.Run("digits", "none"), SETTING, tmp_path / "run")


def test_compare_reuse_tables_have_all_complete_runs(compression_runs: ModuleType, tmp_path: pathlib.Path) -> None:
    none, signs = compression_runs.Run("digits", "none"), compression_runs.Run("digits", "signsgd")
    for run in (none, signs):
        _write(tmp_path / run.name, run.codec.title, [100.0, 1250.0])
    settings = dict.fromkeys(compression_runs.NETS, SETTING)
    assert compression_runs.compare(tmp_path, [signs], settings, reuse=True) == 0
    assert list(json.loads((tmp_path / "summary.json").read_text())) == ["digits-none", "digits-signsgd"]
    assert "| `SignSGD()` | 1 | 125 | 1/32 | 90.00% | 0.00 |" in (tmp_path / "table.md").read_text()


def test_missed_all_targets_met_is_empty(compression_runs: ModuleType) -> None:
    assert compression_runs.missed(_summary(), EXPECTED) == []
    assert compression_runs.missed({}, EXPECTED) == []


@pytest.mark.parametrize(
    ("summary", "start"),
    [
        ({"half": 0.6}, "dense: HalfPrecision(dtype='float16') sends 0.6000 of the bytes"),
        ({"share": 0.002}, "dense: no codec sends at most 1/1,000 of"),
        ({"accuracy": 0.95}, "dense: no codec sends at most 1/1,000 of"),
    ],
)
def test_missed_expectation_is_named(compression_runs: ModuleType, summary: dict[str, float], start: str) -> None:
    (problem,) = compression_runs.missed(_summary(**summary), EXPECTED)
    assert problem.startswith(start)
    assert "\n" not in problem


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_two_workers_send_half_the_bytes_by_float16(tmp_path: pathlib.Path) -> None:
    flags = ["--nets=digits", "--codecs=none", "--codecs=float16", "--digits_epochs=2", f"--output_dir={tmp_path}"]
    command = [sys.executable, str(FOLDER / "run.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    low, high = EXPECTED["digits"]["half_precision_share_within"]
    assert low <= summary["digits-float16"]["share"] <= high
    assert (tmp_path / "compression.png").exists()
