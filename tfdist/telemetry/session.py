# SPDX-License-Identifier: Apache-2.0
"""One `fit` with the Telemetry callback: the event files and the update log that the chief writes."""

from __future__ import annotations

import itertools
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import _forks, _log
from tfdist.compat.keras import saving
from tfdist.coordination.usage import Usage
from tfdist.policies.records import Contribution, Outcome
from tfdist.telemetry import summaries
from tfdist.telemetry.report import Tally
from tfdist.telemetry.update_log import Contributions, EventKind, Header, LogWriter, UpdateRecord, Updates
from tfdist.telemetry.update_log.columns import of_records
from tfdist.telemetry.update_log.writer import HEADER

# TensorBoard's event files, one in each run directory, written by a thread.
#
# `tf.summary` isn't used: a file in a directory that has vanished takes no point any more, and it says nothing.


_FLUSH_SECS = 2.0
_CLOSE_SECS = 20.0
# Points that wait for a disk that does not answer; beyond that the oldest are left out.
_MOST_PENDING = 10_000
_MARK = ".tfdist"
# Runs that others may write, too: programs of their own, and Keras' TensorBoard callback.
_SHARED = (("",), ("train", "validation"))

# Returns the values of an event, in the writer's thread.
Values = Callable[[], Sequence[Any]]
_numbers = itertools.count()


class EventWriters:
    """Writes the events of several run directories of one log directory. Any thread may call it.

    `add` never waits for the disk. An error of the disk, or a directory that vanishes, is one warning; with the next
    flush another file is begun.

    Args:
      directory: log directory of TensorBoard; any path of `tf.io.gfile`.
      warn: receives a line when the disk fails.
    """

    def __init__(self, directory: str, warn: Callable[[str], object]) -> None:
        self.directory = directory
        self._warn = warn
        # Guards `_pending`; the other one the files.
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._pending: list[tuple[str, int, float, Values]] = []
        self._files: dict[str, _EventFile] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfdist telemetry", daemon=True)
        self._thread.start()
        _forks.at_exit(self.close)

    def add(self, run: str, step: int, values: Values) -> None:
        """Adds an event to the file of a run; `values` is called later, in the writer's thread."""
        with self._lock:
            self._pending.append((run, step, time.time(), values))
            del self._pending[:-_MOST_PENDING]

    def flush(self) -> None:
        """Writes what was added; waits for the disk."""
        with self._writing:
            with self._lock:
                pending, self._pending = self._pending, []
            changed = set()
            for run, step, wall_time, values in pending:
                try:
                    found = values()
                except Exception as error:
                    self._warn(f"Telemetry: a point of {run or 'the run'} is left out: {' '.join(str(error).split())}")
                    continue
                if found and self._try(run, lambda each: each.add(step, wall_time, found)):  # noqa: B023 - called at once
                    changed.add(run)
            for run in changed & self._files.keys():
                self._try(run, lambda each: each.writer.flush())

    def close(self) -> None:
        """Writes what was added, closes all files and ends the thread; may be called again."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECS)
        if self._thread.is_alive():
            self._warn(f"Telemetry: the disk of {self.directory} did not answer for {_CLOSE_SECS:g} s")
        _forks.not_at_exit(self.close)

    def _run(self) -> None:
        while not self._ended.wait(_FLUSH_SECS):
            self.flush()
        self.flush()
        with self._writing:
            for run in list(self._files):
                self._try(run, lambda each: each.writer.close())

    def _try(self, run: str, write: Callable[[_EventFile], object]) -> bool:
        """Writes to the file of a run; returns False after an error of the disk, which ends no training."""
        try:
            if run in self._files and self._files[run].is_gone():
                path = self._files.pop(run).path
                self._failed(run, FileNotFoundError(f"{path} has vanished"))
            if run not in self._files:
                self._files[run] = _EventFile(_join(self.directory, self._name(run)))
            write(self._files[run])
        except Exception as error:
            self._files.pop(run, None)
            self._failed(run, error)
            return False
        return True

    def _name(self, run: str) -> str:
        """Returns the directory of a run: another one where somebody else writes, because TensorBoard mixes them up."""
        shared = next((names for names in _SHARED if run in names), ())
        if any(_foreign_events(_join(self.directory, each)) for each in shared):
            return f"tfdist_{run}" if run else "tfdist"
        return run

    def _failed(self, run: str, error: Exception) -> None:
        text = " ".join(str(error).split())
        self._warn(f"Telemetry: {_join(self.directory, run)} can't be written, and is tried again: {text}")


class _EventFile:
    """One event file; begins it. An event file is a TFRecord file of `Event` protos."""

    def __init__(self, directory: str) -> None:
        tf.io.gfile.makedirs(directory)
        number = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self.path = _join(directory, f"events.out.tfevents.{number}{_MARK}")
        self.writer = tf.io.TFRecordWriter(self.path)
        self._write(tf.compat.v1.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, step: int, wall_time: float, values: Sequence[Any]) -> None:
        summary = tf.compat.v1.Summary(value=values)
        self._write(tf.compat.v1.Event(wall_time=wall_time, step=step, summary=summary))

    def _write(self, event: Any) -> None:
        self.writer.write(event.SerializeToString())

    def is_gone(self) -> bool:
        """Returns True if somebody has deleted a local file; an object store isn't asked, for its price and time."""
        return "://" not in self.path and not os.path.exists(self.path)  # noqa: PTH110


