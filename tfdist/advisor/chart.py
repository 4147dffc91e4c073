# SPDX-License-Identifier: Apache-2.0
"""Plot of throughput against workers, with intervals. It needs matplotlib."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from tfdist.advisor.advice import Row

# Okabe and Ito, which colour-blind readers can tell apart too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#000000", "#999999")


def save(path: pathlib.Path, found: Sequence[Row], chosen: Row, title: str) -> None:
    """Saves the plot.

    Raises:
      ValueError: matplotlib is not installed, or can't write such a file.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError('--plot needs matplotlib; pip install "tfdist[experiments]"') from None
    matplotlib.use("agg")  # draws into a file; needs no display
    from matplotlib import pyplot as plt

    single = found[0].prediction.examples_per_sec
    counts = sorted({row.workers for row in found})
    figure, axes = plt.subplots(figsize=(9.0, 5.2), layout="constrained")
    axes.plot(counts, [single * count for count in counts], color="0.6", linestyle=":", label="linear")
    for colour, (name, rows) in zip(_COLOURS, _best_lines(found).items(), strict=False):
        x = [row.workers for row in rows]
        axes.plot(
            x, [row.prediction.examples_per_sec for row in rows], color=colour, marker="o", markersize=4, label=name
        )
        low, high = [row.prediction.low for row in rows], [row.prediction.high for row in rows]
        axes.fill_between(x, low, high, color=colour, alpha=0.12)
    axes.plot(
        [chosen.workers],
        [chosen.prediction.examples_per_sec],
        "o",
        markersize=14,
        fillstyle="none",
        color="black",
        markeredgewidth=1.6,
        label="recommended",
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("workers")
    axes.set_ylabel("examples per second, 90 % interval")
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=110)
    except ValueError as error:
        raise ValueError(f"--plot: {error}. Received: {str(path)!r}") from None
    finally:
        plt.close(figure)


def _best_lines(found: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the rows of each kind of candidate, with the best number of servers and of spares."""
    lines: dict[str, dict[int, Row]] = {}
    for row in found[1:]:
        if row.candidate is None:
            continue
        short = {"MultiWorkerMirroredStrategy": "multi-worker", "ParameterServerStrategy": "parameter server"}
        label = "spares" if row.candidate.spares else row.candidate.label
        own = lines.setdefault(f"{short[row.candidate.strategy]}, {label}", {1: found[0]})
        best = own.get(row.workers)
        if best is None or row.prediction.examples_per_sec > best.prediction.examples_per_sec:
            own[row.workers] = row
    return {name: [own[count] for count in sorted(own)] for name, own in lines.items()}
