# SPDX-License-Identifier: Apache-2.0
"""A training script whose steps sleep between the forward and the backward pass, as if an accelerator computed.

So two cores carry many workers. With `--size=conv` steps compute on all cores instead. `tfdist profile` runs the script
on one device, `machine.py` as all tasks of a cluster.
"""

from __future__ import annotations

import ast
import json
import pathlib
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from tensorflow.python.data.experimental.ops import testing

import tfdist

FLAGS = flags.FLAGS
# Widths of the layers, by name; the parameters of "1M" take 4 MB.
SIZES = {"tiny": (10, 32, 1), "1M": (256, 768, 1024, 10), "conv": (16384, 10)}
flags.DEFINE_enum("strategy", "multi_worker", ["multi_worker", "parameter_server"], "Which strategy.")
flags.DEFINE_string("policy", "", "A policy such as BackupWorkers(spares=1); none by default.")
flags.DEFINE_integer("workers", 1, "How many workers there are.", lower_bound=1)
flags.DEFINE_enum("size", "tiny", list(SIZES), "Of the model.")
flags.DEFINE_integer("batch", 32, "Examples of one worker's step.", lower_bound=1)
flags.DEFINE_float("sleep", 0.2, "Mean seconds of the sleep, lognormal.", lower_bound=0.001)
flags.DEFINE_float("sigma", 0.25, "Standard deviation of its logarithm.", lower_bound=0.0)
flags.DEFINE_integer("steps", 30, "Steps to measure.", lower_bound=1)
flags.DEFINE_string("output", None, "Where the chief writes what it has measured.")


class Sleep(keras.layers.Layer):
    """Passes its input on after a random time; all before it has been computed by then."""

    def call(self, inputs: Any) -> Any:
        with tf.control_dependencies([inputs]):
            # Workers may share a seed; clocks differ in each draw.
            seed = tf.stack([tf.cast(tf.timestamp() * 1e6, tf.int64), tf.constant(1, tf.int64)])
            normal = tf.random.stateless_normal([], seed)
            secs = FLAGS.sleep * tf.exp(FLAGS.sigma * normal - FLAGS.sigma**2 / 2)
            # Half of it: it sleeps before the only element and before the end. A `reduce` takes 9 ms of CPU time.
            pause = tf.data.Dataset.range(1).apply(testing.sleep(tf.cast(secs * 0.5e6, tf.int64)))
            end = pause.get_single_element()
        with tf.control_dependencies([end]):
            return tf.identity(inputs)


class Times(keras.callbacks.Callback):
    """Keeps the seconds of each epoch, of CPU time in it, and when it began and ended, in seconds since 1970."""

    def __init__(self) -> None:
        super().__init__()
        self.secs: list[float] = []
        self.cpu_secs: list[float] = []
        self.spans: list[tuple[float, float]] = []
        self._began = self._cpu_began = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.secs.append(time.perf_counter() - self._began)
        self.cpu_secs.append(time.process_time() - self._cpu_began)
        self.spans.append((time.time() - self.secs[-1], time.time()))


def policies() -> list[Any]:
    if not FLAGS.policy:
        return []
    call = ast.parse(FLAGS.policy, mode="eval").body
    keywords = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    return [getattr(tfdist, call.func.id)(**keywords)]


def main(argv: list[str]) -> None:
    computes = FLAGS.size == "conv"
    if not computes:
        tf.config.threading.set_intra_op_parallelism_threads(1)
    is_served = FLAGS.strategy == "parameter_server"
    if is_served:
        strategy = tfdist.ParameterServerStrategy(policies=policies(), num_workers=FLAGS.workers, transfer="plain")
    else:
        strategy = tfdist.MultiWorkerMirroredStrategy(communication="tensorflow", policies=policies())
    features, *widths = SIZES[FLAGS.size]
    with strategy.scope():
        if computes:
            convolutions = [keras.layers.Conv2D(64, 3, padding="same", activation="relu") for _ in range(3)]
            pooled = keras.layers.GlobalAveragePooling2D()
            hidden, last = [keras.layers.Reshape((32, 32, 16)), *convolutions, pooled], []
        else:
            hidden, last = [keras.layers.Dense(width, activation="relu") for width in widths[:-1]], [Sleep()]
        model = keras.Sequential([keras.layers.Input((features,)), *hidden, keras.layers.Dense(widths[-1]), *last])
        model.compile(keras.optimizers.SGD(1e-3), "mse")
    # An asynchronous step is one worker's batch; any other is shared out among all workers.
    is_shared = not is_served or "BackupWorkers" in FLAGS.policy
    batch = FLAGS.batch * (FLAGS.workers if is_shared else 1)
    random = np.random.default_rng(0)
    x = random.normal(size=(batch, features)).astype("float32")
    y = random.normal(size=(batch, widths[-1])).astype("float32")
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    times = Times()
    # The first epoch traces, and sends the data set to each worker, as any call of `fit` does. It ends when all its
    # updates are made.
    model.fit(data, steps_per_epoch=FLAGS.steps, epochs=2, verbose=0, callbacks=[times])
    cluster = tfdist.Cluster.from_environment()
    if FLAGS.output and (cluster is None or cluster.is_chief):
        cpu_ms = 1e3 * times.cpu_secs[1] / FLAGS.steps
        found = {"steps_per_sec": FLAGS.steps / times.secs[1], "chief_cpu_ms_per_step": cpu_ms}
        pathlib.Path(FLAGS.output).write_text(json.dumps(found))


if __name__ == "__main__":
    app.run(main)
