# SPDX-License-Identifier: Apache-2.0
"""Writes updates, as engines record them, to an update log; docs/update_log.md has the format."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from tfdist.policies.answers import Change, Contribution, Update
from tfdist.telemetry import gfiles
from tfdist.update_log import EventKind, Files, Header, LogWriter, UpdateRecord

# Receives the kind of an event, and a line for people, which names the task.
OnEvent = Callable[[EventKind, str], object]


class LogSink:
    """Receives the updates of a `Recorder`, or the steps of Keras' loop; refers to no callback and no model.

    Args:
      names: names of the replicas.
      is_warming: returns True during a warmup phase.
      on_event: receives changes of the policy, losses and returns.
      examples_of: returns the number of examples in an update, where the engine doesn't know it.

    Attributes:
      writer: writes the log; None writes none.
    """

    def __init__(
        self,
        names: Sequence[str],
        is_warming: Callable[[], bool],
        on_event: OnEvent,
        examples_of: Callable[[Update], int],
    ) -> None:
        self._names = tuple(names)
        self._is_warming = is_warming
        self._was_warming = is_warming()
        self._on_event = on_event
        self._examples_of = examples_of
        self.writer: LogWriter | None = None
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
                    examples or self._examples_of(update),
                    int(self._is_warming()),
                    update.contributions,
                    update.reduce_secs,
                )
            )
        if update.changes:
            self._tell_changes(update.changes)
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

    def _tell_changes(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._tell(EventKind.POLICY_CHANGED, change.text)

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
    files = gfiles.files_of(run_directory)
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
