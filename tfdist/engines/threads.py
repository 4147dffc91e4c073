# SPDX-License-Identifier: Apache-2.0
"""The engine of `MirroredStrategy` with a policy: each device computes in a thread of its own.

How an update flows:

    Keras' step                    a replica's thread, one for each device
      run(): opens   ----------->  may it start?
                                   contribute: takes its part of the batch, reads its device's variables, computes
                                   arrive: does it count?
      collect(): has N  <--------  deliver
      update: adds up, applies to every device's copy
      logs

A late replica continues to compute in its thread. It only reads variables, and its contribution is dropped; then it
starts again, with its part of the batch that is current by then.

Ownership: `RoundRunner` owns the policy and its lock. The engine owns the threads, which hold no reference to the
engine or the strategy, so that both can be garbage-collected: then the threads end.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat.keras.calls import Call
from tfdist.compat.tensorflow import graphs, replicas
from tfdist.coordination import delay_hook, stalls
from tfdist.coordination.round_runner import RoundRunner
from tfdist.engines.base import Engine
from tfdist.passes import replica_batches, splitting
from tfdist.passes.handle import BatchHandle
from tfdist.passes.replica_batches import ReplicaIterator
from tfdist.policies.base import Aggregation, Update
from tfdist.step import gradients, losses, one_replica, trials
from tfdist.step.contribution import ReplicaContribution, add_up
from tfdist.step.logs import Packing
from tfdist.step.replicas import build_optimizer
from tfdist.step.split import SplitTrainStep
from tfdist.step.step import Step

_CLOSING_SECS = 2.0


@dataclasses.dataclass(eq=False)
class _Shared:
    """State that the engine shares with its threads."""

    runner: RoundRunner
    # Step and batch of the update; `None` between updates, because they reference the model, and thereby the strategy.
    job: tuple[ThreadedStep, BatchHandle] | None = None
    is_closed: bool = False


class ThreadedEngine(Engine):
    """Makes updates from the contributions of this process' devices that a policy accepts.

    Args:
      strategy: the strategy whose devices compute.
      policy: decides which contributions count; `begin` was called.
      names: names of the replicas, such as "worker:0".
      on_update: called with each update and its number of examples; it must not reference the strategy.
      stall_timeout_secs: longest wait of an update without progress of any replica.
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
        self._shared = _Shared(RoundRunner(policy, names, stall_timeout_secs))
        self._reporter = stalls.StallReporter(self._shared.runner.waited_for)
        self._threads = [
            threading.Thread(target=_serve, args=(self._shared, replica), name=f"tfdist {name}", daemon=True)
            for replica, name in enumerate(names)
        ]
        self._strategy = weakref.ref(strategy)
        # Called by `close`, when the engine is collected, or at the end of the process.
        self._end_threads = weakref.finalize(self, _close, self._shared, self._reporter, self._threads)

    def distribute(self, dataset: tf.data.Dataset, whole: Callable[[], Any]) -> replica_batches.ReplicaDataset:
        """Returns a data set of handles whose global batches are divided among the devices; others read `whole()`."""
        return replica_batches.ReplicaDataset(self, dataset, len(self._threads), whole)

    def distribute_own(
        self, datasets: Sequence[tf.data.Dataset], whole: Callable[[], Any]
    ) -> replica_batches.ReplicaDataset:
        """Returns a data set of handles, from one data set per device, which the device's thread reads."""
        return replica_batches.ReplicaDatasetFromFunction(self, datasets, whole)

    def open(self, dataset: replica_batches.ReplicaDataset, fit: Call | None) -> ReplicaIterator | None:
        """Opens a pass over a data set, for `fit` and loops of the user's own."""
        del fit
        return None if dataset.is_left_to_stock else dataset.iterate()

    def prepared(self, step: Step, handle: BatchHandle) -> Callable[[Any, BatchHandle], Any]:
        """See `Engine.prepared`.

        A step raises the exception of a replica, and TimeoutError if none made progress for `stall_timeout_secs`.
        """
        strategy, model = self._strategy(), step.model
        if model.jit_compile:
            raise ValueError(
                "compile(jit_compile=True): XLA can't compile a step that a policy takes apart; leave it at 'auto' or "
                "False. Received: jit_compile=True"
            )
        build_optimizer(strategy, model)
        _, is_whole = handle.kind.form
        traced = ThreadedStep(strategy, step, handle.kind.element_spec, is_whole)
        traced.prepare(self._policy.replicas_to_aggregate)
        return lambda iterator, handle: self._step(traced, handle)

    def close(self) -> None:
        """Ends the threads; may be called again."""
        self._end_threads()

    def _step(self, step: ThreadedStep, handle: BatchHandle) -> Any:
        """Makes one update from a handle's batch; returns the logs after it."""
        self._start()
        shared = self._shared
        iterator: ReplicaIterator = handle.of
        with self._reporter.waiting("an update"):
            shared.job = step, handle
            try:
                with shared.runner.wanted():
                    # While the replicas compute.
                    iterator.read_ahead()
                    contributions, update = shared.runner.collect()
            finally:
                shared.job = None
            in_order = sorted(zip(update.contributors, contributions, strict=True), key=lambda pair: pair[0])
            logs = step.update([contribution for _, contribution in in_order])
        self._on_update(update, sum(iterator.rows(handle, replica) for replica in update.contributors))
        return logs

    def _start(self) -> None:
        if self._threads[0].ident is None:
            self._reporter.start()
            for thread in self._threads:
                thread.start()


