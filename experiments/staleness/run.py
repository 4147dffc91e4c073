# SPDX-License-Identifier: Apache-2.0
"""n-softsync on digits, with a fixed rate and with one divided by the staleness, on real processes.

python run.py --flagfile=staleness.flags                          # all runs, one after another
python run.py --flagfile=staleness.flags --run=n-8-inverse        # one of them, here, without delays
"""

from __future__ import annotations

import pathlib
import sys

import softsync_runs
from absl import app, flags

FLAGS = flags.FLAGS
HERE = pathlib.Path(__file__).resolve().parent

flags.DEFINE_string("run", "all", "all, synchronous, or one such as n-8-inverse or n-8-fixed.")
flags.DEFINE_multi_integer("n", [1, 2, 4, 8], "An update is made of num_workers // n gradients.", lower_bound=1)
flags.DEFINE_integer("num_workers", 8, "Worker processes.", lower_bound=2)
flags.DEFINE_integer("minibatch", 16, "Examples of one gradient.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.25, "That plain SGD starts from; it decays to 0.", lower_bound=0.0)
flags.DEFINE_integer("epochs", 8, "How often the held-out digits are evaluated.", lower_bound=1)
flags.DEFINE_integer("gradients_per_epoch", 448, "Of all workers; 448 of 16 are all examples once.", lower_bound=1)
flags.DEFINE_float("mean_secs", 0.15, "By how much each gradient is delayed on average, lognormal with s=0.25.")
flags.DEFINE_integer("seed", 1, "Of the initial weights, of the order of the examples and of the delays.")
flags.DEFINE_string("output_dir", str(HERE / "results"), "Where logs, the plot and the summary go.")


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"run.py takes flags only. Received: {' '.join(argv[1:])}")
    output_dir = pathlib.Path(FLAGS.output_dir).resolve()
    setting = {name: FLAGS[name].value for name in softsync_runs.SETTING}
    wrong = [n for n in FLAGS.n if n > FLAGS.num_workers]
    if wrong:
        raise app.UsageError(f"--n must be at most --num_workers={FLAGS.num_workers}. Received: --n={wrong[0]}")
    if FLAGS.run == "all":
        sys.exit(softsync_runs.compare(output_dir, FLAGS.n, setting))
    run = softsync_runs.find(FLAGS.run, FLAGS.n)
    if run is None:
        names = ", ".join(each.name for each in softsync_runs.runs(FLAGS.n))
        raise app.UsageError(f"--run must be all or one of {names}. Received: --run={FLAGS.run}")
    # TensorFlow takes seconds to import, and the comparing process has no need of it.
    import softsync

    output_dir.mkdir(parents=True, exist_ok=True)
    softsync.train(run.n, run.rule, setting, output_dir)


if __name__ == "__main__":
    try:
        app.run(main)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; all processes have ended")
