# SPDX-License-Identifier: Apache-2.0
"""Queue of steps in flight, shared by the chief's main thread and the workers' threads.

A step is *pending* from `put()` until it is done, has failed, or finds no data. Errors of the user's code are stored,
and raised in the main thread at its next call. Errors of lost tasks are left to the coordinator, which reschedules the
closure on another worker.

If the data have ended on one worker only, its closure is rescheduled for another worker, and the worker's thread is
*parked*. The coordinator doesn't support a choice of worker, and could schedule the closure on the same worker again.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat.keras import calls, fit
from tfdist.compat.tensorflow import coordinator as closures
from tfdist.coordination import keepalive
from tfdist.engines.accumulation import GradientSums
from tfdist.engines.worker_function import Program
from tfdist.passes import splitting
from tfdist.passes.worker_pass import Batch, Piece, WorkerFeed
from tfdist.policies import Contribution, Outcome, Update

# Fetching logs costs a round trip on the worker's thread. Progress bars draw at most 20 times a second.
LOG_INTERVAL_SECS = 0.05
# After an error of the user's code, other workers have this long to finish their current step.
_ERROR_GRACE_SECS = 15.0


class StepQueue:
    """Steps in flight on all workers, under one condition variable.

    Args:
      coordinator: schedules closures on the workers.
      clock: seconds, monotonic.
      stall_timeout_secs: see `AsynchronousEngine`.
      on_update: see `AsynchronousEngine`.

    Attributes:
      pending: the steps in flight.
      logs: by program the flat result of its newest finished step; none from before the chief last wrote a variable.
      on_loss: called when a worker is lost, with True, and when it is back, with False.
      before_put: called before a step is queued; another engine that occupies the workers' threads returns them then.
    """

    def __init__(
        self,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        clock: Callable[[], float],
        stall_timeout_secs: float,
        on_update: Callable[[Update], object],
    ):
        self._coordinator = coordinator
        self.logs: weakref.WeakKeyDictionary[Program, list[np.ndarray]] = weakref.WeakKeyDictionary()
        self._clock = clock
        self._on_update = on_update
        self._updates = 0
        self._updated_at = clock()
        self.before_put: Callable[[], None] | None = None
        self.on_loss: Callable[[int, bool], object] = lambda worker, is_lost: None
        # Gradients lost since the last update.
        self._ended: list[Contribution] = []
        self.stall_timeout_secs = stall_timeout_secs
        self._progressed_at = clock()
        self._changed = threading.Condition()
        self.pending: set[QueuedStep] = set()
        self._handed_back: collections.deque[QueuedStep] = collections.deque()
        self._error: BaseException | None = None
        self._logs_due_at = 0.0
        self._logs_on_their_way = False
        self._running: set[int] = set()
        self._lost: set[int] = set()
        self._cut_short: WorkerFeed | None = None
        # By worker, as in `MadeSteps`: of its last update whose staleness is known, estimated until there is one.
        self._staleness: dict[int, Sequence[int | None]] = collections.defaultdict(lambda: [None])
        self._submit = closures.scheduling(coordinator)
        closures.after_each(coordinator, self._lost, self._find_alive)

    def waited_for(self) -> str:
        """Returns the names of the tasks that the steps in flight wait for."""
        with self._changed:
            busy = [f"worker:{worker}" for worker in sorted(self._running)]
            lost = [f"worker:{worker} (lost; it has to be started again)" for worker in sorted(self._gone())]
        return ", ".join(busy + lost) or "any worker, to take it"

    def progress(self) -> tuple[str, float] | None:
        """Returns the current activity and a number that changes with progress, for the stall reporter."""
        return ("a step", self._progressed_at) if self.pending else None

    # Waiting.

    def wait_until(self, condition: Callable[[], bool] | None = None, fewer_than: int = 1) -> None:
        """Waits until fewer steps than this are in flight, or for another condition. Raises a failed step's error."""
        while True:
            with self._changed:
                is_met = len(self.pending) < fewer_than if condition is None else condition()
                if not (is_met or self._error is not None or self._handed_back):
                    self._changed.wait(keepalive.POLL_SECS)
                    is_met = len(self.pending) < fewer_than if condition is None else condition()
                step = self._handed_back.popleft() if self._handed_back else None
                if is_met and step is None and self._error is None:
                    break
            if step is not None:
                self.put(step)
            elif self._error is not None:
                self._raise_error()
            elif closures.has_failed(self._coordinator):
                self._raise_failure()
            elif self._clock() - self._progressed_at > self.stall_timeout_secs:
                self._raise_stall()
        if self._cut_short is not None and not self.pending:
            self._warn_of_lost_batches()

    def _warn_of_lost_batches(self) -> None:
        """Warns, after a pass, of batches that were not used because a worker was lost."""
        with self._changed:
            feed, self._cut_short = self._cut_short, None
        loss = feed.loss(self._gone())
        if loss:
            # The caller is in Keras or in this library, so no stack level shows a line of the user's code.
            warnings.warn(loss, RuntimeWarning, stacklevel=1)
            fit.show_missing(calls.current(), feed.num_missing)

    def _raise_error(self) -> None:
        """Waits for the other steps to end, and raises the error once."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.pending) == len(self._handed_back), timeout=_ERROR_GRACE_SECS)
            error, self._error = self._error, None
        self.forget_steps()
        if error is not None:
            raise error

    def _raise_failure(self) -> None:
        """Raises the coordinator's fatal error, such as the loss of a parameter server."""
        try:
            closures.raise_failure(self._coordinator)
        finally:
            self.forget_steps()

    def _raise_stall(self) -> None:
        """Raises TimeoutError if no step was completed for `stall_timeout_secs`."""
        missing = self.waited_for()
        self.forget_steps()
        raise TimeoutError(
            f"no step has completed for {self.stall_timeout_secs:g} s; still waiting for {missing}. Start what is "
            "lost again at the same address, or give a slow step more time with stall_timeout_secs. "
            f"Received: stall_timeout_secs={self.stall_timeout_secs:g}"
        )

    def forget_steps(self) -> None:
        """Cancels the steps in flight; the caller raises the reason. Their late results are ignored."""
        with self._changed:
            self.pending.clear()
            self._handed_back.clear()
            self.logs.clear()
            self._logs_on_their_way = False
            self._cut_short = self._error = None
            self._running.clear()
            self._changed.notify_all()

    def abandon_steps(self) -> None:
        """Leaves the steps in flight to end without the call that wanted them, which has raised another error."""
        with self._changed:
            for step in self.pending:
                step.is_abandoned = True
            self._error = None

    # Queuing and running.

    def put(self, step: QueuedStep, needs_logs: bool | None = None) -> bool:
        """Queues a step, or queues it again; only the main thread may call it.

        The coordinator waits for closures, and raises their errors, in that thread.

        Args:
          step: the step.
          needs_logs: True if the step must fetch its result as logs, False if it need not, though it does so now and
            then; None if its result is no logs.

        Returns:
          True if it fetches its result.
        """
        if self.before_put is not None:
            self.before_put()
        now = self._clock()
        with self._changed:
            if not self.pending:
                self._progressed_at = self._updated_at = now
            if needs_logs is not None:
                is_due = not self._logs_on_their_way and now >= self._logs_due_at
                step.wants_logs = needs_logs or is_due
                self._logs_on_their_way |= step.wants_logs
            self.pending.add(step)
            step.queued = True
            self._changed.notify_all()
        feed, accumulation, on_workers = step.feed, step.program.accumulation, None
        try:
            if feed is not None:
                on_workers = feed.on_workers or feed.begin()
            sums = accumulation.on_workers if accumulation else None
            self._submit(self._execute, (step, on_workers, sums), {})
        except BaseException:
            self.forget_steps()
            raise
        return step.wants_logs

    def _execute(self, step: QueuedStep, iterator_on_worker: Any, sums: GradientSums | None) -> None:
        """Runs a step; in the thread of the worker that took it."""
        worker, feed, piece = closures.thread.worker, step.feed, None
        with self._changed:
            if step not in self.pending:
                return
            step.queued = False
            step.local_step = self._updates
            step.started_at = self._clock()
            if feed is not None:
                piece = feed.claim(worker, self._unnoticed)
            has_data = piece is not None or feed is None
            if has_data:
                self._running.add(worker)
        if not has_data:
            self._hand_back(step, worker)
            return
        try:
            self._run(step, worker, piece, iterator_on_worker, sums)
        except Exception as error:
            if closures.is_task_failure(error):
                self._lose(step, worker)
                raise
            # Errors of the user's step are raised to the user, with their type and message.
            closures.clear_error()
            self._finish(step, worker, error=error)

    def _lose(self, step: QueuedStep, worker: int) -> None:
        """Notes the loss of the worker; the coordinator will reschedule the step."""
        with self._changed:
            if worker not in self._lost:
                self._lost.add(worker)
                self.on_loss(worker, True)
            if step.is_update and step in self.pending:
                staleness = self._updates - step.local_step
                lost = Contribution(worker, step.started_at, self._clock(), Outcome.LOST, staleness, 0.0, 0.0)
                self._ended.append(lost)
            if step.feed is not None:
                step.feed.release(worker)
            self._running.discard(worker)
            step.queued = True
            self._changed.notify_all()

    def _find_alive(self, worker: int) -> None:
        """Notes that a lost worker is back; its thread, which calls this, waits within the failed closure until then.

        Not only when it executes its next closure: until then it builds its data again. Another worker that comes to
        the end of its share must not take the pass for ended.
        """
        with self._changed:
            self._lost.discard(worker)
            try:
                self.on_loss(worker, False)
            except Exception as error:
                # An exception would end this thread, and with it the worker.
                self._error = self._error or error
            self._changed.notify_all()

    def _run(
        self, step: QueuedStep, worker: int, piece: Piece | None, iterator_on_worker: Any, sums: GradientSums | None
    ) -> None:
        """Makes as many of the steps of an execution as the piece, that the worker has claimed, has batches."""
        feed, inputs, batch, count = step.feed, step.tensors, None, step.count
        if feed is not None and piece is not None:
            is_own = piece is feed.pieces.own[worker]
            source = iterator_on_worker if is_own else feed.opened(worker, piece)
            if feed.in_step:
                count = count if piece.left is None else min(count, piece.left)
                inputs = [source, *inputs]
            elif (batch := self._batch(step, source)) is None:
                self._hand_back(step, worker)
                return
            else:
                inputs = [*batch, *inputs]
        is_rest = count == step.count
        wants_values = is_rest and (step.wants_logs or step.result is not None)
        program = step.program
        if program.is_plain and count == 1:
            outputs = program.run(*inputs) if wants_values else program.run_silently(*inputs)
            if wants_values:
                # As the logs, now and then: it takes a round trip. Between two of them the last one stands.
                self._staleness[worker] = program.staleness_in(outputs)
            made = MadeSteps(program.fetch(outputs) if wants_values else None, (), self._staleness[worker])
        else:
            made = make_steps(program, count, wants_values, inputs, sums)
        if feed is not None:
            if step.batch is not None:
                step.batch.on_worker = made.batch if batch is None else batch
            feed.pieces.used(worker, count)
        if is_rest:
            self._finish(step, worker, made)
            return
        # The rest of the execution is for another worker: this one is at the end of its share.
        with self._changed:
            if step in self.pending:
                step.count -= count
                if step.is_update:
                    self._count_updates(step, worker, made, self._clock())
        self._hand_back(step, worker)

    def _batch(self, step: QueuedStep, iterator_on_worker: Any) -> list[Any] | None:
        """Takes the next batch of a worker's piece; None at its end."""
        batch = iterator_on_worker.get_next_as_optional()
        if not bool(batch.has_value()):
            return None
        with self._changed:
            resolve(step.took_batch, True)
            self._changed.notify_all()
        found = batch.get_value()
        return splitting.flat(found[0] if step.feed.marks_end else found)

    def _finish(
        self, step: QueuedStep, worker: int, made: MadeSteps | None = None, error: BaseException | None = None
    ) -> None:
        values = None if made is None else made.values
        with self._changed:
            now = self._progressed_at = self._clock()
            if step in self.pending:
                # First: if it raises, this is called again with the error.
                if made is not None and step.is_update:
                    self._count_updates(step, worker, made, now)
                self.pending.remove(step)
                self._running.discard(worker)
                if error is not None and not step.is_abandoned:
                    self._error = self._error or error
                if step.wants_logs:
                    self._logs_on_their_way = False
                    if values is not None:
                        self.logs[step.program] = values
                    self._logs_due_at = now + LOG_INTERVAL_SECS
            resolve(step.took_batch, error is None)
            resolve(step.result, values)
            self._changed.notify_all()

    def _count_updates(self, step: QueuedStep, worker: int, made: MadeSteps, now: float) -> None:
        num_updates = len(made.staleness)
        # Of several steps in one execution, the times of the first start and of the last end are known. A step whose
        # gradients are accumulated for a later one makes no update.
        secs = (now - step.started_at) / max(1, num_updates)
        for index, known in enumerate(made.staleness):
            # The chief's estimate: the updates that arrived while the step was under way.
            staleness = self._updates - step.local_step if known is None else known
            start = step.started_at + index * secs
            gradient = Contribution(worker, start, start + secs, Outcome.ACCEPTED, staleness, 1.0, 0.0)
            ended, self._ended = self._ended, []
            self._updates += 1
            # Updates of several workers may be made in any order.
            opened_secs, self._updated_at = max(0.0, start + secs - self._updated_at), start + secs
            self._on_update(
                Update(
                    self._updates,
                    contributors=(worker,),
                    dropped=(),
                    staleness=(staleness,),
                    wait_secs=0.0,
                    spread_secs=0.0,
                    changes=(),
                    weights=(1.0,),
                    contributions=(*ended, gradient),
                    time=gradient.arrival,
                    opened_secs=opened_secs,
                )
            )
        # The rest of the execution may go to another worker.
        step.started_at = now

    # The end of the data.

    def _hand_back(self, step: QueuedStep, worker: int) -> None:
        """Reschedules a step of a worker without data for another worker; ends it if no worker has data."""
        feed: Any = step.feed
        with self._changed:
            self._running.discard(worker)
            self._progressed_at = self._clock()
            feed.pieces.end(worker)
            if self._no_worker_has_data(feed):
                if not feed.ended:
                    # Once per pass, although several steps may find the end.
                    self._cut_short = feed
                feed.ended = True
                self._drop(step)
                return
            if step in self.pending:
                self._handed_back.append(step)
                self._changed.notify_all()
        self._park(worker)

    def _no_worker_has_data(self, feed: WorkerFeed) -> bool:
        return feed.pieces.have_ended(self._gone())

    def _unnoticed(self) -> set[int]:
        """Returns lost workers, those included that the coordinator has found dead, and that no step has met."""
        return self._gone() - self._running

    def _gone(self) -> set[int]:
        """Returns the workers that are lost now, those that the coordinator lost between two steps included."""
        return self._lost | closures.lost_workers(self._coordinator)

    def _drop(self, step: QueuedStep) -> None:
        self.pending.discard(step)
        if step.wants_logs:
            self._logs_on_their_way = False
        resolve(step.took_batch, False)
        resolve(step.result, None)
        self._changed.notify_all()

    def _park(self, worker: int) -> None:
        """Blocks this worker's thread until there is a step for it, or no step at all."""
        with self._changed:
            while self.pending and not self._has_work(worker) and not closures.has_failed(self._coordinator):
                self._changed.wait(keepalive.POLL_SECS)

    def _has_work(self, worker: int) -> bool:
        """Returns True if a step waits that the worker can make, or must drop because no worker can make it."""
        return any(
            step.queued
            and (
                step.feed is None
                or step.feed.claim(worker, self._unnoticed) is not None
                or self._no_worker_has_data(step.feed)
            )
            for step in self.pending
        )


