# SPDX-License-Identifier: Apache-2.0
"""Trains a small convolutional net on handwritten digits under every strategy, and compares them.

python run.py --flagfile=digits.flags                                    # all four, one after another
python run.py --flagfile=digits.flags --strategy=mirrored                # one of them, in this process
tfdist launch local --num_workers=2 run.py --flagfile=digits.flags --strategy=multi_worker
"""

from __future__ import annotations

import pathlib
import sys

import compare
from absl import app, flags

import tfdist

FLAGS = flags.FLAGS
HERE = pathlib.Path(__file__).resolve().parent

flags.DEFINE_enum("strategy", "all", ["all", *compare.STRATEGIES], "The strategy to train under.")
flags.DEFINE_integer("epochs", 8, "Passes over the training data.", lower_bound=1)
flags.DEFINE_integer("batch_size", 128, "Examples of one update, over all replicas together.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.05, "That SGD with momentum 0.9 starts from; it decays to 0.", lower_bound=0.0)
flags.DEFINE_integer("seed", 1, "Of the initial weights and of the order of the examples.")
flags.DEFINE_string("output_dir", str(HERE / "results"), "Where logs, the plot and the summary go.")
TRAINING_FLAGS = ("epochs", "batch_size", "learning_rate", "seed", "output_dir")


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"run.py takes flags only. Received: {' '.join(argv[1:])}")
    output_dir = pathlib.Path(FLAGS.output_dir).resolve()
    if FLAGS.strategy == "all":
        arguments = [f"--{name}={FLAGS[name].value}" for name in TRAINING_FLAGS]
        sys.exit(compare.compare(output_dir, FLAGS.epochs, arguments))
    # A process that only trains; what is freed in a step is needed in the next one. Several replicas share it.
    tfdist.keep_freed_memory(few_arenas=False)
    # TensorFlow takes seconds to import, and the comparing process has no need of it.
    import train

    run_dir = output_dir / FLAGS.strategy
    run_dir.mkdir(parents=True, exist_ok=True)
    train.train(FLAGS.strategy, FLAGS.epochs, FLAGS.batch_size, FLAGS.learning_rate, FLAGS.seed, run_dir)


if __name__ == "__main__":
    try:
        app.run(main)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; all processes have ended")
