# SPDX-License-Identifier: Apache-2.0
"""Draws what `run.py` left: loss and validation accuracy against seconds. `python plot.py [results]` draws it again."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping

import matplotlib

matplotlib.use("agg")  # draws into a file; needs no display
from matplotlib import pyplot as plt
from matplotlib.ticker import PercentFormatter

# Distinct for colour-blind readers too (Okabe and Ito), and by line style where curves lie on each other.
STYLES = [("#0072B2", "-"), ("#E69F00", "--"), ("#009E73", "-."), ("#D55E00", ":")]


def save(output_dir: pathlib.Path, titles: Mapping[str, str]) -> pathlib.Path:
    """Saves `digits.png`, with one curve for each strategy that has results.

    Args:
      output_dir: where the strategies' folders are.
      titles: what to call each strategy, by the name of its folder.
    """
    figure, (loss, accuracy) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for (strategy, title), (colour, line) in zip(titles.items(), STYLES, strict=True):
        path = output_dir / strategy / "epochs.jsonl"
        rows = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
        seconds = [row["seconds"] for row in rows]
        style = {"color": colour, "linestyle": line, "linewidth": 2.0, "marker": "o", "markersize": 3.5, "label": title}
        if rows:
            loss.plot(seconds, [row["loss"] for row in rows], **style)
            accuracy.plot(seconds, [row["val_accuracy"] for row in rows], **style)
    _dress(loss, "Training loss", "cross-entropy")
    loss.set_yscale("log")
    _dress(accuracy, "Validation accuracy, 360 digits held out", "accuracy")
    accuracy.set_ylim(0.8, 1.005)
    accuracy.set_yticks([0.80, 0.85, 0.90, 0.95, 1.00])
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    accuracy.axhline(0.97, color="0.5", linewidth=1.0, zorder=0)
    accuracy.text(
        0.99,
        0.966,
        "asked: 97% (asynchronous: 94%)",
        color="0.4",
        ha="right",
        va="top",
        transform=accuracy.get_yaxis_transform(),
    )
    accuracy.legend(loc="lower right", frameon=False)
    figure.savefig(output_dir / "digits.png", dpi=150)
    plt.close(figure)
    return output_dir / "digits.png"


def _dress(axes: plt.Axes, title: str, label: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xlabel("seconds since training began")
    axes.set_ylabel(label)
    axes.set_xlim(left=0)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    import compare

    print(save(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else compare.HERE / "results"), compare.STRATEGIES))
