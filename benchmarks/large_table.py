# SPDX-License-Identifier: Apache-2.0
"""A table of 2 GB on four parameter servers: trains, is saved and loaded, and no process holds more than its share.

    python benchmarks/large_table.py                       # 2 GB, four servers; about 8 GB of disk and 5 GB of memory
    python benchmarks/large_table.py --table_mb=256        # a small one

The same table is then restored by three servers from the checkpoint, loaded by two from the `.keras` file, and its
SavedModel by a process without tfdist, which has to hold all of it. Fails if another process' highest resident memory
was more than what it had before there was a table, its share, and --spare_mb. So much is also the limit of the memory
that a task may reserve (RLIMIT_DATA), and 512 MB more where files are read: TensorFlow reserves memory there that it
does not touch.
"""

from __future__ import annotations

import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from absl import app, flags, logging

FLAGS = flags.FLAGS
flags.DEFINE_integer("table_mb", 2048, "Size of the table.", lower_bound=8)
flags.DEFINE_integer("spare_mb", 300, "Memory beyond TensorFlow's own and the share.", lower_bound=1)
flags.DEFINE_enum("optimizer", "sgd", ["sgd", "adagrad"], "Adagrad has a slot as large as the table.")
flags.DEFINE_bool("limited", True, "Limits the memory of the tasks.")
flags.DEFINE_string("output", "benchmarks/results/large_table.json", "Where the figures go.")
flags.DEFINE_string("part", None, "train, restore, load or serve: for the processes of this program.")
flags.DEFINE_integer("num_ps", 4, "Parameter servers of such a process.")
flags.DEFINE_string("folder", None, "Where such a process saves to or loads from.")
WIDTH, IDS, BATCH, STEPS = 64, 16, 64, 20
# Parts, with their parameter servers.
_PARTS = {"train": 4, "restore": 3, "load": 2, "serve": 0}
_MB = 1 << 20
_UNTOUCHED_MB = 512


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"large_table.py takes flags only. Received: {' '.join(argv[1:])}")
    if FLAGS.part:
        folder = pathlib.Path(FLAGS.folder)
        part = _part(FLAGS.part, FLAGS.num_ps, folder) if FLAGS.num_ps else _served(folder)
        pathlib.Path(FLAGS.output).write_text(json.dumps(part))
        return
    found: dict[str, Any] = {"table_mb": FLAGS.table_mb, "optimizer": FLAGS.optimizer, "limited": FLAGS.limited}
    with tempfile.TemporaryDirectory() as name:
        for part, num_ps in _PARTS.items():
            output = pathlib.Path(name) / f"{part}.json"
            command = [sys.executable, __file__, f"--part={part}", f"--num_ps={num_ps}", f"--folder={name}"]
            command += [f"--table_mb={FLAGS.table_mb}", f"--spare_mb={FLAGS.spare_mb}", f"--output={output}"]
            command += [f"--optimizer={FLAGS.optimizer}", f"--limited={FLAGS.limited}"]
            environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"}
            subprocess.run(command, check=True, env=environment, timeout=900)
            found[part] = json.loads(output.read_text())
            print(_table(part, found[part]), flush=True)
    for part in ("restore", "load", "serve"):
        saved = found["train"]["digest"]
        if found[part]["digest"] != saved[: len(found[part]["digest"])]:
            sys.exit(f"{part}: the rows that were read are not those that were saved")
    pathlib.Path(FLAGS.output).write_text(json.dumps(found, indent=1) + "\n")
    most = max(_above(found[part]) for part, num_ps in _PARTS.items() if num_ps)
    print(f"most beyond TensorFlow's own and the share: {most:.0f} MB")
    if most > FLAGS.spare_mb:
        sys.exit(f"wanted: at most {FLAGS.spare_mb} MB")


def _above(part: dict[str, Any]) -> float:
    return max(
        peak - part["own_mb"][task] - (part["share_mb"] if task.startswith("ps") else 0)
        for peaks in part["peak_mb"].values()
        for task, peak in peaks.items()
    )


def _table(part: str, found: dict[str, Any]) -> str:
    tasks = list(found["own_mb"])
    lines = [f"{part}, share {found['share_mb']:.0f} MB".ljust(36) + "".join(f"{task:>10}" for task in tasks)]
    lines.append("before the table, MB".ljust(36) + "".join(f"{found['own_mb'][task]:10.0f}" for task in tasks))
    for phase, peaks in found["peak_mb"].items():
        name = f"peak, {phase} ({found['secs'][phase]:.1f} s)"
        lines.append(name.ljust(36) + "".join(f"{peaks[task]:10.0f}" for task in tasks))
    return "\n".join(lines)


