# SPDX-License-Identifier: Apache-2.0
"""Draws and prints how the sparse and the dense model scale: measured, and as predicted before."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

import matplotlib

matplotlib.use("agg")  # draws into a file; needs no display
from matplotlib import pyplot as plt

# What is wanted of the runs.
LEAST_OF_LINEAR, WITHIN, MOST_GAIN = 0.85, 0.15, 1.6
COLOURS = {"sparse": "#0072B2", "dense": "#D55E00"}


def rates(entry: Mapping[str, Any]) -> dict[int, float]:
    """Returns the median steps per second by number of workers, of the runs that were made."""
    runs = entry.get("runs", {})
    return {int(name): statistics.median(run["steps_per_sec"]) for name, run in runs.items() if "steps_per_sec" in run}


def misses(found: Mapping[str, Any]) -> list[str]:
    """Returns what is not as wanted of the runs that were made."""
    missed = []
    measured = {model: rates(entry) for model, entry in found.items()}
    sparse, dense = measured.get("sparse", {}), measured.get("dense", {})
    if {1, 8} <= sparse.keys() and (share := sparse[8] / (8 * sparse[1])) < LEAST_OF_LINEAR:
        missed.append(f"sparse: 8 workers make {share:.2f} of 8 times one worker's steps; wanted: {LEAST_OF_LINEAR}")
    if {4, 8} <= dense.keys() and (gain := dense[8] / dense[4]) > MOST_GAIN:
        missed.append(f"dense: 8 workers make {gain:.2f} times the steps of 4; wanted: at most {MOST_GAIN}, saturated")
    for model, entry in found.items():
        for workers, rate in measured[model].items():
            error = entry["runs"][str(workers)]["predicted"] / rate - 1
            if abs(error) > WITHIN:
                missed.append(f"{model}, {workers} workers: the prediction is {error:+.1%} off; wanted: {WITHIN:.0%}")
    return missed


def table(found: Mapping[str, Any]) -> str:
    """Returns a line for each run."""
    lines = ["| Model | Workers | Predicted | Measured (epochs) | Error | Of linear | Times one device | MB a step |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for model, entry in found.items():
        alone, measured = 1 / entry["profile"]["step_secs"], rates(entry)
        for workers, rate in measured.items():
            run = entry["runs"][str(workers)]
            rounds = ", ".join(f"{each:.2f}" for each in run["steps_per_sec"])
            of_linear = f"{rate / (workers * measured[1]):.2f}" if 1 in measured else ""
            cells = [model, workers, f"{run['predicted']:.2f}", f"{rate:.2f} ({rounds})"]
            cells += [f"{run['predicted'] / rate - 1:+.1%}", of_linear, f"{rate / alone:.2f}"]
            cells.append(f"{statistics.median(run['bytes_per_step']) / 1e6:.2f}")
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def save(path: pathlib.Path, found: Mapping[str, Any]) -> pathlib.Path:
    """Saves the plot; returns its path."""
    figure, axes = plt.subplots(figsize=(6.4, 4.6), layout="constrained")
    counts = sorted({int(workers) for entry in found.values() for workers in entry["runs"]})
    for model, entry in found.items():
        alone, measured = 1 / entry["profile"]["step_secs"], rates(entry)
        predicted = [entry["runs"][str(workers)]["predicted"] / alone for workers in counts]
        axes.plot(counts, predicted, "--", color=COLOURS[model], linewidth=1.5, label=f"{model}: predicted")
        speedups = [rate / alone for rate in measured.values()]
        axes.plot(list(measured), speedups, "o", color=COLOURS[model], markersize=6, label=f"{model}: measured")
    axes.plot(counts, counts, ":", color="0.6", label="linear")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    ticks = [0.25, 0.5, 1, 2, 4, 8]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel="workers", ylabel="times the steps per second of one device that sends nothing")
    axes.set_title("16 MB of variables on two parameter servers, links of 200 Mb/s", loc="left", fontsize=10)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
