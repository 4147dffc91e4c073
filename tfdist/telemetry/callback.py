# SPDX-License-Identifier: Apache-2.0
"""Keras callback that writes measurements of a training to TensorBoard, and its update log.

Keras' thread                 a point every `update_freq` batches: copies counts, swaps histograms
threads of the engines        each update: `Recorder.record`, which hands columns of them to the `Session`
thread of `EventWriters`      makes protos, samples processes, writes event files
thread of `LogWriter`         writes segments of the update log
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from tfdist import _checks
from tfdist.compat.keras import calls
from tfdist.compat.keras.fit import EpochIterator
from tfdist.policies.records import Outcome
from tfdist.telemetry.recorder import Recorder
from tfdist.telemetry.session import Session, equal_steps
from tfdist.telemetry.update_log import EventKind

# So often, at least, `tfdist watch` has something new, and a graph does not run out of room for times.
_COLLECT_SECS = 1.0


class Telemetry(keras.callbacks.Callback):
    """Writes who is slow, what was dropped, staleness, speed and network traffic to TensorBoard.

        model.fit(dataset, epochs=5, callbacks=[tfdist.callbacks.Telemetry("logs/run1")])

    TensorBoard lists three runs: `log_dir` itself has the values of the job, `train` and `validation` have the logs.
    Points are at `optimizer.iterations`. Each worker is shown by the page and by `tfdist watch`. They read the update
    log (docs/update_log.md) in `policy/updates`.

    On several workers, each needs the callback, and the chief writes. All is written by threads, every few seconds; an
    error of the disk is one warning.

    Args:
      log_dir: the log directory of TensorBoard, or a directory in it. Another training needs another one.
      update_freq: number of batches between two points; no value is read in between.
      update_log: True to write the update log. It needs a path of a file system.
      max_contributions: gradients that the update log keeps; beyond it, the oldest are removed.

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
            _checks.check_count("Telemetry", name, value)
        self._directory = os.fspath(log_dir)
        self._update_freq = update_freq
        self._max_contributions = max_contributions if update_log else 0
        self._clock = time.monotonic
        self._session: Session | None = None
        self._recorder = Recorder([])
        self._is_training = False
        self._last: _Moment | None = None
        self._batches = self._batches_before = 0
        self._iterations_before = self._updates_before = 0
        self._execution_began = self._execution_ended = 0.0
        self._last_batch = -1
        self._evaluated_secs = self._evaluation_began = 0.0
        self._evaluated_for: float | None = None
        self._batch_size = self._accumulated = 0
        self._collected_at = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Opens the files, on the chief."""
        strategy = self.model.distribute_strategy
        self._recorder = _recorder(strategy)
        # A loop of the user's own that has raised has left its files open.
        self._close()
        self._last, self._batches, self._evaluated_secs, self._evaluated_for = None, 0, 0.0, None
        self._collect()
        self._batch_size, self._accumulated = _batch_size(self.model), _accumulated(self.model)
        self._is_training = True
        own = strategy.distribution.replicas
        if own is None or 0 in own:
            self._session = Session(strategy, self._directory, self._max_contributions, self._batch_size)
        call = calls.current()
        if call is not None and call.model is self.model:
            # Keras calls `on_train_end` only without an error.
            call.ends.append(lambda error: self._close(f"ended by {type(error).__name__}"))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reads `optimizer.iterations`; within the epoch updates are counted without reading it."""
        # On every worker, because reading the variable may be a collective operation.
        self._iterations_before = _iterations(self.model)
        self._batches_before, self._last_batch = self._batches, -1
        self._collect()
        self._updates_before = self._recorder.updates
        session = self._session
        if session is not None:
            is_new = not (self._updates_before or self._recorder.has_steps)
            is_resumed = bool(self._iterations_before) and not self._batches and is_new
            session.begin_log(is_resumed)
            session.begin_epoch(self._iterations_before, self._updates_before, self._accumulated)
            if is_resumed:
                session.event(EventKind.RESUMED, f"training continues at iteration {self._iterations_before}")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes the time at which a step begins."""
        self._execution_began = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes the step, and writes a point if enough batches have passed."""
        if not self._is_training:
            return
        self._execution_ended = time.monotonic()
        self._batches = self._batches_before + batch + 1
        distribution = self._distribution()
        if distribution.is_warming() and distribution.serving is None:
            self._note_steps(batch)
        self._last_batch = batch
        if self._session is not None and self._last is None:
            # The first batch includes the building of the graph.
            self._last = self._now()
            self._recorder.take()
        elif self._session is not None and self._last and self._batches - self._last.batches >= self._update_freq:
            self._write(self._session, self._last)
        elif time.monotonic() - self._collected_at > _COLLECT_SECS:
            self._collect()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes the logs of the epoch, on the chief."""
        self._collect()
        if self._session is None:
            return
        iteration = self._iteration(self._batches, self._recorder.updates)
        found: dict[str, dict[str, float]] = {"train": {}, "validation": {}}
        for name, value in (logs or {}).items():
            run, tag = ("validation", name[4:]) if name.startswith("val_") else ("train", name)
            if isinstance(value, int | float):
                found[run][f"logs/{tag}"] = value
        if self._evaluated_for is not None:
            found["validation"]["speed/evaluation_secs"] = self._evaluated_for
            self._evaluated_for = None
        for run, values in found.items():
            self._session.write_logs(iteration, run, values)

    def on_test_begin(self, logs: Any = None) -> None:
        """Stops the measured time."""
        self._evaluation_began = self._clock()

    def on_test_end(self, logs: Any = None) -> None:
        """Continues the measured time."""
        secs = self._evaluated_for = self._clock() - self._evaluation_began
        self._evaluated_secs += secs
        if self._session is not None:
            # With what Keras does after the last step: it reads the metrics and opens the data.
            began, self._execution_ended = self._execution_ended, time.monotonic()
            whole = self._execution_ended - began
            said = f"validation, {secs:.3g} s" + f" of {whole:.3g} s with what comes before it" * (whole > 1.1 * secs)
            self._session.span(EventKind.VALIDATION, said, began, whole)

    def on_train_end(self, logs: Any = None) -> None:
        """Writes the last point and closes the files."""
        if self._session is not None and self._last is not None and self._batches > self._last.batches:
            self._write(self._session, self._last)
        self._collect()
        self._close("finished", is_success=True)

    def flush(self) -> None:
        """Writes what there is so far; waits for the disk."""
        if self._session is not None:
            self._session.flush()

    def _note_steps(self, batch: int) -> None:
        """Notes the steps of an execution that no engine times: those of an engine of a warmup phase."""
        count = batch - self._last_batch
        own, taking_part = self._distribution().replicas, self.model.distribute_strategy.replicas_to_aggregate
        replicas = [each for each in (range(taking_part) if own is None else own) if each < taking_part]
        if count < 1 or not replicas:
            return
        last = self._iteration(self._batches, self._recorder.updates)
        iterations = [last - left // self._accumulated for left in reversed(range(count))]
        given = self._execution_began, time.monotonic(), iterations, replicas, self._batch_size
        updates, rows = equal_steps(*given)
        self._recorder.add_times(updates, rows)
        if self._session is not None:
            self._session.write_updates(updates, rows)

    def _collect(self) -> None:
        """Makes the strategy record the steps whose times are kept in the graph."""
        self._collected_at = time.monotonic()
        self._distribution().collect()
        self._recorder.flush()

    def _distribution(self) -> Any:
        return self.model.distribute_strategy.distribution

    def _now(self) -> _Moment:
        self._collect()
        return _Moment(self._clock() - self._evaluated_secs, self._batches, self._distribution().bytes_sent())

    def _write(self, session: Session, last: _Moment) -> None:
        now = self._last = self._now()
        tally, secs, batches = self._recorder.take(), now.secs - last.secs, now.batches - last.batches
        if self._recorder.is_complete:
            updates = tally.updates / self._accumulated
            examples = tally.examples or session.examples(int(tally.counts[Outcome.ACCEPTED].sum()))
        else:
            updates, examples = batches // self._accumulated, batches * self._batch_size
        iteration = self._iteration(now.batches, self._recorder.updates)
        counted = [(after - before) / max(1, updates) for after, before in zip(now.counted, last.counted, strict=False)]
        session.write(iteration, secs, updates, float(examples), tally, counted)

    def _iteration(self, batches: int, recorded: int) -> int:
        """Computes `optimizer.iterations` from the counts; reading it would wait for steps under a parameter server."""
        updates = batches - self._batches_before
        if self._recorder.is_complete:
            updates = recorded - self._updates_before
        return self._iterations_before + updates // self._accumulated

    def _close(self, ended: str = "", is_success: bool = False) -> None:
        self._is_training = False
        if self._session is not None:
            self._session.close(ended, is_success)
            self._session = None


class _Moment(NamedTuple):
    """Counts between two batches of a training.

    Attributes:
      secs: time, without that of evaluations.
      batches: batches of Keras' loop.
      counted: bytes that each worker has sent, where tfdist counts them.
    """

    secs: float
    batches: int
    counted: Sequence[int]


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


def _iterations(model: Any) -> int:
    return int(keras.ops.convert_to_numpy(getattr(model.optimizer, "iterations", 0)))


def _accumulated(model: Any) -> int:
    """Returns the number of batches in one update."""
    return getattr(model.optimizer, "gradient_accumulation_steps", None) or 1
