# SPDX-License-Identifier: Apache-2.0
"""The engine of `MirroredStrategy` with a policy: each device computes in a thread of its own.

How an update flows:

    Keras' thread                  a replica's thread, one for each device
      step(): opens  ----------->  may it start?
                                   contribute: takes its part of the batch, reads its device's variables, computes
                                   arrive: does it count?
      collect(): has N  <--------  deliver
      update: adds up, applies to every device's copy
      logs

A replica that is late goes on computing in its thread. It only reads, and what comes out is dropped; then it starts
again, with its part of the batch that is current by then.

Who owns what: `Rounds` owns the policy and its lock. The engine owns the threads, which know nothing of the engine or
the strategy, so that both can be collected: then the threads end.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.engines import injection, watch
from tfdist.engines.rounds import Rounds
from tfdist.engines.threaded_data import OwnParts, ReplicaBatch, ReplicaIterator, WholeBatch
from tfdist.engines.threaded_step import ThreadedStep
from tfdist.policies.base import Aggregation, Update

_CLOSING_SECS = 2.0


@dataclasses.dataclass(frozen=True)
class _Job:
    """What the replicas are to compute for an update."""

    step: ThreadedStep
    batch: WholeBatch | OwnParts


class _Shared:
    """State that the engine shares with its threads."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        # None between updates: it leads to the model, and so to the strategy.
        self.job: _Job | None = None
        self.is_closed = False


class ThreadedEngine:
    """Makes updates from contributions of this process' devices, as a policy says.

    Args:
      strategy: the strategy whose devices compute.
      policy: says which contributions count; `begin` was called.
      names: what the replicas are called, such as "worker:0".
      on_update: told of each update that was made, and of how many examples; it must not lead to the strategy.
      stall_timeout_secs: how long an update may wait while nothing is heard of any replica.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        policy: Aggregation,
        names: Sequence[str],
        on_update: Callable[[Update, int], None],
        stall_timeout_secs: float,
    ) -> None:
        self._policy = policy
        self._on_update = on_update
        self._shared = _Shared(Rounds(policy, names, stall_timeout_secs))
        self._reporter = watch.StallReporter(self._shared.rounds.waited_for)
        self._threads = [
            threading.Thread(target=_serve, args=(self._shared, replica), name=f"tfdist {name}", daemon=True)
            for replica, name in enumerate(names)
        ]
        self._is_started = False
        self._strategy = weakref.ref(strategy)
        # Also at the end of the process.
        self.close = weakref.finalize(self, _close, self._shared, self._reporter, self._threads)

    def prepare(self, step: Callable[..., Any], ticket: ReplicaBatch) -> ThreadedStep:
        """Traces a model's `train_step` for batches like this one."""
        prepared = ThreadedStep(self._strategy(), step, ticket.element_spec, ticket.is_whole)
        prepared.prepare(self._policy.replicas_to_aggregate)
        return prepared

    def step(self, step: ThreadedStep, iterator: ReplicaIterator) -> list[np.ndarray]:
        """Makes one update from the iterator's next batch.

        Returns:
          The flat logs after it.

        Raises:
          Exception: what a replica raised.
          TimeoutError: nothing was heard of the replicas for too long.
        """
        self._start()
        shared = self._shared
        batch = iterator.take()
        with self._reporter.waiting("an update"):
            shared.job = _Job(step, batch)
            try:
                with shared.rounds.wanted():
                    # While the replicas compute.
                    iterator.read_ahead()
                    contributions, update = shared.rounds.collect()
            finally:
                shared.job = None
            in_order = sorted(zip(update.contributors, contributions, strict=True), key=lambda pair: pair[0])
            logs = step.update([contribution for _, contribution in in_order])
        self._on_update(update, sum(batch.rows(replica) for replica in update.contributors))
        return logs

    def _start(self) -> None:
        if not self._is_started:
            self._is_started = True
            self._reporter.start()
            for thread in self._threads:
                thread.start()


def _serve(shared: _Shared, replica: int) -> None:
    """Contributes until the engine is closed; a replica's thread."""
    attempt = 0
    while True:
        local_step = shared.rounds.start(replica, lambda: shared.is_closed)
        if local_step is None:
            return
        job = shared.job
        try:
            if job is not None:
                _contribute(shared.rounds, job, replica, local_step, attempt)
        except Exception as error:
            # Whatever the user's step raises belongs to the user.
            shared.rounds.fail(replica, local_step, error, isinstance(error, tf.errors.OutOfRangeError))
        else:
            if job is None:
                shared.rounds.give_up(replica)
        attempt += 1
        del job


def _contribute(rounds: Rounds, job: _Job, replica: int, local_step: int, attempt: int) -> None:
    injection.before_contribution(replica, attempt)
    contribution = job.step.contribute(replica, job.batch.flat(replica))
    if rounds.arrive(replica, local_step):
        rounds.deliver(replica, local_step, contribution)


def _close(shared: _Shared, reporter: watch.StallReporter, threads: Sequence[threading.Thread]) -> None:
    shared.is_closed = True
    shared.rounds.wake()
    reporter.stop()
    # A thread that returns from TensorFlow to a Python that has ended would abort the process.
    deadline = time.monotonic() + _CLOSING_SECS
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
