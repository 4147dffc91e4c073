# SPDX-License-Identifier: Apache-2.0
"""Draws the charts of the README from the results of `make bench`: `python benchmarks/charts.py`.

No number of a chart is typed by hand; `tests/test_docs.py` compares the committed picture with the results.
"""

from __future__ import annotations

import json
import pathlib
import statistics

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "results" / "reference.json"
STRAGGLER = HERE.parent / "docs" / "images" / "straggler.svg"
STRATEGIES = {
    "mirrored": "MirroredStrategy",
    "multi_worker": "MultiWorkerMirroredStrategy",
    "parameter_server": "ParameterServerStrategy",
}


def straggler_rates() -> dict[str, tuple[float, float, float]]:
    """Median updates/s of the row `stalled`, by strategy: without a spare, with one, and the limit of these delays."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["training"]
    found = {}
    for strategy in STRATEGIES:
        rivals = {row["rival"]: row for row in rows if (row["row"], row["strategy"]) == ("stalled", strategy)}
        limit = rivals.pop("limit")
        (without,) = rivals.values()
        columns = without["rival_steps_per_sec"], without["tfdist_steps_per_sec"], limit["rival_steps_per_sec"]
        found[strategy] = tuple(statistics.median(column) for column in columns)
    return found


def labels() -> list[str]:
    """The numbers that the chart shows."""
    return [f"{rate:.1f}" for without, spared, _ in straggler_rates().values() for rate in (without, spared)]


def draw_straggler(path: pathlib.Path = STRAGGLER) -> None:
    """Writes the chart of `straggler_rates`."""
    import matplotlib as mpl

    mpl.use("svg")
    # Text as text, and the same bytes for the same results.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tfdist", "font.size": 11})
    import matplotlib.pyplot as plt

    rates = straggler_rates()
    figure, axes = plt.subplots(figsize=(7.6, 3.2))
    for index, (without, spared, limit) in enumerate(reversed(rates.values())):
        for offset, rate, colour, label in (
            (0.19, without, "#b0b7bf", "waits for all four"),
            (-0.19, spared, "#1f6fb2", "BackupWorkers(spares=1)"),
        ):
            axes.barh(index + offset, rate, 0.36, color=colour, label=label if index == 0 else None)
            is_long = rate > limit / 2
            place, colour, side = (rate - 0.1, "white", "right") if is_long else (rate + 0.1, "black", "left")
            axes.text(place, index + offset, f"{rate:.1f}", va="center", ha=side, color=colour)
        axes.plot([limit, limit], [index - 0.42, index + 0.42], color="#444", lw=1, ls=":")
    axes.set_yticks(range(len(rates)), [STRATEGIES[name] for name in reversed(rates)])
    axes.set_xlim(0, max(limit for *_, limit in rates.values()) * 1.12)
    axes.set_xlabel("updates per second; dotted: what the delays alone allow")
    figure.suptitle("Four workers, one of them ten times as slow", x=0.01, ha="left", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="upper right", frameon=False, ncols=2, fontsize=10, bbox_to_anchor=(0.99, 0.93))
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    draw_straggler()
