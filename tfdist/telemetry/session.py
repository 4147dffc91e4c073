# SPDX-License-Identifier: Apache-2.0
"""One `fit` with the Telemetry callback: its writers, and which run directories this process writes."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import _forks, _log
from tfdist.compat.keras import saving
from tfdist.coordination.usage import Usage
from tfdist.policies.records import Contribution, Update
from tfdist.telemetry import scalar_files, summaries
from tfdist.telemetry.recorder import RecorderSums, Times
from tfdist.telemetry.update_log import (
    Contributions,
    EventKind,
    Files,
    Header,
    LocalFiles,
    LogWriter,
    UpdateRecord,
    Updates,
)

# Files of an update log on an object store, by `tf.io.gfile`.


class GFiles:
    """Files of an object store, where a file appears when it is complete. See `update_log.Files`."""

    def read(self, path: str, offset: int = 0) -> bytes:
        """Returns the content of a file from an offset on."""
        with _os_errors(), tf.io.gfile.GFile(path, "rb") as file:
            file.seek(offset)
            return file.read()

    def write(self, path: str, data: bytes) -> None:
        """Writes a file, which appears whole or not at all."""
        with _os_errors(), tf.io.gfile.GFile(path, "wb") as file:
            file.write(data)

    def entries(self, directory: str) -> tuple[list[str], list[str]]:
        """Returns the names of the subdirectories and of the files in a directory; none if it doesn't exist."""
        with _os_errors():
            try:
                names = sorted(tf.io.gfile.listdir(directory))
            except tf.errors.NotFoundError:
                return [], []
            # Object stores mark directories by a slash.
            marked = {name for name in names if name.endswith("/") or tf.io.gfile.isdir(f"{directory}/{name}")}
        return [name.rstrip("/") for name in names if name in marked], [name for name in names if name not in marked]

    def remove(self, path: str) -> None:
        """Removes a file; no error if it doesn't exist."""
        with _os_errors(), contextlib.suppress(tf.errors.NotFoundError):
            tf.io.gfile.remove(path)

    def claim_directory(self, path: str) -> bool:
        """Makes a directory and its parents; returns False if it has files. An object store can't do both at once."""
        if self.entries(path)[1]:
            return False
        with _os_errors():
            tf.io.gfile.makedirs(path)
        return True


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    try:
        yield
    except tf.errors.OpError as error:
        raise OSError(f"{type(error).__name__}: {error.message}") from error


# Writes updates, as engines record them, to an update log; docs/update_log.md has the format.


# Receives the kind of an event, and a line for people, which names the task.
OnEvent = Callable[[EventKind, str], object]


