# SPDX-License-Identifier: Apache-2.0
"""Draws loss against seconds for every run. `python chart.py [results] [spares]` draws it again."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping

import matplotlib

matplotlib.use("agg")  # draws into a file; needs no display
from matplotlib import pyplot as plt

# A colour for each strategy (Okabe and Ito), dashed without spares.
STYLES = [("#0072B2", "--"), ("#0072B2", "-"), ("#D55E00", "--"), ("#D55E00", "-")]


def save(output_dir: pathlib.Path, titles: Mapping[str, str]) -> pathlib.Path:
    """Saves `backup_workers.png`.

    Args:
      output_dir: where the runs' folders are.
      titles: what to call each run, by the name of its folder.
    """
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    for (name, title), (colour, line) in zip(titles.items(), STYLES, strict=True):
        path = output_dir / name / "epochs.jsonl"
        rows = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
        if rows:
            x, y = [row["seconds"] for row in rows], [row["val_loss"] for row in rows]
            axes.plot(x, y, color=colour, linestyle=line, linewidth=2.0, marker="o", markersize=3.5, label=title)
    axes.set_title("One straggler, with and without a spare: loss on 360 digits held out", loc="left")
    axes.set_xlabel("seconds since training began")
    axes.set_ylabel("cross-entropy")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlim(left=0)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(output_dir / "backup_workers.png", dpi=150)
    plt.close(figure)
    return output_dir / "backup_workers.png"


if __name__ == "__main__":
    import contest

    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else contest.HERE / "results")
    print(save(folder, contest.titles(int(sys.argv[2] if len(sys.argv) > 2 else 1))))
