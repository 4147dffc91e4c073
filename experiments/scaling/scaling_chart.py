# SPDX-License-Identifier: Apache-2.0
"""Draws published against predicted throughput of a table, one panel for each model."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("agg")  # draws into a file; needs no display
from matplotlib import pyplot as plt
from matplotlib.ticker import PercentFormatter

BLUE, ORANGE = "#0072B2", "#D55E00"


def save(path: pathlib.Path, title: str, results: Sequence[Mapping[str, Any]], calibrate_up_to: int) -> None:
    """Saves the plot.

    Args:
      path: the picture.
      title: its title.
      results: rows with devices, model, published, predicted, low and high.
      calibrate_up_to: devices of the last row that the model was calibrated on.
    """
    models = sorted({row["model"] for row in results})
    columns = min(3, len(models))
    lines = -(-len(models) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(3.9 * columns + 0.4, 3.4 * lines + 0.9), squeeze=False, layout="constrained"
    )
    for axes in list(grid.flat)[len(models) :]:
        axes.set_visible(False)
    for axes, model in zip(grid.flat, models, strict=False):
        rows = sorted((row for row in results if row["model"] == model), key=lambda row: row["devices"])
        _panel(axes, rows, calibrate_up_to)
        worst = max((abs(row["error"]) for row in rows if row["devices"] > calibrate_up_to), default=None)
        axes.set_title(model if worst is None else f"{model}: within {worst:.1%}", loc="left", fontsize=10)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axes: plt.Axes, rows: Sequence[Mapping[str, Any]], calibrate_up_to: int) -> None:
    """Draws efficiency, the throughput per device relative to the first row, because differences are small."""
    devices = [row["devices"] for row in rows]
    single = rows[0]["published"] / rows[0]["devices"]

    def efficiency(name: str, chosen: Sequence[Mapping[str, Any]]) -> list[float]:
        return [row[name] / (single * row["devices"]) for row in chosen]

    low, high = efficiency("low", rows), efficiency("high", rows)
    axes.fill_between(devices, low, high, color=BLUE, alpha=0.2, label="90 % interval")
    axes.plot(devices, efficiency("predicted", rows), color=BLUE, linewidth=1.8, label="predicted")
    for is_known, colour, label in ((True, "0.2", "calibrated on"), (False, ORANGE, "published, not calibrated on")):
        chosen = [row for row in rows if (row["devices"] <= calibrate_up_to) == is_known]
        x = [row["devices"] for row in chosen]
        axes.plot(x, efficiency("published", chosen), "o", markersize=5, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(devices, [str(count) for count in devices])
    axes.set_ylim(0, 1.1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("devices")
    axes.set_ylabel("throughput per device, of one device's")
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