class LogSink:
    """Receives the updates of a `Recorder`, or the steps of Keras' loop; refers to no callback and no model.

    Args:
      names: names of the replicas.
      is_warming: returns True during a warmup phase.
      on_event: receives changes of the policy, losses and returns.
      examples_of: returns the number of examples in so many gradients, where the engine doesn't know it.

    Attributes:
      writer: writes the log; None writes none.
      is_closed: True after `close`.
    """

    def __init__(
        self,
        names: Sequence[str],
        is_warming: Callable[[], bool],
        on_event: OnEvent,
        examples_of: Callable[[int], int],
    ) -> None:
        self._names = tuple(names)
        self._is_warming = is_warming
        self._was_warming = is_warming()
        self._on_event = on_event
        self._examples_of = examples_of
        self.writer: LogWriter | None = None
        self.is_closed = False
        # The optimizer's iterations after so many recorded updates; batches of gradient accumulation in one iteration.
        self._iterations = 0
        self._updates = 0
        self._per_iteration = 1

    def begin(self, iterations: int, updates: int, per_iteration: int) -> None:
        """Notes the value of the optimizer's iterations after so many recorded updates."""
        self._iterations, self._updates, self._per_iteration = iterations, updates, per_iteration

    def record(self, update: Update, examples: int, count: int) -> None:
        """See `recorder.Sink`."""
        # The engine of a warmup phase doesn't time its updates; the callback times them, by Keras' steps.
        # Another thread may close it.
        writer = self.writer
        if writer is not None and update.time:
            iterations = self._iterations + (count - self._updates) // self._per_iteration
            writer.add(
                UpdateRecord(
                    iterations,
                    update.time,
                    update.opened_secs,
                    update.wait_secs,
                    examples or self._examples_of(len(update.contributors)),
                    int(self._is_warming()),
                    update.contributions,
                )
            )
        for change in update.changes:
            self._tell(EventKind.POLICY_CHANGED, change.text)
        self._check_phase()

    def record_steps(self, updates: Updates, rows: Contributions, count: int) -> None:
        """See `recorder.StepSink`."""
        writer = self.writer
        if writer is not None:
            made = count - self._updates - np.arange(len(updates))[::-1]
            examples = self._examples_of(len(rows) // len(updates))
            writer.add_columns(
                updates.replace(
                    step=self._iterations + made // self._per_iteration,
                    examples=np.full(len(updates), examples),
                    phase=np.full(len(updates), self._is_warming()),
                ),
                rows,
            )
        self._check_phase()

    def step(self, iterations: int, examples: int, contributions: tuple[Contribution, ...]) -> None:
        """Writes a step of Keras' loop, in which each gradient of this process was computed."""
        writer = self.writer
        if writer is not None:
            start, end = contributions[0].start, contributions[0].arrival
            phase = int(self._is_warming())
            writer.add(UpdateRecord(iterations, end, end - start, 0.0, examples, phase, contributions))
        self._check_phase()

    def lost(self, replica: int, is_lost: bool) -> None:
        """See `recorder.LossSink`."""
        kind = EventKind.LOST if is_lost else EventKind.RETURNED
        self._tell(kind, "takes no part any more" if is_lost else "takes part again", replica)

    def close(self) -> None:
        """Writes what is left."""
        self.is_closed = True
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.close()

    def span(self, kind: EventKind, text: str, begin: float, secs: float) -> None:
        """Writes to the log alone what all workers were in for some time, such as a validation."""
        writer = self.writer
        if writer is not None:
            writer.event(kind, text, time=begin, secs=secs)

    def event(self, kind: EventKind, text: str, task: str = "") -> None:
        """Writes an event of a task, or of the whole job."""
        if task in self._names:
            self._tell(kind, text, self._names.index(task))
        else:
            self._tell(kind, f"{task}: {text}" if task else text)

    def _check_phase(self) -> None:
        if self._was_warming and not self._is_warming():
            self._was_warming = False
            self._tell(EventKind.PHASE_CHANGED, "the warmup phase is over: all replicas train")

    def _tell(self, kind: EventKind, text: str, replica: int = -1) -> None:
        writer = self.writer
        if writer is not None:
            # The log has a column for the worker, a line of TensorBoard has not.
            writer.event(kind, text, replica)
        self._on_event(kind, f"{self._names[replica]} {text}" if replica >= 0 else text)


def _last_job(directory: str, files: Files) -> str | None:
    """Returns the job of the newest log in a run directory, if there is one."""
    try:
        names = [each for each in files.entries(directory)[0] if each.partition("_")[0] == "updates"]
        # updates, updates_2, ..., updates_10
        newest = max(names, key=lambda each: (len(each), each), default=None)
        return Header.from_json(files.read(f"{directory}/{newest}/log.json")).job if newest else None
    except (OSError, ValueError):
        return None


def open_log(
    run_directory: str,
    *,
    is_resumed: bool,
    job: str,
    task: str,
    workers: Sequence[str],
    strategy: str,
    policies: Sequence[object],
    max_contributions: int,
    warn: Callable[[str], None],
) -> LogWriter:
    """Begins the update log of a run directory.

    Args:
      run_directory: where it is.
      is_resumed: True if an earlier program has begun this training; its log and this one belong to one job.
      job: see `Header`, as all of the others.
      task: writes the log.
      workers: names of the workers.
      strategy: class name.
      policies: the policies.
      max_contributions: see `LogWriter`.
      warn: see `LogWriter`.
    """
    files = GFiles() if "://" in run_directory else LocalFiles()
    # All engines use the monotonic clock, whose second 0 is the start of the machine: the log counts from now on.
    zero_secs = time.monotonic()
    header = Header(
        job=(_last_job(run_directory, files) if is_resumed else None) or job,
        writer=task,
        workers=tuple(workers),
        strategy=strategy,
        policies=tuple(map(repr, policies)),
        origin_secs=time.time(),
    )
    directory = os.path.join(run_directory, "updates")  # noqa: PTH118 - may be a gs:// path
    return LogWriter(directory, header, files, max_contributions=max_contributions, warn=warn, zero_secs=zero_secs)


# TensorBoard's event files, one in each run directory, written by a thread.
#
# Files of single tasks have the same format under a name that TensorBoard doesn't list: the page and `tfdist watch`
# read them. So one training is few runs.
#
# `tf.summary` isn't used: its operations run in the caller's thread, and under parameter servers beside the cluster's.
# An event file is a TFRecord file of `Event` protos.


FLUSH_SECS = 2.0
_CLOSE_SECS = 20.0
# Points that wait for a disk that does not answer; beyond that the oldest are left out.
_MOST_PENDING = 10_000
_MARK = scalar_files.MARK
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
      flush_secs: time between two writes.
    """

    def __init__(
        self,
        directory: str,
        warn: Callable[[str], object],
        flush_secs: float = FLUSH_SECS,
    ) -> None:
        self.directory = directory
        self._flush_secs = flush_secs
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
                try:
                    summary = tf.compat.v1.Summary(value=found)
                    if summary.value:
                        self._file(run).write(tf.compat.v1.Event(wall_time=wall_time, step=step, summary=summary))
                        changed.add(run)
                except Exception as error:
                    # Telemetry never ends a training, whatever a file system raises.
                    self._failed(run, error)
            for run in changed & self._files.keys():
                try:
                    self._files[run].flush()
                except Exception as error:
                    self._failed(run, error)

    def close(self) -> None:
        """Writes what was added, closes all files and ends the thread; may be called again."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECS)
        if self._thread.is_alive():
            self._warn(f"Telemetry: the disk of {self.directory} did not answer for {_CLOSE_SECS:g} s")
        _forks.not_at_exit(self.close)

    def _run(self) -> None:
        while not self._ended.wait(self._flush_secs):
            self.flush()
        self.flush()
        with self._writing:
            for run in list(self._files):
                try:
                    self._files.pop(run).close()
                except Exception as error:
                    self._failed(run, error)

    def _file(self, run: str) -> _EventFile:
        file = self._files.get(run)
        if file is not None and file.is_gone():
            self._failed(run, FileNotFoundError(f"{file.path} has vanished"))
            file = None
        if file is None:
            is_listed = scalar_files.task_of(run) is None
            file = self._files[run] = _EventFile(_join(self.directory, self._name(run)), is_listed)
        return file

    def _name(self, run: str) -> str:
        """Returns the directory of a run: another one where somebody else writes, because TensorBoard mixes them up."""
        shared = next((names for names in _SHARED if run in names), ())
        if any(_foreign_events(_join(self.directory, each)) for each in shared):
            return f"tfdist_{run}" if run else "tfdist"
        return run

    def _failed(self, run: str, error: Exception) -> None:
        self._files.pop(run, None)
        text = " ".join(str(error).split())
        self._warn(f"Telemetry: {_join(self.directory, run)} can't be written, and is tried again: {text}")


class _EventFile:
    """One event file; begins it.

    Args:
      directory: its run directory, which is made if need be.
      is_listed: True if TensorBoard is to list the run.
    """

    def __init__(self, directory: str, is_listed: bool) -> None:
        tf.io.gfile.makedirs(directory)
        host = socket.gethostname()
        kind = "events.out.tfevents" if is_listed else "scalars"
        name = f"{kind}.{int(time.time()):010d}.{host}.{os.getpid()}.{next(_numbers)}{_MARK}"
        self.path = _join(directory, name)
        self._writer = tf.io.TFRecordWriter(self.path)
        self.write(tf.compat.v1.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

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
    """Holds the writers of one `fit`, until `close`; refers to no model.

    Args:
      strategy: a tfdist strategy.
      directory: log directory.
      max_contributions: of the update log; 0 writes none.
      batch_size: number of examples in a batch; 0 if it isn't known.
      hparams: for the HParams tab.

    Attributes:
      events: writes event files.
      sink: writes the update log.
      is_chief: True if this process writes the values of the job.
    """

    def __init__(
        self,
        strategy: Any,
        directory: str,
        max_contributions: int,
        batch_size: int,
        hparams: Mapping[str, str | float | bool],
    ) -> None:
        distribution = self._distribution = strategy.distribution
        recorder = self._recorder = distribution.recorder
        self._strategy = strategy
        self._num_workers = len(recorder.names)
        own = distribution.replicas
        self._replicas = range(self._num_workers) if own is None else own
        self.is_chief = own is None or 0 in own
        self._batch_size = batch_size
        self._gradients_per_batch: int = distribution.gradients_per_batch()
        self._has_warned = False
        self.events = EventWriters(directory, warn=self._warn)
        self.sink = LogSink(recorder.names, distribution.is_warming, self._on_event, self._examples_of)
        self._iteration = 0
        # Of the writer's thread: by task the last counters, and the time of all of them.
        self._usage: dict[str, Usage] = {}
        self._usage_at, self._usage_iteration = 0.0, -1
        self._is_closed = False
        self._max_contributions = max_contributions
        # Of a `fit` around this one, which goes on later.
        self._outer = getattr(recorder.sink, "__self__", None)
        # Last: from here on the recorder hands over.
        recorder.sink, recorder.step_sink = self.sink.record, self.sink.record_steps
        recorder.loss_sink = self.sink.lost
        if self.is_chief:
            self._begin_session(hparams)
        self._is_begun = False
        saving.listen_to_saves(self._on_save)

    @property
    def times_steps(self) -> bool:
        """True in a phase of `Warmup` with an engine of its own, which times no update."""
        return self._distribution.is_warming() and self._distribution.serving is None

    def replicas_in_step(self) -> Sequence[int]:
        """Returns the replicas of this process that train in the warmup phase."""
        taking_part = self._strategy.replicas_to_aggregate
        return [replica for replica in self._replicas if replica < taking_part]

    def examples(self, gradients: int) -> float:
        """Returns the number of examples in so many gradients; 0 if it isn't known."""
        return self._batch_size * gradients / self._gradients_per_batch if self._gradients_per_batch else 0.0

    def _examples_of(self, gradients: int) -> int:
        return int(self.examples(gradients))

    def counted_bytes(self) -> Sequence[int]:
        """See `Distribution.bytes_sent`."""
        return self._distribution.bytes_sent()

    def write(
        self,
        iteration: int,
        secs: float,
        updates: float,
        examples: float,
        sums: RecorderSums,
        times: Mapping[int, Times],
        counted: Sequence[float],
    ) -> None:
        """Hands a point of the job to the writer's thread, on the chief."""
        has_policy = bool(self._distribution.policies) or self._distribution.serving is not None
        has_policy &= self._recorder.is_complete
        settings = self._settings() if has_policy else {}
        given = secs, updates, examples, sums, times, settings, counted, has_policy
        self.events.add("", iteration, lambda: summaries.job(*given))
        self.add_usage(iteration)

    def flush(self) -> None:
        """Writes what there is so far; waits for the disk."""
        self.events.flush()
        if self.sink.writer is not None:
            self.sink.writer.flush()

    def close(self, status: int = summaries.RUNNING, ended: str = "") -> None:
        """Writes what is left and ends the threads; may be called again.

        Args:
          status: for the HParams tab.
          ended: how the training has ended, for the log; "" if that is not known.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if ended and self.is_chief:
            self.sink.span(EventKind.FINISHED, ended, time.monotonic(), 0.0)
        if self._recorder.sink == self.sink.record:
            self._hand_back()
        if status == summaries.SUCCESS:
            if self.is_chief:
                end = time.time()
                self.events.add("", self._iteration, lambda: [summaries.session_end(status, end)])
            # After an error the other tasks may not answer.
            self.add_usage(self._iteration, at_end=True)
        self.sink.close()
        self.events.close()

    def _hand_back(self) -> None:
        recorder, outer = self._recorder, self._outer
        if outer is None or outer.is_closed:
            recorder.sink = recorder.step_sink = recorder.loss_sink = None
        else:
            recorder.sink, recorder.step_sink, recorder.loss_sink = outer.record, outer.record_steps, outer.lost

    def validated(self, begin: float, secs: float) -> None:
        """Notes a validation in the log."""
        if self.is_chief:
            self.sink.span(EventKind.VALIDATION, f"validation, {secs:.3g} s", begin, secs)

    def _on_save(self, strategy: Any, path: str, begin: float, secs: float) -> None:
        if self.is_chief and strategy is self._strategy:
            name = os.path.basename(path.rstrip("/")) or path  # noqa: PTH119 - may be a gs:// path
            self.sink.span(EventKind.CHECKPOINT, f"checkpoint {name}, {secs:.3g} s", begin, secs)

    def _settings(self) -> dict[str, float]:
        settings = {}
        if self._recorder.is_complete:
            settings["replicas_to_aggregate"] = float(self._strategy.replicas_to_aggregate)
            settings["is_warming"] = float(self._distribution.is_warming())
        spares = self._distribution.spares()
        return settings if spares is None else {**settings, "spares": float(spares)}

    def _run_of(self, replica: int) -> str:
        return summaries.run_of(f"worker:{replica}", self._num_workers) or ""

    def begin_log(self, is_resumed: bool) -> None:
        """Begins the update log, if this process is to write one and has not begun it; notes a restart.

        Args:
          is_resumed: True if an earlier program has begun this training.
        """
        if not self._is_begun:
            self._is_begun = True
            self._open_log(is_resumed)
            self._note_restart()

    def _open_log(self, is_resumed: bool) -> None:
        if not self._max_contributions or not self.is_chief:
            return
        self.sink.writer = open_log(
            os.path.join(self.events.directory, "policy"),  # noqa: PTH118 - may be a gs:// path
            is_resumed=is_resumed,
            job=self._distribution.job,
            task=self._distribution.task,
            workers=self._recorder.names,
            strategy=type(self._strategy).__name__,
            policies=self._distribution.policies,
            max_contributions=self._max_contributions,
            warn=self._warn,
        )

    def _begin_session(self, hparams: Mapping[str, str | float | bool]) -> None:
        policies, start = self._distribution.policies, time.time()
        whole = {
            "strategy": type(self._strategy).__name__,
            "policies": ", ".join(map(repr, policies)) or "none",
            "num_workers": self._num_workers,
            **self._distribution.sizes,
            **hparams,
        }
        self.events.add("", 0, lambda: [summaries.session_start(whole, start), summaries.layout(summaries.LAYOUT)])

    def _note_restart(self) -> None:
        restarts = self._distribution.own_usage().restarts
        if restarts:
            self.sink.event(EventKind.RESTARTED, f"restart {restarts} by the launcher", self._distribution.task)

    def _on_event(self, kind: EventKind, line: str) -> None:
        if self.is_chief:
            name = "policy/changes" if kind in (EventKind.POLICY_CHANGED, EventKind.PHASE_CHANGED) else "tasks/events"
            self.events.add("", self._iteration, lambda: [summaries.text(name, line)])

    def _warn(self, line: str) -> None:
        """Warns of the disk, once for all writers."""
        if not self._has_warned:
            self._has_warned = True
            _log.say(line)

    def add_usage(self, iteration: int, at_end: bool = False) -> None:
        """Samples this process, and fetches the counters of those without the callback in the writer's thread."""
        self._iteration = iteration
        now = time.monotonic()
        # One point for each step.
        if iteration == self._usage_iteration or (not at_end and self._usage and now - self._usage_at < _USAGE_SECS):
            return
        self._usage_iteration = iteration
        last, last_at, self._usage_at = self._usage, self._usage_at, now
        distribution = self._distribution
        served, task = distribution.served_tasks, distribution.task
        found = self._usage = {task: distribution.own_usage()}
        fetched: list[bool] = []

        def values(name: str) -> list[Any]:
            if name != task and not fetched:
                fetched.append(True)
                found.update(distribution.usage())
            return summaries.process(last.get(name), found[name], now - last_at) if name in found else []

        # A worker that trains itself has its own file; the chief of a cluster of servers has none, nor has one process.
        runs = {task: self._run_of(self._replicas[0]) if distribution.replicas is not None else ""}
        runs |= {name: summaries.run_of(name, self._num_workers) or "" for name in served}
        for name, run in runs.items():
            self.events.add(run, iteration, lambda name=name: values(name))
