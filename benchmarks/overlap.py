# SPDX-License-Identifier: Apache-2.0
"""Measures how much of the sums over the workers happens while the backward pass still computes.

    python benchmarks/overlap.py                 # two workers, the model with 25M parameters, both transports
    python benchmarks/overlap.py --batch=256     # a longer backward pass

Each bucket of gradients notes when it was computed and when its sum was there. The last bucket to be computed ends the
backward pass. What is summed before that is hidden. The same processes also train with sums that begin after the whole
backward pass, by turns, so that the gain is seen in the time of a step.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import app, flags
from sizes import SIZES

from tfdist.launchers import local
from tfdist.launchers.shape import Shape
from tfdist.launchers.supervise.processes import PortReservation, Supervisor

FLAGS = flags.FLAGS
HERE = pathlib.Path(__file__).resolve().parent
_LIMIT_SECS = 240.0
_MOST_BUCKETS = 64
_NUM_WORKERS = 2
# By name: the sums begin when all gradients are computed.
_WAYS = {"overlapped": False, "at the end": True}

flags.DEFINE_list("communications", ["tensorflow", "mpi"], "The transports.")
flags.DEFINE_list("batches", ["32", "256"], "Examples in a step of one worker.")
flags.DEFINE_string("size", "25M", "A key of sizes.SIZES.")
flags.DEFINE_integer("rounds", 4, "How often each way has its turn.", lower_bound=1)
flags.DEFINE_integer("steps", 8, "Steps of a turn that are measured; two come before.", lower_bound=1)
flags.DEFINE_string("output", str(HERE / "results" / "overlap.json"), "Where the figures go.")
flags.DEFINE_string("worker", None, "COMMUNICATION/BATCH: trains as a worker. For this script alone.")


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of one worker, in milliseconds.

    Attributes:
      step: from its begin to the begin of the next one.
      backward: from its begin to the last gradient.
      first: from its begin to the first sum.
      communication: in which a bucket is under way.
      hidden: of these, before the last gradient.
      buckets: of each, from the begin of the step: when it is computed, and when its sum is there.
    """

    step: float
    backward: float
    first: float
    communication: float
    hidden: float
    buckets: list[tuple[float, float]]


