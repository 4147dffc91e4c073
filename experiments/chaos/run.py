# SPDX-License-Identifier: Apache-2.0
"""Trains on digits while a random task is killed every 10 s, and compares with the same training in peace.

python run.py --flagfile=chaos.flags                                    # parameter server and multi-worker
python run.py --flagfile=chaos.flags --strategy=multi_worker            # one of them
"""

from __future__ import annotations

import pathlib
import sys

import trials
from absl import app, flags

FLAGS = flags.FLAGS
HERE = pathlib.Path(__file__).resolve().parent

flags.DEFINE_enum("strategy", "all", ["all", *trials.STRATEGIES], "The strategy to train under.")
flags.DEFINE_integer("epochs", 10, "How often as many steps are made as one pass over the data has.", lower_bound=1)
flags.DEFINE_integer("batch_size", 32, "Examples of one update, over all replicas together.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.02, "That SGD with momentum 0.9 starts from; it decays to 0.", lower_bound=0.0)
flags.DEFINE_integer("save_freq", 50, "Steps from one checkpoint to the next.", lower_bound=1)
flags.DEFINE_float("kill_interval_secs", 10.0, "From one kill to the next, at least.", lower_bound=0.1)
flags.DEFINE_float(
    "least_training_secs", 3.0, "For how long steps are made from one kill to the next, at least.", lower_bound=0.0
)
flags.DEFINE_integer("most_kills", None, "How many tasks are killed at most, in each run; no end by default.")
flags.DEFINE_float("limit_secs", 600.0, "How long one run may take.", lower_bound=1.0)
flags.DEFINE_integer("seed", 1, "Of the initial weights, of the order of the examples, and of who is killed.")
flags.DEFINE_string("output_dir", str(HERE / "results"), "Where logs, the plot and the summary go.")
SETTING = (*trials.TRAINING, *trials.TROUBLE)


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"run.py takes flags only. Received: {' '.join(argv[1:])}")
    if not sys.platform.startswith("linux"):
        raise app.UsageError(f"run.py finds tasks in /proc, which only Linux has. Received: {sys.platform}")
    strategies = list(trials.STRATEGIES) if FLAGS.strategy == "all" else [FLAGS.strategy]
    setting = {name: FLAGS[name].value for name in SETTING}
    sys.exit(trials.compare(pathlib.Path(FLAGS.output_dir).resolve(), strategies, setting))


if __name__ == "__main__":
    try:
        app.run(main)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; all processes have ended")
