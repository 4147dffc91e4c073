# SPDX-License-Identifier: Apache-2.0
"""The engine of `ParameterServerStrategy` with policies of asynchronous training.

It differs from `rounds` in that workers are not synchronized with Keras' steps. Each worker takes the next data,
computes, sends its gradient to the parameter servers, and starts again as soon as the policies allow it. Gradients wait
on the parameter servers. Each step of Keras' loop makes one update from the gradients that the policies choose.

    Keras' loop (chief)        a worker's thread (chief)          the worker          the parameter servers
                               start(): may it?
                               take(): from what?
                               contribute  -------------------->  computes     <-->  read the variables
                               push  ------------------------->   sends it     --->  keep it
      step(): collect()  <---- hand_over()
      update  ------------------------------------------------------------------->   weigh, add up, apply
      applied()

A pass over data of known length has one step per batch. If gradients were dropped, there are fewer updates than steps,
and the last steps of the pass change nothing.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import _log
from tfdist.compat.tensorflow import coordinator
from tfdist.coordination import delay_hook
from tfdist.coordination.round_runner import StreamRunner
from tfdist.engines import rounds
from tfdist.engines.rounds import RoundStep, parts_of_batch
from tfdist.passes.worker_pass import ChiefFeed, WorkerFeed, WorkerIterator
from tfdist.policies.base import Update
from tfdist.step import gradients
from tfdist.transforms import ARRIVAL


class StreamEngine(rounds.RoundEngine):
    """Makes updates from contributions that arrive at any time. See `RoundEngine` for the arguments."""

    _runner: StreamRunner
    _runner_type = StreamRunner

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Any worker may contribute any part of a batch.
        self.num_parts = self._num_own_parts = self.replicas_to_aggregate
        self._sharding = self._engine.data_sharding
        self._step: RoundStep | None = None
        self._iterator: WorkerIterator | None = None
        # Of the pass, once there is one: a `WorkerStreamFeed` or a `ChiefStreamFeed`.
        self._feed: Any = None
        # Flat, of the newest update of the step.
        self._logs: Any = None
        # Number of updates at the beginning of this pass; None after the warning about too few updates.
        self._begun_at: int | None = 0

    def _of_policy(self) -> dict[str, Any]:
        is_weighted = self._policy.is_weighted or gradients.transforms_of(self._strategy).has(ARRIVAL)
        return {"total_num_replicas": self.replicas_to_aggregate, "is_weighted": is_weighted, "is_relative": True}

    def _make(self, step: RoundStep, iterator: WorkerIterator) -> tuple[list[np.ndarray], Update | None]:
        self._begin(step, iterator)
        update = None
        with contextlib.nullcontext() if self._warmup is None else self._phase(step, self._warmup):
            self._reside(step, iterator, None)
            with self._runner.wanted():
                try:
                    collected = self._runner.collect(functools.partial(self._check, step, iterator, None))
                    if collected is not None:
                        contributions, update = collected
                        self._logs = step.update(contributions, update.weights, update.staleness)
                        self._runner.applied()
                except BaseException:
                    # Before the contributions are discarded, so that no worker starts again with the failed step.
                    self.leave()
                    raise
        if update is None:
            self._without_update(iterator)
        if isinstance(iterator.feed, ChiefFeed):
            iterator.feed.redeem()
        return self._logs, update

    def _begin(self, step: RoundStep, iterator: WorkerIterator) -> None:
        """Prepares for another step function, or another pass over the data."""
        if step is self._step and iterator is self._iterator:
            return
        # Remaining contributions are of another model, or of a `fit` that was interrupted.
        self.leave()
        self._runner.discard()
        if step is not self._step:
            self._step, self._logs = step, None
        if iterator is not self._iterator:
            feed = iterator.decide(by_chief=False)
            if isinstance(feed, ChiefFeed):
                self._feed = ChiefStreamFeed(lambda: self._read(feed, iterator))
            else:
                self._feed = WorkerStreamFeed(feed)
            self._iterator, self._begun_at = iterator, self._policy.step
            self._runner.resume()
        if self._feed.from_chief:
            step.prepare_for_batches()

    def end_fit(self) -> None:
        """See `RoundEngine.end_fit`."""
        super().end_fit()
        self._step = self._iterator = None

    def _read(self, feed: ChiefFeed, iterator: WorkerIterator) -> list[Any]:
        # In the thread of one worker, but any worker may be given a part.
        with tf.device(coordinator.CHIEF_DEVICE):
            return parts_of_batch(feed.next_batch(), iterator, self.replicas_to_aggregate)

    def _without_update(self, iterator: WorkerIterator) -> None:
        """Raises the end of the data; returns if Keras expects a step, which then changes nothing."""
        if iterator.dataset.cardinality == tf.data.UNKNOWN_CARDINALITY or self._logs is None:
            iterator.is_ended = True
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        if self._begun_at is not None:
            _log.say(
                f"this pass over the data made {self._policy.step - self._begun_at} updates, fewer than it has "
                "batches: gradients were dropped, or workers were lost with what they had read"
            )
            self._begun_at = None

    def _lose(self, worker: int, is_so: Callable[[], bool] = lambda: True) -> None:
        def release() -> None:
            if self._feed is not None:
                self._feed.release(worker)
            # Idle workers may take its remaining data.
            self._runner.resume()

        self._runner.lose(worker, is_so, release)

    # In a worker's thread.

    def _serve(self, residence: Any, iterator_on_worker: Any) -> None:
        worker, feed = coordinator.thread.worker, self._feed
        self._runner.bring_back(worker)
        while (local_step := self._runner.start(worker, residence.left.is_set)) is not None:
            try:
                self._contribute_from(feed, iterator_on_worker, residence.step, worker, local_step)
            except tf.errors.OutOfRangeError:
                coordinator.clear_error()
                self._runner.give_up(worker)
                feed.ended(worker)
            except Exception as error:
                if coordinator.is_task_failure(error):
                    self._lose(worker)
                    raise
                coordinator.clear_error()
                self._runner.fail(worker, local_step, error, self._residence is not residence)

    def _contribute_from(self, feed: Any, own: Any, step: RoundStep, worker: int, local_step: int) -> None:
        source = feed.take(worker, own)
        if source is None:
            self._runner.end(worker, lambda: self._feed is not feed or feed.has_more(worker))
            return
        if feed.from_chief:
            contribution, input_secs, is_last = step.contribute_from(*source), 0.0, False
        else:
            contribution, input_secs, is_last = step.contribute_next(source, worker)
        # After the variables were read: an earlier delay would not make the gradient stale.
        delay_hook.before_contribution(worker, next(self._attempts[worker]))
        if self._runner.is_wanted(worker, local_step, input_secs):
            pushed = step.push(*contribution) if step.push else contribution
            self._runner.hand_over(worker, local_step, pushed, input_secs)
        feed.used(worker)
        if is_last:
            feed.ended(worker)


# Sources of batches, or of parts of batches, for workers that are not synchronized with Keras' steps.
#
#     Pieces    a worker reads its own share, and then pieces without a reader (their worker was lost, or doesn't take
#               part yet), from the position of their last reader
#     Parts     the chief reads the data, and a worker takes the next part
#
# The workers' threads on the chief call them; each call concerns one worker. A part that was taken and not used,
# because its worker was lost, is assigned again. `from_chief` is True if `take` returns a batch, and not an iterator on
# the worker.


class WorkerStreamFeed:
    """Pieces of the workers' shares, each with an iterator on the worker that reads it.

    Args:
      feed: the shares.
    """

    from_chief = False

    def __init__(self, feed: WorkerFeed) -> None:
        self._feed = feed
        feed.pieces.wait_for_claims()
        self._lock = threading.Lock()

    def take(self, worker: int, own: Any) -> Any | None:
        """Returns the iterator over the piece of `worker`, or over a piece without a reader; None at the end.

        Args:
          worker: its index.
          own: its iterator over its own share.
        """
        with self._lock:
            piece = self._feed.pieces.claim(worker)
        if piece is None:
            return None
        # Only this worker's thread opens it.
        return own if piece is self._feed.pieces.own[worker] else self._feed.opened(worker, piece)

    def used(self, worker: int) -> None:
        """Notes that the last `take` of `worker` was used in a contribution."""
        with self._lock:
            self._feed.pieces.used(worker)

    def ended(self, worker: int) -> None:
        """Notes that the piece of `worker` has ended."""
        with self._lock:
            self._feed.pieces.end(worker)

    def has_more(self, worker: int) -> bool:
        """Returns True if `take` has a source for `worker`."""
        with self._lock:
            return self._feed.pieces.has_more(worker)

    def release(self, worker: int) -> None:
        """Notes that `worker` was lost: another worker may read the rest of its piece."""
        with self._lock:
            self._feed.release(worker)


class ChiefStreamFeed:
    """Parts of batches that the chief reads.

    Args:
      read: returns the parts of the next batch, each a flat list of tensors.
    """

    from_chief = True

    def __init__(self, read: Callable[[], list[Any]]) -> None:
        self._read = read
        # Held while a batch is read, which may take long. The methods of a deque and of a dict need no lock.
        self._reading = threading.Lock()
        self._parts: collections.deque[Any] = collections.deque()
        self._taken: dict[int, Any] = {}
        self._at_end = False

    def ended(self, worker: int) -> None:
        """Does nothing: the end is known when a batch is read."""

    def take(self, worker: int, own: None = None) -> Any | None:
        """Returns the next part; None at the end."""
        del own
        while True:
            with contextlib.suppress(IndexError):
                part = self._taken[worker] = self._parts.popleft()
                return part
            with self._reading:
                if self._parts:
                    continue
                if self._at_end:
                    return None
                try:
                    self._parts.extend(self._read())
                except tf.errors.OutOfRangeError:
                    self._at_end = True

    def has_more(self, worker: int) -> bool:
        """Returns True if `take` has a source for `worker`, or may have one."""
        del worker
        return bool(self._parts) or not self._at_end

    def used(self, worker: int) -> None:
        """Notes that the last `take` of `worker` was used in a contribution."""
        self._taken.pop(worker, None)

    def release(self, worker: int) -> None:
        """Notes that `worker` was lost: another worker takes its part."""
        if (part := self._taken.pop(worker, None)) is not None:
            self._parts.appendleft(part)
