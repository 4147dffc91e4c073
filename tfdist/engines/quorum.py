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

Ownership: the quorum server owns the policy. Keras' step alone launches collectives and writes variables. The second
thread computes while Keras' step waits for a round; a contribution that takes longer is dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.keras.calls import Call
from tfdist.compat.keras.optimizers import SumGradients
from tfdist.compat.tensorflow import replicas
from tfdist.coordination import delay_hook, keepalive, stalls, worker_waits
from tfdist.coordination.quorum import Act, QuorumClient, Verdict
from tfdist.engines.agreement import Agreement
from tfdist.engines.base import Engine
from tfdist.passes import handle as handles
from tfdist.passes import splitting
from tfdist.passes.handle import BatchHandle, CountedDataset
from tfdist.passes.shares import Sum
from tfdist.policies.records import Contribution, Outcome, Update
from tfdist.step import contribution, losses, one_replica, step_times, trials
from tfdist.step import gradients as transforms
from tfdist.step.replicas import writes_after_inputs
from tfdist.step.split import SplitTrainStep
from tfdist.step.step import Step

# Longest wait, at the end of the program, for a contribution in progress.
_END_SECS = 10.0


@dataclasses.dataclass(eq=False)
class _Round:
    """Update that Keras' step waits for, with this worker's contribution once it is computed."""

    traced: QuorumStep
    of: PartIterator
    step: int
    is_taken: bool = False
    contribution: list[tf.Tensor] | None = None


