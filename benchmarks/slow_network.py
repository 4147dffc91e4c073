# SPDX-License-Identifier: Apache-2.0
"""Two workers in network namespaces, joined by a slow link: updates per second with and without compression.

    python benchmarks/slow_network.py                   # 100 Mb/s, 25 million parameters; root, iproute2

Each contender is started in turn, in every round, as two processes that reach each other over the link alone. They sum
by TensorFlow's collectives, because an MPI library would find that both are on one machine, and use its memory. Each
worker also asks the kernel what its connections have sent, beside `strategy.report()`.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

from absl import app, flags

from tfdist import Cluster, Task
from tfdist.launchers.supervise import processes

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "support"))
import namespaces

# By name: the codec, how many steps are made before the measurement, and how many are measured. An adaptive threshold
# grows by 2 in 20 steps until its density is within its bounds.
CONTENDERS: dict[str, tuple[str, int, int]] = {
    "uncompressed": ("", 2, 2),
    'HalfPrecision("bfloat16")': ('HalfPrecision("bfloat16")', 2, 3),
    "Threshold(max_density=0.0025)": ("Threshold(max_density=0.0025)", 150, 30),
    "TopK(0.001)": ("TopK(0.001, momentum=0)", 4, 30),
    "PowerSGD(4)": ("PowerSGD(4)", 4, 30),
}
LEAST_RATIO = 20.0
_JUDGED = "Threshold(max_density=0.0025)"
_LIMIT_SECS = 400.0
_PORT = 9000

FLAGS = flags.FLAGS
flags.DEFINE_integer("mbits", 100, "Megabits per second of the link, in each direction.", lower_bound=1)
flags.DEFINE_string("size", "25M", "Model to measure with.")
flags.DEFINE_integer("rounds", 3, "How often each contender is started.", lower_bound=1)
flags.DEFINE_list("contenders", list(CONTENDERS), "What to measure.")
flags.DEFINE_string("output", "benchmarks/results/slow_network.json", "Where the samples go.")
flags.DEFINE_string(
    "worker", None, "Codec of a worker, whose result goes to --output; for the processes of this program."
)
flags.DEFINE_integer("steps", 1, "Steps that such a worker measures.")
flags.DEFINE_integer("steps_before", 1, "Steps that it makes before.", lower_bound=1)
flags.register_validator(
    "contenders", lambda names: set(names) <= set(CONTENDERS), f"use any of {', '.join(CONTENDERS)}"
)


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"slow_network.py takes flags only. Received: {' '.join(argv[1:])}")
    if FLAGS.worker is not None:
        pathlib.Path(FLAGS.output).write_text(json.dumps(_train(FLAGS.worker, FLAGS.steps_before, FLAGS.steps)))
        return
    if problem := namespaces.missing():
        sys.exit(f"slow_network.py: {problem}")
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in FLAGS.contenders}
    for number in range(FLAGS.rounds):
        for name, found in samples.items():
            print(f"{name}, {number + 1} of {FLAGS.rounds}", file=sys.stderr, flush=True)
            found.append(_run(*CONTENDERS[name]))
    pathlib.Path(FLAGS.output).write_text(
        json.dumps({"mbits": FLAGS.mbits, "size": FLAGS.size, "samples": samples}, indent=1) + "\n"
    )
    print(_table(samples))
    for name in (_JUDGED,) if {_JUDGED, "uncompressed"} <= samples.keys() else ():
        if (ratio := statistics.median(_ratios(samples, name))) < LEAST_RATIO:
            sys.exit(f"{name} makes {ratio:.1f} times as many updates as without compression; wanted: {LEAST_RATIO:g}")


def _table(samples: dict[str, list[dict[str, float]]]) -> str:
    columns = f"{'ratio':>7}  {'kB a step, kernel':>17}  {'by report()':>11}"
    lines = [f"{FLAGS.mbits} Mb/s, {FLAGS.size:18}  updates/s  {columns}"]
    for name, found in samples.items():
        middle = {key: statistics.median(each[key] for each in found) for key in found[0]}
        ratios = _ratios(samples, name)
        ratio = f"{statistics.median(ratios):7.1f}" if ratios else " " * 7
        sent = f"{middle['kernel_bytes'] / 1e3:17.1f}  {middle['reported_bytes'] / 1e3:11.1f}"
        lines.append(f"{name:30}  {middle['updates_per_sec']:9.2f}  {ratio}  {sent}")
    return "\n".join(lines)


def _ratios(samples: dict[str, list[dict[str, float]]], name: str) -> list[float]:
    pairs = zip(samples[name], samples.get("uncompressed", ()), strict=False)
    return [ours["updates_per_sec"] / theirs["updates_per_sec"] for ours, theirs in pairs]


def _run(codec: str, steps_before: int, steps: int) -> dict[str, float]:
    """Returns what the slower worker has measured, and the bytes of the one that has sent more."""
    with (
        namespaces.joined(2, FLAGS.mbits) as (spaces, hosts),
        tempfile.TemporaryDirectory() as folder,
        processes.Supervisor() as supervisor,
    ):
        addresses = {index: f"{host}:{_PORT}" for index, host in enumerate(hosts)}
        outputs = [pathlib.Path(folder) / f"{index}.json" for index in addresses]
        started = []
        for index, space in enumerate(spaces):
            environment = {
                **os.environ,
                "PATH": namespaces.PATH,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "GRPC_VERBOSITY": "ERROR",
            }
            environment["TF_CONFIG"] = Cluster({"worker": addresses}, Task("worker", index)).to_tf_config()
            command = ["ip", "netns", "exec", space, sys.executable, __file__, f"--worker={codec}"]
            command += [
                f"--steps_before={steps_before}",
                f"--steps={steps}",
                f"--size={FLAGS.size}",
                f"--output={outputs[index]}",
            ]
            started.append(supervisor.start(f"worker:{index}", command, environment))
        for process in started:
            if process.wait(_LIMIT_SECS) != 0:
                raise RuntimeError(f"{process.name} failed:\n" + "\n".join(process.tail))
        found = [json.loads(output.read_text()) for output in outputs]
    return {key: (min if key == "updates_per_sec" else max)(each[key] for each in found) for key in found[0]}


def _train(codec: str, steps_before: int, steps: int) -> dict[str, float]:
    import traffic

    import tfdist

    policies: list[Any] = []
    if codec:
        policies = [tfdist.Compression(eval(f"tfdist.compression.{codec}"))]
    tfdist.keep_freed_memory()
    import keras
    import models
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tfdist.MultiWorkerMirroredStrategy(communication="tensorflow", policies=policies)
    size = models.SIZES[FLAGS.size]
    with strategy.scope():
        model = models.compiled(keras, size)
    data = models.dataset(size, replicas=strategy.num_replicas_in_sync)

    def counted() -> tuple[float, int, int]:
        return time.perf_counter(), traffic.sent_by_this_process(), max(strategy.report().message_bytes.values())

    class Measured(keras.callbacks.Callback):
        began = ended = (0.0, 0, 0)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch + 1 == steps_before:
                self.began = counted()
            elif batch + 1 == steps_before + steps:
                self.ended = counted()

    measured = Measured()
    model.fit(data, steps_per_epoch=steps_before + steps, verbose=0, callbacks=[measured])
    secs, kernel, reported = (end - begin for begin, end in zip(measured.began, measured.ended, strict=True))
    return {"updates_per_sec": steps / secs, "kernel_bytes": kernel / steps, "reported_bytes": reported / steps}


if __name__ == "__main__":
    app.run(main)