def _serve(shared: _Shared, replica: int) -> None:
    """Contributes until the engine is closed; runs in a replica's thread."""
    attempt = 0
    while True:
        local_step = shared.runner.start(replica, lambda: shared.is_closed)
        if local_step is None:
            return
        job = shared.job
        try:
            if job is None:
                shared.runner.give_up(replica)
            else:
                _contribute(shared.runner, *job, replica, local_step, attempt)
        except Exception as error:
            # Errors of the user's step are raised to the user.
            shared.runner.fail(replica, local_step, error, isinstance(error, tf.errors.OutOfRangeError))
        attempt += 1
        del job


def _contribute(
    runner: RoundRunner, step: ThreadedStep, handle: BatchHandle, replica: int, local_step: int, attempt: int
) -> None:
    delay_hook.before_contribution(replica, attempt)
    begin = time.monotonic()
    batch = handle.of.flat(handle, replica)
    input_secs = time.monotonic() - begin
    contribution = step.contribute[replica](*batch)
    if runner.arrive(replica, local_step, input_secs):
        runner.deliver(replica, local_step, contribution)


def _close(shared: _Shared, reporter: stalls.StallReporter, threads: Sequence[threading.Thread]) -> None:
    shared.is_closed = True
    shared.runner.wake()
    reporter.stop()
    # A thread that returns from TensorFlow after Python has ended aborts the process.
    deadline = time.monotonic() + _CLOSING_SECS
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


# Traced functions of a train step whose replicas are the devices of one process.
#
#     contribute    on a replica's device    reads its copies of the variables, computes; the result goes to the first
#                                            replica's device
#     update        on all devices           adds up on the first replica's device, then applies to every copy
#
# Of replicas that span devices, each part goes to the device that has the part in the first replica.
# The contributions of an update are on one device, in the order of the replicas. So the update is the same function for
# any contributors, and its sum does not depend on the order of arrival.


# Device that reads the batch, and cuts it into parts.
_HOST = "/device:CPU:0"


