# SPDX-License-Identifier: Apache-2.0
"""One `fit` with the Telemetry callback: its writers, and which run directories this process writes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.compat import saves
from tfdist.policies.answers import Update
from tfdist.runtime import messages
from tfdist.runtime.usage import Usage
from tfdist.telemetry import points, summaries
from tfdist.telemetry.events import EventWriters
from tfdist.telemetry.log_sink import LogSink, open_log
from tfdist.telemetry.recorder import Sums, Times
from tfdist.update_log import EventKind

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
        # Last: from here on the recorder hands over.
        if recorder.is_complete:
            recorder.sink, recorder.loss_sink = self.sink.record, self.sink.lost
        if self.is_chief:
            self._begin_session(hparams)
        self._is_begun = False
        saves.listen(self._on_save)

    @property
    def times_steps(self) -> bool:
        """True if the engine doesn't time the present update: without a policy, and in the phase of its own engine."""
        is_in_phase = self._distribution.is_warming() and self._distribution.serving is None
        return is_in_phase or not self._recorder.is_complete

    def replicas_in_step(self) -> Sequence[int]:
        """Returns the replicas of this process that train in a step without a policy: not all in a warmup phase."""
        if not self._distribution.is_warming():
            return self._replicas
        taking_part = self._strategy.replicas_to_aggregate
        return [replica for replica in self._replicas if replica < taking_part]

    def examples(self, gradients: int) -> float:
        """Returns the number of examples in so many gradients; 0 if it isn't known."""
        return self._batch_size * gradients / self._gradients_per_batch if self._gradients_per_batch else 0.0

    def _examples_of(self, update: Update) -> int:
        return int(self.examples(len(update.contributors)))

    def counted_bytes(self) -> Sequence[int]:
        """See `Distribution.bytes_sent`."""
        return self._distribution.bytes_sent()

    def write(
        self,
        iteration: int,
        secs: float,
        updates: float,
        examples: float,
        sums: Sums,
        times: Mapping[int, Times],
        counted: Sequence[float],
    ) -> None:
        """Hands a point to the writer's thread."""
        self._iteration = iteration
        add, is_complete = self.events.add, self._recorder.is_complete
        if self.is_chief:
            has_policy = bool(self._distribution.policies) or self._distribution.serving is not None
            settings, of_policy = self._settings() if has_policy else {}, sums if is_complete or sums.updates else None
            given = secs, updates, examples, of_policy, times, settings, counted, has_policy
            add("", iteration, lambda: points.job(*given))
        self._add_usage(iteration)

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
            self._recorder.sink = self._recorder.loss_sink = None
        if status == summaries.SUCCESS:
            if self.is_chief:
                end = time.time()
                self.events.add("", self._iteration, lambda: [summaries.session_end(status, end)])
            # After an error the other tasks may not answer.
            self._add_usage(self._iteration, at_end=True)
        self.sink.close()
        self.events.close()

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
        return points.run_of(f"worker:{replica}", self._num_workers) or ""

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
        if not self._max_contributions or not (self.is_chief or not self._recorder.is_complete):
            return
        # Where one task decides, or is alone, it writes the log of all workers.
        run = "policy" if self._recorder.is_complete else self._run_of(self._replicas[0])
        self.sink.writer = open_log(
            os.path.join(self.events.directory, run),  # noqa: PTH118 - may be a gs:// path
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
        self.events.add("", 0, lambda: [summaries.session_start(whole, start), summaries.layout(points.LAYOUT)])

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
            messages.say(f"tfdist: {line}")

    def _add_usage(self, iteration: int, at_end: bool = False) -> None:
        """Samples this process in the writer's thread, and fetches the counters of processes without the callback."""
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
            return points.process(last.get(name), found[name], now - last_at) if name in found else []

        # A worker that trains itself has its own file; the chief of a cluster of servers has none, nor has one process.
        runs = {task: self._run_of(self._replicas[0]) if distribution.replicas is not None else ""}
        runs |= {name: points.run_of(name, self._num_workers) or "" for name in served}
        for name, run in runs.items():
            self.events.add(run, iteration, lambda name=name: values(name))
