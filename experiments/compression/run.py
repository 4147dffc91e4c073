# SPDX-License-Identifier: Apache-2.0
"""Bytes against accuracy: two nets on digits, two workers, and each codec of `tfdist.compression`.

python run.py --flagfile=compression.flags                            # all runs, one after another
python run.py --flagfile=quick.flags                                  # some of them, on the small net
tfdist launch local --num_workers=2 --communication=mpi run.py --run=digits-signsgd
"""

from __future__ import annotations

import pathlib
import sys

import compression_runs
from absl import app, flags

FLAGS = flags.FLAGS
HERE = pathlib.Path(__file__).resolve().parent
NETS, CODECS = list(compression_runs.NETS), list(compression_runs.CODECS)

flags.DEFINE_string("run", "all", "all, or a net and a codec such as digits-signsgd: one run, in this process.")
flags.DEFINE_multi_enum("nets", NETS, NETS, "Nets to train.")
flags.DEFINE_multi_enum("codecs", CODECS, CODECS, "Codecs to compare; none is uncompressed.")
flags.DEFINE_integer("digits_epochs", 16, "Passes of the convolutional net over the training data.", lower_bound=1)
flags.DEFINE_integer("dense_epochs", 6, "Passes of the dense net over the training data.", lower_bound=1)
flags.DEFINE_integer("warmup_epochs", 1, "Epochs in which the first worker trains alone.", lower_bound=0)
flags.DEFINE_integer("batch_size", 128, "Examples of one update, over both workers together.", lower_bound=2)
flags.DEFINE_float("learning_rate", 0.05, "Initial rate of SGD with momentum 0.9; decays to 0.", lower_bound=0.0)
flags.DEFINE_integer("seed", 1, "Seed of the initial weights and of the order of the examples.")
flags.DEFINE_boolean("reuse", False, "Keep the results of complete runs of the same setting.")
flags.DEFINE_string("output_dir", str(HERE / "results"), "Directory of logs, plot and tables.")


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"run.py takes flags only. Received: {' '.join(argv[1:])}")
    output_dir = pathlib.Path(FLAGS.output_dir).resolve()
    output_dir.mkdir(parents=True, exist_ok=True)
    common = {name: FLAGS[name].value for name in compression_runs.SETTING}
    settings = {net: {"epochs": FLAGS[f"{net}_epochs"].value, **common} for net in NETS}
    if FLAGS.run == "all":
        todo = compression_runs.runs(FLAGS.nets, FLAGS.codecs)
        sys.exit(compression_runs.compare(output_dir, todo, settings, FLAGS.reuse))
    run = compression_runs.find(FLAGS.run)
    if run is None:
        names = ", ".join(each.name for each in compression_runs.runs(NETS, CODECS))
        raise app.UsageError(f"--run must be all or one of {names}. Received: --run={FLAGS.run}")
    # Imports TensorFlow, which takes seconds; the comparing process does not need it.
    import compressed

    compressed.train(run, settings[run.net], output_dir)


if __name__ == "__main__":
    try:
        app.run(main)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; all processes have ended")