class ThreadedStep:
    """A Keras train step, traced for a `MirroredStrategy`.

    Args:
      strategy: the strategy in whose scope it is traced.
      step: a model's `train_step`.
      element_spec: the structure of `tf.TypeSpec`s of a replica's input.
      is_whole: True if the input is the whole batch, from which the replica takes its part.

    Attributes:
      contribute: by replica, computes its flat contribution from its flat input.
    """

    def __init__(self, strategy: tf.distribute.Strategy, step: Step, element_spec: Any, is_whole: bool) -> None:
        self._strategy = strategy
        self._devices: Sequence[str] = strategy.extended.worker_devices
        self._spec = element_spec
        self._is_whole = is_whole
        transforms = gradients.transforms_of(strategy)
        sums = trials.sums_in(strategy, step, element_spec, len(self._devices))
        self._step = SplitTrainStep(step, len(self._devices), transforms=transforms, sums=sums)
        self._template: ReplicaContribution | None = None
        # Devices of a flat contribution.
        self._homes: list[str] = []
        flat = tf.nest.flatten(element_spec, expand_composites=True)
        replicas = [
            self._step.settled(lambda replica=replica: one_replica.trace(strategy, self._on_replica(replica), flat))
            for replica in range(len(self._devices))
        ]
        self.contribute = [graphs.bare_call(replica) for replica in replicas]
        self._specs = [tf.TensorSpec(t.shape, t.dtype) for t in replicas[0].outputs]
        self._packing = Packing()
        # By the number of contributions.
        self._updates: dict[int, Callable[..., Any]] = {}

    def prepare(self, num_contributions: int) -> None:
        """Traces the update from this number of contributions, unless it was."""
        if num_contributions not in self._updates:
            specs = self._specs * num_contributions
            self._updates[num_contributions] = graphs.bare_call(one_replica.trace(self._strategy, self._update, specs))

    def update(self, contributions: Sequence[Sequence[tf.Tensor]]) -> Any:
        """Makes an update from contributions, and returns the logs after it."""
        self.prepare(len(contributions))
        update = self._updates[len(contributions)]
        return self._packing.rebuild(self._packing.unpack(update(*itertools.chain(*contributions))))

    # Traced code.

    def _on_replica(self, replica: int) -> Callable[..., list[tf.Tensor]]:
        def contribute(*flat: tf.Tensor) -> list[tf.Tensor]:
            with tf.device(_HOST):
                part, rows = tf.nest.pack_sequence_as(self._spec, flat, expand_composites=True), None
                if self._is_whole:
                    part, rows = splitting.cut(part, replica, len(self._devices)), splitting.rows(part)
            with tf.device(self._devices[replica]):
                return self._step.unless_empty(self._strategy, compute, self._at_home, part, rows)

        def compute(part: Any, rows: tf.Tensor | None) -> ReplicaContribution:
            with (
                tf.device(self._devices[replica]),
                tf.distribute.ReplicaContext(self._strategy, replica),
                losses.counted_as_one(self._strategy),
            ):
                contribution = self._template = self._step.contribute(part, rows)
            self._homes = [self._home(each) for each in tf.nest.flatten(contribution, expand_composites=True)]
            return contribution

        return contribute

    def _at_home(self, contribution: ReplicaContribution) -> list[tf.Tensor]:
        flat = tf.nest.flatten(contribution, expand_composites=True)
        return [replicas.to_device(*each) for each in zip(flat, self._homes, strict=True)]

    def _home(self, tensor: tf.Tensor) -> str:
        """Returns the first replica's device for the part of the model that a tensor is of."""
        parts = replicas.parts_of(self._strategy)
        return parts.groups[0][parts.part_of(tensor)] if parts else self._devices[0]

    def _update(self, *flat: tf.Tensor) -> list[tf.Tensor]:
        size = len(self._specs)
        if replicas.parts_of(self._strategy):
            homes = itertools.cycle(self._homes)
            flat = tuple(replicas.to_device(*each) for each in zip(flat, homes, strict=False))
        parts = [flat[start : start + size] for start in range(0, len(flat), size)]
        contributions = [tf.nest.pack_sequence_as(self._template, part, expand_composites=True) for part in parts]
        with one_replica.replica_on(self._strategy, self._devices[0]):
            total = add_up(contributions)
            apply = one_replica.apply_to_copies(self._strategy)
            self._step.update(total, num_contributions=len(contributions), assign=one_replica.assign_all, apply=apply)
            for variable, count in zip(self._step.counters, self._step.counts(total), strict=True):
                # A metric's value is the sum over its copies.
                one_replica.copies_of(variable)[0].assign_add(tf.cast(count, variable.dtype))
            return self._packing.pack(self._step.logs(total))