def _part(part: str, num_ps: int, folder: pathlib.Path) -> dict[str, Any]:
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    logging.set_verbosity(logging.WARNING)
    rows = FLAGS.table_mb * _MB // (4 * WIDTH)
    strategy = tfdist.ParameterServerStrategy(
        num_workers=1, num_ps=num_ps, variable_partitioner=tfdist.ShardedTables(), policies=[tfdist.LazyRows()]
    )
    generator = np.random.default_rng(0)
    ids = generator.integers(0, rows, size=(BATCH * STEPS, IDS))
    targets = generator.normal(size=(BATCH * STEPS, 1)).astype("float32")

    def compiled(rows: int) -> Any:
        with strategy.scope():
            layers = [keras.layers.Embedding(rows, WIDTH, name="table"), keras.layers.Flatten(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((IDS,), dtype="int64"), *layers])
            model.compile(keras.optimizers.get(FLAGS.optimizer), "mse")
        return model

    def trained(model: Any) -> None:
        model.fit(ids % model.layers[0].input_dim, targets, batch_size=BATCH, verbose=0)

    # What TensorFlow and a program need without any table.
    trained(compiled(4096))
    copies = 2 if FLAGS.optimizer == "adagrad" else 1
    tasks = {name: strategy.distribution.serving.embedded.pid(name) for name in strategy.distribution.served_tasks}
    watched = _Memory({"chief": os.getpid(), **tasks}, copies * FLAGS.table_mb / num_ps)
    if FLAGS.limited:
        watched.limit(FLAGS.spare_mb + (0 if part == "train" else _UNTOUCHED_MB))
    with watched.phase("build"):
        model = compiled(rows)
        model.optimizer.build(model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=model)
    if part == "restore":
        with watched.phase("restore"):
            checkpoint.read(str(folder / "checkpoint")).assert_existing_objects_matched()
    if part == "load":
        with watched.phase("load"):
            model.load_weights(folder / "model.keras")
    digest = _digest(model)
    with watched.phase("train"):
        trained(model)
    if part == "train":
        digest = _digest(model)
        with watched.phase("checkpoint"):
            checkpoint.write(str(folder / "checkpoint"))
        with watched.phase("save .keras"):
            model.save(folder / "model.keras")
        with watched.phase("export"):
            model.export(folder / "exported", verbose=False)
    return watched.figures() | {"digest": digest}


def _served(folder: pathlib.Path) -> dict[str, Any]:
    """Loads the SavedModel as any program does that serves it."""
    import numpy as np
    import tensorflow as tf

    watched = _Memory({"chief": os.getpid()}, 0)
    with watched.phase("serve"):
        model = tf.saved_model.load(str(folder / "exported"))
        model.serve(np.zeros((BATCH, IDS), "int64"))
    table = model.variables[0]
    digest = _sums(table.shape[0], lambda first, last: tf.gather(table, tf.range(first, last)).numpy())
    if "tfdist" in sys.modules:
        sys.exit("serve: tfdist was imported")
    return watched.figures() | {"share_mb": FLAGS.table_mb, "digest": digest}


def _digest(model: Any) -> list[float]:
    """Sums of blocks of the table, and of the slot."""
    tables = [model.layers[0].embeddings, *(each for each in model.optimizer.variables if "table" in each.path)]
    return [each for table in tables for each in _sums(table.shape[0], table.value.read_rows)]


def _sums(count: int, read_rows: Callable[[int, int], Any]) -> list[float]:
    size = count // 256
    blocks = (read_rows(index * size, (index + 1) * size) for index in range(256))
    return [float(abs(rows.astype("float64")).sum()) for rows in blocks]


class _Memory:
    """Highest resident memory of processes in phases of a program."""

    def __init__(self, tasks: dict[str, int], share_mb: float) -> None:
        self._tasks, self._share_mb = tasks, share_mb
        self._own = {task: _status(pid, "VmRSS") for task, pid in tasks.items()}
        self._peaks: dict[str, dict[str, float]] = {}
        self._secs: dict[str, float] = {}
        self._name, self._began = "", 0.0

    def limit(self, spare_mb: float) -> None:
        for task, pid in self._tasks.items():
            share = self._share_mb if task.startswith("ps") else 0
            most = int((_status(pid, "VmData") + share + spare_mb) * _MB)
            resource.prlimit(pid, resource.RLIMIT_DATA, (most, most))

    def phase(self, name: str) -> _Memory:
        self._name, self._began = name, time.perf_counter()
        for pid in self._tasks.values():
            # Sets the highest value back to the present one.
            pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")
        return self

    def __enter__(self) -> None:
        """Does nothing; see `phase`."""

    def __exit__(self, *error: object) -> None:
        self._secs[self._name] = time.perf_counter() - self._began
        self._peaks[self._name] = {task: _status(pid, "VmHWM") for task, pid in self._tasks.items()}

    def figures(self) -> dict[str, Any]:
        return {"share_mb": self._share_mb, "own_mb": self._own, "peak_mb": self._peaks, "secs": self._secs}


def _status(pid: int, name: str) -> float:
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


if __name__ == "__main__":
    app.run(main)
