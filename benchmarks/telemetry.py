# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of `tfdist.callbacks.Telemetry` per step: points, histograms and the update log.

`measure` runs this file once for each strategy. In one `fit`, epochs with and without the callback take turns, and each
is compared with its neighbour. Of several workers all take turns alike, and the chief is measured. `multi_worker_clock`
compares steps that take the times of input, computing and sum, without the callback, with steps that don't.

    python telemetry.py --strategy=multi_worker_clock --strategy=multi_worker   # these alone, 3 minutes
    python telemetry.py --output=results/telemetry.json   # also writes medians, quartiles and all samples
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import child
from absl import app, flags

CLOCK = "multi_worker_clock"
STRATEGIES = ("mirrored", "parameter_server", "asynchronous", "multi_worker", "multi_worker_policy", CLOCK)
MOST_SHARE = 0.01
_NUM_WORKERS = 4
_STEPS_PER_EPOCH = 100
_LIMIT_SECS = 600.0

FLAGS = flags.FLAGS


def measure(
    pairs: int, progress: Callable[[str], None], strategies: Sequence[str] = STRATEGIES
) -> dict[str, dict[str, list[float]]]:
    """Trains for so many pairs of epochs under each strategy.

    Returns:
      By strategy: "with" and "without", seconds of each epoch; "inside", seconds within the callback in the former.
    """
    found = {}
    for strategy in strategies:
        progress(f"telemetry: {strategy}")
        arguments = [f"--strategy={strategy}", f"--pairs={pairs}"]
        run = _run_workers if strategy.startswith("multi_worker") else child.result
        found[strategy] = run(__file__, arguments, _LIMIT_SECS)
    return found


