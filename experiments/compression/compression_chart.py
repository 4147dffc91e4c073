# SPDX-License-Identifier: Apache-2.0
"""Draws accuracy against bytes, one panel per net. `python compression_chart.py [results]` draws it again."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import matplotlib

matplotlib.use("agg")  # draws into a file; needs no display
from matplotlib import patches, patheffects
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, MultipleLocator, NullLocator, PercentFormatter

# Distinct for colour-blind readers (Okabe and Ito), and by marker.
STYLES = {
    "uncompressed": ("0.2", "*"),
    "HalfPrecision": ("#E69F00", "s"),
    "Threshold, adaptive": ("#0072B2", "o"),
    "Threshold, fixed tau": ("#56B4E9", "^"),
    "TopK": ("#009E73", "D"),
    "SignSGD": ("#CC79A7", "P"),
    "PowerSGD": ("#D55E00", "v"),
    "PowerSGD, 4 bits": ("#882255", "<"),
}
WANTED_SHARE, WANTED_BEHIND = 1e-3, 0.005
# Accuracies below it are drawn on the lower edge and labelled with their value.
_LOWEST = 0.82
_TARGET = "#FBF7C7"


def save(output_dir: pathlib.Path, summary: Mapping[str, Mapping[str, Any]], nets: Mapping[str, str]) -> pathlib.Path:
    """Saves `compression.png`.

    Args:
      output_dir: its folder.
      summary: rows of `compression_runs.summarize` by run.
      nets: title of each net.
    """
    drawn = [net for net in nets if any(row["net"] == net for row in summary.values())]
    shape = {"figsize": (6.2 * len(drawn) + 0.6, 5.6), "squeeze": False, "sharey": True}
    figure, grid = plt.subplots(1, len(drawn), layout="constrained", **shape)
    for axes, net in zip(grid[0], drawn, strict=True):
        rows = [row for row in summary.values() if row["net"] == net]
        for family in STYLES:
            _draw(axes, family, [row for row in rows if row["family"] == family])
        _mark_target(axes, rows)
        _dress(axes, nets[net])
    grid[0, 0].set_ylabel("validation accuracy, 1,800 images")
    target = patches.Patch(color=_TARGET, label="target: 1/1,000 of the bytes, 0.5 points")
    lines = {str(line.get_label()): line for axes in grid.flat for line in axes.lines if line.get_label()[0] != "_"}
    lines[target.get_label()] = target
    figure.legend(
        lines.values(),
        lines.keys(),
        loc="outside lower center",
        frameon=False,
        ncols=4 if len(drawn) > 1 else 3,
    )
    figure.savefig(output_dir / "compression.png", dpi=110)
    plt.close(figure)
    return output_dir / "compression.png"


def _draw(axes: plt.Axes, family: str, rows: list[Mapping[str, Any]]) -> None:
    if not rows:
        return
    colour, marker = STYLES[family]
    rows = sorted(rows, key=lambda row: row["share"])
    x, y = [row["share"] for row in rows], [max(row["accuracy"], _LOWEST) for row in rows]
    axes.plot(x, y, color=colour, marker=marker, markersize=7, linewidth=1.4, label=family, clip_on=False, zorder=3)
    # Labels of adaptive thresholds are above their points, all others below, because the lines are close.
    place = {"xytext": (0, 8), "va": "bottom"} if family == "Threshold, adaptive" else {"xytext": (0, -8), "va": "top"}
    for row, at in zip(rows, y, strict=True):
        is_low = row["accuracy"] < _LOWEST
        text = f"{row['label']}: {row['accuracy']:.0%}" if is_low else row["label"]
        style = {"xytext": (0, 8), "va": "bottom"} if is_low else place
        # The line rises from the leftmost point, to its right.
        is_left = row is rows[0] and len(rows) > 1
        axes.annotate(
            text,
            (row["share"], at),
            textcoords="offset points",
            ha="right" if is_left else "center",
            fontsize=8,
            color=colour,
            # Keeps labels readable where a line runs behind them.
            path_effects=[patheffects.withStroke(linewidth=3, foreground="white")],
            zorder=4,
            **style,
        )


def _mark_target(axes: plt.Axes, rows: list[Mapping[str, Any]]) -> None:
    """Shades the target: 1/1000 of the bytes, within half a point of uncompressed training."""
    uncompressed = next((row["accuracy"] for row in rows if row["family"] == "uncompressed"), None)
    if uncompressed is not None:
        axes.axhline(uncompressed, color="0.6", linewidth=0.8, linestyle=":", zorder=0)
        axes.fill_between([1e-6, WANTED_SHARE], uncompressed - WANTED_BEHIND, 1.005, color=_TARGET)


def _dress(axes: plt.Axes, title: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xscale("log")
    axes.set_xlim(3e-5, 2)
    axes.set_ylim(_LOWEST, 1.005)
    axes.set_xlabel("bytes per update after the first epoch, as a fraction of float32")
    axes.xaxis.set_major_locator(LogLocator(10, numticks=10))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: "1" if share >= 1 else f"1/{round(1 / share):,}"))
    axes.yaxis.set_major_locator(MultipleLocator(0.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    import compression_runs

    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else compression_runs.HERE / "results")
    print(save(folder, json.loads((folder / "summary.json").read_text()), compression_runs.NETS))
