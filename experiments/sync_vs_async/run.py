# SPDX-License-Identifier: Apache-2.0
"""Synchronous against asynchronous training, and what is between them, on digits and on real processes.

python run.py --flagfile=sync_vs_async.flags                    # all runs, one after another
python run.py --flagfile=quick.flags                            # a few short ones
"""

from __future__ import annotations

import pathlib
import sys

import races
from absl import app, flags

FLAGS = flags.FLAGS
HERE = pathlib.Path(__file__).resolve().parent

flags.DEFINE_multi_enum("speeds", list(races.SPEEDS), races.SPEEDS, "Whether all workers are equally fast.")
flags.DEFINE_multi_integer("num_workers", [1, 2, 4, 8], "How many workers.", lower_bound=1)
flags.DEFINE_multi_enum("methods", list(races.METHODS), list(races.METHODS), "Who competes.")
flags.DEFINE_float("secs", 6.0, "How long each run trains.", lower_bound=0.5)
flags.DEFINE_integer("minibatch", 16, "Examples of one gradient.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.05, "Of plain SGD, for each gradient of an update.", lower_bound=0.0)
flags.DEFINE_float("mean_secs", 0.1, "By how much each gradient is delayed on average, lognormal with s=0.25.")
flags.DEFINE_float("slowdown", 10.0, "How many times as slow the last worker is where they are uneven.")
flags.DEFINE_integer("bound", 4, "The most that a gradient may be stale under `bounded`.", lower_bound=1)
flags.DEFINE_integer("every_steps", 4, "How many steps workers make alone under `averaged`.", lower_bound=1)
flags.DEFINE_integer("seed", 1, "Of the initial weights, of the order of the examples and of the delays.")
flags.DEFINE_string("output_dir", str(HERE / "results"), "Where the plots and the table go.")
flags.DEFINE_enum("run", "all", ["all", *races.METHODS], "What `all` starts: one run of one method, in this process.")


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"run.py takes flags only. Received: {' '.join(argv[1:])}")
    output_dir = pathlib.Path(FLAGS.output_dir).resolve()
    output_dir.mkdir(parents=True, exist_ok=True)
    todo = races.races(FLAGS.num_workers, FLAGS.speeds)
    setting = {name: FLAGS[name].value for name in races.SETTING}
    if FLAGS.run == "all":
        sys.exit(races.compare(output_dir, todo, FLAGS.methods, setting))
    # TensorFlow takes seconds to import, and the comparing process has no need of it.
    import racing

    setting["num_workers"] = todo[0].num_workers
    racing.train(FLAGS.run, setting, races.delays(todo[0], setting), output_dir)


if __name__ == "__main__":
    try:
        app.run(main)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; all processes have ended")
