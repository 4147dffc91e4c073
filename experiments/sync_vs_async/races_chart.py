# SPDX-License-Identifier: Apache-2.0
"""Draws loss against seconds and against examples, one picture for even and one for uneven workers."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import matplotlib

matplotlib.use("agg")  # draws into a file; needs no display
from matplotlib import pyplot as plt

# Okabe and Ito, which colour-blind readers can tell apart too.
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7")


def save(output_dir: pathlib.Path, results: Mapping[Any, Mapping[str, Any]], titles: Mapping[str, str]) -> list[Any]:
    """Saves `even.png` and `uneven.png`, of those that there is anything of.

    Args:
      output_dir: where they go.
      results: by race (`races.Race`) and method, the points.
      titles: what to call each method.
    """
    alone = next((points for race, points in results.items() if race.num_workers == 1), {})
    paths = []
    for speeds in dict.fromkeys(race.speeds for race in results):
        drawn = [race for race in results if race.speeds == speeds and (race.num_workers > 1 or len(results) == 1)]
        if not drawn:
            continue
        shape = {"figsize": (4.0 * len(drawn) + 1.8, 7.0), "squeeze": False, "sharey": True}
        figure, grid = plt.subplots(2, len(drawn), layout="constrained", **shape)
        for column, race in enumerate(drawn):
            for axes, by in zip(grid[:, column], ("seconds", "examples"), strict=True):
                _draw(axes, by, results[race], titles)
                for points in alone.values() if race.num_workers > 1 else ():
                    _curve(axes, by, points, color="0.5", linestyle=":", label="1 worker")
                axes.set_xlabel("seconds" if by == "seconds" else "examples that entered updates")
                axes.set_ylabel("cross-entropy on 360 digits held out" if column == 0 else "")
            grid[0, column].set_title(f"{race.num_workers} workers", loc="left")
        lines = {str(line.get_label()): line for axes in grid.flat for line in axes.lines}
        figure.legend(lines.values(), lines.keys(), loc="outside right upper", frameon=False)
        figure.suptitle("All workers equally fast" if speeds == "even" else "One worker slower than the others")
        paths.append(output_dir / f"{speeds}.png")
        figure.savefig(paths[-1], dpi=110)
        plt.close(figure)
    return paths


def _draw(axes: plt.Axes, by: str, results: Mapping[str, Any], titles: Mapping[str, str]) -> None:
    for (method, title), colour in zip(titles.items(), COLOURS, strict=True):
        if method in results:
            _curve(axes, by, results[method], color=colour, label=title)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)


def _curve(axes: plt.Axes, by: str, points: Any, **style: Any) -> None:
    x, y = [point[by] for point in points], [point["val_loss"] for point in points]
    axes.plot(x, y, linewidth=1.8, marker="o", markersize=3.0, **style)