def main(argv: Sequence[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"overlap.py takes flags only. Received: {' '.join(argv[1:])}")
    if FLAGS.worker is not None:
        communication, batch = FLAGS.worker.split("/")
        pathlib.Path(FLAGS.output).write_text(json.dumps(_train(communication, int(batch))))
        return
    report: dict[str, Any] = {"size": FLAGS.size, "cores": os.cpu_count(), "workers": _NUM_WORKERS, "found": {}}
    report["load_average_before"] = os.getloadavg()[0]
    for communication, batch in itertools.product(FLAGS.communications, FLAGS.batches):
        found = _run(f"{communication}/{batch}")
        report["found"][f"{communication}, {batch} examples"] = found
        print(_line(f"{communication}, {batch} examples", found), flush=True)
        pathlib.Path(FLAGS.output).write_text(json.dumps(report, indent=1) + "\n")


def _line(name: str, found: dict[str, Any]) -> str:
    middle = found["overlapped"]
    return (
        f"{name:26} communication {middle['communication']:6.1f} ms, hidden {middle['hidden']:5.1f} ms "
        f"({middle['share']:.0%}; the backward pass goes on for {middle['window']:.1f} ms after the first bucket); "
        f"step {middle['step']:.1f} ms, with the sums at the end {found['at the end']['step']:.1f} ms, "
        f"ratio {found['ratio']:.2f}"
    )


def _run(worker: str) -> dict[str, Any]:
    """Returns the medians of the first worker, by way, and the gain in time, by rounds."""
    with tempfile.TemporaryDirectory() as folder, PortReservation(_NUM_WORKERS) as ports, Supervisor() as supervisor:
        arguments = [str(pathlib.Path(__file__).resolve()), f"--worker={worker}", f"--size={FLAGS.size}"]
        arguments += [f"--rounds={FLAGS.rounds}", f"--steps={FLAGS.steps}"]
        outputs = [pathlib.Path(folder) / f"{index}.json" for index in range(_NUM_WORKERS)]
        started = []
        request = local.plan(local.LocalJob(tuple(arguments), Shape(_NUM_WORKERS)), ports.ports)
        for task, output in zip(request.tasks, outputs, strict=True):
            environment = os.environ | dict(task.env) | {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR"}
            started.append(supervisor.start(task.name, [*task.command, f"--output={output}"], environment))
        for process in started:
            if process.wait(_LIMIT_SECS) != 0:
                raise RuntimeError(f"{process.name} failed:\n" + "\n".join(process.tail))
        turns = json.loads(outputs[0].read_text())
    ratios = [
        _median(one["steps"], "step") / _median(other["steps"], "step")
        for one, other in zip(_of(turns, "at the end"), _of(turns, "overlapped"), strict=True)
    ]
    summary: dict[str, Any] = {
        name: _summary([step for turn in _of(turns, name) for step in turn["steps"]]) for name in _WAYS
    }
    return {"ratio": statistics.median(ratios), "ratios": ratios, **summary}


def _of(turns: Sequence[dict[str, Any]], way: str) -> list[dict[str, Any]]:
    return [turn for turn in turns if turn["way"] == way]


def _median(steps: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.median(step[name] for step in steps)


def _summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        **{name: _median(steps, name) for name in ("step", "backward", "communication", "hidden")},
        "window": statistics.median(step["backward"] - step["first"] for step in steps),
        "share": statistics.median(step["hidden"] / step["communication"] for step in steps),
        "steps": steps,
    }


def _train(communication: str, batch: int) -> list[dict[str, Any]]:
    import tfdist

    tfdist.keep_freed_memory()
    import keras
    import models
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    recorder = _Recorder()
    strategy = tfdist.MultiWorkerMirroredStrategy(communication=communication)
    recorder.install(strategy._sums)
    size = dataclasses.replace(SIZES[FLAGS.size], batch=batch)
    with strategy.scope():
        model = models.compiled(keras, size)
    data = models.dataset(size, replicas=strategy.num_replicas_in_sync)

    class Steps(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.found: list[Step] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.began = time.time()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.found.append(_step(self.began, time.time(), recorder.times()))

    turns, steps = [], Steps()
    for _, (way, at_end) in itertools.product(range(FLAGS.rounds), _WAYS.items()):
        recorder.at_end = at_end
        recorder.start()
        # Traces the step anew.
        model.make_train_function(force=True)
        model.fit(data, steps_per_epoch=2 + FLAGS.steps, verbose=0, callbacks=[steps])
        turns.append({"way": way, "steps": [dataclasses.asdict(step) for step in steps.found[2:]]})
    return turns


def _step(began: float, ended: float, buckets: Sequence[tuple[float, float]]) -> Step:
    """Reads the notes of a step.

    Args:
      began: seconds since the epoch.
      ended: the same.
      buckets: of each, when it was computed, and when its sum was there; both transports sum them in this order.
    """
    spans = [(1e3 * (ready - began), 1e3 * (done - began)) for ready, done in buckets]
    backward = max(ready for ready, _ in spans)
    under_way = list(_in_turn(spans))
    return Step(
        step=1e3 * (ended - began),
        backward=backward,
        first=under_way[0][0],
        communication=sum(done - start for start, done in under_way),
        hidden=sum(min(done, backward) - start for start, done in under_way if start < backward),
        buckets=spans,
    )


def _in_turn(spans: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yields the begin and the end of each sum: it waits for its own bucket, and for the sum before."""
    before = 0.0
    for ready, done in spans:
        yield max(ready, before), done
        before = done


class _Recorder:
    """Notes, in the graph of a step, when each bucket is computed and when its sum is there.

    Attributes:
      at_end: whether the sums of a step that is traced from now on begin when all of its gradients are computed.
    """

    def __init__(self) -> None:
        import tensorflow as tf

        self.at_end = False
        # One for each bucket, so that no note waits for another one.
        self._tf, self._count = tf, 0
        self._places: list[Any] = []

    def install(self, sums: Any) -> None:
        """Looks at the sums of a strategy."""
        with self._tf.device("CPU:0"):
            self._places = [self._tf.Variable([0.0, 0.0], dtype=self._tf.float64) for _ in range(_MOST_BUCKETS)]
        sums._sum_of, sums.in_step = self._noting(sums._sum_of), self._in_turn(sums.in_step)

    def start(self) -> None:
        """A new step will be traced."""
        self._count = 0

    def times(self) -> list[tuple[float, float]]:
        """Of each bucket of the last step, the seconds since the epoch."""
        return [tuple(place.numpy().tolist()) for place in self._places[: self._count]]

    def _in_turn(self, in_step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def after_all(tensors: Sequence[Any]) -> Any:
            # Keras may trace a step twice; the last trace is the one that runs.
            self._count = 0
            if not self.at_end:
                return in_step(tensors)
            with self._tf.control_dependencies(list(tensors)):
                return in_step([self._tf.identity(tensor) for tensor in tensors])

        return after_all

    def _noting(self, sum_of: Callable[..., Any]) -> Callable[..., Any]:
        def noted(flat: Any, in_step: bool = False) -> Any:
            if not in_step or self._tf.executing_eagerly():
                return sum_of(flat, in_step)
            place = self._places[self._count]
            self._count += 1
            ready = self._time_after(flat)
            total = sum_of(flat, in_step)
            place.assign([ready, self._time_after(total)])
            return total

        return noted

    def _time_after(self, tensor: Any) -> Any:
        """Returns when a tensor is computed, in seconds since the epoch.

        TensorFlow orders operations with side effects as the program does; the clock is none of them.
        """
        with self._tf.control_dependencies([tensor]):
            now = self._tf.timestamp()
        self._tf.compat.v1.get_default_graph().experimental_acd_manager.run_independently(now.op)
        return now


if __name__ == "__main__":
    app.run(main)
