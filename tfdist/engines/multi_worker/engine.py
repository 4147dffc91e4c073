# SPDX-License-Identifier: Apache-2.0
"""The engine of `MultiWorkerMirroredStrategy` with a policy: quorum all-reduce.

How an update flows, on each worker:

    Keras' step                       second thread                     the server (in the chief's process)
      run(): wants step 7         -->  reads its part of the batch
                                       computes a contribution
                                       reports it  ------------------->  asks the policy
      <-----------------------------------------------------------------  step 7 is made by 0, 2 and 5
      joins one all-reduce
      with its contribution, or with
      zeros and weight 0 if it is not
      among them; applies the sum

So a collective never waits for a gradient. A late worker continues to compute meanwhile; its step is over when its
contribution is complete, and the quorum server drops the contribution. All workers apply the same sum, so their weights
stay equal to the bit.

Ownership: the quorum server owns the policy. Keras' step alone launches collectives and writes variables; the second
thread computes while Keras' step waits for a round; a contribution that takes longer is dropped. The wait is in an
operation that calls Python, so it occupies one of TensorFlow's inter-op threads; the strategy adds one thread for it.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import step_errors
from tfdist.compat.running_loop import Fit
from tfdist.data.handle import BatchHandle, CountedDataset, registry
from tfdist.engines.base import Engine
from tfdist.engines.multi_worker.agreement import Agreement
from tfdist.engines.multi_worker.data import PartIterator, Pass
from tfdist.engines.multi_worker.step import QuorumStep, Sums
from tfdist.policies.answers import Contribution, Outcome, Update
from tfdist.runtime import delay_hook, stalls
from tfdist.runtime.quorum_client import QuorumClient
from tfdist.runtime.quorum_messages import Verdict
from tfdist.step.step_calls import StepCalls

_POLL_SECS = 0.5
# Longest wait, at the end of the program, for a contribution in progress.
_END_SECS = 10.0


@dataclasses.dataclass(eq=False)
class _Round:
    """Update that Keras' step waits for, with this worker's contribution once it is computed."""

    traced: QuorumStep
    of: Pass
    step: int
    is_taken: bool = False
    contribution: list[tf.Tensor] | None = None


class QuorumEngine(Engine):
    """Runs quorum all-reduce on one worker.

    Args:
      strategy: the strategy; one replica per worker.
      worker: this worker's number.
      client: its connection to the quorum server.
      sums: over all workers.
      prepare: checks and builds a model before its step is traced.
      record: called with each update and its number of examples.
      agreement: knows of waits that can't end.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        worker: int,
        client: QuorumClient,
        sums: Sums,
        prepare: Callable[[keras.Model], None],
        record: Callable[[Update, int], None],
        agreement: Agreement,
    ) -> None:
        self._agreement = agreement
        self._strategy = strategy
        self._worker = worker
        self._client = client
        self._sums = sums
        self._prepare = prepare
        self._record = record
        self._calls = StepCalls(self.trace, self._make_round)
        self._passes = itertools.count(1)
        self._attempts = itertools.count()
        self._step = 0
        self._changed = threading.Condition()
        self._round: _Round | None = None
        self._error: BaseException | None = None
        # Exception of the last round.
        self._raised: BaseException | None = None
        self._is_computing = False
        self._is_closing = False
        self._clock = time.monotonic
        # Step, start and end of each contribution since the last update.
        self._computed: list[tuple[int, float, float]] = []
        self._thread = threading.Thread(target=self._compute, name="tfdist-contributions", daemon=True)
        self._reporter = stalls.StallReporter(client.waited_for)

    def start(self) -> None:
        """Starts the threads, which `close` ends."""
        step_errors.install()
        self._thread.start()
        self._reporter.start()

    def close(self) -> None:
        """Ends the threads; may be called again."""
        self._reporter.stop()
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._client.close()
        # A thread inside of TensorFlow must not outlive Python.
        self._thread.join(_END_SECS)

    # In Keras' thread.

    def distribute(self, own: tf.data.Dataset, whole: Callable[[], Any]) -> CountedDataset:
        """Returns a data set of handles over this worker's parts, for `fit`; other loops read `whole()`."""
        return CountedDataset(self, own, whole)

    def open(self, dataset: CountedDataset, fit: Fit | None) -> PartIterator | None:
        """Opens a pass of `fit` over a data set."""
        if fit is None:
            return None

        def begin() -> Pass:
            # On every worker, even a late one: each new iterator of a shuffle draws a new order.
            dataset.opened += 1
            return self._begin_pass(iter(dataset.own), dataset.own.element_spec)

        return PartIterator(begin, dataset.cardinality)

    def rest(self, dataset: CountedDataset, iterators: Sequence[Any], left: int) -> PartIterator:
        """See `CountedDataset.rest`."""
        return PartIterator(lambda: self._begin_pass(iterators[0], dataset.own.element_spec), left)

    def _begin_pass(self, iterator: Any, element_spec: Any) -> Pass:
        # All workers begin the same passes, in the same order.
        return Pass(next(self._passes), iterator, registry.kind(self, element_spec))

    def run(self, step: Callable[..., Any], handle: BatchHandle) -> Any:
        """Makes an update from one batch of all workers; in cross-replica context, in a graph or eagerly.

        Args:
          step: a model's bound `train_step`.
          handle: of a data set of this engine.

        Returns:
          The step's result for all workers together.

        Raises:
          ConnectionError: the quorum server or another worker is gone.
          tf.errors.OutOfRangeError: the data have ended, on all workers.
        """
        traced, flat = self._calls.run(step, handle)
        return traced.update(flat)

    def trace(self, step: Callable[..., Any], handle: BatchHandle) -> QuorumStep:
        """Traces a model's `train_step` for batches like this one."""
        self._prepare(getattr(step, "__self__"))  # noqa: B009
        return QuorumStep(self._strategy, step, handle.kind.element_spec, self._sums)

    # In Keras' step.

    def _make_round(self, traced: QuorumStep, of: Pass) -> list[tf.Tensor]:
        """Waits until the next update is decided; returns this worker's contribution to it, or zeros."""
        self._raised = None
        try:
            return self._round_of(traced, of)
        except BaseException as error:
            self._raised = error
            raise

    def _round_of(self, traced: QuorumStep, of: Pass) -> list[tf.Tensor]:
        opened_at = self._clock()
        current = _Round(traced, of, self._step)
        with self._changed:
            self._round = current
            is_late = self._is_computing
            self._changed.notify_all()
        if is_late:
            # Otherwise the second thread reports at once that it has started, which implies this.
            self._client.want(of.number, current.step)
        try:
            with self._reporter.waiting("an update"), self._agreement.joint():
                verdict = self._client.wait(of.number, current.step, self._check)
        except ConnectionError as loss:
            raise self._agreement.explain(loss) from None
        finally:
            # No contribution begins to read variables from here on.
            with self._changed:
                self._round = None
        if verdict is None:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        self._step += 1
        self._record(_update(verdict, self._own_gradients(verdict), self._clock(), opened_at), verdict.count)
        is_contributor = self._worker in verdict.contributors()
        return _given(current) if is_contributor else traced.nothing

    def _own_gradients(self, verdict: Verdict) -> tuple[Contribution, ...]:
        """Returns this worker's gradients since the previous update; the accepted one is last."""
        with self._changed:
            computed, self._computed = self._computed, []
        is_contributor = self._worker in verdict.contributors()
        found = []
        for step, start, arrival in computed:
            is_accepted = is_contributor and step == verdict.step
            outcome = Outcome.ACCEPTED if is_accepted else Outcome.DROPPED
            found.append(
                Contribution(self._worker, start, arrival, outcome, verdict.step - step, float(is_accepted), 0.0)
            )
        return tuple(found)

    def raised_in_step(self, error: Exception) -> BaseException | None:
        """See `Engine.raised_in_step`: the exception of the last round."""
        del error
        raised, self._raised = self._raised, None
        return raised

    def _check(self) -> None:
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error
        self._agreement.check()

    # In the second thread.

    def _compute(self) -> None:
        while (current := self._next_round()) is not None:
            try:
                self._contribute(current)
            except BaseException as error:
                with self._changed:
                    self._error = error
                self._client.wake()

    def _next_round(self) -> _Round | None:
        with self._changed:
            self._is_computing = False
            while not self._is_closing:
                current = self._round
                if current is not None and not current.is_taken:
                    current.is_taken = True
                    if not self._client.is_decided(current.of.number, current.step):
                        self._is_computing = True
                        return current
                self._changed.wait(_POLL_SECS)
        return None

    def _contribute(self, current: _Round) -> None:
        of = current.of
        start = self._clock()
        self._client.started(of.number, current.step)
        delay_hook.before_contribution(self._worker, next(self._attempts))
        try:
            contribution, examples = current.traced.contribute(of.iterator)
        except tf.errors.OutOfRangeError:
            self._client.ended(of.number, current.step)
            return
        end = self._clock()
        with self._changed:
            # At most one for each update.
            self._computed.append((current.step, start, end))
        # Before the report: Keras' step reads it as soon as it is accepted.
        current.contribution = contribution
        self._client.arrived(of.number, current.step, examples, end - start)


def _given(current: _Round) -> list[tf.Tensor]:
    if current.contribution is None:
        raise RuntimeError(
            f"the quorum server counts on a contribution to step {current.step} that was never announced"
        )
    return current.contribution


def _update(verdict: Verdict, own: tuple[Contribution, ...], now: float, opened_at: float) -> Update:
    contributors = verdict.contributors()
    return Update(
        step=verdict.step + 1,
        contributors=contributors,
        dropped=verdict.dropped(),
        # Synchronous policies accept gradients of the current step only.
        staleness=(0,) * len(contributors),
        wait_secs=verdict.wait_secs,
        spread_secs=verdict.spread_secs,
        changes=(),
        contributions=own,
        time=now,
        opened_secs=now - opened_at,
    )
