# SPDX-License-Identifier: Apache-2.0
"""Draws how far each run was when, and who was killed when. `python chaos_chart.py [results]` draws it again."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("agg")  # draws into a file; needs no display
import step_logs
from matplotlib import pyplot as plt

TITLES = {"parameter_server": "Parameter server: chief, 2 workers, 1 ps", "multi_worker": "Multi-worker: 2 workers"}
# Distinct for colour-blind readers too (Okabe and Ito), and by shape.
KILLED = {"chief": ("#D55E00", "s"), "ps": ("#CC79A7", "D"), "worker": ("#E69F00", "v")}
CHAOS, CALM = "#0072B2", "0.6"


def save(output_dir: pathlib.Path, summary: Mapping[str, Mapping[str, Any]]) -> pathlib.Path:
    """Saves `chaos.png`.

    Args:
      output_dir: where the runs' folders are.
      summary: what `trials.compare` writes: for each strategy and run at least "start", in seconds since 1970.
    """
    figure, panels = plt.subplots(
        1, len(summary), figsize=(5.5 * len(summary), 4.6), layout="constrained", squeeze=False
    )
    for axes, (strategy, runs) in zip(panels[0], summary.items(), strict=True):
        for kind, row in runs.items():
            folder = output_dir / f"{strategy}-{kind}"
            attempts = step_logs.read(folder / "steps")
            _draw_steps(axes, kind, attempts, row["start"])
            path = folder / "kills.json"
            _draw_kills(axes, json.loads(path.read_text()) if path.exists() else [], attempts, row["start"])
        axes.set_title(TITLES[strategy], loc="left")
        axes.set_xlabel("seconds since the launcher was started")
        axes.set_ylabel("step")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower right", frameon=False)
    figure.savefig(output_dir / "chaos.png", dpi=120)
    plt.close(figure)
    return output_dir / "chaos.png"


def _draw_steps(axes: plt.Axes, kind: str, attempts: Mapping[int, Sequence[step_logs.Step]], start: float) -> None:
    label = {"calm": "calm", "chaos": "while tasks are killed"}[kind]
    for steps in attempts.values():
        x, y = [step.secs - start for step in steps], [step.number for step in steps]
        axes.plot(x, y, color=CHAOS if kind == "chaos" else CALM, linewidth=2.0, label=label)
        label = None


def _draw_kills(
    axes: plt.Axes, kills: Sequence[Any], attempts: Mapping[int, Sequence[step_logs.Step]], start: float
) -> None:
    steps = [(step.secs - start, step.number) for made in attempts.values() for step in made]
    for task_type, (colour, marker) in KILLED.items():
        times = [secs for secs, task in kills if task.partition(":")[0] == task_type]
        # At the newest step of that time.
        heights = [max(((when, number) for when, number in steps if when <= secs), default=(0, 0))[1] for secs in times]
        if times:
            label = f"{task_type} killed"
            style = {"color": colour, "marker": marker, "edgecolor": "white", "linewidth": 0.7, "zorder": 3}
            axes.scatter(times, heights, s=55, label=label, **style)


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent / "results")
    print(save(folder, json.loads((folder / "summary.json").read_text())))