# Element of the queue of `AsynchronousEngine`: a step, or the steps of an execution (`steps_per_execution`).


@dataclasses.dataclass(eq=False)
class QueuedStep:
    """Program and batch of a step, and the futures of its result.

    Attributes:
      feed: of the pass that its worker reads; None if the batch is among the tensors.
      count: how many steps are still to be made, one after the other by one worker as long as its share lasts.
      result: of the last of them, as are the logs.
      is_abandoned: True if the call that queued it has raised.
    """

    program: Program
    tensors: Sequence[tf.Tensor]
    feed: WorkerFeed | None = None
    wants_logs: bool = False
    took_batch: concurrent.futures.Future | None = None
    result: concurrent.futures.Future | None = None
    queued: bool = False
    is_abandoned: bool = False
    # True for an update; and the number of updates and the time when it was last started.
    is_update: bool = False
    local_step: int = 0
    started_at: float = 0.0
    # The batch, for a loop that may use it again.
    batch: Batch | None = None
    count: int = 1


def resolve(future: concurrent.futures.Future | None, value: Any) -> None:
    """Sets the result of a future, unless it is None or done."""
    if future is not None and not future.done():
        future.set_result(value)


# The steps of one closure: one step, or those of an execution of Keras (`steps_per_execution`).
#
# An execution of K steps is one handle and one closure. Small steps are one call for K - 1 of them, and one for the
# last, which has the result:
#
#     Keras' loop (chief)      a worker's thread (chief)          the worker's process
#       take_handle(K):
#       one handle, K batches
#       queue one closure  -->  make_steps(count)            -->   K - 1 times: next batch of its share,
#       logs of the newest                                         read variables, update, add 1 to `counter`
#       finished closure        the last one alone           -->   once more
#                          <--  staleness of each, and logs if they are due
#
# Ownership: a closure is one worker's as long as its share lasts; the rest goes to another worker as one closure again
# (`step_queue`). If a worker is lost in the middle, another one repeats the closure: updates that were made are made
# again, at most K of them. The counter is on a parameter server. It counts the updates of all workers, so the staleness
# of each of the K updates is exact, although the chief sees them arrive together.