class QuorumEngine(Engine):
    """Runs quorum all-reduce on one worker.

    Args:
      strategy: the strategy; one replica per worker.
      worker: this worker's number.
      client: its connection to the quorum server.
      sum_over_workers: sums tensors over all workers, in a step that all trace alike; in cross-replica context.
      sum_gradients: returns what sums the dense gradients of an optimizer, if they aren't sent as they are.
      prepare: checks and builds a model before its step is traced.
      record: called with each update and its number of examples.
      agreement: knows of waits that can't end.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        worker: int,
        client: QuorumClient,
        sum_over_workers: Sum,
        sum_gradients: Callable[[], SumGradients | None],
        prepare: Callable[[keras.Model], None],
        record: Callable[[Update, int], None],
        agreement: Agreement,
    ) -> None:
        self._agreement = agreement
        self._strategy = strategy
        self._worker = worker
        self._client = client
        self._sums = sum_over_workers, sum_gradients
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
        # Step, start, end and wait for the batch of each contribution since the last update.
        self._computed: list[tuple[int, float, float, float]] = []
        # Gradients that were computed before the last update, and are counted with the next one as dropped.
        self._uncounted: list[tuple[int, float, float, float]] = []
        self._thread = threading.Thread(target=self._compute, name="tfdist-contributions", daemon=True)
        self._reporter = stalls.StallReporter(client.waited_for)

    def start(self) -> None:
        """Starts the threads, which `close` ends."""
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

    def open(self, dataset: CountedDataset, fit: Call | None) -> PartIterator | None:
        """Opens a pass of `fit` over a data set."""
        if fit is None:
            return None
        # On every worker, even a late one, and not at the first batch: Keras makes iterators that it never reads, and
        # each of a shuffle draws an order.
        dataset.opened += 1
        return self.rest(dataset, [iter(dataset.own)], dataset.cardinality)

    def rest(self, dataset: CountedDataset, iterators: Sequence[Any], left: int) -> PartIterator:
        """See `CountedDataset.rest`."""
        return PartIterator(self, self._passes, iterators[0], dataset.own.element_spec, left)

    def prepared(self, step: Step, handle: BatchHandle) -> Callable[[Any, BatchHandle], Any]:
        """See `Engine.prepared`.

        A step raises ConnectionError if the quorum server or another worker is gone, and `tf.errors.OutOfRangeError` if
        the data have ended, on all workers.
        """
        self._prepare(step.model)
        traced = QuorumStep(self._strategy, step, handle.kind.element_spec, *self._sums)
        # Rows of tables differ in number from batch to batch.
        update = tf.function(traced.update, autograph=False, input_signature=[traced.specs])
        return lambda iterator, handle: update(self._round_of(traced, handle.of))

    # In Keras' step.

    def _round_of(self, traced: QuorumStep, of: PartIterator) -> list[tf.Tensor]:
        """Waits until the next update is decided; returns this worker's contribution to it, or zeros."""
        opened_at = time.monotonic()
        current = _Round(traced, of, self._step)
        with self._changed:
            self._round = current
            is_late = self._is_computing
            self._changed.notify_all()
        if is_late:
            # Otherwise the second thread reports at once that it has started, which implies this.
            self._client.report(Act.WANTED, of.number, current.step)
        try:
            with self._reporter.waiting("an update"), self._agreement.joint(part=worker_waits.STEP):
                verdict = self._client.wait(of.number, current.step, self._check)
        except ConnectionError as loss:
            raise self._agreement.failure_behind(loss, self._client.lost) or loss from None
        finally:
            # No contribution begins to read variables from here on.
            with self._changed:
                self._round = None
        if verdict is None:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        self._step += 1
        own, now = self._own_gradients(verdict), time.monotonic()
        update = Update(
            step=self._step,
            contributors=verdict.workers,
            dropped=verdict.dropped,
            # Synchronous policies accept gradients of the current step only.
            staleness=(0,) * len(verdict.workers),
            wait_secs=verdict.wait_secs,
            spread_secs=verdict.spread_secs,
            changes=(),
            contributions=own,
            time=now,
            opened_secs=now - opened_at,
        )
        self._record(update, verdict.count)
        if self._worker not in verdict.workers:
            return traced.nothing
        if current.contribution is None:
            raise RuntimeError(
                f"the quorum server counts on a contribution to step {current.step} that was never announced"
            )
        return current.contribution

    def _own_gradients(self, verdict: Verdict) -> tuple[Contribution, ...]:
        """Returns this worker's gradients that the verdict counts; the accepted one is last.

        The verdict decides on the counts, which are those of all workers. A gradient that arrived after the verdict
        was made is counted by the next one.
        """
        with self._changed:
            computed, self._computed = self._computed, []
        accepted = [computed.pop()] if computed and self._worker in verdict.workers else []
        # The server has counted all others with an earlier update: those of a pass that has ended.
        waiting, num_dropped = self._uncounted + computed, verdict.dropped.count(self._worker)
        dropped, self._uncounted = waiting[:num_dropped], waiting[max(num_dropped, len(self._uncounted)) :]
        found = []
        for outcome, gradients in ((Outcome.DROPPED, dropped), (Outcome.ACCEPTED, accepted)):
            for step, start, arrival, input_secs in gradients:
                known = outcome, verdict.step - step, float(outcome is Outcome.ACCEPTED), 0.0, input_secs
                found.append(Contribution(self._worker, start, arrival, *known))
        return tuple(found)

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
                self._changed.wait(keepalive.POLL_SECS)
        return None

    def _contribute(self, current: _Round) -> None:
        of = current.of
        start = time.monotonic()
        self._client.report(Act.STARTED, of.number, current.step)
        delay_hook.before_contribution(self._worker, next(self._attempts))
        try:
            contribution, examples, input_secs = current.traced.contribute(of.iterator)
        except tf.errors.OutOfRangeError:
            self._client.report(Act.ENDED, of.number, current.step)
            return
        end = time.monotonic()
        secs = end - start
        # By the machine's time, which may be set.
        input_secs = max(0.0, min(input_secs, secs))
        with self._changed:
            # At most one for each update.
            self._computed.append((current.step, start, end, input_secs))
        # Before the report: Keras' step reads it as soon as it is accepted.
        current.contribution = contribution
        self._client.report(Act.ARRIVED, of.number, current.step, examples, secs, input_secs)


# The data of a strategy with a policy: this worker's part of each batch.
#
# In `fit` an iterator returns handles, and reads nothing: a second thread reads the part when it computes a
# contribution. Other loops (`evaluate`, `predict`, custom loops) use the stock iterator over batches.


