# SPDX-License-Identifier: Apache-2.0
"""Dense against sparse models under parameter servers: where each saturates.

python saturation.py

Published (Jeff Dean, talks of 2015 and 2016): 25 to 40 times the speed of one GPU on 50 GPUs for dense models, and 300
times on 500 for sparse ones. The ordering is to be reproduced, under the assumptions `DENSE` and `SPARSE`.
"""

from __future__ import annotations

import dataclasses
import pathlib

import matplotlib
from absl import app, flags

from tfdist import BackupWorkers
from tfdist.planning import simulation

matplotlib.use("agg")  # draws into a file; needs no display
from matplotlib import pyplot as plt

FLAGS = flags.FLAGS
HERE = pathlib.Path(__file__).resolve().parent
flags.DEFINE_string("plot", str(HERE / "results" / "saturation.png"), "Where the plot goes.")
WORKERS = (1, 2, 5, 10, 20, 50, 100, 200, 500)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model and its cluster: all links have 10 Gbit/s, computing times are lognormal with s = 0.25.

    Attributes:
      title: for the plot.
      model: its bytes and rows.
      step_secs: mean seconds of a step on one device.
      servers: parameter servers.
      published: workers, and the published speedup there.
    """

    title: str
    model: simulation.ModelProfile
    step_secs: float
    servers: int
    published: tuple[int, float, float]


# A net for images of 25 million parameters, on a K40 with 32 images a step; ten parameter servers.
DENSE = Setting(
    "dense: 100 MB of gradients, a step of 1 s, 10 servers",
    simulation.ModelProfile(dense_bytes="100MB", batch_size=32),
    1.0,
    10,
    (50, 25, 40),
)
# A language model whose softmax and embeddings are sampled: 8,000 rows of 4 kB and a dense part of 8 MB; 50 servers.
SPARSE = Setting(
    "sparse: 8,000 rows of 4 kB and 8 MB of dense gradients, a step of 1 s, 50 servers",
    simulation.ModelProfile(dense_bytes="8MB", sparse_tables=[simulation.SparseTable(8000, 4096)], batch_size=32),
    1.0,
    50,
    (500, 300, 300),
)


def speedups(setting: Setting, is_synchronous: bool) -> dict[int, float]:
    """Returns throughput by number of workers, relative to one device without communication."""
    found = {}
    for workers in WORKERS:
        cluster = simulation.ClusterModel(
            workers=workers,
            servers=setting.servers,
            compute=simulation.lognormal(mean=setting.step_secs, s=0.25),
            network=simulation.NetworkModel(bandwidth="10Gbit", latency_secs="50us"),
        )
        policies = [BackupWorkers(spares=0)] if is_synchronous else []
        updates = 30 if is_synchronous else 20 * workers
        result = simulation.simulate(cluster, setting.model, policies=policies, num_updates=updates)
        found[workers] = result.examples_per_sec / result.single_examples_per_sec
    return found


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"saturation.py takes flags only. Received: {' '.join(argv[1:])}")
    figure, grid = plt.subplots(1, 2, figsize=(10.5, 4.6), layout="constrained", sharey=True)
    for axes, setting in zip(grid, (DENSE, SPARSE), strict=True):
        print(setting.title)
        print(f"  {'workers':14}" + "".join(f"{count:>8}" for count in WORKERS))
        for name, colour, is_synchronous in (("asynchronous", "#0072B2", False), ("synchronous", "#D55E00", True)):
            found = speedups(setting, is_synchronous)
            print(f"  {name:14}" + "".join(f"{value:8.1f}" for value in found.values()))
            axes.plot(list(found), list(found.values()), color=colour, marker="o", markersize=4, label=name)
        workers, low, high = setting.published
        axes.plot(
            [workers, workers], [low, high], color="black", linewidth=4, marker="_", markersize=12, label="published"
        )
        axes.plot(WORKERS, WORKERS, color="0.6", linestyle=":", label="linear")
        axes.set(xscale="log", yscale="log", xlabel="workers")
        axes.set_xticks(WORKERS, [str(count) for count in WORKERS])
        axes.set_yticks(WORKERS, [str(count) for count in WORKERS])
        axes.minorticks_off()
        axes.set_title(setting.title.replace(", a step", ",\na step"), loc="left", fontsize=9)
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylabel("times the throughput of one device")
    grid[0].legend(frameon=False)
    path = pathlib.Path(FLAGS.plot)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"plot: {path}")


if __name__ == "__main__":
    app.run(main)