@dataclasses.dataclass(frozen=True)
class MadeSteps:
    """The outcome of a closure.

    Attributes:
      values: the flat result of its last step on the chief, if it was wanted.
      batch: the batch of its last step on the worker, for a loop that may use it again.
      staleness: for each update, the number of other updates between its reading and its writing of the variables;
        None where the chief has to estimate it.
    """

    values: list[np.ndarray] | None
    batch: Sequence[tf.Tensor]
    staleness: Sequence[int | None]


def make_steps(
    program: Program, count: int, wants_values: bool, inputs: Sequence[Any], sums: GradientSums | None
) -> MadeSteps:
    """Makes steps on the worker of the calling thread, one after the other.

    Args:
      program: the traced step.
      count: how many steps.
      wants_values: True if the result of the last one is to be fetched.
      inputs: the arguments of the step; its batch is the next one of an iterator among them if there are several steps.
      sums: the worker's sums of gradients, if it accumulates them.
    """
    left, outputs, staleness, chosen = count, (), [], program
    while left:
        given, in_a_row = inputs, left - wants_values
        if sums is not None:
            given, until_update = [*inputs, *sums.handles], program.accumulation.num_steps - 1 - sums.count
            chosen, in_a_row = program.adding if until_update else program, min(in_a_row, until_update)
        several = chosen.num_several
        made = several if in_a_row >= several else 1
        if made > 1:
            try:
                staleness += chosen.run_several(*given)
            except Exception as error:
                if sums is not None and not closures.is_task_failure(error):
                    sums.clear()
                raise
        else:
            outputs = chosen.run(*given) if wants_values and left == 1 else chosen.run_silently(*given)
            staleness += chosen.staleness_in(outputs)
        if sums is not None:
            sums.count = (sums.count + made) % program.accumulation.num_steps
        left -= made
    return MadeSteps(chosen.fetch(outputs) if wants_values else None, chosen.batch_in(outputs), staleness)
