# SPDX-License-Identifier: Apache-2.0
"""Keras callback that writes measurements of a training to TensorBoard, and its update log.

Keras' thread                 a point every `update_freq` batches: copies counts, swaps histograms
threads of the engines        each update: `Recorder.record`, which hands columns of them to the `Session`
thread of `EventWriters`      makes protos, samples processes, writes event files
thread of `LogWriter`         writes segments of the update log
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from tfdist import _checks, _log
from tfdist.compat.keras import calls, saving
from tfdist.compat.keras.fit import EpochIterator
from tfdist.coordination.usage import Usage
from tfdist.policies.records import Contribution, Outcome
from tfdist.telemetry import event_files
from tfdist.telemetry.recorder import Recorder
from tfdist.telemetry.report import Tally
from tfdist.telemetry.update_log import Contributions, EventKind, Header, LogWriter, UpdateRecord, Updates
from tfdist.telemetry.update_log.columns import of_records
from tfdist.telemetry.update_log.writer import HEADER

# So often, at least, `tfdist watch` has something new, and a graph does not run out of room for times.
_COLLECT_SECS = 1.0
# Counters of processes are fetched and written no more often.
_USAGE_SECS = 5.0


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

    # See `compat.keras.calls.Call`: no logs of batches are read.
    follows_batches = False

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
        fit = EpochIterator.of(self.model)
        # Examples in each global batch but the last one; 0 if that isn't known.
        size = fit.batch_size if fit is not None else None
        self._batch_size = int(size) if isinstance(size, int) else 0
        # Batches in one update.
        self._accumulated = getattr(self.model.optimizer, "gradient_accumulation_steps", None) or 1
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
        self._iterations_before = int(keras.ops.convert_to_numpy(getattr(self.model.optimizer, "iterations", 0)))
        self._batches_before, self._last_batch = self._batches, -1
        self._collect()
        self._updates_before = self._recorder.updates
        session = self._session
        if session is not None:
            is_new = not (self._updates_before or self._recorder.has_steps)
            is_resumed = bool(self._iterations_before) and not self._batches and is_new
            session.begin_epoch(self._iterations_before, self._updates_before, self._accumulated, is_resumed)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes the time at which a step begins."""
        self._execution_began = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes the step, and writes a point if enough batches have passed."""
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
        iteration = self._iteration()
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
        """Notes the steps of an execution that no engine times, those of a warmup phase, as equally long."""
        count = batch - self._last_batch
        own, taking_part = self._distribution().replicas, self.model.distribute_strategy.replicas_to_aggregate
        replicas = [each for each in (range(taking_part) if own is None else own) if each < taking_part]
        if count < 1 or not replicas:
            return
        last, secs = self._iteration(), (self._execution_ended - self._execution_began) / count
        records = []
        for left in reversed(range(count)):
            ended = self._execution_ended - left * secs
            gradients = [Contribution(replica, ended - secs, ended) for replica in replicas]
            iteration = last - left // self._accumulated
            records.append(UpdateRecord(iteration, ended, secs, 0.0, self._batch_size, 1, gradients))
        updates, rows = of_records(records)
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
        counted = [(after - before) / max(1, updates) for after, before in zip(now.counted, last.counted, strict=False)]
        session.write(self._iteration(), secs, updates, float(examples), tally, counted)

    def _iteration(self) -> int:
        """Computes `optimizer.iterations` from the counts; reading it would wait for steps under a parameter server."""
        updates = self._batches - self._batches_before
        if self._recorder.is_complete:
            updates = self._recorder.updates - self._updates_before
        return self._iterations_before + updates // self._accumulated

    def _close(self, ended: str = "", is_success: bool = False) -> None:
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


class Session:
    """Holds the writers of one `fit` on the chief, until `close`; refers to no model.

    Args:
      strategy: a tfdist strategy.
      directory: log directory.
      max_contributions: of the update log; 0 writes none.
      batch_size: number of examples in a batch; 0 if it isn't known.

    Attributes:
      events: writes event files.
      log: writes the update log; None before the first epoch, and where none is written.
      is_closed: True after `close`.
    """

    def __init__(self, strategy: Any, directory: str, max_contributions: int, batch_size: int) -> None:
        self._strategy = strategy
        distribution = self._distribution = strategy.distribution
        recorder = self._recorder = distribution.recorder
        self._batch_size = batch_size
        self._gradients_per_batch: int = distribution.gradients_per_batch()
        self._has_warned = self._has_begun = self.is_closed = False
        self.events = event_files.EventWriters(directory, warn=self._warn)
        self.log: LogWriter | None = None
        self._max_contributions = max_contributions
        self._iteration = 0
        # The optimizer's iterations after so many recorded updates; batches of gradient accumulation in one iteration.
        self._begun = 0, 0, 1
        self._is_warming = distribution.is_warming()
        # By task the last counters, and their time: of the writer's thread.
        self._usage: tuple[dict[str, Usage], float] = {}, 0.0
        self._usage_due, self._usage_iteration = 0.0, -1
        # Of a `fit` around this one, which goes on later.
        self._outer: Session | None = getattr(recorder.sink, "__self__", None)
        recorder.is_warming = distribution.is_warming
        recorder.sink, recorder.on_event = self._on_updates, self.event
        saving.listen_to_saves(self._on_save)

    def begin_epoch(self, iterations: int, updates: int, per_iteration: int, is_resumed: bool) -> None:
        """Notes the optimizer's iterations after so many recorded updates; with the first epoch the log begins.

        Args:
          iterations: value of the optimizer's iterations.
          updates: number of recorded updates.
          per_iteration: number of batches in one iteration.
          is_resumed: True if an earlier program has begun this training; its log and this one belong to one job.
        """
        self._begun = iterations, updates, per_iteration
        if not self._has_begun:
            self._has_begun = True
            self._begin_log(is_resumed)
        if is_resumed:
            self.event(EventKind.RESUMED, f"training continues at iteration {iterations}")

    def _begin_log(self, is_resumed: bool) -> None:
        """Begins the update log, and notes a restart."""
        if self._max_contributions and "://" in self.events.directory:
            self._warn(
                "Telemetry writes no update log, for tfdist watch and the page, to an object store; use a path of a "
                f"file system, or update_log=False. Received: log_dir={self.events.directory!r}"
            )
        elif self._max_contributions:
            self.log = self._open_log(is_resumed)
        if restarts := self._distribution.own_usage().restarts:
            task, names, line = self._distribution.task, self._recorder.names, f"restart {restarts} by the launcher"
            self.event(EventKind.RESTARTED, *((line, names.index(task)) if task in names else (f"{task}: {line}", -1)))

    def _open_log(self, is_resumed: bool) -> LogWriter:
        run, distribution = pathlib.Path(self.events.directory, "policy"), self._distribution
        # All engines use the monotonic clock, whose second 0 is the start of the machine: the log counts from now on.
        zero_secs = time.monotonic()
        header = Header(
            job=(_last_job(run) if is_resumed else None) or distribution.job,
            writer=distribution.task,
            workers=self._recorder.names,
            strategy=type(self._strategy).__name__,
            policies=tuple(map(repr, distribution.policies)),
            origin_secs=time.time(),
        )
        most = self._max_contributions
        return LogWriter(str(run / "updates"), header, max_contributions=most, warn=self._warn, zero_secs=zero_secs)

    def examples(self, gradients: Any) -> Any:
        """Returns the number of examples in so many gradients; 0 if it isn't known."""
        return self._batch_size * gradients / self._gradients_per_batch if self._gradients_per_batch else 0 * gradients

    def _on_updates(self, updates: Updates, rows: Contributions) -> None:
        """See `recorder.Sink`."""
        iterations, begun, per_iteration = self._begun
        owner = np.repeat(np.arange(len(updates)), updates.count)[rows.outcome == Outcome.ACCEPTED]
        guessed = self.examples(np.bincount(owner, minlength=len(updates)))
        step = iterations + (updates.step - begun) // per_iteration
        examples = np.where(updates.examples > 0, updates.examples, guessed)
        self.write_updates(updates.replace(step=step, examples=examples), rows)

    def write_updates(self, updates: Updates, rows: Contributions) -> None:
        """Writes updates to the log, and an event at the end of the warmup phase."""
        if self.log is not None:
            self.log.add_columns(updates, rows)
        after = np.flatnonzero(updates.phase == 0)
        if self._is_warming and len(after):
            self._is_warming = False
            moment = float(updates.time[after[0]] - updates.opened[after[0]])
            self.event(EventKind.PHASE_CHANGED, "the warmup phase is over: all replicas train", time=moment)

    def event(self, kind: EventKind, text: str, replica: int = -1, time: float | None = None) -> None:
        """Writes an event to the log, and to TensorBoard."""
        if self.log is not None:
            self.log.event(kind, text, replica, time)
        # The log has a column for the worker, a line of TensorBoard has not.
        line = f"{self._recorder.names[replica]} {text}" if replica >= 0 else text
        name = "policy/changes" if kind in (EventKind.POLICY_CHANGED, EventKind.PHASE_CHANGED) else "tasks/events"
        self.events.add("", self._iteration, lambda: [event_files.text(name, line)])

    def span(self, kind: EventKind, text: str, begin: float, secs: float = 0.0) -> None:
        """Writes to the log alone what all workers were in for some time, such as a validation."""
        if self.log is not None:
            self.log.event(kind, text, time=begin, secs=secs)

    def _on_save(self, strategy: Any, path: str, begin: float, secs: float) -> None:
        if strategy is self._strategy:
            name = os.path.basename(path.rstrip("/")) or path  # noqa: PTH119 - may be a gs:// path
            self.span(EventKind.CHECKPOINT, f"checkpoint {name}, {secs:.3g} s", begin, secs)

    def write(
        self, iteration: int, secs: float, updates: float, examples: float, tally: Tally, counted: Sequence[float]
    ) -> None:
        """Hands a point of the job to the writer's thread."""
        distribution, settings = self._distribution, None
        if self._recorder.is_complete and (distribution.policies or distribution.serving is not None):
            given = {"is_warming": distribution.is_warming(), "spares": distribution.spares()}
            given["replicas_to_aggregate"] = self._strategy.replicas_to_aggregate
            settings = {name: float(value) for name, value in given.items() if value is not None}
        self.events.add("", iteration, lambda: event_files.job(secs, updates, examples, tally, settings, counted))
        self.add_usage(iteration)

    def write_logs(self, iteration: int, run: str, values: Mapping[str, float]) -> None:
        """Writes values at the end of an epoch to a run: "train" or "validation"."""
        self.events.add(run, iteration, lambda: [event_files.scalar(name, value) for name, value in values.items()])
        if self.log is not None and "logs/loss" in values:
            self.log.scalar(f"loss/{run}", iteration, values["logs/loss"])

    def add_usage(self, iteration: int, at_end: bool = False) -> None:
        """Samples the counters of all tasks, now and then, in the writer's thread: some answer by the network."""
        self._iteration, now = iteration, time.monotonic()
        # One point for each step.
        if iteration != self._usage_iteration and (at_end or now >= self._usage_due):
            self._usage_iteration, self._usage_due = iteration, now + _USAGE_SECS
            self.events.add("", iteration, lambda: self._sample(iteration))

    def _sample(self, iteration: int) -> list[Any]:
        """Writes what each task sends and receives to the log; returns the values of this process."""
        (last, last_at), found, now = self._usage, self._distribution.usage(), time.monotonic()
        secs, task, log = now - last_at, self._distribution.task, self.log
        self._usage = found, now
        for name, each in found.items() if log is not None else ():
            if name in last:
                before = last[name]
                log.scalar(f"sent/{name}", iteration, (each.bytes_sent - before.bytes_sent) / secs, now)
                log.scalar(f"received/{name}", iteration, (each.bytes_received - before.bytes_received) / secs, now)
        return event_files.process(last.get(task), found[task], secs) if task in found else []

    def flush(self) -> None:
        """Writes what there is so far; waits for the disk."""
        self._recorder.flush()
        self.events.flush()
        if self.log is not None:
            self.log.flush()

    def close(self, ended: str = "", is_success: bool = False) -> None:
        """Writes what is left and ends the threads; may be called again.

        Args:
          ended: how the training has ended, for the log; "" if that is not known.
          is_success: True if it has not raised.
        """
        if self.is_closed:
            return
        self._recorder.flush()
        if ended:
            self.span(EventKind.FINISHED, ended, time.monotonic())
        self.is_closed = True
        if self._recorder.sink == self._on_updates:
            outer = self._outer if self._outer is not None and not self._outer.is_closed else None
            self._recorder.sink = None if outer is None else outer._on_updates
            self._recorder.on_event = None if outer is None else outer.event
        if is_success:
            # After an error the other tasks may not answer.
            self.add_usage(self._iteration, at_end=True)
        self.events.close()
        if self.log is not None:
            self.log.close()

    def _warn(self, line: str) -> None:
        """Warns of the disk, once for all writers."""
        if not self._has_warned:
            self._has_warned = True
            _log.say(line)


def _last_job(directory: pathlib.Path) -> str | None:
    """Returns the job of the newest log in a run directory, if there is one."""
    try:
        # updates, updates_2, ..., updates_10
        newest = max(directory.glob(f"updates*/{HEADER}"), key=lambda each: (len(each.parent.name), each), default=None)
        return Header.from_json(newest.read_bytes()).job if newest else None
    except (OSError, ValueError):
        return None


def _recorder(strategy: Any) -> Recorder:
    recorder = getattr(getattr(strategy, "distribution", None), "recorder", None)
    if not isinstance(recorder, Recorder):
        raise ValueError(
            "Telemetry is for models of a tfdist strategy: build and compile the model in `with strategy.scope():` of, "
            f"say, tfdist.MirroredStrategy(). Received: a model of {type(strategy).__name__}"
        )
    return recorder
