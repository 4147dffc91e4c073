# SPDX-License-Identifier: Apache-2.0
"""Measures the bytes that training on two workers sends, synchronous and with parameters averaged every H steps.

`measure` runs this file as both workers of a cluster, once for each way to train. Each worker asks the kernel how much
its own connections have sent before and after a number of steps, so that nothing else on the machine counts.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, cast

from absl import app, flags

EVERY_STEPS = 16
# Five periods.
STEPS = 5 * EVERY_STEPS
MOST_SHARE = 1.05 / EVERY_STEPS
_FEATURES, _WIDTHS = 256, (512, 256, 10)
_LIMIT_SECS = 300.0
_SECRET = "TFDIST_JOB_SECRET"
# By name: the optimizer, and what becomes of its state; None without the policy. The first is what others are
# compared with, and the target is for the second.
WAYS: dict[str, tuple[str, str | None]] = {
    "synchronous": ("SGD", None),
    "H=16": ("SGD", "average"),
    "H=16, Adam, local": ("Adam", "local"),
    "H=16, Adam, average": ("Adam", "average"),
}

FLAGS = flags.FLAGS


def measure(progress: Callable[[str], None]) -> dict[str, Any]:
    """Trains in all ways.

    Returns:
      By name: "bytes_per_step" that a worker's connections have sent, "reported_per_step" by `strategy.report()`, and
      "share", the part of what the first way sends.
    """
    results: dict[str, Any] = {}
    for name in WAYS:
        progress(f"traffic: {name}")
        workers = _run(name)
        # Both send the same in a ring of two; who leads sends a little more.
        results[name] = {key: max(worker[key] for worker in workers) for key in workers[0]}
        first = results["synchronous"]["bytes_per_step"]
        results[name]["share"] = results[name]["bytes_per_step"] / first
    return results


def sent_by_this_process() -> int:
    """Bytes that the open connections of this process have sent."""
    from tfdist.coordination import usage

    return sum(each.sent for each in usage.by_socket().values())


def summary(report: dict[str, Any]) -> str:
    """A few lines for people."""
    lines = [f"{'traffic, 2 workers':24}  kB a step and worker  by report()    share  target"]
    for name, found in report.items():
        target = f"<= {MOST_SHARE:.4f}" if name == "H=16" else ""
        missed = "  MISSED" if target and found["share"] > MOST_SHARE else ""
        sent, told = found["bytes_per_step"] / 1e3, found["reported_per_step"] / 1e3
        lines.append(f"{name:24}  {sent:20.1f}  {told or '':11.5}  {found['share']:7.4f}  {target}{missed}".rstrip())
    return "\n".join(lines)


def _run(way: str) -> list[dict[str, float]]:
    from tfdist import Cluster, Task
    from tfdist.launchers.supervise.processes import PortReservation

    with tempfile.TemporaryDirectory() as folder, PortReservation(2) as reserved:
        addresses = {index: f"127.0.0.1:{port}" for index, port in enumerate(reserved.ports)}
        outputs = [pathlib.Path(folder) / f"{index}.json" for index in addresses]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for index, output in enumerate(outputs):
                cluster = Cluster({"worker": addresses}, Task("worker", index))
                environment = {name: value for name, value in os.environ.items() if name != _SECRET}
                environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"}
                environment["TF_CONFIG"] = cluster.to_tf_config()
                command = [sys.executable, __file__, f"--way={way}", f"--result={output}"]
                with output.with_suffix(".log").open("w") as log:
                    processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
            codes = [process.wait(_LIMIT_SECS) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            last = "\n".join(output.with_suffix(".log").read_text()[-2000:] for output in outputs)
            raise RuntimeError(f"traffic: the workers of {way!r} ended with {codes}:\n{last}")
        return [json.loads(output.read_text()) for output in outputs]


def _train(way: str) -> dict[str, float]:
    import tfdist

    kind, state = WAYS[way]
    policies: list[Any] = []
    if state is not None:
        policies = [tfdist.ParameterAveraging(EVERY_STEPS, optimizer_state=cast(Any, state))]
    strategy = tfdist.MultiWorkerMirroredStrategy(communication="tensorflow", policies=policies)
    import keras
    import numpy as np
    import tensorflow as tf

    generator = np.random.default_rng(0)
    x = generator.normal(size=(64, _FEATURES)).astype("float32")
    y = generator.normal(size=(64, _WIDTHS[-1])).astype("float32")
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    with strategy.scope():
        layers = [keras.layers.Dense(width, "relu") for width in _WIDTHS]
        model = keras.Sequential([keras.Input((_FEATURES,)), *layers])
        model.compile(getattr(keras.optimizers, kind)(1e-4), "mse")
    # One period first, which traces and opens connections.
    model.fit(data, steps_per_epoch=EVERY_STEPS, verbose=0)
    before, told = sent_by_this_process(), max(strategy.report().message_bytes.values())
    model.fit(data, steps_per_epoch=STEPS, verbose=0)
    after, told_after = sent_by_this_process(), max(strategy.report().message_bytes.values())
    return {"bytes_per_step": (after - before) / STEPS, "reported_per_step": (told_after - told) / STEPS}


def main(argv: list[str]) -> None:
    del argv
    found = _train(FLAGS.way)
    pathlib.Path(FLAGS.result).write_text(json.dumps(found))


if __name__ == "__main__":
    flags.DEFINE_enum("way", None, list(WAYS), "How to train.", required=True)
    flags.DEFINE_string("result", None, "Where the result goes.", required=True)
    app.run(main)
