# SPDX-License-Identifier: Apache-2.0
"""`ParameterServerStrategy`: asynchronous training of one model by many workers, under unmodified `model.fit`.

Every task runs the same script. The chief's constructor returns, and its `fit` drives the workers; in a `worker` or
`ps` task the constructor serves until the chief is done and then ends the process. Without TF_CONFIG it starts a
cluster of local processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import (
    array_data,
    autograph_rules,
    cluster_joining,
    colocation,
    creation_lines,
    late_builds,
    overlapping_loops,
    plain_loops,
    python_operation,
    running_loop,
    scheduled_functions,
    strategy_order,
    symbolic_build,
    trainers,
)
from tfdist.data import splitting
from tfdist.engines.parameter_server import batch_arguments, scope_checks, step_dispatch, worker_batch
from tfdist.engines.parameter_server.accumulation import Accumulation
from tfdist.engines.parameter_server.aggregated import AggregatedEngine
from tfdist.engines.parameter_server.aggregated_step import AggregatedStep
from tfdist.engines.parameter_server.asynchronous import AsynchronousEngine
from tfdist.engines.parameter_server.coordinated_variable import coordinate
from tfdist.engines.parameter_server.engine import CoordinatedEngine
from tfdist.engines.parameter_server.partitioned_variable import PartitionedVariable, partition
from tfdist.engines.parameter_server.program import Program
from tfdist.engines.parameter_server.transfer import plan as transfer_plan
from tfdist.engines.parameter_server.worker_batch import WorkerBatch
from tfdist.engines.parameter_server.worker_data import WorkerIterator, find_iterator
from tfdist.engines.parameter_server.worker_dataset import WorkerDataset, WorkerDatasetFromFunction
from tfdist.policies import composition
from tfdist.policies.saved_state import SavedState
from tfdist.runtime import rendezvous, stalls
from tfdist.serving import embedded
from tfdist.step import function_keys, in_scope, keras_steps, one_replica, rehearsal
from tfdist.strategies import _parameter_server_arguments
from tfdist.strategies.distribution import Distribution
from tfdist.telemetry.report import Recorder, Report


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """`tf.distribute.ParameterServerStrategy` for Keras 3: `fit`, `evaluate`, `predict`, and counts that are right.

    Each step of Keras' loop is one update, made by whichever worker is free, from its next batch and the newest
    values of the variables. The chief keeps a bounded number of steps in flight and does not wait for each. What it
    reads or writes (a metric, a checkpoint, the learning rate) comes after all steps before it.

    Args:
      cluster_resolver: As for the stock strategy. Without one the cluster is taken from TF_CONFIG; without that
        either, `num_workers` worker and `num_ps` ps processes are started on this machine, and end with this program.
      variable_partitioner: As for the stock strategy: how to split variables over the parameter servers.
      policies: Policies that decide which gradients count. Empty: asynchronous training.
      data_sharding: Each worker's share of the data that `fit` trains on. `"shard"`: worker i of n takes the batches
        i, i + n, ...; `"replicate"`: all of it; `"dynamic"`: whichever batch is next when it asks, through tf.data
        service.
      num_workers: Workers to start where there is no cluster.
      num_ps: Parameter servers to start where there is no cluster.
      start_timeout_secs: Longest wait for the start of the other tasks.
      stall_timeout_secs: Longest wait for lost tasks without which training can't continue.
      transfer: How variables and gradients cross the network. `"auto"`: small ones together, and products with large
        kernels on the parameter servers where a short measurement says that this is faster; `"plain"`: as stock
        TensorFlow sends them.

    Raises:
      ValueError: An argument is out of range.
      ClusterError: TF_CONFIG is not a parameter-server cluster.
      TimeoutError: A task did not start in time; the message names it.
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
        transfer: str = "auto",
    ):
        composition.check(policies, "ParameterServerStrategy")
        _parameter_server_arguments.check(policies, data_sharding, start_timeout_secs, stall_timeout_secs)
        transfer_plan.check_mode(transfer)
        cluster = _parameter_server_arguments.find_cluster(cluster_resolver)
        if cluster is not None and cluster.task.type in ("worker", "ps"):
            sys.exit(embedded.serve(cluster, start_timeout_secs))
        if cluster is None:
            embedded.check_sizes(num_workers, num_ps)
        composed = composition.compose(
            policies, "ParameterServerStrategy", _parameter_server_arguments.num_workers_of(cluster, num_workers)
        )
        creation_lines.remember()
        strategy_order.join_cluster()
        self._data_sharding = data_sharding
        is_dynamic = data_sharding == "dynamic"
        self._serving = serving = embedded.attach(cluster, num_workers, num_ps, start_timeout_secs, is_dynamic)
        names = [f"worker:{index}" for index in range(serving.num_workers)]
        self.distribution = Distribution(Recorder(names, is_complete=True), SavedState(policies), serving=serving)
        with rendezvous.naming_port(cluster):
            super().__init__(serving.resolver(), variable_partitioner)
        # `run` and `reduce` of this class choose the worker themselves; the stock check would only warn.
        scheduled_functions.allow_without_coordinator(self)
        colocation.replace(self, lambda stock: in_scope.colocating(self, self._scope, stock))
        scope_checks.check_colocation(self)
        plain_loops.allow(self)
        late_builds.allow(self, in_scope.redirected)
        autograph_rules.leave_library()
        self._engine = CoordinatedEngine(
            self,
            serving.num_workers,
            serving.data_service_address,
            stall_timeout_secs=stall_timeout_secs,
            on_update=lambda update: self.distribution.recorder.record(update),
        )
        has_gpu = "GPU" in self.extended.worker_devices[0].upper()
        self._transfer = transfer_plan.of(transfer, self._num_workers, self._num_ps, has_gpu)
        self._programs: dict[Any, Any] = {}
        self._functions = function_keys.Traced()
        self._aggregated: AggregatedEngine | None = None
        self._num_parts = 1
        self._aggregate(composed, stall_timeout_secs)
        self.distribution.coordinator = self._engine.coordinator
        stalls.InterruptEscape(self._engine.waited_for).install()
        strategy_order.joined_cluster()

    def _aggregate(self, composed: composition.Composition, stall_timeout_secs: float) -> None:
        """Builds the engine of the policies, if there are any."""
        aggregation = composed.aggregation
        if aggregation is None:
            return
        engine = AggregatedEngine if aggregation.is_synchronous else AsynchronousEngine
        record = self.distribution.recorder.record
        self._aggregated = engine(
            self, self._engine, aggregation, self._transfer, record, stall_timeout_secs, composed.warmup
        )
        # A batch is cut into the parts of an update.
        if not aggregation.is_synchronous:
            self._num_parts = aggregation.replicas_to_aggregate
        elif self._data_sharding == "shard":
            self._num_parts = self._engine.num_workers

    def _connect_to_cluster(self, coordinator_name: str) -> None:
        del coordinator_name
        cluster_spec = self._serving.renamed_resolver(cluster_joining.CHIEF_JOB).cluster_spec()
        self._num_workers, self._num_ps = cluster_spec.num_tasks("worker"), cluster_spec.num_tasks("ps")
        cluster_joining.join(cluster_spec)

    @contextlib.contextmanager
    def _scope(self) -> Any:
        with super().scope(), tf.variable_creator_scope(self._create_coordinated):
            yield self

    def scope(self) -> contextlib.AbstractContextManager:
        """See the stock `scope`. Variables made in it live on the parameter servers and count exactly."""
        build = running_loop.build_in_caller()
        if build is not None:
            self._begin_call()
            rehearsal.before_keras(self, build.model, build.step)
        return self._scope()

    def _begin_call(self) -> None:
        # Contributions to a pass, and batches read ahead, are dropped when another pass begins.
        overlapping_loops.begin(self, is_exclusive=True, nests=not isinstance(self._aggregated, AsynchronousEngine))

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
        scheduled_functions.reset(self)
        caller = running_loop.calling_object()
        dataset = array_data.untuned(array_data.sized(dataset, caller), caller)
        if self._data_sharding == "shard":
            dataset = splitting.reorder_batches(dataset, seed=0)
        if self._num_parts > 1:
            splitting.check_batched(dataset.element_spec, self._num_parts)
        if isinstance(self._aggregated, AsynchronousEngine):
            described = WorkerDataset(self._engine, dataset, self._data_sharding, self._num_parts)
        else:
            is_dealt = self._aggregated is not None and self._data_sharding == "shard"
            described = WorkerDataset(self._engine, dataset, "deal" if is_dealt else self._data_sharding)
        if running_loop.iterating_fit() is not None:
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
        is the stock method.
        """
        if tf.distribute.in_cross_replica_context() and self._on_worker():
            return super().run(fn, args, kwargs, options)
        given = tf.nest.map_structure(
            lambda x: tf.convert_to_tensor(x) if isinstance(x, np.ndarray) else x, (args, kwargs or {})
        )
        kind = keras_steps.classify(fn)
        scope_checks.check_scope(fn)
        with tf.init_scope(), self.scope():  # `fit`, where optimizers are built, may be called outside of it.
            keras_steps.check(fn, asynchronous=self._aggregated is None)
        return (self._run_eagerly if tf.executing_eagerly() else self._run_in_graph)(kind, fn, *given)

    def _on_worker(self) -> bool:
        return scheduled_functions.is_traced(self)

    def _run_eagerly(self, kind: str, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        model = keras_steps.model_of(fn)
        if model is not None and model.run_eagerly:
            return self._run_on_chief(fn, args, kwargs)
        handles = worker_batch.handles_in((args, kwargs))
        numbers = [int(handle.handle) for handle in handles]
        if self._is_aggregated(kind, handles):
            step = self._aggregated_step(fn, handles[0])
            return step.rebuild(self._aggregated.step(step, find_iterator(numbers[0])))
        batch = batch_arguments.unused(numbers)
        iterator, in_parts = batch and batch.iterator, batch is None and bool(handles)
        program = self._program(kind, fn, args, kwargs, iterator, in_parts)
        parts = batch_arguments.parts_on_chief(numbers, handles) if in_parts else []
        return program.rebuild(
            step_dispatch.dispatch(self._engine, kind, program, parts + program.flatten_arguments(args, kwargs), batch)
        )

    def _run_on_chief(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs a step untraced, with a batch brought to the chief: prints and breakpoints in it see values."""
        self._engine.barrier(writes=True)
        args, kwargs = worker_batch.as_values(args, kwargs)
        with self.scope(), one_replica.replica_on(self, cluster_joining.CHIEF_DEVICE):
            return fn(*args, **kwargs)

    def _program(
        self,
        kind: str,
        fn: Any,
        args: tuple,
        kwargs: dict[str, Any],
        iterator: WorkerIterator | None,
        in_parts: bool,
    ) -> Program:
        worker_fed = iterator is not None and batch_arguments.takes_batches_itself(kind, iterator)
        specs = tf.nest.map_structure(batch_arguments.spec_of, (args, kwargs))
        programs, key = self._traced_with(fn), (function_keys.key_of(fn), worker_fed, in_parts, repr(specs))
        if key not in programs:
            rehearsal.before(self, fn, *worker_batch.as_specs(list(args), kwargs))
            programs[key] = self._traced(fn, args, kwargs, worker_fed, in_parts)
            self._functions.note(fn, programs, key)
        return programs[key]

    def _traced(self, fn: Any, args: tuple, kwargs: dict[str, Any], worker_fed: bool, in_parts: bool) -> Program:
        optimizer, accumulation = keras_steps.accumulates(fn), None
        if optimizer is not None and self._aggregated is None:
            kept, key = self._traced_with(fn), ("accumulation", optimizer)
            accumulation = kept.get(key) or kept.setdefault(key, Accumulation(self._engine.coordinator, optimizer))
        return Program(self, fn, args, kwargs, worker_fed, in_parts, accumulation, self._transfer)

    def _run_in_graph(self, kind: str, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Leaves an operation in the caller's graph that queues the step each time it runs."""
        handles = worker_batch.handles_in((args, kwargs))
        if self._is_aggregated(kind, handles):
            return self._aggregate_in_graph(fn, handles[0])
        rehearsal.before(self, fn, *worker_batch.as_specs(list(args), kwargs))
        by_feed: dict[tuple[bool, bool], Program] = {}

        def program_for(worker_fed: bool, in_parts: bool) -> Program:
            if (worker_fed, in_parts) not in by_feed:
                by_feed[worker_fed, in_parts] = self._traced(fn, args, kwargs, worker_fed, in_parts)
            return by_feed[worker_fed, in_parts]

        program = program_for(bool(handles) and kind not in ("test", "predict"), False)

        def queue(*inputs: tf.Tensor) -> list[np.ndarray]:
            numbers, tensors = [int(number) for number in inputs[: len(handles)]], list(inputs[len(handles) :])
            batch = batch_arguments.unused(numbers)
            if batch is None and handles:
                parts = batch_arguments.parts_on_chief(numbers, handles)
                return step_dispatch.dispatch(self._engine, kind, program_for(False, True), parts + tensors, None)
            worker_fed = batch is not None and batch_arguments.takes_batches_itself(kind, batch.iterator)
            return step_dispatch.dispatch(self._engine, kind, program_for(worker_fed, False), tensors, batch)

        inputs = [handle.handle for handle in handles] + program.flatten_arguments(args, kwargs)
        return program.rebuild(python_operation.call(queue, inputs, program.dtypes))

    def _is_aggregated(self, kind: str, handles: Sequence[WorkerBatch]) -> bool:
        """True if workers contribute to this step; a batch that the chief hands in whole is one worker's matter."""
        return kind == "train" and len(handles) == 1 and self._aggregated is not None

    def _aggregated_step(self, fn: Callable[..., Any], handle: WorkerBatch) -> AggregatedStep:
        steps, key = self._traced_with(fn), (fn, "step", handle.structure)
        if key not in steps:
            rehearsal.before(self, fn, *worker_batch.as_specs([handle], {}))
            spec, count = handle.element_spec, self._num_parts
            steps[key] = self._aggregated.prepare(fn, splitting.part_spec(spec, count) if count > 1 else spec)
        return steps[key]

    def _traced_with(self, fn: Callable[..., Any]) -> dict[Any, Any]:
        kept = keras_steps.traced_with(fn)
        return self._programs if kept is None else kept

    def _aggregate_in_graph(self, fn: Callable[..., Any], handle: WorkerBatch) -> Any:
        """Leaves an operation in the caller's graph that makes an update each time it runs."""
        step = self._aggregated_step(fn, handle)

        def update(number: tf.Tensor) -> list[np.ndarray]:
            return self._aggregated.step(step, find_iterator(int(number)))

        return step.rebuild(python_operation.call(update, [handle.handle], step.dtypes))

    @property
    def replicas_to_aggregate(self) -> int:
        """Number of gradients of an update, at present: 1 without a policy."""
        return self._aggregated.replicas_to_aggregate if self._aggregated else 1

    def report(self) -> Report:
        """Counts since the strategy was built."""
        return dataclasses.replace(self.distribution.recorder.report(), transfer=str(self._transfer))

    # Results. A step is made by one replica, so there is nothing to be combined.

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """Reduces over `axis`; there is nothing to reduce over replicas, because one of them makes each step."""
        caller = running_loop.calling_object()
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
