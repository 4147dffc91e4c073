# SPDX-License-Identifier: Apache-2.0
"""`ParameterServerStrategy`: asynchronous training of one model by many workers, under unmodified `model.fit`.

Every task runs the same script. The chief's constructor returns, and its `fit` drives the workers. In a `worker` or
`ps` task the constructor serves until the chief is done, and then ends the process. Without TF_CONFIG it starts a
cluster of local processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import cluster as clusters
from tfdist import model_parallel
from tfdist import transforms as gradient_transforms
from tfdist.cluster import Cluster, note_joined
from tfdist.compat.keras import calls, fit, models, saving, sharding
from tfdist.compat.keras.scope import allow_loops_without_run, build_in_scope, check_made_in_scope, remember_lines
from tfdist.compat.tensorflow import context, coordinator, graphs, inputs, variables
from tfdist.compat.tensorflow.coordinator import lost_workers, stop_coordinator
from tfdist.compression import on_servers
from tfdist.coordination import rendezvous, stalls
from tfdist.engines import server_calls, worker_function
from tfdist.engines.asynchronous import AsynchronousEngine
from tfdist.engines.rounds import RoundEngine
from tfdist.engines.server_calls import ServerMemory, TaskUsages
from tfdist.engines.streams import StreamEngine
from tfdist.engines.transfer import plan as transfer_plan
from tfdist.engines.transfer.encoding import Encoding
from tfdist.passes import progress, splitting, worker_batch
from tfdist.passes.handle import executions, without_optional_components
from tfdist.passes.worker_batch import WorkerBatch
from tfdist.passes.worker_dataset import WorkerDataset
from tfdist.passes.worker_pass import WorkerIterator
from tfdist.policies import composition
from tfdist.policies.base import Policy
from tfdist.policies.compression import Compression
from tfdist.serving import embedded
from tfdist.step import replicas, scope
from tfdist.step.gradients import Transforms
from tfdist.step.step import Step, check_for_workers, make_predict_function
from tfdist.strategies import _common, _devices
from tfdist.strategies.distribution import Closing, Distribution
from tfdist.tables import partitioned_variable, sharded_tables
from tfdist.tables.partitioned_variable import PartitionedVariable, coordinate
from tfdist.telemetry.recorder import Recorder
from tfdist.telemetry.report import Report


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy, Closing):
    """`tf.distribute.ParameterServerStrategy` for Keras 3: `fit`, `evaluate`, `predict`, and counts that are right.

    Each step of Keras' loop is one update, made by whichever worker is free, from its next batch and the newest
    values of the variables. The chief keeps a bounded number of steps in flight and does not wait for each. What it
    reads or writes (a metric, a checkpoint, the learning rate) comes after all steps before it.

    Args:
      cluster_resolver: As for the stock strategy. Without one the cluster is taken from TF_CONFIG. Without TF_CONFIG,
        `num_workers` worker and `num_ps` ps processes are started on this machine, and end with this program.
      variable_partitioner: As for the stock strategy: how to split variables over the parameter servers.
      policies: Policies that decide which gradients count, and how they are sent. Empty: asynchronous training.
      transforms: Functions that change gradients on their way to the update, such as
        `[tfdist.transforms.clip_by_global_norm(1.0)]`.
      data_sharding: Each worker's share of the data that `fit` trains on. `"shard"`: worker i of n takes the batches
        i, i + n, ..., and what a lost worker leaves; `"replicate"`: all of it.
      num_workers: Workers to start where there is no cluster; 2 by default.
      num_ps: Parameter servers to start where there is no cluster; 1 by default.
      start_timeout_secs: Longest wait for the start of the other tasks.
      stall_timeout_secs: Longest wait for lost tasks without which training can't continue.
      transfer: How variables and gradients are sent. `"auto"` sends small ones together, of embeddings the rows of a
        step, and gradients of large kernels as factors. `"plain"` sends them as stock TensorFlow does.
      devices_per_replica: Number of a worker's devices that compute a step together, each a part of the model's layers
        (`tfdist.placement`, `tfdist.split`). They are its first GPUs, or logical CPUs where it has none. The variables
        are on the parameter servers; each part reads its own.

    Raises:
      ValueError: An argument is out of range, or a worker does not have the devices of `devices_per_replica`.
      ClusterError: TF_CONFIG is not a parameter-server cluster.
      TimeoutError: A task did not start in time; the message names it.
      RuntimeError: This program has a ParameterServerStrategy that is not closed; or, with `Compression`, a task runs a
        server of another program.
      SystemExit: In a `worker` or `ps` task, once the chief is done.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        variable_partitioner: Callable[..., Any] | None = None,
        *,
        policies: Iterable[Policy] | None = (),
        transforms: Iterable[gradient_transforms.GradientTransform] | None = (),
        data_sharding: str = "shard",
        num_workers: int | None = None,
        num_ps: int | None = None,
        start_timeout_secs: float = 300.0,
        stall_timeout_secs: float = 600.0,
        transfer: str = "auto",
        devices_per_replica: int = 1,
    ):
        transforms = gradient_transforms.in_order(transforms)
        policies = _checked_policies(policies, transforms, data_sharding, devices_per_replica)
        _common.check_timeouts(start_timeout_secs=start_timeout_secs, stall_timeout_secs=stall_timeout_secs)
        transfer_plan.check_mode(transfer)
        partitioner = sharded_tables.fitting(variable_partitioner)
        num_cpus = _devices.served_cpus(devices_per_replica)
        cluster = Cluster.from_environment() if cluster_resolver is None else embedded.cluster_of(cluster_resolver)
        if cluster is None:
            num_workers, num_ps = 2 if num_workers is None else num_workers, 1 if num_ps is None else num_ps
            embedded.check_sizes(num_workers, num_ps)
            _devices.check_embedded(devices_per_replica, num_workers)
        else:
            cluster.check_parameter_server()
            note_joined()
            if cluster.task.type in ("worker", "ps"):
                sys.exit(embedded.serve(cluster, start_timeout_secs, num_cpus if cluster.task.type == "worker" else 1))
            warn_of_sizes(cluster, num_workers, num_ps)
            num_workers, num_ps = cluster.num_workers, cluster.num_ps
        composed = composition.compose(policies, "ParameterServerStrategy", num_workers)
        remember_lines()
        context.join_cluster()
        self._serving = embedded.attach(cluster, num_workers, num_ps, start_timeout_secs, num_cpus)
        try:
            if isinstance(variable_partitioner, sharded_tables.ShardedTables):
                variable_partitioner.begin(num_ps)
            names = [f"worker:{index}" for index in range(num_workers)]
            self.distribution = Distribution(Recorder(names, is_complete=True), serving=self._serving)
            with rendezvous.naming_port(cluster):
                super().__init__(self._serving.resolver(), partitioner)
            _devices.span_workers(self, devices_per_replica, num_workers)
            self._change_stock()
            self._take_shards(partitioner, composed.is_lazy)
            self._start_engine(data_sharding, transfer, stall_timeout_secs)
            self.distribution.transforms = Transforms(transforms, self._worker_memory(stall_timeout_secs))
            self._follow_policies(policies, composed, transfer, stall_timeout_secs)
            self._measure()
            self._become_chief()
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Ends what a constructor that raises has started."""
        engine = getattr(self, "_engine", None)
        if engine is not None:
            self.distribution.is_closed = True
            engine.close()
            stop_coordinator(engine.coordinator)
        self._serving.close()
        if self._serving.embedded is not None:
            coordinator.disconnect()

    def _change_stock(self) -> None:
        """Replaces what the stock strategy does otherwise, before the first variable is made."""
        fit.shorten_tracebacks()
        # `run` and `reduce` of this class choose the worker themselves; the stock check would only warn.
        coordinator.allow_without_coordinator(self)
        variables.replace_colocation(self, lambda stock: scope.colocating(self, self._scope, stock))
        variables.replace_colocation(self, functools.partial(_in_scope_only, self))
        allow_loops_without_run()
        build_in_scope(self, scope.redirected)
        saving.wait_for_variables()
        graphs.leave_library()
        saving.clear_tasks()
        calls.before_each(self._before_call)
        calls.ask_strategies("train", "test", "predict")

    def _start_engine(self, data_sharding: str, transfer: str, stall_timeout_secs: float) -> None:
        """Starts the engine that runs all functions on the workers."""
        self._transfer = transfer_plan.TransferPlan(transfer)
        self._engine = AsynchronousEngine(
            self,
            self._num_workers,
            stall_timeout_secs=stall_timeout_secs,
            on_update=self.distribution.recorder.record,
            transfer=self._transfer,
            data_sharding=data_sharding,
        )
        self._engine.servers = self._serving.cluster.jobs["ps"]
        coordinator.before_use(self._engine.coordinator, lambda: None)
        # Makes the train steps of Keras' loop.
        self._training: AsynchronousEngine | RoundEngine = self._engine

    def _follow_policies(
        self, policies: Sequence[Any], composed: composition.Composition, transfer: str, stall_timeout_secs: float
    ) -> None:
        """Starts the engine of the policies, if there are any."""
        self.distribution.gradients_per_batch = lambda: 1
        # How the train steps of Keras' loop send variables and gradients.
        self._sending = self._transfer
        of_workers, aggregation = {}, composed.aggregation
        if composed.compression:
            server_calls.check_codecs(self._num_workers, self._num_ps, stall_timeout_secs)
            compression = composed.compression
            memory = self._worker_memory(stall_timeout_secs, "/device:CPU:0")
            encoding = Encoding(compression.codec, memory, self._num_workers, compression.variables)
            self._sending = transfer_plan.TransferPlan(transfer, encoding)
            self.distribution.bytes_sent = encoding.bytes_sent
            of_workers["Compression"] = encoding.feedback
        if aggregation is not None:
            self.distribution.spares = lambda: getattr(aggregation, "spares", None)
            engine = RoundEngine if aggregation.is_synchronous else StreamEngine
            given = self._sending, self.distribution.recorder.record, stall_timeout_secs, composed.warmup
            # Of a batch that the workers share, each gradient of an update has a part.
            is_split = not aggregation.is_synchronous or self._engine.data_sharding == "shard"
            total = aggregation.total_num_replicas if aggregation.is_synchronous else aggregation.replicas_to_aggregate
            self.distribution.gradients_per_batch = lambda: total if is_split else 1
            self._training = training = engine(self, self._engine, aggregation, *given)
            self._engine.share_workers(training.leave)
        for each in {self._engine, self._training}:
            each.follow_losses(lambda worker, is_lost: self.distribution.recorder.changed(worker, is_lost))
        self.distribution.take(policies, *dict.fromkeys((self._engine, self._training)), of_workers=of_workers)

    def _worker_memory(self, timeout_secs: float, device: str | None = None) -> ServerMemory:
        return ServerMemory(self, self._engine.coordinator, self._num_workers, timeout_secs, device)

    def _measure(self) -> None:
        """Fetches the counters of all processes whenever the report needs them."""
        coordinator = self._engine.coordinator
        tasks = [f"worker:{index}" for index in range(self._num_workers)] + [f"ps:{i}" for i in range(self._num_ps)]
        usages, own = TaskUsages(tasks, lambda: lost_workers(coordinator)), self.distribution.own_usage
        self._new_usage = lambda: usages.fetch(only_new=True)
        self.distribution.usage = lambda: {**usages.fetch(), self.distribution.task: own()}
        self.distribution.served_tasks = tasks

    def _become_chief(self) -> None:
        """Makes this process the chief of the cluster, until `close`."""
        escape = stalls.InterruptEscape(self._engine.waited_for)
        escape.install()
        context.joined_cluster()
        self.distribution.on_close = [self._leave, escape.uninstall]
        clusters.join(self._serving.cluster.with_task(clusters.Task("chief", 0)))
        self.distribution.shown = {"task": "chief:0", "workers": self._num_workers, "ps": self._num_ps}

    def _take_shards(self, variable_partitioner: Any, is_lazy: bool) -> None:
        """Looks up rows of variables in shards, and updates shards and rows, on their servers."""
        self._has_partitioner = variable_partitioner is not None
        if variable_partitioner is not None:
            sharding.know_shards()
        if variable_partitioner is not None or is_lazy:
            sharding.replace_update(
                self, lambda *given: partitioned_variable.update_by_shards(given[0], is_lazy, given[1])
            )

    def _connect_to_cluster(self, coordinator_name: str) -> None:
        del coordinator_name
        cluster_spec = self._serving.cluster_spec(coordinator.CHIEF_JOB)
        self._num_workers, self._num_ps = cluster_spec.num_tasks("worker"), cluster_spec.num_tasks("ps")
        coordinator.connect(cluster_spec)

    def _leave(self) -> None:
        """Ends the coordinator and the servers, and takes this process out of their cluster."""
        is_answered = set(self.distribution.served_tasks) <= set(self._new_usage())
        last = self.distribution.usage()
        self.distribution.usage = lambda: last
        self._serving.finish()
        stop_coordinator(self._engine.coordinator)
        context.leave_cluster(can_join_again=self._serving.embedded is not None)
        # TensorFlow would wait without end for a task that is stopped, and writes an error for one that has ended.
        if is_answered:
            coordinator.disconnect()
        self._serving.close()
        if not is_answered and self._serving.embedded is not None:
            coordinator.disconnect()
        clusters.join(None)

    @contextlib.contextmanager
    def _scope(self) -> Any:
        self.distribution.check_open()
        with super().scope(), tf.variable_creator_scope(self._create_coordinated):
            yield self

    def scope(self) -> contextlib.AbstractContextManager:
        """See the stock `scope`. Variables made in it live on the parameter servers and count exactly."""
        return self._scope()

    def build_model(self, model: Any, data: Any, step: str) -> None:
        """See `KerasSteps.build_model`."""
        self._begin_call()
        # One worker evaluates a whole batch.
        is_whole = step == "test_step" and isinstance(data, WorkerDataset)
        _common.build_model(self, model, data, step, data.element_spec if is_whole else None)

    def _before_call(self, call: calls.Call) -> None:
        """Looks at a call of any model of this process before it begins."""
        workers = f"the {self._num_workers} workers" if self._num_workers > 1 else "the worker"
        if self.distribution.is_closed:
            return
        if call.model.distribute_strategy is self:
            models.leave_building_to_strategy(call.model)
            call.ends.append(self._engine.end_call)
            if call.kind == "fit" and isinstance(self._training, RoundEngine):
                call.after.append(functools.partial(self._end_fit, call, self._training))
        scope.begin(self, call, f"the chief would train the model alone, without {workers}")

    def _end_fit(self, call: calls.Call, engine: RoundEngine) -> None:
        # A call that was refused leaves the pass of another call as it is.
        if call.under is self:
            engine.end_fit()

    def _begin_call(self) -> None:
        self.distribution.check_open()
        # Contributions to a pass, and batches read ahead, are dropped when another pass begins.
        calls.refuse_overlap(self, is_exclusive=True, nests=not isinstance(self._training, StreamEngine))

    def _create_coordinated(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        beside: contextlib.AbstractContextManager = contextlib.nullcontext()
        reference = kwargs.get("colocate_with")
        if isinstance(reference, PartitionedVariable):
            # An optimizer's slot: its shape is that of the variable, so it falls into the same shards.
            beside = sharding.beside_shards(self, kwargs.pop("colocate_with").variables[0])
        initial = sharding.present_initializer(kwargs.get("dtype"))
        if initial is not None and self._has_partitioner and kwargs.get("shape") is None:
            kwargs |= {"initial_value": initial, "shape": initial.shape}
        with beside:
            variable = next_creator(**kwargs)
        made = coordinate(variable, self.distribution.barrier, initial.path if initial else "")
        if initial is not None and initial.is_postponed:
            made.fill(initial.rows)
        return made

    # Data.

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any = None) -> Iterable[Any]:
        """Leaves the batches of `dataset` to the workers, each its share; the chief does not read them."""
        self._begin_call()
        if isinstance(dataset, WorkerDataset):
            return dataset
        if not tf.executing_eagerly():
            return super().experimental_distribute_dataset(dataset, options)
        caller, call = calls.epochs_being_made(), calls.current()
        trains = call is not None and call.trains
        replicas.check_fixed_sizes(self, dataset, self._training.num_parts if trains else 1, self._num_workers == 1)
        if trains and self._num_workers > 1:
            _common.accept_handed_out(dataset)
            _common.check_files(dict.fromkeys(self.distribution.recorder.names, inputs.files_written(dataset)))
        if caller is not None:
            dataset = without_optional_components(dataset)
        own = inputs.untuned(inputs.sized(dataset, caller), caller)
        # Keras makes another data set of arrays for each call: kept with it, they would wait for the garbage collector.
        is_given = own is dataset
        return progress.distributed_once(own, self._training) if is_given else self._training.distribute(own)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset], options: Any = None
    ) -> Iterable[Any]:
        """Leaves to each worker the batches of the data set that `dataset_fn`, called here, makes for it."""
        if not tf.executing_eagerly():
            return super().distribute_datasets_from_function(dataset_fn, options)
        self.distribution.check_open()
        count = self._engine.num_workers
        contexts = [tf.distribute.InputContext(count, worker, self.num_replicas_in_sync) for worker in range(count)]
        return self._training.distribute_own([dataset_fn(context) for context in contexts])

    # Steps.

    def run(
        self, fn: Callable[..., Any], args: tuple = (), kwargs: dict[str, Any] | None = None, options: Any = None
    ) -> Any:
        """Runs `fn` on a worker.

        In Keras' loop the steps overlap, and the logs returned are those of the newest finished one. Any other
        function is waited for, and its own result returned. In a function given to `ClusterCoordinator.schedule` it
        is the stock method.
        """
        self.distribution.check_function(fn)
        if tf.distribute.in_cross_replica_context() and coordinator.thread.is_scheduling:
            return super().run(fn, args, kwargs, options)
        args, kwargs = worker_function.in_tensors(args, kwargs or {})
        step = Step(fn)
        self._check_step(step)
        if step.runs_eagerly and tf.executing_eagerly():
            _check_shards(step)
            return self._engine.run_on_chief(step, args, kwargs)
        if step.kind == "train" and len(args) == 1 and isinstance(args[0], WorkerBatch) and not kwargs:
            return args[0].engine.run(step, args[0])
        # Other functions, and steps of batches that the chief hands in whole, are one worker's matter.
        return self._engine.run_function(step, args, kwargs)

    def _check_step(self, step: Step) -> None:
        if step.kind in ("train", "test"):
            # Other variables are the chief's own: workers would overwrite each other's counts in them.
            scope.take_over(self, step.model)
            check_made_in_scope(self, (*step.model.variables, *step.model.metrics_variables))
        if step.kind != "other" and (model := step.model_in_use) is not None:
            model_parallel.check_placement(self, model)
        with tf.init_scope(), self.scope():  # `fit`, where optimizers are built, may be called outside of it.
            check_for_workers(step, asynchronous=self._training is self._engine)

    def function_of(self, model: keras.Model, kind: str, stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns what makes an execution in plain Python; see `calls.ask_strategies`.

        One worker computes a whole batch that is given to `train_on_batch` and the like.
        """
        if kind == "predict":
            return self._predicting(model, stock)
        step = Step(model.train_step if kind == "train" else model.test_step)

        def alone(batch: Any) -> Any:
            return self.run(step.function, args=(batch,))

        def prepare(handle: WorkerBatch) -> Callable[[WorkerIterator, WorkerBatch], Any]:
            if model.run_eagerly:
                return lambda iterator, handle: alone(handle)
            self._check_step(step)
            return (handle.engine if kind == "train" else self._engine).prepared(step, handle)

        def on_batch(iterator: Any) -> Any:
            with graphs.told_in_brief():
                return alone(next(iterator))

        return executions(model, functools.wraps(stock)(on_batch), prepare)

    def _predicting(self, model: keras.Model, stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns what makes an execution of `predict`, whose batches Keras takes itself."""
        step, prepared = Step(make_predict_function(model)), dict[Any, Callable[..., Any]]()

        @functools.wraps(stock)
        def function(batches: Sequence[Any]) -> Any:
            first = batches[0]
            with graphs.told_in_brief():
                if not isinstance(first, WorkerBatch):
                    return self.run(step.function, args=(first,))
                make = prepared.get(first.kind)
                if make is None:
                    self._check_step(step)
                    # Not `first`, which a trace would keep, with its pass.
                    make = prepared[first.kind] = self._engine.prepared(step, first.of.dataset.next_one)
                outputs = [make(first.of, batch) for batch in batches]
            return outputs[0] if len(outputs) == 1 else tf.nest.map_structure(splitting.joined, *outputs)

        return function

    @property
    def replicas_to_aggregate(self) -> int:
        """Number of gradients of an update, at present: 1 without a policy."""
        return self._training.replicas_to_aggregate

    def report(self) -> Report:
        """Counts since the strategy was built."""
        report = dataclasses.replace(self.distribution.recorder.report(), transfer=str(self._sending))
        return self.distribution.complete(report)

    # Results. A step is made by one replica, so there is nothing to be combined.

    def reduce(self, reduce_op: tf.distribute.ReduceOp | str, value: Any, axis: Any) -> Any:
        """Reduces over `axis`; there is nothing to reduce over replicas, because one of them makes each step."""
        if coordinator.thread.is_scheduling:
            return super().reduce(reduce_op, value, axis)
        (value,) = worker_batch.as_values(value)
        if axis is None:
            return value
        total = tf.reduce_sum if str(getattr(reduce_op, "name", reduce_op)).upper() == "SUM" else tf.reduce_mean
        return tf.nest.map_structure(lambda leaf: total(leaf, axis=axis), value)

    def gather(self, value: Any, axis: int) -> Any:
        """Returns `value`: a step is made by one replica."""
        del axis
        return worker_batch.as_values(value)[0]

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns `value` alone: a step is made by one replica."""
        return (*worker_batch.as_values(value),)

    def experimental_distribute_values_from_function(self, value_fn: Callable[..., Any]) -> Any:
        """Returns the result of `value_fn` for the replica that makes a step."""
        return value_fn(tf.distribute.experimental.ValueContext(0, 1))


_SHARDINGS = ("shard", "replicate")


def _in_scope_only(strategy: Any, stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes optimizers of the strategy refuse to make slots for a variable that was made outside of the scope."""

    def colocate_vars_with(variable: Any) -> Any:
        # A partitioned one has parts of the strategy's.
        if isinstance(variable, tf.Variable) and not hasattr(variable, "variables"):
            check_made_in_scope(strategy, [variable])
        return stock(variable)

    return colocate_vars_with


def _check_shards(step: Step) -> None:
    """Raises ValueError for a step that trains variables in shards untraced: their gradients would be lost."""
    if step.kind != "train":
        return
    for variable in step.model.trainable_variables:
        if sharding.in_shards(variable) is not None:
            raise ValueError(
                "run_eagerly=True can't train variables in shards, such as variable_partitioner has made of "
                f"{variable.path!r}. Compile with run_eagerly=False, or build the strategy without it. "
                "Received: run_eagerly=True"
            )


def warn_of_sizes(cluster: Cluster, num_workers: int | None, num_ps: int | None) -> None:
    """Warns of numbers that are not those of the cluster, which the strategy takes."""
    for name, job, value in (("num_workers", "worker", num_workers), ("num_ps", "ps", num_ps)):
        count = len(cluster.jobs[job])
        if value is not None and value != count:
            warnings.warn(
                f"ParameterServerStrategy({name}={value!r}) has no effect: there is a cluster already, with "
                f"{count} {job} task{'s' * (count != 1)}; give the number to what makes TF_CONFIG "
                f"(tfdist launch local --{name}={value!r}).",
                RuntimeWarning,
                stacklevel=3,
            )


def _checked_policies(
    policies: Iterable[Any] | None, transforms: Sequence[Any], data_sharding: Any, devices_per_replica: Any
) -> Sequence[Any]:
    """Returns the policies; raises ValueError for them, and for the arguments that some of them exclude."""
    _devices.check_devices_per_replica(devices_per_replica, "ParameterServerStrategy")
    if data_sharding not in _SHARDINGS:
        raise ValueError(
            f"data_sharding must be one of {', '.join(map(repr, _SHARDINGS))}. "
            f"Received: data_sharding={data_sharding!r}"
        )
    checked = composition.check_policies(policies, "ParameterServerStrategy", transforms, devices_per_replica)
    for policy in checked:
        if isinstance(policy, Compression):
            on_servers.check_codec(policy.codec, f"Received: policies={list(checked)!r}")
    return checked
