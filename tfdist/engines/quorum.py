# SPDX-License-Identifier: Apache-2.0
"""The engine of `MultiWorkerMirroredStrategy` with a policy: quorum all-reduce.

How an update flows, on each worker:

    Keras' thread                       second thread                     the board (in the chief's process)
      next(iterator): wants step 7 -->  reads its part of the batch
                                        computes a contribution
                                        it is there  ------------------>  asks the policy
      <-----------------------------------------------------------------  step 7 is made by 0, 2 and 5
      train_step: joins one all-reduce
      with its contribution, or with
      zeros and weight 0 if it is not
      among them; applies the sum

So a collective never waits for a gradient. A worker that is late goes on computing meanwhile; when its contribution is
there, its step is over, and the board drops it. All workers apply the same sum, so their weights stay equal to the bit.

Who owns what: the board owns the policy. Keras' thread is the only one that launches collectives, and the only one that
writes variables; the second thread computes only while Keras' thread waits for a round, or in vain.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.engines import injection, keras_steps, watch
from tfdist.engines.quorum_member import Member
from tfdist.engines.quorum_step import QuorumStep, Sum, Ticket
from tfdist.engines.quorum_wire import Verdict
from tfdist.policies.base import Update

_POLL_SECS = 0.5
# How long the program's end waits for a contribution that is still being computed.
_END_SECS = 10.0


@dataclasses.dataclass(eq=False)
class Pass:
    """One pass of `fit` over the data; `number` is the same on all workers."""

    number: int
    step: QuorumStep
    iterator: Any


@dataclasses.dataclass(eq=False)
class _Round:
    """An update that Keras' thread waits for, and this worker's contribution to it once that is there."""

    of: Pass
    step: int
    is_taken: bool = False
    contribution: list[tf.Tensor] | None = None


class QuorumEngine:
    """Makes the rounds of one worker.

    Args:
      strategy: the strategy; one replica per worker.
      worker: this worker's number.
      member: its connection to the board.
      sum_over_workers: sums tensors over all workers, in cross-replica context.
      prepare: checks and builds what must be there before a model's step is traced.
      record: told of each update, and of how many examples it was made.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        worker: int,
        member: Member,
        sum_over_workers: Sum,
        prepare: Callable[[keras.Model], None],
        record: Callable[[Update, int], None],
    ) -> None:
        self._strategy = strategy
        self._worker = worker
        self._member = member
        self._sum_over_workers = sum_over_workers
        self._prepare = prepare
        self._record = record
        self._passes = itertools.count(1)
        self._attempts = itertools.count()
        self._step = 0
        self._changed = threading.Condition()
        self._round: _Round | None = None
        self._error: BaseException | None = None
        self._is_computing = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._compute, name="tfdist-contributions", daemon=True)
        self._reporter = watch.StallReporter(member.waited_for)

    def start(self) -> None:
        """Starts the second thread; it ends with the program."""
        self._thread.start()
        self._reporter.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Ends; may be called again."""
        self._reporter.stop()
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._member.close()
        # A thread inside of TensorFlow must not outlive Python.
        self._thread.join(_END_SECS)

    # In Keras' thread.

    def begin(self, model: keras.Model, part: tf.data.Dataset) -> Pass:
        """Begins a pass: traces the model's step if that was not done, and opens the data.

        The data are opened here and on every worker, by those too who will be late for the whole pass, because a
        shuffle draws a new order whenever that is done.
        """
        return Pass(next(self._passes), self._traced(model, part.element_spec), iter(part))

    def round(self, of: Pass) -> Ticket | None:
        """Waits until the next update can be made.

        Returns:
          What this worker gives to it, or None if the data are at their end.

        Raises:
          ConnectionError: the board or another worker is gone.
        """
        current = _Round(of, self._step)
        with self._changed:
            self._round = current
            is_late = self._is_computing
            self._changed.notify_all()
        if is_late:
            # Else the second thread says at once that it has started, which says this too.
            self._member.want(of.number, current.step)
        try:
            with self._reporter.waiting("an update"):
                verdict = self._member.wait(of.number, current.step, self._check)
        finally:
            # Nobody begins to read variables from here on.
            with self._changed:
                self._round = None
        if verdict is None:
            return None
        self._step += 1
        self._record(_update(verdict), verdict.count)
        is_contributor = self._worker in verdict.contributors()
        return of.step.ticket(_given(current) if is_contributor else of.step.nothing)

    def _check(self) -> None:
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _traced(self, model: keras.Model, element_spec: Any) -> QuorumStep:
        steps: Any = keras_steps.traced_with(model.train_step)
        key = (id(self), repr(element_spec))
        if key not in steps:
            self._prepare(model)
            steps[key] = QuorumStep(self._strategy, model.train_step, element_spec, self._sum_over_workers)
        return steps[key]

    # In the second thread.

    def _compute(self) -> None:
        while (current := self._next_round()) is not None:
            try:
                self._contribute(current)
            except BaseException as error:
                with self._changed:
                    self._error = error
                self._member.wake()

    def _next_round(self) -> _Round | None:
        with self._changed:
            self._is_computing = False
            while not self._is_closing:
                current = self._round
                if current is not None and not current.is_taken:
                    current.is_taken = True
                    if not self._member.is_decided(current.of.number, current.step):
                        self._is_computing = True
                        return current
                self._changed.wait(_POLL_SECS)
        return None

    def _contribute(self, current: _Round) -> None:
        of = current.of
        self._member.started(of.number, current.step)
        injection.before_contribution(self._worker, next(self._attempts))
        try:
            contribution, examples = of.step.contribute(of.iterator)
        except tf.errors.OutOfRangeError:
            self._member.ended(of.number, current.step)
            return
        # Before it is announced: whoever hears that it counts will look for it.
        current.contribution = contribution
        self._member.arrived(of.number, current.step, examples)


def _given(current: _Round) -> list[tf.Tensor]:
    if current.contribution is None:
        raise RuntimeError(f"the board counts on a contribution to step {current.step} that was never announced")
    return current.contribution


def _update(verdict: Verdict) -> Update:
    contributors = verdict.contributors()
    return Update(
        step=verdict.step + 1,
        contributors=contributors,
        dropped=verdict.dropped(),
        # The policies that work here take gradients of the current step only.
        staleness=(0,) * len(contributors),
        wait_secs=verdict.wait_secs,
        spread_secs=verdict.spread_secs,
        changes=(),
    )
