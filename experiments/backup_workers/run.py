# SPDX-License-Identifier: Apache-2.0
"""Trains on digits with a straggler, with and without backup workers, on real processes.

python run.py --flagfile=backup_workers.flags                                        # all, one after another
python run.py --flagfile=backup_workers.flags --strategy=parameter_server            # one of them, here
"""

from __future__ import annotations

import pathlib
import sys

import contest
from absl import app, flags

FLAGS = flags.FLAGS
HERE = pathlib.Path(__file__).resolve().parent

flags.DEFINE_enum("strategy", "all", ["all", *contest.STRATEGIES], "The strategy to train under.")
flags.DEFINE_integer("num_workers", 4, "Worker processes.", lower_bound=2)
flags.DEFINE_integer("spares", 1, "Backup workers; it is compared with 0.", lower_bound=0)
flags.DEFINE_float("mean_secs", 0.05, "By how much each gradient is delayed on average, lognormal with s=0.25.")
flags.DEFINE_float("slowdown", 10.0, "How many times as long the last worker's are delayed.", lower_bound=1.0)
flags.DEFINE_integer("updates", 160, "Updates of each run, in segments of 20.", lower_bound=20)
flags.DEFINE_integer("batch_size", 128, "Examples of one update, over all replicas together.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.05, "Of SGD with momentum 0.9.", lower_bound=0.0)
flags.DEFINE_integer("seed", 1, "Of the initial weights, of the order of the examples and of the delays.")
flags.DEFINE_string("output_dir", str(HERE / "results"), "Where logs, the plot and the summary go.")


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"run.py takes flags only. Received: {' '.join(argv[1:])}")
    output_dir = pathlib.Path(FLAGS.output_dir).resolve()
    if FLAGS.strategy == "all":
        sys.exit(contest.compare(output_dir, {name: FLAGS[name].value for name in contest.SETTING}))
    # TensorFlow takes seconds to import, and the comparing process has no need of it.
    import straggling

    output_dir.mkdir(parents=True, exist_ok=True)
    straggling.train(FLAGS.strategy, {name: FLAGS[name].value for name in contest.SETTING}, output_dir)


if __name__ == "__main__":
    try:
        app.run(main)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; all processes have ended")