def summary(report: dict[str, dict[str, list[float]]]) -> str:
    """A line for each strategy."""
    lines = [f"{'telemetry':20}  step, ms  longer by  quartiles           within the callback  target"]
    for strategy, secs in report.items():
        ratios = [a / b - 1 for a, b in zip(secs["with"], secs["without"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        inside = sum(secs["inside"]) / sum(secs["with"]) if secs["inside"] else 0.0
        # Of the first, a busy machine can say no more than where it surely is not.
        missed = "  MISSED" if low > MOST_SHARE or inside > MOST_SHARE else ""
        lines.append(
            f"{strategy:20}  {1e3 * statistics.median(secs['without']) / _STEPS_PER_EPOCH:8.2f}  "
            f"{statistics.median(ratios):9.2%}  {low:.2%} to {high:.2%}".ljust(62)
            + f"{inside:.2%} of the time".ljust(21)
            + f"<= {MOST_SHARE:.0%}{missed}"
        )
    return "\n".join(lines)


def _figures(report: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Returns the figures of each strategy, and the samples that they are of."""
    found = {}
    for strategy, secs in report.items():
        ratios = [a / b - 1 for a, b in zip(secs["with"], secs["without"], strict=True)]
        found[strategy] = {
            "step_ms": 1e3 * statistics.median(secs["without"]) / _STEPS_PER_EPOCH,
            "longer_by_median": statistics.median(ratios),
            "longer_by_quartiles": statistics.quantiles(ratios, n=4),
            "within_callback": sum(secs["inside"]) / sum(secs["with"]) if secs["inside"] else None,
            "target": MOST_SHARE,
            "secs": secs,
        }
    return {"load_average": os.getloadavg(), "steps_per_epoch": _STEPS_PER_EPOCH, "strategies": found}


def _run_workers(script: str, arguments: list[str], limit_secs: float) -> Any:
    """Runs this file as each worker of a cluster on this machine; returns the chief's result."""
    from tfdist import Cluster, Task
    from tfdist.launchers.supervise.processes import PortReservation

    with tempfile.TemporaryDirectory() as folder, PortReservation(_NUM_WORKERS) as reserved:
        addresses = {index: f"127.0.0.1:{port}" for index, port in enumerate(reserved.ports)}
        outputs = [pathlib.Path(folder) / f"{index}.json" for index in addresses]
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for index, output in enumerate(outputs):
                cluster = Cluster({"worker": addresses}, Task("worker", index))
                environment = {name: value for name, value in os.environ.items() if name != "TFDIST_JOB_SECRET"}
                environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"}
                environment["TF_CONFIG"] = cluster.to_tf_config()
                command = [sys.executable, script, *arguments, f"--result={output}"]
                with output.with_suffix(".log").open("w") as log:
                    workers.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
            codes = [worker.wait(limit_secs) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        if any(codes):
            last = "\n".join(output.with_suffix(".log").read_text()[-2000:] for output in outputs)
            raise RuntimeError(f"telemetry: the workers ended with {codes}:\n{last}")
        return json.loads(outputs[0].read_text())


def _strategy() -> Any:
    import tensorflow as tf

    import tfdist

    policies, (chosen,) = [tfdist.BackupWorkers(spares=1)], FLAGS.strategy
    if chosen == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        parts = [tf.config.LogicalDeviceConfiguration()] * _NUM_WORKERS
        tf.config.set_logical_device_configuration(cpu, parts)
        tf.config.threading.set_inter_op_parallelism_threads(_NUM_WORKERS + 1)
        return tfdist.MirroredStrategy([f"CPU:{index}" for index in range(_NUM_WORKERS)], policies=policies)
    if chosen.startswith("multi_worker"):
        return tfdist.MultiWorkerMirroredStrategy(
            communication="tensorflow", policies=policies if chosen.endswith("policy") else []
        )
    given = [] if chosen == "asynchronous" else policies
    return tfdist.ParameterServerStrategy(num_workers=_NUM_WORKERS, policies=given)


def _train(directory: str) -> dict[str, list[float]]:
    strategy = _strategy()
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    with strategy.scope():
        model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((32 * _NUM_WORKERS, 10), np.float32)
    data = tf.data.Dataset.from_tensors((x, x[:, :1])).repeat()

    class Alternating(keras.callbacks.Callback):
        """Runs the callback in every second epoch: off on, on off, off on, ..."""

        def __init__(self) -> None:
            super().__init__()
            self.telemetry = tfdist.callbacks.Telemetry(directory)
            self.secs: dict[str, list[float]] = {"with": [], "without": [], "inside": []}
            self.is_on = False
            self.inside = self.began = 0.0
            self.sinks: tuple[Any, Any] = (None, None)

        def _call(self, function: Callable[..., None], *arguments: Any) -> None:
            if self.is_on:
                start = time.perf_counter()
                function(*arguments)
                self.inside += time.perf_counter() - start

        def on_train_begin(self, logs: Any = None) -> None:
            self.telemetry.set_model(self.model)
            self.telemetry.on_train_begin()
            recorder = strategy.distribution.recorder
            self.sinks = recorder.sink, recorder.on_event

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            # The first two epochs build graphs and warm up.
            self.is_on = epoch % 4 in (1, 2)
            # What engines hand over in their own threads.
            recorder = strategy.distribution.recorder
            recorder.sink, recorder.on_event = self.sinks if self.is_on else (None, None)
            # The steps of an epoch without the callback are not its cost.
            strategy.distribution.collect()
            recorder.take()
            self.inside, self.began = 0.0, time.perf_counter()
            self._call(self.telemetry.on_epoch_begin, epoch)

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self._call(self.telemetry.on_train_batch_begin, batch, logs)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self._call(self.telemetry.on_train_batch_end, batch, logs)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self._call(self.telemetry.on_epoch_end, epoch, logs)
            if epoch >= 2:
                self.secs["with" if self.is_on else "without"].append(time.perf_counter() - self.began)
            if epoch >= 2 and self.is_on:
                self.secs["inside"].append(self.inside)

        def on_train_end(self, logs: Any = None) -> None:
            self.telemetry.on_train_end()

    alternating = Alternating()
    epochs = 2 + 2 * FLAGS.pairs
    model.fit(data, steps_per_epoch=_STEPS_PER_EPOCH, epochs=epochs, callbacks=[alternating], verbose=0)
    return alternating.secs


def _train_with_clock() -> dict[str, list[float]]:
    """Trains two models by turns, of which one was traced with the clock of `tfdist.step.step_times`."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tfdist.step import step_times

    strategy = _strategy()
    x = np.ones((32 * _NUM_WORKERS, 10), np.float32)
    data = tf.data.Dataset.from_tensors((x, x[:, :1])).repeat()
    zero = tf.data.Dataset.from_tensors(tf.constant(0.0, tf.float64)).repeat()

    def untimed(dataset: tf.data.Dataset) -> tf.data.Dataset:
        return tf.data.Dataset.zip(zero, dataset.prefetch(2), zero)

    class Ends(keras.callbacks.Callback):
        """Keeps the time of each step's end."""

        def __init__(self) -> None:
            super().__init__()
            self.secs: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.secs.append(time.perf_counter())

    models = {}
    for kind in ("with", "without"):
        with strategy.scope():
            models[kind] = keras.Sequential([keras.Input((10,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
            models[kind].compile("sgd", "mse")
    found: dict[str, list[float]] = {"with": [], "without": [], "inside": []}
    times = strategy._synchronous_engine.times
    for index in range(2 + 2 * FLAGS.pairs):
        kind = "with" if index % 4 in (0, 3) else "without"
        off = mock.patch.object(step_times, "timed", untimed) if kind == "without" else contextlib.nullcontext()
        strategy._synchronous_engine.times = times if kind == "with" else None
        ends = Ends()
        with off:
            models[kind].fit(data, steps_per_epoch=_STEPS_PER_EPOCH + 5, epochs=1, callbacks=[ends], verbose=0)
        if index >= 2:
            found[kind].append(ends.secs[-1] - ends.secs[4])
    return found


def _main(argv: list[str]) -> None:
    if FLAGS.result is None:
        found = measure(FLAGS.pairs, lambda text: print(text, flush=True), FLAGS.strategy)
        print(summary(found))
        if FLAGS.output:
            pathlib.Path(FLAGS.output).write_text(json.dumps(_figures(found), indent=1) + "\n")
        return
    with tempfile.TemporaryDirectory() as directory:
        result = _train_with_clock() if FLAGS.strategy[0] == CLOCK else _train(directory)
    with open(FLAGS.result, "w") as output:  # noqa: PTH123, a path and no more
        json.dump(result, output)


if __name__ == "__main__":
    flags.DEFINE_multi_enum("strategy", STRATEGIES, STRATEGIES, "What to train under.")
    flags.DEFINE_integer("pairs", 40, "Epochs with the callback, and as many without.")
    flags.DEFINE_string("output", None, "File for figures and samples, as JSON.")
    flags.DEFINE_string("result", None, "File for the result of one strategy; all are run, and shown, without it.")
    app.run(_main)
