# SPDX-License-Identifier: Apache-2.0
"""MultiWorkerMirroredStrategy: several processes, each with a copy of the model, one update for all."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import _forks, _machine
from tfdist import cluster as clusters
from tfdist import transforms as gradient_transforms
from tfdist.compat.keras import calls, saving
from tfdist.compat.keras.optimizers import SumGradients
from tfdist.compat.tensorflow import collectives, context, inputs, replicas
from tfdist.coordination import stalls
from tfdist.coordination.quorum import QuorumServer
from tfdist.engines.agreement import Agreement
from tfdist.engines.averaging import AveragingEngine
from tfdist.engines.quorum import QuorumEngine
from tfdist.engines.warmup import WarmupEngine
from tfdist.passes import progress, splitting
from tfdist.policies import composition
from tfdist.policies.base import Aggregation, Policy, Update
from tfdist.step import one_replica
from tfdist.step.gradients import ProcessMemory, Transforms
from tfdist.strategies import _common, _communication, _devices, _multi_worker_cluster, _shared_calls, _shared_datasets
from tfdist.strategies._communication import CompressedSums
from tfdist.strategies.distribution import Distribution
from tfdist.telemetry.recorder import Recorder
from tfdist.transport.sums import Messages, WorkerSums


class MultiWorkerMirroredStrategy(_common.KerasSteps, tf.distribute.MultiWorkerMirroredStrategy):
    """Synchronous training on several workers: `tf.distribute.MultiWorkerMirroredStrategy`, made to work with Keras 3.

    Every worker runs the same script. Without TF_CONFIG it trains alone on the local devices, and so does an evaluator.

    With a policy, `fit` makes each update from the gradients that the policy accepts. All workers take part in every
    all-reduce at once; a late worker contributes zeros and continues to compute. Custom loops and `train_on_batch` stay
    synchronous.

    Args:
      cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver`; TF_CONFIG by default.
      communication_options: a `tf.distribute.experimental.CommunicationOptions`.
      communication: library that sums tensors of CPUs over the workers: "mpi" (by mpi4py), or "tensorflow" for
        TensorFlow's collectives. "auto" takes MPI where each worker has mpi4py with one MPI library that can be started
        (`pip install '.[mpi]'` in a checkout), else TensorFlow's. GPUs always use the latter, which have NCCL.
      devices_per_replica: number of a worker's devices that hold a copy of the model together, each a part of its
        layers (`tfdist.placement`, `tfdist.split`). A worker has all of its GPUs, or all of its logical CPUs where it
        has none; as many on each.
      policies: policies that decide which gradients count, such as `[tfdist.BackupWorkers(spares=1)]`. Empty: all do.
      transforms: functions that change gradients on their way to the update, such as
        `[tfdist.transforms.clip_by_global_norm(1.0)]`.
      start_timeout_secs: longest wait for the start of all workers.
      stall_timeout_secs: longest wait of an update, with a policy, without progress of the workers that it waits for.
        A worker whose process has ended is an error at once.

    Raises:
      ClusterError: the description of the cluster is invalid.
      TimeoutError: a worker did not start in time; the message names it.
      ValueError: the policy is not for this strategy, "mpi" can't be used, `devices_per_replica` does not divide the
        number of devices, or a timeout is not positive.
      ConnectionError: the workers do not belong to one job; they have different secrets.
    """

    # Of several workers.
    _agreement: Agreement
    # `None` without a policy.
    _quorum: QuorumEngine | None = None
    # True for workers of one device each, without a policy: `fit` reads their parts.
    _knows_sizes = False
    # `None` without Compression.
    _compressed: CompressedSums | None = None
    # For example a job of several workers of which the launcher has given up all but one.
    _is_cluster_of_one = False
    # On the chief, with a policy.
    _quorum_server: QuorumServer | None = None

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
        *,
        communication: str = "auto",
        devices_per_replica: int = 1,
        policies: Iterable[Policy] | None = (),
        transforms: Iterable[gradient_transforms.GradientTransform] | None = (),
        start_timeout_secs: float = 300.0,
        stall_timeout_secs: float = 600.0,
    ) -> None:
        transforms = gradient_transforms.in_order(transforms)
        _devices.check_devices_per_replica(devices_per_replica, "MultiWorkerMirroredStrategy")
        policies = composition.check_policies(policies, "MultiWorkerMirroredStrategy", transforms, devices_per_replica)
        _communication.check_communication(communication)
        _common.check_timeouts(start_timeout_secs=start_timeout_secs, stall_timeout_secs=stall_timeout_secs)
        cluster = _multi_worker_cluster.find_cluster(cluster_resolver)
        _devices.check_worker(devices_per_replica)
        if cluster is None:
            _communication.check_alone(communication)
        else:
            clusters.note_joined()
        _machine.keep_if_launched(few_arenas=True)
        inputs.leave_untuned()
        is_training = cluster is None or cluster.task in cluster.training_tasks
        num_workers = 1 if cluster is None else len(cluster.training_tasks)
        policies = policies if is_training else ()
        composed = composition.compose(policies, "MultiWorkerMirroredStrategy", num_workers)
        self._aggregation, self._warmup = composed.aggregation, composed.warmup
        self._gathers: dict[Any, Any] = {}
        # None without other workers.
        self._same_batches: _shared_datasets.SameBatches | None = None
        self._sums = WorkerSums(self)
        self.distribution = Distribution(Recorder([f"worker:{index}" for index in range(num_workers)]))
        self.distribution.transforms = Transforms(transforms, ProcessMemory(self))
        self.distribution.task = str(cluster.task) if cluster else "worker:0"
        self.distribution.shown = {"task": self.distribution.task, "workers": num_workers}
        if cluster is not None:
            clusters.join(cluster)
            self.distribution.on_close.append(lambda: clusters.join(None))
        if cluster is None or not is_training or num_workers == 1:
            # An evaluator would be looked for among the workers.
            empty = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
            resolver = cluster_resolver if is_training else empty
            with _devices.of_worker(self, devices_per_replica):
                super().__init__(resolver, communication_options)
            self._is_cluster_of_one = cluster is not None and is_training
            self.distribution.take(policies)
            if not policies:
                self._take_times(1, 0, "/device:CPU:0")
            _common.mend_keras(self)
            return
        _multi_worker_cluster.join_workers(cluster, start_timeout_secs, has_policy=composed.aggregation is not None)
        with stalls.interrupt_ends_process(), _devices.of_worker(self, devices_per_replica):
            super().__init__(cluster_resolver, communication_options)
        collectives.broadcast_all_dtypes(self)
        _common.mend_keras(self)
        for policy in (composed.aggregation, composed.warmup, composed.compression):
            self._check_devices(policy)
        self._join(cluster)
        self._choose_sums(communication, composed.compression, start_timeout_secs)
        if composed.aggregation:
            self._start_quorum(composed.aggregation, cluster, stall_timeout_secs)
        self._start_engines(composed, num_workers)
        of_workers = {"Compression": self._compressed} if self._compressed else None
        self.distribution.take(policies, self._quorum, self._warming, self._averaging, of_workers=of_workers)
        # Of all that is done at the end of the program the first.
        _forks.at_exit(self._agreement.end)

    def explained(self, error: Exception) -> BaseException | None:
        """See `Closing.explained`; in place of TensorFlow's error that of the data, or of a sum in Python."""
        of_data = _shared_datasets.explain(error) if isinstance(error, tf.errors.InvalidArgumentError) else None
        return self._sums.failure() or of_data or super().explained(error)

    def _before_call(self, call: calls.Call) -> None:
        super()._before_call(call)
        distribution = getattr(self, "distribution", None)
        if distribution is not None and distribution.agreement is not None:
            call.after.append(distribution.agreement.blocked.forget)
            if call.kind == "fit" and call.model.distribute_strategy is self:
                calls.add_callback(call, keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: self._compare(call)))

    def _compare(self, call: calls.Call) -> None:
        if not self._is_apart:
            _shared_calls.compare_models(call, self._agreement)

    def _prepare(self, model: keras.Model) -> None:
        super()._prepare(model)
        if self._compressed and not self.distribution.is_warming():
            self._compressed.prepare(model)

    def _sum_gradients(self, in_step: bool = False) -> SumGradients | None:
        # In the phase of a warmup gradients are not encoded.
        if self._compressed is None or self.distribution.is_warming():
            return None
        return self._compressed.in_step if in_step else self._compressed.anywhere

    def _join(self, cluster: clusters.Cluster) -> None:
        # Each call needs all workers, in the same order on all.
        self._is_exclusive = True
        self._trained_alone = f"each of {len(cluster.training_tasks)} workers would train a model of its own"
        addresses = {task: cluster.address(task) for task in cluster.training_tasks}
        agreement = self._agreement = Agreement(cluster.task, cluster.training_tasks, addresses)
        self.distribution.agreement = agreement
        self.distribution.broadcast = lambda given: one_replica.broadcast(
            given, agreement.is_chief, self._sum_over_workers
        )
        replicas.note_traced(self, agreement.note_traced)
        _multi_worker_cluster.share_random_state(agreement)
        agreement.start(has_gpus=any("GPU" in device for device in self.extended.worker_devices))
        _multi_worker_cluster.leave_at_exit(agreement)
        self._same_batches = _shared_datasets.SameBatches(agreement)
        saving.write_by_chief()
        saving.share_checkpoints(str(cluster.task))
        if not agreement.is_chief:
            saving.wait_for_files(str(cluster.task))
        _multi_worker_cluster.tell_others_of_errors(agreement)
        escape = stalls.InterruptEscape(agreement.waited_for, on_interrupt=_multi_worker_cluster.end_soon_after_exit)
        escape.install()
        self.distribution.on_close += [escape.uninstall, agreement.close]
        self.distribution.job = agreement.from_chief(lambda: secrets.token_hex(8), "naming the job")
        self.distribution.replicas = [agreement.tasks.index(agreement.task)]
        self.distribution.usage = _multi_worker_cluster.share_usage(agreement, self.distribution.own_usage)

    def _check_devices(self, policy: Any) -> None:
        count = len(self.extended.worker_devices)
        if policy and count > 1:
            raise ValueError(
                f"{policy!r} needs one device per worker under MultiWorkerMirroredStrategy; start one process for each "
                f"device, and let it see only that one (CUDA_VISIBLE_DEVICES). Received: {count} devices"
            )

    def _choose_sums(self, communication: str, compression: Any, start_timeout_secs: float) -> None:
        """Chooses what sums tensors over the workers: TensorFlow's collectives or MPI, and codecs for gradients."""
        agreement = self._agreement
        found = _communication.connect(communication, agreement, self.extended.worker_devices, start_timeout_secs)
        if found is not None:
            in_sum, in_gather = (_communication.jointly(agreement, each) for each in (found.sum, found.gather))
            self._sums.use(in_sum, in_gather, agreement.reporter.waiting, lambda: found.failure)
        if self.distribution.transforms.list:
            tasks = [str(task) for task in agreement.tasks]
            exchange = Messages(self._sums, tasks, agreement.tasks.index(agreement.task))
            self.distribution.transforms.memory = ProcessMemory(self, exchange)
        if compression:
            self._compressed = CompressedSums(compression, self._sums, agreement)
            self.distribution.bytes_sent = self._compressed.bytes_sent

    def _start_quorum(self, policy: Aggregation, cluster: clusters.Cluster, stall_timeout_secs: float) -> None:
        client, self._quorum_server = _multi_worker_cluster.connect_quorum(
            policy, cluster, self._agreement, stall_timeout_secs
        )
        worker, sums = cluster.training_tasks.index(cluster.task), (self._sums.in_step, self._sum_gradients)
        self._quorum = QuorumEngine(self, worker, client, *sums, self._prepare, self._record, self._agreement)
        self._quorum.start()
        self.distribution.on_close += [self._quorum_server.close] if self._quorum_server else []
        _forks.at_exit(self.distribution.close)
        self.distribution.recorder.is_complete = True
        # Of "auto", the chief's policy alone knows.
        self.distribution.spares = lambda: self.num_replicas_in_sync - self.replicas_to_aggregate

    def _start_engines(self, composed: composition.Composition, num_workers: int) -> None:
        """Starts the engines of a warmup and of averaging."""
        parts, sum_up, record = self._parts(), self._sum_over_workers, self.distribution.recorder.record
        if composed.warmup:
            # Without a policy for what follows, the number of examples is not known after the phase.
            counted = record if composed.aggregation else lambda update, _: record(update)
            self._warming = WarmupEngine(self, composed.warmup, parts, sum_up, counted, self._agreement)
        if composed.aggregation:
            return
        own, averages = (replicas.worker_index(self), replicas.worker_device(self)), composed.averaging is not None
        times = self._take_times(num_workers, *own, averages)
        if composed.averaging:
            compressed = self._compressed
            of_differences = (lambda: compressed.of_differences) if compressed else None
            engine = AveragingEngine(self, composed.averaging, parts, sum_up, times, of_differences)
            self._averaging = engine
            if not compressed:
                self.distribution.bytes_sent = lambda: [engine.bytes_sent] * num_workers
        else:
            self._knows_sizes = len(self.extended.worker_devices) == 1

    def _record(self, update: Update, examples: int) -> None:
        # Only the quorum server's policy decides; every worker receives the result.
        self._num_contributed = len(update.contributors)
        # The chief has all of it, with the times of each gradient.
        whole = self._quorum_server.update_of(update.step) if self._quorum_server else None
        self.distribution.recorder.record(whole or update, examples)

    def gather(self, value: Any, axis: int) -> Any:
        """Puts the values of all replicas together along `axis`, as `tf.distribute.Strategy.gather` does."""
        return collectives.gather_any(functools.partial(self._gather, axis), self.experimental_local_results, value)

    def _gather(self, axis: int, value: Any) -> Any:
        is_plain = isinstance(value, tf.Tensor) and value.shape.rank
        if not is_plain or not tf.executing_eagerly() or not replicas.has_other_workers(self):
            return super().gather(value, axis)
        # The stock method traces a function at each call. For any shape: all workers trace the same, at the same time.
        key = axis, value.dtype, value.shape.rank
        if key not in self._gathers:
            stock, spec = super().gather, tf.TensorSpec([None] * value.shape.rank, value.dtype)
            self._gathers[key] = tf.function(lambda given: stock(given, axis), input_signature=[spec], autograph=False)
        return self._gathers[key](value)

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any = None) -> Iterable[Any]:
        """Divides each batch of `dataset` among the replicas of all workers, as evenly as its size allows.

        With the auto-shard policy OFF each worker may have a data set of its own, of which all batches are used. With
        FILE and HINT TensorFlow gives each worker its files, or its shard.
        """
        dataset, epoch_iterator = self._accepted(dataset)
        if self._quorum or self._knows_sizes:
            # With an unknown size the end shows within a step, which ends an execution of several steps in the middle.
            dataset = inputs.sized(dataset, epoch_iterator)
        return self._divided(dataset, options, epoch_iterator)

    def _divided(self, dataset: Any, options: Any, epoch_iterator: Any) -> Any:
        count = self.num_replicas_in_sync
        has_policy = self._quorum or self._averaging or self._warming
        is_dataset = isinstance(dataset, tf.data.Dataset)
        if has_policy and (options is not None or not is_dataset):
            _shared_datasets.check_shared(dataset, f"options={options}, {type(dataset).__name__}")
        if count == 1 or not is_dataset:
            return self._left_to_tensorflow(dataset, options)
        splitting.check_batched(dataset.element_spec, count)
        division = _shared_datasets.compare(
            dataset,
            self.distribution.agreement,
            _is_for_predict(),
            self._is_apart,
            is_watched=not self._warming,
            has_policy=bool(has_policy),
        )
        if division is _shared_datasets.Division.OWN:
            # Each worker's batches are as large as a global one. So each is the examples of a worker for several steps.
            dealt = splitting.deal(dataset, range(count), count).prefetch(count)
            own = self.distribute_datasets_from_function(lambda context: dealt, options)
            inputs.count_batches_of(epoch_iterator, own)
            return own
        if division is _shared_datasets.Division.TENSORFLOW:
            return self._read_directly(super().experimental_distribute_dataset(dataset, options))
        is_known = int(dataset.cardinality()) != tf.data.UNKNOWN_CARDINALITY
        dataset = self._reordered(dataset)
        if options is not None:
            return self._dealt(dataset, is_known, options)
        return progress.remember(self._dealt(dataset, is_known), dataset, lambda rest: self._dealt(rest, is_known))

    def build_model(self, model: keras.Model, data: Any, step: str) -> None:
        """See `KerasSteps.build_model`."""
        calls.refuse_overlap(self, self._is_exclusive)
        call, agreement = calls.current(), self.distribution.agreement
        # Of data that were distributed before the call, nothing has been compared in it.
        is_distributed = isinstance(data, tf.distribute.DistributedDataset)
        if agreement is not None and is_distributed and call is not None and not call.is_compared:
            _shared_calls.gather_and_compare(agreement, None, "comparing the calls", self._is_apart)
        super().build_model(model, data, step)

    @property
    def _is_apart(self) -> bool:
        """True if the workers' copies of a model may differ now."""
        return self._averaging is not None or self.distribution.saved_state.is_chief_ahead

    def _left_to_tensorflow(self, dataset: Any, options: Any) -> Any:
        if options is not None or replicas.worker_count(self) > 1:
            return super().experimental_distribute_dataset(dataset, options)
        # A single worker reads all batches, so a pass can be resumed by skipping the first ones.
        dataset, distribute = self._reordered(dataset), super().experimental_distribute_dataset
        return progress.remember(distribute(dataset), dataset, distribute)

    def _reordered(self, dataset: Any) -> Any:
        """Changes the order of Keras-shuffled batches in a cluster of any size, so that a resized job keeps it."""
        is_in_cluster = self.distribution.agreement is not None or self._is_cluster_of_one
        if not is_in_cluster or not splitting.is_shuffled_by_keras(dataset):
            return dataset
        # Seeds are set after the strategy is built; the chief's is the one that counts.
        seed = context.global_seed()
        if self.distribution.agreement is not None:
            seed = self.distribution.agreement.from_chief(lambda: seed, "agreeing on the order of batches")
        return dataset if seed is None else splitting.reorder_batches(dataset, seed)

    def _dealt(self, dataset: tf.data.Dataset, is_known: bool, options: Any = None) -> Any:
        parts, count = self._parts(), self.num_replicas_in_sync
        # In a warmup phase some workers leave out whole passes, which could not be told apart.
        mapped = None
        if self._same_batches is not None and not self._warming:
            mapped = self._same_batches.watching(dataset, _is_for_predict(), has_quorum=self._quorum is not None)
        dealt = splitting.deal(dataset, parts, count, mapped).prefetch(len(parts))
        distributed = self._read_directly(super().distribute_datasets_from_function(lambda context: dealt, options))
        if is_known:  # All workers reach the end in the same step.
            inputs.assume_full_batches(distributed)
        if options is not None or not (self._quorum or self._averaging or self._warming or self._knows_sizes):
            return distributed
        own = splitting.deal(dataset, parts[:1], count, mapped, with_totals=True).prefetch(1)
        whole = self._quorum.distribute(own, lambda: distributed) if self._quorum else distributed
        if self._averaging:
            whole = self._averaging.distribute(mapped() if mapped else dataset, lambda: distributed)
        # If the length is not known, the workers agree on the end in each step.
        if self._knows_sizes and is_known and tf.executing_eagerly():
            whole = self._synchronous_engine.distribute(own, lambda: distributed)
        return self._warming.distribute(whole, [own]) if self._warming else whole

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset], options: Any = None
    ) -> Iterable[Any]:
        """Distributes the data sets that `dataset_fn`, called on each worker, makes for it."""
        distributed = self._read_directly(super().distribute_datasets_from_function(dataset_fn, options))
        has_policy = bool(self._quorum or self._averaging or self._warming)
        if self.distribution.agreement is not None and tf.executing_eagerly():
            steps = inputs.steps_of(distributed, len(self.extended.worker_devices))
            steps = _shared_datasets.longest(steps, self.distribution.agreement, has_policy)
            inputs.set_length(distributed, steps)
        if not has_policy or not tf.executing_eagerly():
            return distributed
        workers, count = replicas.worker_count(self), self.num_replicas_in_sync
        read = dataset_fn(tf.distribute.InputContext(workers, replicas.worker_index(self), count))
        own = splitting.without_total(read)
        whole = self._quorum.distribute(own, lambda: distributed) if self._quorum else distributed
        whole = self._averaging.distribute_own(read, lambda: distributed) if self._averaging else whole
        return self._warming.distribute(whole, [own], is_same_length=False) if self._warming else whole

    def _read_directly(self, distributed: Any) -> Any:
        return inputs.read_directly(distributed, self.extended.worker_devices)

    def _parts(self) -> range:
        # The order in which Keras' predict puts the replicas of several workers together.
        return range(replicas.worker_index(self), self.num_replicas_in_sync, replicas.worker_count(self))

    def _sum_over_workers(self, tensors: Sequence[tf.Tensor], in_step: bool = False) -> list[tf.Tensor]:
        return self._sums.in_step(tensors) if in_step else self._sums(tensors)


def _is_for_predict() -> bool:
    call = calls.current()
    return call is not None and call.kind == "predict"