def _foreign_events(directory: str) -> bool:
    try:
        names = tf.io.gfile.listdir(directory)
    except tf.errors.OpError:
        return False
    return any("tfevents" in name and not name.endswith(_MARK) for name in names)


def _join(directory: str, name: str) -> str:
    return os.path.join(directory, name)  # noqa: PTH118 - may be a gs:// path


# Counters of processes are fetched and written no more often.
_USAGE_SECS = 5.0


class Session:
    """Holds the writers of one `fit` on the chief, until `close`; refers to no model.

    Args:
      strategy: a tfdist strategy.
      directory: log directory.
      max_contributions: of the update log; 0 writes none.
      batch_size: number of examples in a batch; 0 if it isn't known.

    Attributes:
      events: writes event files.
      log: writes the update log; None before `begin_log`, and where none is written.
      is_closed: True after `close`.
    """

    def __init__(self, strategy: Any, directory: str, max_contributions: int, batch_size: int) -> None:
        self._strategy = strategy
        distribution = self._distribution = strategy.distribution
        recorder = self._recorder = distribution.recorder
        self._batch_size = batch_size
        self._gradients_per_batch: int = distribution.gradients_per_batch()
        self._has_warned = self._has_begun_log = self.is_closed = False
        self.events = EventWriters(directory, warn=self._warn)
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

    def begin_log(self, is_resumed: bool) -> None:
        """Begins the update log, if that is not done; notes a restart.

        Args:
          is_resumed: True if an earlier program has begun this training; its log and this one belong to one job.
        """
        if self._has_begun_log:
            return
        self._has_begun_log = True
        restarts = self._distribution.own_usage().restarts
        if self._max_contributions and "://" in self.events.directory:
            self._warn(
                "Telemetry writes no update log, for tfdist watch and the page, to an object store; use a path of a "
                f"file system, or update_log=False. Received: log_dir={self.events.directory!r}"
            )
        elif self._max_contributions:
            self.log = self._open_log(is_resumed)
        if restarts:
            task, names = self._distribution.task, self._recorder.names
            line = f"restart {restarts} by the launcher"
            is_worker = task in names
            self.event(EventKind.RESTARTED, *((line, names.index(task)) if is_worker else (f"{task}: {line}", -1)))

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

    def begin_epoch(self, iterations: int, updates: int, per_iteration: int) -> None:
        """Notes the value of the optimizer's iterations after so many recorded updates."""
        self._begun = iterations, updates, per_iteration

    def examples(self, gradients: Any) -> Any:
        """Returns the number of examples in so many gradients; 0 if it isn't known."""
        return self._batch_size * gradients / self._gradients_per_batch if self._gradients_per_batch else 0 * gradients

    def _on_updates(self, updates: Updates, rows: Contributions) -> None:
        """See `recorder.Sink`."""
        iterations, begun, per_iteration = self._begun
        owner = np.repeat(np.arange(len(updates)), updates.count)[rows.outcome == Outcome.ACCEPTED]
        guessed = self.examples(np.bincount(owner, minlength=len(updates)))
        self.write_updates(
            updates.replace(
                step=iterations + (updates.step - begun) // per_iteration,
                examples=np.where(updates.examples > 0, updates.examples, guessed),
            ),
            rows,
        )

    def write_updates(self, updates: Updates, rows: Contributions) -> None:
        """Writes updates to the log, and an event at the end of the warmup phase."""
        # Another thread may close it.
        log = self.log
        if log is not None:
            log.add_columns(updates, rows)
        after = np.flatnonzero(updates.phase == 0)
        if self._is_warming and len(after):
            self._is_warming = False
            moment = float(updates.time[after[0]] - updates.opened[after[0]])
            self.event(EventKind.PHASE_CHANGED, "the warmup phase is over: all replicas train", time=moment)

    def event(self, kind: EventKind, text: str, replica: int = -1, time: float | None = None) -> None:
        """Writes an event to the log, and to TensorBoard."""
        log, iteration = self.log, self._iteration
        if log is not None:
            log.event(kind, text, replica, time)
        # The log has a column for the worker, a line of TensorBoard has not.
        line = f"{self._recorder.names[replica]} {text}" if replica >= 0 else text
        name = "policy/changes" if kind in (EventKind.POLICY_CHANGED, EventKind.PHASE_CHANGED) else "tasks/events"
        self.events.add("", iteration, lambda: [summaries.text(name, line)])

    def span(self, kind: EventKind, text: str, begin: float, secs: float = 0.0) -> None:
        """Writes to the log alone what all workers were in for some time, such as a validation."""
        log = self.log
        if log is not None:
            log.event(kind, text, time=begin, secs=secs)

    def _on_save(self, strategy: Any, path: str, begin: float, secs: float) -> None:
        if strategy is self._strategy:
            name = os.path.basename(path.rstrip("/")) or path  # noqa: PTH119 - may be a gs:// path
            self.span(EventKind.CHECKPOINT, f"checkpoint {name}, {secs:.3g} s", begin, secs)

    def write(
        self, iteration: int, secs: float, updates: float, examples: float, tally: Tally, counted: Sequence[float]
    ) -> None:
        """Hands a point of the job to the writer's thread."""
        has_policy = bool(self._distribution.policies) or self._distribution.serving is not None
        has_policy &= self._recorder.is_complete
        given = secs, updates, examples, tally, self._settings() if has_policy else {}, counted, has_policy
        self.events.add("", iteration, lambda: summaries.job(*given))
        self.add_usage(iteration)

    def _settings(self) -> dict[str, float]:
        settings = {
            "replicas_to_aggregate": float(self._strategy.replicas_to_aggregate),
            "is_warming": float(self._distribution.is_warming()),
        }
        spares = self._distribution.spares()
        return settings if spares is None else {**settings, "spares": float(spares)}

    def write_logs(self, iteration: int, run: str, values: Mapping[str, float]) -> None:
        """Writes values at the end of an epoch to a run: "train" or "validation"."""
        self.events.add(run, iteration, lambda: [summaries.scalar(name, value) for name, value in values.items()])
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
        return summaries.process(last.get(task), found[task], secs) if task in found else []

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
        log, self.log = self.log, None
        if log is not None:
            log.close()

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


def equal_steps(
    begin: float, end: float, iterations: Sequence[int], replicas: Sequence[int], examples: int
) -> tuple[Updates, Contributions]:
    """Returns the steps of an execution of Keras' loop in a warmup phase, with equal times, as columns.

    Args:
      begin: time of the begin of the first step.
      end: time of the end of the last one.
      iterations: `optimizer.iterations` after each step.
      replicas: those that have computed.
      examples: number of examples in each step; 0 if unknown.
    """
    secs = (end - begin) / len(iterations)
    records = []
    for index, iteration in enumerate(iterations):
        start, ended = begin + index * secs, begin + (index + 1) * secs
        gradients = [Contribution(replica, start, ended) for replica in replicas]
        records.append(UpdateRecord(iteration, ended, secs, 0.0, examples, 1, gradients))
    return of_records(records)