class PartIterator(handles.HandleIterator):
    """One pass of `fit` over this worker's parts.

    It never ends if the number of batches is unknown or infinite; then a step raises the end of the data.

    Args:
      engine: makes the steps.
      numbers: of the passes; all workers draw the same one at the first handle. Keras makes iterators that it never
        reads.
      iterator: iterator over the parts, read by the second thread only.
      element_spec: the structure of `tf.TypeSpec`s of an element.
      left: number of batches; below zero if it is unknown or infinite.

    Attributes:
      number: the number of the pass, once it has begun; 0 before.
      iterator: see the argument.
    """

    def __init__(self, engine: Any, numbers: Iterator[int], iterator: Any, element_spec: Any, left: int) -> None:
        self._numbers = numbers
        self._left = left
        self.number = 0
        self.iterator = iterator
        self._kind = handles.kind_of(engine, element_spec)

    def next_handle(self) -> handles.BatchHandle | None:
        """See `HandleIterator`."""
        if self._left == 0:
            return None
        self.number = self.number or next(self._numbers)
        self._left -= self._left > 0
        return BatchHandle(self._kind, self)


# Traced functions of a train step whose gradients are summed by an all-reduce of the workers that have arrived.
#
# contribute    in a thread of its own, without collectives: a contribution, as flat tensors
# nothing       the same tensors, of zeros and without rows: the contribution of a late worker
# update        in Keras' step, on all workers at once: sums their contributions, and applies the sum


