# SPDX-License-Identifier: Apache-2.0
"""Keras callback that writes measurements of a training to TensorBoard, and its update log.

Keras' thread                 a point every `update_freq` batches: copies counts, swaps histograms
threads of the engines        each update: `Recorder.record`, which hands it to the `LogSink`
thread of `EventWriters`      makes protos, samples processes, writes event files
thread of `LogWriter`         writes segments of the update log
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import keras

from tfdist import _checks
from tfdist.compat.keras import calls
from tfdist.compat.keras.fit import EpochIterator
from tfdist.policies.records import Contribution, Outcome
from tfdist.telemetry import summaries
from tfdist.telemetry.recorder import Recorder
from tfdist.telemetry.session import Session
from tfdist.telemetry.update_log import EventKind

# So often, at least, `tfdist watch` has something new, and a graph does not run out of room for times.
_COLLECT_SECS = 1.0


class Telemetry(keras.callbacks.Callback):
    """Writes who is slow, what was dropped, staleness, speed and network traffic to TensorBoard.

        model.fit(dataset, epochs=5, callbacks=[tfdist.callbacks.Telemetry("logs/run1")])

    TensorBoard lists three runs: `log_dir` itself has the values of the job, `train` and `validation` have the logs.
    Points are at `optimizer.iterations`. Each worker is shown by the page and by `tfdist watch`. They read the update
    log (docs/update_log.md) in `policy/updates`, and the counters of processes in `workers/worker_03` and `ps/ps_0`.

    On several workers, each needs the callback, and writes its own directory: `log_dir` is a shared path, one of an
    object store, or a path of each machine. All is written by threads, every few seconds; an error of the disk is one
    warning.

    Args:
      log_dir: the log directory of TensorBoard, or a directory in it. Another training needs another one.
      update_freq: number of batches between two points; no value is read in between.
      update_log: True to write the update log.
      max_contributions: gradients that the update log keeps one by one; older updates are aggregated.

    Raises:
      ValueError: an argument is invalid. When training begins: the model belongs to no tfdist strategy.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        update_freq: int = 50,
        *,
        update_log: bool = True,
        max_contributions: int = 8_000_000,
    ) -> None:
        super().__init__()
        for name, value in (("update_freq", update_freq), ("max_contributions", max_contributions)):
            if not _checks.is_count(value, at_least=1):
                raise ValueError(f"Telemetry({name}=...) must be an integer of at least 1. Received: {name}={value!r}")
        self._directory = os.fspath(log_dir)
        self._update_freq = update_freq
        self._max_contributions = max_contributions if update_log else 0
        self._clock = time.monotonic
        self._session: Session | None = None
        self._recorder = Recorder([])
        self._last: summaries.Moment | None = None
        self._batches = self._batches_before = 0
        self._iterations_before = self._updates_before = 0
        self._execution_began = 0.0
        self._last_batch = -1
        self._evaluated_secs = self._evaluation_began = 0.0
        self._evaluated_for: float | None = None
        self._batch_size = self._accumulated = 0
        self._collected_at = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Opens the files."""
        strategy = self.model.distribute_strategy
        self._recorder = _recorder(strategy)
        # A loop of the user's own that has raised has left its files open.
        self._close(summaries.RUNNING)
        self._last, self._batches, self._evaluated_secs, self._evaluated_for = None, 0, 0.0, None
        self._collect()
        self._batch_size, self._accumulated = _batch_size(self.model), _accumulated(self.model)
        self._recorder.take_times()
        hparams, size = _hparams(self.model, self._batch_size), self._batch_size
        self._session = Session(strategy, self._directory, self._max_contributions, size, hparams)
        call = calls.current()
        if call is not None and call.model is self.model:
            call.ends.append(self._raised)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reads `optimizer.iterations`; within the epoch updates are counted without reading it."""
        # On every worker, because reading the variable may be a collective operation.
        self._iterations_before = _iterations(self.model)
        self._batches_before, self._last_batch = self._batches, -1
        self._collect()
        self._updates_before = self._recorder.updates
        if self._session is not None:
            sink = self._session.sink
            is_new = not (self._updates_before or self._recorder.has_steps)
            is_resumed = bool(self._iterations_before) and not self._batches and is_new
            self._session.begin_log(is_resumed)
            sink.begin(self._iterations_before, self._updates_before, self._accumulated)
            if is_resumed:
                sink.event(EventKind.RESUMED, f"training continues at iteration {self._iterations_before}")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes the time at which a step begins."""
        self._execution_began = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes the step, and writes a point if enough batches have passed."""
        session = self._session
        if session is None:
            return
        self._batches = self._batches_before + batch + 1
        if session.times_steps:
            self._note_steps(session, batch)
        self._last_batch = batch
        if self._last is None:
            # The first batch includes the building of the graph.
            self._last = self._now()
            self._recorder.take_times()
        elif self._batches - self._last.batches >= self._update_freq:
            self._write(session, self._last)
        elif time.monotonic() - self._collected_at > _COLLECT_SECS:
            self._collect()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes the logs of the epoch, on the chief."""
        self._collect()
        if self._session is None or not self._session.is_chief:
            return
        iteration = self._iteration(self._batches, self._recorder.updates)
        found: dict[str, list[Any]] = {"train": [], "validation": []}
        for name, value in (logs or {}).items():
            run, tag = ("validation", name[4:]) if name.startswith("val_") else ("train", name)
            if isinstance(value, int | float):
                found[run].append(summaries.scalar(f"logs/{tag}", value))
        if self._evaluated_for is not None:
            found["validation"].append(summaries.scalar("speed/evaluation_secs", self._evaluated_for))
            self._evaluated_for = None
        for run, values in found.items():
            if values:
                self._session.events.add(run, iteration, lambda values=values: values)

    def on_test_begin(self, logs: Any = None) -> None:
        """Stops the measured time."""
        self._evaluation_began = self._clock()

    def on_test_end(self, logs: Any = None) -> None:
        """Continues the measured time."""
        self._evaluated_for = self._clock() - self._evaluation_began
        self._evaluated_secs += self._evaluated_for
        if self._session is not None:
            self._session.validated(time.monotonic() - self._evaluated_for, self._evaluated_for)

    def on_train_end(self, logs: Any = None) -> None:
        """Writes the last point and closes the files."""
        if self._session is not None and self._last is not None and self._batches > self._last.batches:
            self._write(self._session, self._last)
        self._collect()
        self._close(summaries.SUCCESS, "finished")

    def flush(self) -> None:
        """Writes what there is so far; waits for the disk."""
        if self._session is not None:
            self._session.flush()

    def _note_steps(self, session: Session, batch: int) -> None:
        """Notes the steps of an execution that no engine times, with equal times."""
        count = batch - self._last_batch
        if count < 1:
            return
        end = time.monotonic()
        secs = (end - self._execution_began) / count
        iteration = self._iteration(self._batches, self._recorder.updates)
        for index in range(count):
            start = self._execution_began + index * secs
            gradients = tuple(
                Contribution(replica, start, start + secs, Outcome.ACCEPTED, 0, 1.0, 0.0)
                for replica in session.replicas_in_step()
            )
            if gradients:
                self._recorder.add_step(gradients, start + secs)
                step = iteration - (count - 1 - index) // self._accumulated
                session.sink.step(step, self._batch_size, gradients)

    def _collect(self) -> None:
        """Makes the strategy record the steps whose times are kept in the graph."""
        self._collected_at = time.monotonic()
        self._distribution().collect()

    def _distribution(self) -> Any:
        return self.model.distribute_strategy.distribution

    def _now(self) -> summaries.Moment:
        self._collect()
        counted = self._session.counted_bytes() if self._session is not None else ()
        return summaries.Moment(self._clock() - self._evaluated_secs, self._batches, self._recorder.sums(), counted)

    def _write(self, session: Session, last: summaries.Moment) -> None:
        if not session.is_chief:
            # The chief writes the values of the job, and so nothing is added up here.
            self._collect()
            self._last = dataclasses.replace(last, batches=self._batches)
            session.add_usage(self._iteration(self._batches, self._recorder.updates))
            return
        now = self._last = self._now()
        sums, secs, batches = now.sums.since(last.sums), now.secs - last.secs, now.batches - last.batches
        updates, examples = sums.updates / self._accumulated, float(sums.examples)
        if not self._recorder.is_complete:
            updates, examples = batches // self._accumulated, batches * self._batch_size
        else:
            examples = examples or session.examples(sum(sums.accepted))
        iteration = self._iteration(now.batches, now.sums.updates)
        counted = [(after - before) / max(1, updates) for after, before in zip(now.counted, last.counted, strict=False)]
        session.write(iteration, secs, updates, examples, sums, self._recorder.take_times(), counted)

    def _iteration(self, batches: int, recorded: int) -> int:
        """Computes `optimizer.iterations` from the counts; reading it would wait for steps under a parameter server."""
        updates = batches - self._batches_before
        if self._recorder.is_complete:
            updates = recorded - self._updates_before
        return self._iterations_before + updates // self._accumulated

    def _raised(self, error: BaseException) -> None:
        """Closes the files of a training that has raised: Keras calls `on_train_end` only without an error."""
        self._close(summaries.RUNNING, f"ended by {type(error).__name__}")

    def _close(self, status: int, ended: str = "") -> None:
        if self._session is not None:
            self._session.close(status, ended)
            self._session = None


def _recorder(strategy: Any) -> Recorder:
    recorder = getattr(getattr(strategy, "distribution", None), "recorder", None)
    if not isinstance(recorder, Recorder):
        raise ValueError(
            "Telemetry is for models of a tfdist strategy: build and compile the model in `with strategy.scope():` of, "
            f"say, tfdist.MirroredStrategy(). Received: a model of {type(strategy).__name__}"
        )
    return recorder


def _batch_size(model: keras.Model) -> int:
    """Returns the number of examples in each global batch but the last one; 0 if it isn't known."""
    fit = EpochIterator.of(model)
    size = fit.batch_size if fit is not None else None
    return int(size) if isinstance(size, int) else 0


def _hparams(model: keras.Model, batch_size: int) -> dict[str, str | float | bool]:
    """Returns what runs are compared by in the HParams tab, except for what the strategy knows."""
    optimizer: Any = model.optimizer
    found: dict[str, str | float | bool] = {
        "optimizer": type(getattr(optimizer, "inner_optimizer", optimizer)).__name__
    }
    rate = getattr(optimizer, "learning_rate", None)
    try:
        # Of a schedule, its value now.
        found["learning_rate"] = float(keras.ops.convert_to_numpy(rate))
    except (TypeError, ValueError, RuntimeError):
        found["learning_rate"] = -1.0
    found["batch_size"] = batch_size
    found["steps_per_execution"] = int(getattr(model, "steps_per_execution", None) or 1)
    return found


def _iterations(model: Any) -> int:
    return int(keras.ops.convert_to_numpy(getattr(model.optimizer, "iterations", 0)))


def _accumulated(model: Any) -> int:
    """Returns the number of batches in one update."""
    return getattr(model.optimizer, "gradient_accumulation_steps", None) or 1
