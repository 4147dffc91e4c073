# SPDX-License-Identifier: Apache-2.0
"""The engine of `ParameterServerStrategy` with a policy: updates from the contributions of several workers.

How an update flows:

    Keras' loop (chief)          a worker's thread (chief)          the worker          the parameter servers
      step(): opens  ----------->  may it start?
                                   contribute ------------------->  reads its part
                                                                    of the batch  <-->  reads the variables
                                   arrive: does it count?           keeps the gradients
                                   push  ------------------------>  sends them  ----->  keep them
                                   deliver
      collect(): has N  <---------
      update  ------------------------------------------------------------------->  add up, apply
      logs  <---------------------------------------------------------------------

Only control traffic and the logs cross the chief. A late gradient is not sent: it stays on its worker. Small gradients
are sent by `contribute`, late or not, and there is no `push`: a call costs more than they do.

Ownership: `RoundRunner` owns the policy and its lock. A worker's thread belongs to the coordinator, which detects the
loss of the worker. A closure of this engine *resides* in the thread, and returns it as soon as another function is
scheduled (an evaluation, for example). A handle to gradients belongs to its next user; no code waits for the handles of
a dead worker, or clears them.

An update is made exactly once: its contributions were pushed before it begins, each counts once, and it touches
parameter servers only.
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
import numpy as np
import tensorflow as tf

from tfdist.compat.keras import optimizers
from tfdist.compat.keras.calls import Call
from tfdist.compat.tensorflow import coordinator, replicas
from tfdist.compat.tensorflow.coordinator import SERVER_DEVICE
from tfdist.coordination import delay_hook, stalls
from tfdist.coordination.round_runner import RoundRunner
from tfdist.engines.asynchronous import AsynchronousEngine
from tfdist.engines.base import Engine
from tfdist.engines.transfer import encoding
from tfdist.engines.transfer.plan import TransferPlan
from tfdist.engines.worker_function import check_graph
from tfdist.passes import splitting
from tfdist.passes.worker_batch import PartLayout, WorkerBatch
from tfdist.passes.worker_dataset import WorkerDataset, WorkerDatasetFromFunction
from tfdist.passes.worker_pass import ChiefFeed, WorkerFeed, WorkerIterator
from tfdist.policies.base import Aggregation, Update
from tfdist.policies.warmup import Warmup
from tfdist.step import gradients as gradient_transforms
from tfdist.step import one_replica, rehearsal, step_times, trials
from tfdist.step.contribution import ReplicaContribution, add_up, weigh
from tfdist.step.logs import Packing
from tfdist.step.split import SplitTrainStep
from tfdist.step.step import Step
from tfdist.tables import coordinated_variable
from tfdist.tables.partitioned_variable import RowPieces
from tfdist.transforms import ARRIVAL
from tfdist.transport.bundles import Bundles

# A time that a worker has measured is fetched so often: it takes a round trip on the way of a step.
_SAMPLE_SECS = 0.25
# The context of an update in which all workers take part.
_WHOLE = contextlib.nullcontext()


@dataclasses.dataclass(eq=False)
class _Residence:
    """Step that workers contribute to until another function is scheduled."""

    step: RoundStep
    iterator: WorkerIterator
    # If the chief reads the data: each worker's part of this update's batch, flat.
    parts: list[list[tf.Tensor]] | None = None
    # Set once the workers are to return their threads.
    left: threading.Event = dataclasses.field(default_factory=threading.Event)


class RoundEngine(Engine):
    """Makes updates from the contributions that a policy accepts.

    Args:
      strategy: the strategy whose cluster it drives.
      engine: runs all functions but training steps on these workers.
      policy: decides which contributions count; `begin` was called.
      transfer: how variables and gradients cross the network.
      on_update: called with each update.
      stall_timeout_secs: longest wait for lost workers without which no update is possible.
      warmup: decides how many workers take part at first; all by default.
    """

    marks_end = True
    _runner_type = RoundRunner

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        engine: AsynchronousEngine,
        policy: Aggregation,
        transfer: TransferPlan,
        on_update: Callable[[Update], None],
        stall_timeout_secs: float,
        warmup: Warmup | None = None,
    ) -> None:
        self._strategy = strategy
        self._engine = engine
        self.num_workers = engine.num_workers
        self.coordinator = engine.coordinator
        self._on_update = on_update
        # Each update needs a part of the batch from each worker, if the workers share the data.
        is_shared = engine.data_sharding == "shard"
        self.num_parts = self.num_workers if is_shared else 1
        self._sharding = "deal" if is_shared else engine.data_sharding
        # Into which a worker's own batches are cut.
        self._num_own_parts = 1
        names = [f"worker:{index}" for index in range(self.num_workers)]
        self._policy = policy
        self._transfer = transfer
        self._runner = self._runner_type(policy, names, stall_timeout_secs)
        self._warmup = warmup
        self._residence: _Residence | None = None
        self._attempts = [itertools.count() for _ in names]
        # What Keras' thread waits for, with a token of its own; None while it waits for nothing.
        self._wait: tuple[str, object] | None = None
        self._reporter = stalls.StallReporter(self._runner.waited_for, progress=lambda: self._wait)
        self._reporter.start()

    def raised_in_step(self, error: Exception) -> BaseException | None:
        """See `Engine.raised_in_step`."""
        return self._engine.raised_in_step(error)

    @property
    def replicas_to_aggregate(self) -> int:
        """Number of gradients of the next update."""
        return self._policy.replicas_to_aggregate

    def follow_losses(self, on_loss: Callable[[int, bool], object]) -> None:
        """See `AsynchronousEngine.follow_losses`."""
        self._runner.on_loss = on_loss

    def distribute(self, dataset: tf.data.Dataset) -> WorkerDataset:
        """Returns a data set of handles, of whose batches each worker reads its part."""
        dataset = self._engine.in_order(dataset)
        if self.num_parts > 1:
            splitting.check_batched(dataset.element_spec, self.num_parts)
        return WorkerDataset(self, dataset, self._sharding, self._num_own_parts)

    def distribute_own(self, datasets: Sequence[tf.data.Dataset]) -> WorkerDataset:
        """Returns a data set of handles, from one data set per worker."""
        return WorkerDatasetFromFunction(self, datasets, self._num_own_parts)

    def open(self, dataset: WorkerDataset, fit: Call | None) -> WorkerIterator:
        """Begins a pass over a data set, for any loop."""
        del fit
        return WorkerIterator(self._engine, dataset)

    def prepared(self, step: Step, handle: WorkerBatch) -> Callable[[WorkerIterator, WorkerBatch], Any]:
        """See `Engine.prepared`."""

        def trace() -> RoundStep:
            spec, count = handle.element_spec, self.num_parts
            rehearsal.before(self._strategy, step.function, [spec])
            part_spec = splitting.part_spec(spec, count) if count > 1 else spec
            given = self._strategy, step, self._transfer, part_spec, handle.kind.form
            return RoundStep(*given, replicas_to_aggregate=self.replicas_to_aggregate, **self._of_policy())

        return functools.partial(self.step, self._engine.programs.traces.find(step, ("round", handle.kind), trace))

    def _of_policy(self) -> dict[str, Any]:
        """Returns the arguments of `RoundStep` that depend on the kind of the policy."""
        return {"total_num_replicas": self.num_workers}

    def step(self, step: RoundStep, iterator: WorkerIterator, handle: WorkerBatch | None = None) -> Any:
        """Makes one update.

        Returns:
          The logs after it.

        Raises:
          tf.errors.OutOfRangeError: the data have ended.
          TimeoutError: too many workers were lost for `stall_timeout_secs`.
        """
        del handle
        self._wait = "an update", object()
        try:
            logs, update = self._make(step, iterator)
        finally:
            self._wait = None
        if update is not None:
            self._on_update(update)
        return step.rebuild(logs)

    def _make(self, step: RoundStep, iterator: WorkerIterator) -> tuple[list[np.ndarray], Update | None]:
        """Makes an update, and returns it with the flat logs after it; None if no gradient is left for one."""
        feed, parts = iterator.feed or iterator.decide(by_chief=False), None
        if isinstance(feed, ChiefFeed):
            parts = parts_of_batch(feed.next_batch(), iterator, self.num_parts) * (self.num_workers // self.num_parts)
            step.prepare_for_batches()
            feed.redeem()
        feed.updates += 1
        with _WHOLE if self._warmup is None else self._phase(step, self._warmup):
            present = self._residence
            if parts is not None or present is None or present.step is not step or present.iterator is not iterator:
                self._reside(step, iterator, parts)
            try:
                self._runner.open()
                contributions, update = self._runner.collect(functools.partial(self._check, step, iterator, parts))
            except BaseException:
                self._runner.discard()
                raise
            return step.update(contributions), update

    def _phase(self, step: RoundStep, warmup: Warmup) -> contextlib.AbstractContextManager[None]:
        """Context of one update, in which only the workers of the warmup phase take part."""
        return _WHOLE if warmup.is_over else self._limited(step, warmup)

    @contextlib.contextmanager
    def _limited(self, step: RoundStep, warmup: Warmup) -> Iterator[None]:
        is_first = warmup.unit == "epochs" and _is_first_step(step.model)
        self._runner.limit(warmup.taking_part_next(is_first))
        made = self._policy.step
        yield
        if self._policy.step > made:
            warmup.opened(is_first)
            if is_first and _is_first_step(step.model):
                raise ValueError(
                    "Warmup(epochs=...) learns from a metric where an epoch begins, and this model's train_step "
                    "updates none; use Warmup(steps=...). "
                    f"Received: a model {step.model.name!r} whose metrics count nothing"
                )

    def close(self) -> None:
        """Returns the workers' threads to the coordinator, and ends this engine's own thread; may be called again."""
        self.leave()
        self._reporter.stop()

    def _check(self, step: RoundStep, iterator: WorkerIterator, parts: list[list[tf.Tensor]] | None) -> None:
        if coordinator.has_failed(self.coordinator):
            # The coordinator waits for all closures to end before it raises.
            self.leave()
            coordinator.raise_failure(self.coordinator)
        for worker in coordinator.lost_workers(self.coordinator):
            # A worker may have died in an evaluation, for example, which the runner doesn't see.
            self._lose(worker, lambda worker=worker: worker in coordinator.lost_workers(self.coordinator))
        # Another thread of the program may have scheduled a function in the meantime.
        self._reside(step, iterator, parts)

    def _lose(self, worker: int, is_so: Callable[[], bool] = lambda: True) -> None:
        self._runner.lose(worker, is_so)

    def _reside(self, step: RoundStep, iterator: WorkerIterator, parts: list[list[tf.Tensor]] | None) -> None:
        """Schedules the closures that contribute to these updates, unless they run already."""
        present = self._residence
        if present is not None and present.step is step and present.iterator is iterator:
            present.parts = parts
            return
        self.leave()
        residence = self._residence = _Residence(step, iterator, parts)
        on_workers = iterator.feed.begin() if isinstance(iterator.feed, WorkerFeed) else None
        for _ in range(self.num_workers):
            coordinator.scheduling(self.coordinator)(self._serve, (residence, on_workers), {})

    def leave(self) -> None:
        """Returns the workers' threads to the coordinator."""
        if self._residence is not None:
            self._residence.left.set()
        self._residence = None
        self._runner.wake()

    def end_fit(self) -> None:
        """Leaves the model of a `fit` that has ended, so that it can be collected."""
        self.leave()

    def _serve(self, residence: _Residence, iterator_on_worker: Any) -> None:
        """Contributes until another function is scheduled; runs in the thread of the closure's worker."""
        worker, step, runner = coordinator.thread.worker, residence.step, self._runner
        attempts, is_over = self._attempts[worker], residence.left.is_set
        runner.bring_back(worker)
        while (local_step := runner.start(worker, is_over)) is not None:
            try:
                attempt, parts, input_secs = next(attempts), residence.parts, 0.0
                if delay_hook.installed is not delay_hook.no_delay:
                    delay_hook.before_contribution(worker, attempt)
                if parts is not None:
                    contribution = step.contribute_from(*parts[worker])
                elif worker in residence.iterator.feed.at_end:
                    raise tf.errors.OutOfRangeError(None, None, "End of sequence")
                else:
                    contribution, input_secs, is_last = step.contribute_next(iterator_on_worker, worker)
                    residence.iterator.feed.took(worker)
                    if is_last:
                        residence.iterator.feed.at_end.add(worker)
                if runner.arrive(worker, local_step, input_secs):
                    pushed = step.push(*contribution) if step.push else contribution
                    runner.deliver(worker, local_step, pushed)
            except Exception as error:
                if coordinator.is_task_failure(error):
                    self._lose(worker)
                    raise
                # Errors of the user's step are raised to the user, with their type and message.
                coordinator.clear_error()
                is_end = isinstance(error, tf.errors.OutOfRangeError)
                if is_end and residence.iterator.feed is not None:
                    residence.iterator.feed.ended = True
                runner.fail(worker, local_step, error, is_end)