class QuorumStep:
    """A Keras train step, traced for a `MultiWorkerMirroredStrategy` of one replica per worker.

    Args:
      strategy: the strategy.
      step: a model's `train_step`, whose optimizers were built.
      element_spec: of a worker's part of a batch, and the number of examples in all parts, or ().
      sum_over_workers: see `QuorumEngine`.
      sum_gradients: likewise.

    Attributes:
      nothing: the contribution of a late worker: flat tensors.
      specs: of a flat contribution.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        step: Step,
        element_spec: Any,
        sum_over_workers: Sum,
        sum_gradients: Callable[[], SumGradients | None],
    ) -> None:
        self._strategy = strategy
        self._sum_over_workers = sum_over_workers
        self._sum_gradients = sum_gradients
        self._replica = replicas.in_sync_group(strategy, 0)
        self._device = strategy.extended.worker_devices[0]
        count = strategy.num_replicas_in_sync
        of_examples = trials.sums_in(strategy, step, element_spec[0], count)
        self._step = SplitTrainStep(step, count, transforms=transforms.transforms_of(strategy), sums=of_examples)
        self._template: contribution.ReplicaContribution | None = None
        specs = [tf.data.IteratorSpec(element_spec)]
        self._contribute = self._step.settled(lambda: one_replica.trace(strategy, self._contribute_next, specs))
        self.specs = [tf.TensorSpec(output.shape, output.dtype) for output in self._contribute.outputs[1:]]
        with tf.init_scope():
            # Only sparse gradients have an unknown number of rows, which is 0 here.
            self.nothing = [tf.zeros([size or 0 for size in spec.shape], spec.dtype) for spec in self.specs]

    def contribute(self, iterator: Any) -> tuple[list[tf.Tensor], int, float]:
        """Computes a contribution from the next batch of an iterator.

        Returns:
          The contribution, flat; its number of examples; and the seconds of waiting for the batch.

        Raises:
          tf.errors.OutOfRangeError: the data have ended.
        """
        facts, *flat = self._contribute(iterator)
        # The read waits for the device.
        examples, input_secs = facts.numpy().tolist()
        return flat, int(examples), input_secs

    def update(self, flat: Sequence[tf.Tensor]) -> Any:
        """Makes an update from the contributions of all workers; in cross-replica context, in a graph or eagerly.

        Args:
          flat: this worker's contribution, or `nothing`.

        Returns:
          The result of Keras' step for all workers together.
        """
        with writes_after_inputs({self._device: list(flat)}):
            own = tf.nest.pack_sequence_as(self._template, flat, expand_composites=True)
            # This worker's own counts so far: their sum over workers is part of the gradients' all-reduce.
            counters = [one_replica.copies_of(variable)[0] for variable in self._step.counters]
            before = [tf.convert_to_tensor(counter) for counter in counters]
            sent, sum_gradients = own._replace(counts=[*before, *own.counts]), self._sum_gradients()
            total = self._add_up_encoded(sent, sum_gradients) if sum_gradients else self._add_up(sent)
            before, new = total.counts[: len(counters)], total.counts[len(counters) :]
            new = self._step.counts(total._replace(counts=new))
            total = total._replace(counts=[old + tf.cast(add, old.dtype) for old, add in zip(before, new, strict=True)])
            with self._as_replica():
                apply = one_replica.apply_to_copies(self._strategy)
                self._step.update(total, are_final=sum_gradients is not None, apply=apply)
                for counter, count in zip(counters, self._step.counts(own._replace(weight=total.weight)), strict=True):
                    counter.assign_add(tf.cast(count, counter.dtype))
                return self._step.logs(total, total.counts)

    def _add_up(self, own: contribution.ReplicaContribution) -> contribution.ReplicaContribution:
        """Returns the sum over all workers; a gradient may be None."""
        rest = own._replace(gradients=[each for each in own.gradients if isinstance(each, tf.Tensor)])
        sums = tf.nest.pack_sequence_as(rest, self._sum_over_workers(tf.nest.flatten(rest)))
        gradients, dense = [*own.gradients], iter(sums.gradients)
        for index, (gradient, variable) in enumerate(zip(own.gradients, self._step.variables(), strict=True)):
            if isinstance(gradient, tf.IndexedSlices):
                gradients[index] = self._add_up_rows(gradient, variable.shape)
            elif gradient is not None:
                gradients[index] = next(dense)
        return sums._replace(gradients=gradients)

    def _add_up_encoded(
        self, own: contribution.ReplicaContribution, sum_gradients: SumGradients
    ) -> contribution.ReplicaContribution:
        """Does the same in two rounds: a codec keeps parts of the gradients that the optimizer is given in the end."""
        calls, variables = self._step.calls(), self._step.variables()
        rows = [None if isinstance(each, tf.Tensor) else each for each in own.gradients]
        total = self._add_up(own._replace(gradients=rows))
        # Several calls may be equal.
        unique = {id(each): each for each in calls}
        factors = {key: self._step.factor(total, call) for key, call in unique.items()}
        final = [
            contribution.times(given if each is None else each, factors[id(call)])
            for given, each, call in zip(own.gradients, total.gradients, calls, strict=True)
        ]
        for call in unique.values():
            chosen = [index for index, each in enumerate(rows) if each is None and calls[index] is call]
            given = [final[index] for index in chosen], [variables[index] for index in chosen]
            for index, found in zip(chosen, sum_gradients(call.optimizer, *given), strict=True):
                final[index] = found
        return total._replace(gradients=final)

    def _add_up_rows(self, gradient: tf.IndexedSlices, shape: Sequence[int]) -> tf.IndexedSlices:
        with tf.device(self._device):
            own = tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
            rows = tf.distribute.Strategy.reduce(self._strategy, "SUM", own, axis=None)
            return tf.IndexedSlices(rows.values, rows.indices, tf.constant(list(shape), rows.indices.dtype))

    def _contribute_next(self, iterator: Any) -> list[tf.Tensor]:
        (batch, total), input_secs = step_times.timed_read(iterator.get_next)
        pack = functools.partial(tf.nest.flatten, expand_composites=True)
        batch_rows = total if tf.is_tensor(total) else None
        with tf.device(self._device):
            flat = self._step.unless_empty(self._strategy, self._computed, pack, batch, batch_rows)
        examples = splitting.rows(batch)
        # Computed after all other tensors, so that a read of the count waits for them.
        with tf.control_dependencies(flat):
            count = tf.cast(0 if examples is None else examples, tf.float64)
            return [tf.stack([count, input_secs]), *flat]

    def _computed(self, batch: Any, batch_rows: tf.Tensor | None) -> contribution.ReplicaContribution:
        with self._as_replica(), losses.counted_as_one(self._strategy):
            found = self._step.contribute(batch, batch_rows)
        # The shape of the table must not be summed.
        gradients = [
            tf.IndexedSlices(each.values, each.indices) if isinstance(each, tf.IndexedSlices) else each
            for each in found.gradients
        ]
        self._template = found._replace(gradients=gradients)
        return self._template

    @contextlib.contextmanager
    def _as_replica(self) -> Iterator[None]:
        with tf.device(self._device), tf.distribute.ReplicaContext(self._strategy, self._replica):
            yield
