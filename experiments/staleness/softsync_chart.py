# SPDX-License-Identifier: Apache-2.0
"""Draws how stale the gradients were, and what came of it. `python softsync_chart.py [results]` draws it again."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("agg")  # draws into a file; needs no display
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator, PercentFormatter

# A colour for each n (Okabe and Ito), dashed for the fixed rate.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
LINES = {"fixed": "--", "inverse": "-"}


def save(output_dir: pathlib.Path, runs: Sequence[Any]) -> pathlib.Path:
    """Saves `staleness.png`.

    Args:
      output_dir: where the runs' folders are.
      runs: `softsync_runs.runs(...)`; those without results are left out.
    """
    figure, (ages, accuracy) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    colours = dict(zip(dict.fromkeys(run.n for run in runs if run.n), COLOURS, strict=False))
    for run in runs:
        folder = output_dir / run.name
        if not (folder / "report.json").exists():
            continue
        style = {"color": colours.get(run.n, "0.25"), "linestyle": LINES.get(run.rule, ":"), "linewidth": 2.0}
        staleness = {
            int(key): count for key, count in json.loads((folder / "report.json").read_text())["staleness"].items()
        }
        if run.rule != "fixed" and run.n:
            keys = range(max(staleness) + 2)
            shares = [staleness.get(key, 0) / sum(staleness.values()) for key in keys]
            mean = sum(key * share for key, share in zip(keys, shares, strict=True))
            label = f"n={run.n}: mean {mean:.2f}"
            ages.plot(keys, shares, **style, marker="o", markersize=3.5, label=label)
        rows = [json.loads(text) for text in (folder / "epochs.jsonl").read_text().splitlines()]
        x, y = [row["epoch"] for row in rows], [row["val_accuracy"] for row in rows]
        accuracy.plot(x, y, **style, marker="o", markersize=3.5, label=run.title)
    _dress(
        ages, "How stale gradients are (inverse rule)", "staleness: global step - local step", "share of the gradients"
    )
    ages.set_ylim(bottom=0)
    ages.set_xlim(left=-0.3)
    ages.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _dress(accuracy, "Validation accuracy, 360 digits held out", "epoch", "accuracy")
    accuracy.set_ylim(0, 1.02)
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    figure.savefig(output_dir / "staleness.png", dpi=120)
    plt.close(figure)
    return output_dir / "staleness.png"


def _dress(axes: plt.Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False)


if __name__ == "__main__":
    import softsync_runs

    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else softsync_runs.HERE / "results")
    print(save(folder, softsync_runs.runs([1, 2, 4, 8])))
