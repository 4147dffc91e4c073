# SPDX-License-Identifier: Apache-2.0
"""`ParameterServerStrategy`: asynchronous training of one model by many workers, under unmodified `model.fit`.

Every task runs the same script. The chief's constructor returns, and its `fit` drives the workers; in a `worker` or
`ps` task the constructor serves until the chief is done and then ends the process. Without TF_CONFIG it starts a
cluster of local processes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import serving
from tfdist.cluster import Cluster
from tfdist.compat import (
    array_data,
    autograph_rules,
    creation_lines,
    late_builds,
    plain_loops,
    symbolic_build,
    trainers,
)
from tfdist.engines import (
    fitting,
    function_keys,
    in_scope,
    joining,
    keras_steps,
    overlap,
    python_operation,
    rehearsal,
    rendezvous,
    sharing,
    watch,
    worker_batch,
)
from tfdist.engines.accumulating import Accumulation
from tfdist.engines.aggregated import AggregatedEngine
from tfdist.engines.aggregated_step import AggregatedStep
from tfdist.engines.asynchronous import AsynchronousEngine
from tfdist.engines.coordinated import CoordinatedEngine
from tfdist.engines.coordinated_variable import coordinate
from tfdist.engines.partitioned_variable import PartitionedVariable, partition
from tfdist.engines.program import Program
from tfdist.engines.worker_batch import Batch, WorkerBatch, find_iterator
from tfdist.engines.worker_data import WorkerIterator
from tfdist.engines.worker_dataset import WorkerDataset, WorkerDatasetFromFunction
from tfdist.policies import composition
from tfdist.policies.base import Aggregation
from tfdist.strategies import _common, order, saving
from tfdist.telemetry.report import Recorder, Report

_SHARDINGS = ("shard", "replicate", "dynamic")


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """`tf.distribute.ParameterServerStrategy` for Keras 3: `fit`, `evaluate`, `predict`, and counts that are right.

    Each step of Keras' loop is one update, made by whichever worker is free, from its next batch and the newest
    values of the variables. The chief keeps a bounded number of steps in flight and does not wait for each. What it
    reads or writes (a metric, a checkpoint, the learning rate) comes after all steps before it.

    Args:
      cluster_resolver: As for the stock strategy. Without one the cluster is taken from TF_CONFIG; without that
        either, `num_workers` worker and `num_ps` ps processes are started on this machine, and end with this program.
      variable_partitioner: As for the stock strategy: how to split variables over the parameter servers.
      policies: Which contributions count and when. Empty: asynchronous.
      data_sharding: Each worker's share of the data that `fit` trains on. `"shard"`: worker i of n takes the batches
        i, i + n, ...; `"replicate"`: all of it; `"dynamic"`: whichever batch is next when it asks, through tf.data
        service.
      num_workers: Workers to start where there is no cluster.
      num_ps: Parameter servers to start where there is no cluster.
      start_timeout_secs: How long to wait for the other tasks to come up.
      stall_timeout_secs: How long to wait for lost tasks without which training can't go on.

    Raises:
      ValueError: An argument is out of range.
      ClusterError: TF_CONFIG is not a parameter-server cluster.
      TimeoutError: A task did not come up in time; the message names it.
      RuntimeError: This program has built a ParameterServerStrategy before.
      SystemExit: In a `worker` or `ps` task, once the chief is done.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        variable_partitioner: Callable[..., Any] | None = None,
        *,
        policies: Sequence[Any] = (),
        data_sharding: str = "shard",
        num_workers: int = 2,
        num_ps: int = 1,
        start_timeout_secs: float = 300.0,
        stall_timeout_secs: float = 600.0,
    ):
        composition.check(policies, "ParameterServerStrategy")
        _check_arguments(policies, data_sharding, start_timeout_secs, stall_timeout_secs)
        cluster = _find_cluster(cluster_resolver)
        if cluster is not None and cluster.task.type in ("worker", "ps"):
            sys.exit(serving.serve(cluster, start_timeout_secs))
        if cluster is None:
            serving.check_sizes(num_workers, num_ps)
        composed = composition.compose(policies, "ParameterServerStrategy", _num_workers(cluster, num_workers))
        creation_lines.remember()
        order.join_cluster()
        self._data_sharding = data_sharding
        self._serving = serving.attach(cluster, num_workers, num_ps, start_timeout_secs, data_sharding == "dynamic")
        with rendezvous.naming_port(cluster):
            super().__init__(self._serving.resolver(), variable_partitioner)
        # `run` and `reduce` of this class decide themselves what belongs on a worker; the stock check would only warn
        # about it.
        self.extended._allow_run_without_coordinator = True
        self.extended.colocate_vars_with = in_scope.colocating(self, self._scope)
        keras_steps.check_colocation(self.extended)
        plain_loops.allow(self)
        late_builds.allow(self, in_scope.redirected)
        autograph_rules.leave_library()
        self._engine = CoordinatedEngine(
            self,
            self._serving.num_workers,
            self._serving.data_service_address,
            stall_timeout_secs=stall_timeout_secs,
            on_update=lambda update: self._recorder.record(update),
        )
        self._programs: dict[Any, Any] = {}
        self._functions = function_keys.Traced()
        self._recorder = Recorder([f"worker:{index}" for index in range(self._serving.num_workers)])
        self._aggregated: AggregatedEngine | None = None
        self._num_parts = 1
        self._aggregate(composed, stall_timeout_secs)
        self._policies_to_save = saving.PoliciesToSave(policies)
        watch.InterruptEscape(self._engine.waited_for).install()
        order.joined_cluster()

    def _aggregate(self, composed: composition.Composition, stall_timeout_secs: float) -> None:
        """Has policies decide what updates are made of, if there are any."""
        aggregation = composed.aggregation
        if aggregation is None:
            return
        engine = AggregatedEngine if aggregation.is_synchronous else AsynchronousEngine
        self._aggregated = engine(
            self, self._engine, aggregation, self._recorder.record, stall_timeout_secs, composed.warmup
        )
        # A batch is cut into what an update is made of.
        if not aggregation.is_synchronous:
            self._num_parts = aggregation.replicas_to_aggregate
        elif self._data_sharding == "shard":
            self._num_parts = self._engine.num_workers

    def _connect_to_cluster(self, coordinator_name: str) -> None:
        del coordinator_name
        cluster_spec = self._serving.renamed_resolver(joining.CHIEF_JOB).cluster_spec()
        self._num_workers, self._num_ps = cluster_spec.num_tasks("worker"), cluster_spec.num_tasks("ps")
        joining.join(cluster_spec)

    @contextlib.contextmanager
    def _scope(self) -> Any:
        with super().scope(), tf.variable_creator_scope(self._create_coordinated):
            yield self

    def scope(self) -> contextlib.AbstractContextManager:
        """See the stock `scope`. Variables made in it live on the parameter servers and count exactly."""
        frame = sys._getframe(1)
        if fitting.is_build(frame):
            self._begin_call()
            rehearsal.before_keras(self, frame.f_locals["self"], fitting.step_to_build(frame))
        return self._scope()

    def _begin_call(self) -> None:
        # What workers have given for a pass, or read of it, is dropped when another one begins.
        overlap.begin(self, is_exclusive=True, nests=not isinstance(self._aggregated, AsynchronousEngine))

    def _create_coordinated(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if isinstance(kwargs.get("colocate_with"), PartitionedVariable):
            # An optimizer's slot: its shape is that of the variable, so it falls into the same shards.
            del kwargs["colocate_with"]
        variable = next_creator(**kwargs)
        return partition(coordinate(variable, self._barrier), self._barrier)

    def _barrier(self, writes: bool) -> None:
        self._engine.barrier(writes)

    # Data.

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any = None) -> Any:
        """Leaves the batches of `dataset` to the workers, each its share; the chief does not read them."""
        self._begin_call()
        if isinstance(dataset, WorkerDataset):
            return dataset
        if not tf.executing_eagerly():
            return super().experimental_distribute_dataset(dataset, options)
        # The stock coordinator leaves it set when a function that it is given fails to trace.
        self.extended._being_scheduled = False
        caller = sys._getframe(1).f_locals.get("self")
        dataset = array_data.untuned(array_data.sized(dataset, caller), caller)
        if self._data_sharding == "shard":
            dataset = sharing.reorder_batches(dataset, seed=0)
        if self._num_parts > 1:
            sharing.check_batched(dataset.element_spec, self._num_parts)
        if isinstance(self._aggregated, AsynchronousEngine):
            described = WorkerDataset(self._engine, dataset, self._data_sharding, self._num_parts)
        else:
            is_dealt = self._aggregated is not None and self._data_sharding == "shard"
            described = WorkerDataset(self._engine, dataset, "deal" if is_dealt else self._data_sharding)
        if fitting.fit_frame() is not None:
            described.check_first_batch()
        return described

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset], options: Any = None
    ) -> Any:
        """Leaves to each worker the batches of the data set that `dataset_fn`, called here, makes for it."""
        if not tf.executing_eagerly():
            return super().distribute_datasets_from_function(dataset_fn, options)
        count = self._engine.num_workers
        contexts = [tf.distribute.InputContext(count, worker, self.num_replicas_in_sync) for worker in range(count)]
        num_parts = self._num_parts if isinstance(self._aggregated, AsynchronousEngine) else 1
        return WorkerDatasetFromFunction(self._engine, [dataset_fn(context) for context in contexts], num_parts)

    # Steps.

    def run(
        self, fn: Callable[..., Any], args: tuple = (), kwargs: dict[str, Any] | None = None, options: Any = None
    ) -> Any:
        """Runs `fn` on a worker.

        In Keras' loop the steps overlap, and the logs returned are those of the newest finished one. Any other
        function is waited for, and its own result returned. In a function given to `ClusterCoordinator.schedule` it
        means what it means in the stock strategy.
        """
        if tf.distribute.in_cross_replica_context() and self._on_worker():
            return super().run(fn, args, kwargs, options)
        given = tf.nest.map_structure(
            lambda x: tf.convert_to_tensor(x) if isinstance(x, np.ndarray) else x, (args, kwargs or {})
        )
        kind = keras_steps.classify(fn)
        keras_steps.check_scope(fn)
        with tf.init_scope(), self.scope():  # `fit`, where optimizers are built, may be called outside of it.
            keras_steps.check(fn, asynchronous=self._aggregated is None)
        return (self._run_eagerly if tf.executing_eagerly() else self._run_in_graph)(kind, fn, *given)

    def _on_worker(self) -> bool:
        return self.extended._being_scheduled

    def _run_eagerly(self, kind: str, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        tickets = worker_batch.tickets_in((args, kwargs))
        handles = [int(ticket.handle) for ticket in tickets]
        if self._is_aggregated(kind, tickets):
            step = self._aggregated_step(fn, tickets[0])
            return step.rebuild(self._aggregated.step(step, find_iterator(handles[0])))
        batch = worker_batch.unused(handles)
        iterator, in_parts = batch and batch.iterator, batch is None and bool(tickets)
        program = self._program(kind, fn, args, kwargs, iterator, in_parts)
        parts = worker_batch.parts_on_chief(handles, tickets) if in_parts else []
        return program.rebuild(self._dispatch(kind, program, parts + program.flatten_arguments(args, kwargs), batch))

    def _program(
        self,
        kind: str,
        fn: Any,
        args: tuple,
        kwargs: dict[str, Any],
        iterator: WorkerIterator | None,
        in_parts: bool,
    ) -> Program:
        worker_fed = iterator is not None and _takes_batches_itself(kind, iterator)
        specs = tf.nest.map_structure(_spec, (args, kwargs))
        programs, key = self._traced_with(fn), (function_keys.key_of(fn), worker_fed, in_parts, repr(specs))
        if key not in programs:
            rehearsal.before_workers(self, fn, args, kwargs)
            programs[key] = self._traced(fn, args, kwargs, worker_fed, in_parts)
            self._functions.note(fn, programs, key)
        return programs[key]

    def _traced(self, fn: Any, args: tuple, kwargs: dict[str, Any], worker_fed: bool, in_parts: bool) -> Program:
        optimizer, accumulation = keras_steps.accumulates(fn), None
        if optimizer is not None and self._aggregated is None:
            kept, key = self._traced_with(fn), ("accumulation", optimizer)
            accumulation = kept.get(key) or kept.setdefault(key, Accumulation(self._engine.coordinator, optimizer))
        return Program(self, fn, args, kwargs, worker_fed, in_parts, accumulation)

    def _run_in_graph(self, kind: str, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Leaves an operation in the caller's graph that queues the step each time it runs."""
        tickets = worker_batch.tickets_in((args, kwargs))
        if self._is_aggregated(kind, tickets):
            return self._aggregate_in_graph(fn, tickets[0])
        rehearsal.before_workers(self, fn, args, kwargs)
        by_feed: dict[tuple[bool, bool], Program] = {}

        def program_for(worker_fed: bool, in_parts: bool) -> Program:
            if (worker_fed, in_parts) not in by_feed:
                by_feed[worker_fed, in_parts] = self._traced(fn, args, kwargs, worker_fed, in_parts)
            return by_feed[worker_fed, in_parts]

        program = program_for(bool(tickets) and kind not in ("test", "predict"), False)

        def queue(*inputs: tf.Tensor) -> list[np.ndarray]:
            handles, tensors = [int(handle) for handle in inputs[: len(tickets)]], list(inputs[len(tickets) :])
            batch = worker_batch.unused(handles)
            if batch is None and tickets:
                parts = worker_batch.parts_on_chief(handles, tickets)
                return self._dispatch(kind, program_for(False, True), parts + tensors, None)
            worker_fed = batch is not None and _takes_batches_itself(kind, batch.iterator)
            return self._dispatch(kind, program_for(worker_fed, False), tensors, batch)

        inputs = [ticket.handle for ticket in tickets] + program.flatten_arguments(args, kwargs)
        return program.rebuild(python_operation.call(queue, inputs, program.dtypes))

    def _is_aggregated(self, kind: str, tickets: Sequence[WorkerBatch]) -> bool:
        """Whether workers contribute to this step; a batch that the chief hands in whole is one worker's matter."""
        return kind == "train" and len(tickets) == 1 and self._aggregated is not None

    def _aggregated_step(self, fn: Callable[..., Any], ticket: WorkerBatch) -> AggregatedStep:
        steps, key = self._traced_with(fn), (fn, "step", ticket.structure)
        if key not in steps:
            rehearsal.before_workers(self, fn, (ticket,), {})
            spec, count = ticket.element_spec, self._num_parts
            steps[key] = self._aggregated.prepare(fn, sharing.part_spec(spec, count) if count > 1 else spec)
        return steps[key]

    def _traced_with(self, fn: Callable[..., Any]) -> dict[Any, Any]:
        kept = keras_steps.traced_with(fn)
        return self._programs if kept is None else kept

    def _aggregate_in_graph(self, fn: Callable[..., Any], ticket: WorkerBatch) -> Any:
        """Leaves an operation in the caller's graph that makes an update each time it runs."""
        step = self._aggregated_step(fn, ticket)

        def update(handle: tf.Tensor) -> list[np.ndarray]:
            return self._aggregated.step(step, find_iterator(int(handle)))

        return step.rebuild(python_operation.call(update, [ticket.handle], step.dtypes))

    @property
    def replicas_to_aggregate(self) -> int:
        """How many gradients an update is made of, as things are: 1 without a policy."""
        return self._aggregated.replicas_to_aggregate if self._aggregated else 1

    def report(self) -> Report:
        """What was counted since the strategy was built."""
        return self._recorder.report()

    def _dispatch(self, kind: str, program: Program, tensors: list[tf.Tensor], batch: Batch | None) -> list[np.ndarray]:
        if batch is None:
            return self._engine.call(program, tensors, None)
        iterator = batch.iterator
        if kind == "predict":
            return self._predict(program, iterator)
        if iterator.feed(False) == "chief":
            batch.on_chief = iterator.next_local_batch()
            tensors = batch.on_chief + tensors
            iterator.redeem()
        if kind in ("train", "test") or not program.dtypes:
            is_last, is_update = iterator.is_last, kind == "train"
            return self._engine.step(program, tensors, iterator, last=is_last, is_update=is_update, batch=batch)
        return self._engine.call(program, tensors, iterator, batch)

    def _predict(self, program: Program, iterator: WorkerIterator) -> list[np.ndarray]:
        """Returns the predictions for the next batch; those for the ones after it are under way meanwhile."""
        ahead = iterator.started
        with contextlib.suppress(tf.errors.OutOfRangeError):
            while len(ahead) < self._engine.window:
                ahead.append(self._engine.start(program, iterator.next_local_batch(), iterator))
        if not ahead:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        iterator.redeem()
        return self._engine.wait_for(ahead.popleft())

    # Results. A step is made by one replica, so there is nothing to be combined.

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """Reduces over `axis`; there is nothing to reduce over replicas, because one of them makes each step."""
        caller = sys._getframe(1).f_locals.get("self")
        if isinstance(value, WorkerBatch) and trainers.is_trainer(caller):
            batch = find_iterator(int(value.handle)).placeholder()
            with self.scope():
                symbolic_build.build(caller, batch)
            return batch
        if self._on_worker():
            return super().reduce(reduce_op, value, axis)
        value = worker_batch.looked_at(value)
        if axis is None:
            return value
        total = tf.reduce_sum if str(getattr(reduce_op, "name", reduce_op)).upper() == "SUM" else tf.reduce_mean
        return tf.nest.map_structure(lambda leaf: total(leaf, axis=axis), value)

    def gather(self, value: Any, axis: int) -> Any:
        """Returns `value`: a step is made by one replica."""
        del axis
        return worker_batch.looked_at(value)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns `value` alone: a step is made by one replica."""
        return (worker_batch.looked_at(value),)

    def experimental_distribute_values_from_function(self, value_fn: Callable[..., Any]) -> Any:
        """Returns what `value_fn` gives for the one replica that makes a step."""
        return value_fn(tf.distribute.experimental.ValueContext(0, 1))


def _spec(leaf: Any) -> Any:
    """What a step is traced for: of a batch its structure, and not which batch it is."""
    if isinstance(leaf, WorkerBatch):
        return leaf.structure
    return tf.type_spec_from_value(leaf) if tf.is_tensor(leaf) else leaf


def _takes_batches_itself(kind: str, iterator: WorkerIterator) -> bool:
    """Whether the traced step reads its batch from an iterator on the worker; else it is handed the batch.

    Where a policy has the workers read parts of batches, all other steps are handed whole ones by the chief.
    """
    return iterator.feed(by_chief=kind in ("test", "predict") or iterator.is_cut) == "worker" and iterator.shares_known


def _find_cluster(resolver: tf.distribute.cluster_resolver.ClusterResolver | None) -> Cluster | None:
    cluster = Cluster.from_environment() if resolver is None else serving.cluster_of(resolver)
    if cluster is not None:
        cluster.check_parameter_server()
    return cluster


def _num_workers(cluster: Cluster | None, num_workers: int) -> int:
    return num_workers if cluster is None else len(cluster.jobs["worker"])


def _check_arguments(
    policies: Sequence[Any], data_sharding: str, start_timeout_secs: float, stall_timeout_secs: float
) -> None:
    if data_sharding not in _SHARDINGS:
        raise ValueError(
            f"data_sharding must be one of {', '.join(map(repr, _SHARDINGS))}. "
            f"Received: data_sharding={data_sharding!r}"
        )
    in_step = [policy for policy in policies if isinstance(policy, Aggregation)]
    if in_step and data_sharding == "dynamic":
        raise ValueError(
            'data_sharding="dynamic" gives whole batches to whoever asks first, and under '
            f'{in_step[0]!r} a batch is shared by all workers; use "shard". Received: data_sharding="dynamic", '
            f"policies={policies!r}"
        )
    _common.check_timeouts(start_timeout_secs=start_timeout_secs, stall_timeout_secs=stall_timeout_secs)