# Traced functions of a train step whose gradients are aggregated on the parameter servers.
#
#     contribute    on a worker                    reads the variables, computes; the result stays there
#     push          worker to parameter servers    each gradient to the server of its variable; the result stays there
#     update        on the parameter servers       adds up what was pushed, and applies it
#
# They exchange handles: the chief's references to remote tensors. Gradients are summed only after the policy has chosen
# the contributors, so a worker that dies during a push leaves unused handles, and no partial sum.


class RoundStep:
    """A Keras train step, traced for a `ParameterServerStrategy`.

    Args:
      strategy: the strategy in whose scope it is traced.
      step: a model's `train_step`.
      transfer: how variables and gradients cross the network.
      element_spec: the structure of `tf.TypeSpec`s of a worker's batch.
      layout: what the workers' iterators give besides batches.
      total_num_replicas: number of parts of a batch.
      replicas_to_aggregate: expected number of contributions of an update. An update from another number is traced on
        first use, which waits for every worker that is up, even if it is stopped.
      is_weighted: True if the gradients of each contribution have a weight and a staleness.
      is_relative: see `SplitTrainStep`.

    Attributes:
      model: the Keras model of the step.
      contribute: the traced function of `contribute_next`.
      contribute_from: computes a contribution from the tensors of a batch of the chief, on the default device, which is
        the worker; None before `prepare_for_batches`.
      push: sends a contribution from its worker, the default device, to the parameter servers; returns what is there.
        None if `contribute` has sent it.
      rebuild: packs flat logs into what Keras' step returns.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        step: Step,
        transfer: TransferPlan,
        element_spec: Any,
        layout: PartLayout,
        total_num_replicas: int,
        replicas_to_aggregate: int,
        is_weighted: bool = False,
        is_relative: bool = False,
    ) -> None:
        self._strategy = strategy
        self._transfer = transfer
        self.model = step.model
        # Of the gradients that are sent; None to send them as they are.
        self._encoding = transfer.encoding
        # The scale of losses may change before the gradients of asynchronous replicas are applied.
        self._is_unscaled = self._encoding is not None or is_relative
        self._has_totals, self._marks_end = layout.has_totals, layout.marks_end
        self._spec = (element_spec, tf.TensorSpec([], tf.int64)) if layout.has_totals else element_spec
        self._transforms = gradient_transforms.transforms_of(strategy)
        self._step = SplitTrainStep(
            step,
            total_num_replicas,
            is_relative=is_relative,
            can_take_maxima=True,
            transforms=self._transforms,
            arrives_at_update=True,
            sums=trials.sums_in(strategy, step, element_spec, total_num_replicas),
        )
        self._is_weighted = is_weighted
        self._template: ReplicaContribution | None = None
        self._bundles: Bundles | encoding.EncodedBundles | None = None
        self._rows = RowPieces([], [])
        self._home = ""
        self.contribute_from: Any = None
        element = (self._spec, tf.TensorSpec([None], tf.int8)) if self._marks_end else self._spec
        self.contribute = self._step.settled(
            lambda: self._trace(self._contribute_next, [tf.data.IteratorSpec(element)])
        )
        check_graph(step, self.contribute)
        self._specs = [tf.TensorSpec(t.shape, t.dtype) for t in self.contribute.outputs[: -1 - self._marks_end]]
        self.push = None if self._bundles.are_small else self._trace(self._to_servers, self._specs)
        if self.push is not None and self._encoding is not None:
            self.push = functools.partial(_push_encoded, self._encoding, self.push)
        self._packing = Packing()
        self.rebuild = self._packing.rebuild
        # By worker, when the time of waiting for a batch is fetched again, and the last one.
        self._inputs: dict[int, tuple[float, float]] = {}
        # By the number of contributions.
        self._updates: dict[int, Callable[..., Any]] = {}
        self._update_from(replicas_to_aggregate)

    def contribute_next(self, iterator: Any, worker: int) -> tuple[list[tf.Tensor], float, bool]:
        """Computes a contribution from the iterator of `worker`, which is the default device.

        Returns:
          The contribution, the seconds of waiting for the batch (of this one, or of one shortly before), and True if it
          is known to be the last one.
        """
        *contribution, read = self.contribute(iterator)
        # The shape is known here; the tensor stays on the worker.
        is_last = self._marks_end and contribution.pop().shape[0] == 0
        now = time.monotonic()
        due, input_secs = self._inputs.get(worker, (now, 0.0))
        if now >= due:
            input_secs = float(read.numpy())
            self._inputs[worker] = now + _SAMPLE_SECS, input_secs
        return contribution, input_secs, is_last

    def prepare_for_batches(self) -> None:
        """Traces the function of `contribute_from`; only Keras' thread may call it."""
        if self.contribute_from is None:
            specs = tf.nest.flatten(self._spec, expand_composites=True)
            self.contribute_from = self._step.settled(lambda: self._trace(self._contribute_batch, specs))

    def update(
        self,
        contributions: Sequence[Sequence[tf.Tensor]],
        weights: Sequence[float] | None = None,
        staleness: Sequence[int] | None = None,
    ) -> list[np.ndarray]:
        """Makes an update from contributions that were pushed, and returns the flat logs after it.

        Args:
          contributions: results of `push`.
          weights: factors of each contribution's gradients, if `is_weighted`.
          staleness: of each contribution, likewise.
        """
        update = self._updates.get(len(contributions)) or self._update_from(len(contributions))
        tensors = [*itertools.chain.from_iterable(contributions)]
        with tf.device(self._home):
            if self._is_weighted:
                tensors.append(tf.constant([weights, staleness], tf.float32, [2, len(contributions)]))
            return self._packing.unpack(update(*tensors))

    def _update_from(self, count: int) -> Callable[..., Any]:
        weights = [tf.TensorSpec([2, count], tf.float32)] if self._is_weighted else []
        update = self._updates[count] = self._trace(self._update, self._specs * count + weights)
        return update

    def _trace(self, function: Callable[..., Any], specs: Sequence[Any]) -> Callable[..., Any]:
        return one_replica.trace(self._strategy, function, specs)

    # Traced code.

    def _contribute_next(self, iterator: Any) -> list[tf.Tensor]:
        found, secs = step_times.timed_read(iterator.get_next)
        element, *mark = found if self._marks_end else (found,)
        return [*self._contribute(element), *mark, secs]

    def _contribute_batch(self, *flat: tf.Tensor) -> list[tf.Tensor]:
        return self._contribute(tf.nest.pack_sequence_as(self._spec, flat, expand_composites=True))

    def _contribute(self, element: Any) -> list[tf.Tensor]:
        batch, total = element if self._has_totals else (element, None)
        with tf.device(self._strategy.extended.worker_devices[0]):
            computed = self._step.unless_empty(self._strategy, self._computed, self._packed, batch, total)
        return self._to_servers(*computed) if self._bundles.are_small else computed

    def _packed(self, contribution: ReplicaContribution) -> list[tf.Tensor]:
        return self._bundles.pack(tf.nest.flatten(contribution, expand_composites=True))

    def _computed(self, batch: Any, batch_rows: tf.Tensor | None) -> ReplicaContribution:
        worker = self._strategy.extended.worker_devices[0]
        with (
            self._as_replica(worker),
            self._transfer.reading(self.model, worker),
            coordinated_variable.watched(self._step.written_past_keras),
        ):
            contribution = self._step.contribute(batch, batch_rows)
        self._transfer.place()
        if self._is_unscaled:
            with self._as_replica(worker):
                gradients = encoding.unscaled(contribution.gradients, self._step.targets())
            contribution = contribution._replace(gradients=gradients)
        self._rows = RowPieces(contribution.gradients, self._step.targets())
        with self._as_replica(worker):
            contribution = contribution._replace(gradients=self._rows.split(contribution.gradients))
        self._place(contribution)
        return contribution

    def _place(self, contribution: ReplicaContribution) -> None:
        """Chooses the devices of a contribution: those of the variables and shards, and the first one for the rest."""
        self._template = contribution
        self._home = (self._rows.devices or [SERVER_DEVICE])[0]
        flat = tf.nest.flatten(contribution, expand_composites=True)
        # The gradient that each tensor is of; behind them is the rest of the contribution.
        owners = [
            i for i, each in enumerate(contribution.gradients) for _ in tf.nest.flatten(each, expand_composites=True)
        ]
        destinations = [self._rows.devices[i] for i in owners] + [self._home] * (len(flat) - len(owners))
        if self._encoding is None:
            self._bundles = self._transfer.bundles(flat, destinations, replicas.homes_of(self._strategy, flat))
            return
        groups = self._encoding.groups(contribution.gradients, self._rows.targets, self._rows.devices, owners)
        self._bundles = encoding.EncodedBundles(self._encoding, groups, flat, destinations, self._transfer.bundles)

    def _to_servers(self, *bundles: tf.Tensor) -> list[tf.Tensor]:
        return self._bundles.send(bundles)

    def _update(self, *flat: tf.Tensor) -> list[tf.Tensor]:
        size = len(self._specs)
        count = (len(flat) - self._is_weighted) // size
        contributions = [self._pack(flat[start : start + size]) for start in range(0, count * size, size)]
        weights, staleness = [1.0] * count, [0] * count
        if self._is_weighted:
            weights, staleness = tf.unstack(flat[-1][0], count), tf.unstack(flat[-1][1], count)
        if self._transforms.has(ARRIVAL):
            facts = zip(contributions, weights, staleness, strict=True)
            contributions = [self._arrived(*each, count) for each in facts]
        if self._is_weighted:
            contributions = [weigh(*each, self._rows.devices) for each in zip(contributions, weights, strict=True)]
        with self._as_replica(self._home):
            total = add_up(contributions, self._rows.devices)
            gradients = total.gradients
            if self._is_unscaled:
                gradients = encoding.scaled(gradients, self._rows.targets, self._rows.devices)
            total = total._replace(gradients=self._rows.joined(gradients))
            found = optimizers.optimizers_of(self.model)
            # The stock way of loss scaling can't be around gradient accumulation's conditional.
            with optimizers.patched_attributes([change for each in found for change in optimizers.scaling_alone(each)]):
                self._step.update(total, lambda variable: tf.device(variable.value.device))
            for variable, count in zip(self._step.counters, self._step.counts(total), strict=True):
                variable.value.assign_add(tf.cast(count, variable.dtype))
            return self._packing.pack(self._step.logs(total))

    def _arrived(
        self, contribution: ReplicaContribution, weight: Any, staleness: Any, count: int
    ) -> ReplicaContribution:
        with self._as_replica(self._home):
            joined = contribution._replace(gradients=self._rows.joined(contribution.gradients))
            found = self._step.arrived(joined, weight, staleness, count, is_scaled=not self._is_unscaled)
            return contribution._replace(gradients=self._rows.split(found))

    def _as_replica(self, device: str) -> Any:
        return one_replica.replica_on(self._strategy, device)

    def _pack(self, flat: Sequence[tf.Tensor]) -> ReplicaContribution:
        return tf.nest.pack_sequence_as(self._template, self._bundles.unpack(flat), expand_composites=True)


def _push_encoded(counted: encoding.Encoding, push: Callable[..., Any], *contribution: tf.Tensor) -> list[tf.Tensor]:
    *pushed, sent = push(*contribution)
    counted.count(coordinator.this_worker(), int(sent.numpy()))
    return pushed


def parts_of_batch(batch: Sequence[tf.Tensor], iterator: WorkerIterator, num_parts: int) -> list[list[tf.Tensor]]:
    """Returns the parts of a flat batch that the chief has read, flat, as the workers' iterators would give them."""
    whole = tf.nest.pack_sequence_as(iterator.dataset.element_spec, batch, expand_composites=True)
    totals = [splitting.rows(whole)] if iterator.dataset.kind.form.has_totals else []
    parts = [splitting.cut(whole, part, num_parts) for part in range(num_parts)]
    return [[*splitting.flat(part), *totals] for part in parts]


def _is_first_step(model: Any) -> bool:
    """Returns True before the first step of an epoch: the metrics have counted nothing since `fit` reset them.

    Call it outside of a graph. It reads variables, so call it only if the result matters.
    """
    return not any(
        keras.ops.convert_to_numpy(variable).any() for variable in model.metrics_variables if "count" in variable.path
    )
