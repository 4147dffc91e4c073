# SPDX-License-Identifier: Apache-2.0
"""MirroredStrategy: one process, a copy of the model on each of its devices."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import _machine
from tfdist import transforms as gradient_transforms
from tfdist.compat.tensorflow import context, inputs, replicas
from tfdist.engines.averaging import AveragingEngine
from tfdist.engines.threads import ThreadedEngine
from tfdist.engines.warmup import WarmupEngine
from tfdist.passes import progress, splitting
from tfdist.passes.replica_batches import ReplicaDataset, ReplicaDatasetFromFunction
from tfdist.policies import composition
from tfdist.policies.base import Policy
from tfdist.step.gradients import ProcessMemory, Transforms
from tfdist.strategies import _common, _devices
from tfdist.strategies.distribution import Distribution
from tfdist.telemetry.recorder import Recorder

# TensorFlow tells the collectives of a process apart by numbers that each strategy counts from this one.
_KEY_BASES = itertools.count(2**16, 2**16)


class MirroredStrategy(_common.KerasSteps, tf.distribute.MirroredStrategy):
    """Synchronous training on the devices of one machine: `tf.distribute.MirroredStrategy`, mended for Keras 3.

    With a policy, `fit` computes each device's gradient in a thread of its own, and makes an update as soon as the
    policy says so. All other calls (`evaluate`, `predict`, `train_on_batch`) stay synchronous. A data set is read once
    for all devices, which wait for it together. Each device reads by itself the data set that
    `distribute_datasets_from_function` makes for it, so a slow one delays only that device.

    Each device that is late within an operation holds one of TensorFlow's inter-op threads, of which there is one for
    each CPU. With fewer CPUs than devices, ask for more at the top of the program:
    `tf.config.threading.set_inter_op_parallelism_threads(devices)`.

    Args:
      devices: device names such as `["GPU:0", "GPU:1"]`; all GPUs by default, or the CPU where there are none.
      cross_device_ops: how gradients are reduced, a `tf.distribute.CrossDeviceOps`; not used by `fit` with a policy.
      devices_per_replica: number of devices that hold a copy of the model together, each a part of its layers
        (`tfdist.placement`, `tfdist.split`); successive ones of `devices`. By default those are all GPUs, or all
        logical CPUs where there are none.
      policies: policies that decide which gradients count, such as `[tfdist.BackupWorkers(spares=1)]`; by default all
        do.
      transforms: functions that change gradients on their way to the update, such as
        `[tfdist.transforms.clip_by_global_norm(1.0)]`.
      stall_timeout_secs: longest wait of an update, with a policy, while no device brings a gradient.

    Raises:
      ValueError: the policies don't go together, or not with this number of devices; `devices_per_replica` does not
        divide it; or a timeout is not positive.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: tf.distribute.CrossDeviceOps | None = None,
        *,
        devices_per_replica: int = 1,
        policies: Iterable[Policy] | None = (),
        transforms: Iterable[gradient_transforms.GradientTransform] | None = (),
        stall_timeout_secs: float = 600.0,
    ) -> None:
        transforms = gradient_transforms.in_order(transforms)
        _devices.check_devices_per_replica(devices_per_replica, "MirroredStrategy")
        policies = composition.check_policies(policies, "MirroredStrategy", transforms)
        _devices.check_names(devices)
        _common.check_timeouts(stall_timeout_secs=stall_timeout_secs)
        # Else its all-reduces would be taken for those of another strategy on these devices, of other shapes.
        self._collective_key_base = next(_KEY_BASES)
        groups = _grouped(devices, cross_device_ops, devices_per_replica) if devices_per_replica > 1 else []
        _machine.keep_if_launched(few_arenas=False)
        inputs.leave_untuned()
        super().__init__([group[0] for group in groups] or devices, cross_device_ops)
        if groups:
            _devices.span(self, groups)
        composed = composition.compose(policies, "MirroredStrategy", self.num_replicas_in_sync)
        policy = self._aggregation = composed.aggregation
        self._warmup = composed.warmup
        _common.mend_keras(self)
        names = [f"worker:{replica}" for replica in range(self.num_replicas_in_sync)]
        self.distribution = Distribution(Recorder(names, is_complete=policy is not None))
        self.distribution.transforms = Transforms(transforms, ProcessMemory(self))
        self.distribution.shown = {"devices": [each.rpartition("device:")[2] for each in self.extended.worker_devices]}
        record = self.distribution.recorder.record
        self._engine = ThreadedEngine(self, policy, names, record, stall_timeout_secs) if policy else None
        parts, sum_up = range(self.num_replicas_in_sync), self._sum_over_workers
        if not policy:
            averages = composed.averaging is not None
            times = self._take_times(self.num_replicas_in_sync, None, "/device:CPU:0", averages)
            if composed.averaging:
                self._averaging = AveragingEngine(self, composed.averaging, parts, sum_up, times)
        self._is_exclusive = bool(policies)
        if composed.warmup:
            # Without a policy for what follows, the number of examples is not known after the phase.
            counted = record if policy else lambda update, _: record(update)
            self._warming = WarmupEngine(self, composed.warmup, parts, sum_up, counted)
        if policy:
            self.distribution.spares = lambda: getattr(policy, "spares", None)
        self.distribution.take(policies, self._engine, self._warming, self._averaging)

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Runs `fn` on every replica. With a policy, the `train_step` that `fit` hands in makes an update."""
        if self.num_replicas_in_sync > 1:
            context.mirrored_trains()
        return super().run(fn, args, kwargs, options)

    def experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any = None) -> Iterable[Any]:
        """Divides each batch of `dataset` among the replicas, as evenly as its size allows.

        With a policy, iterating over the result gives handles, for `strategy.run(model.train_step, args=(handle,))`.
        """
        dataset, _ = self._accepted(dataset)
        distributed = self._distributed(dataset, options)
        return distributed if options is not None else progress.remember(distributed, dataset, self._distributed)

    def _distributed(self, dataset: Any, options: Any = None) -> Any:
        whole = self._divided(dataset, options)
        if self._warming is None or whole is dataset or not tf.executing_eagerly():
            return whole
        if options is not None or not isinstance(dataset, tf.data.Dataset):
            raise ValueError(
                "experimental_distribute_dataset: with a warmup phase it takes a tf.data.Dataset and no options; leave "
                f"them away. Received: dataset={dataset!r}, options={options!r}"
            )
        return self._warming.distribute(whole, [dataset.prefetch(1)], is_whole=True)

    def _divided(self, dataset: Any, options: Any) -> Any:
        replicas = self.num_replicas_in_sync
        if replicas > 1:
            context.mirrored_trains()
        if isinstance(dataset, ReplicaDataset):
            return dataset
        is_plain = options is None and isinstance(dataset, tf.data.Dataset) and tf.executing_eagerly()
        # The policies of one exclude those of the other.
        engine = self._averaging or self._engine
        if engine is None or not is_plain:
            return self._synchronous(dataset, options)
        return engine.distribute(dataset, lambda: self._synchronous(dataset, options))

    def _synchronous(self, dataset: Any, options: Any) -> Any:
        replicas = self.num_replicas_in_sync
        if options is not None or not isinstance(dataset, tf.data.Dataset) or replicas == 1:
            return super().experimental_distribute_dataset(dataset, options)
        splitting.check_batched(dataset.element_spec, replicas)
        size = splitting.static_size(dataset.element_spec)
        if size is not None and size % replicas == 0 and splitting.has_one_size(dataset.element_spec):
            return super().experimental_distribute_dataset(dataset, options)
        dealt = splitting.deal(dataset, range(replicas), replicas).prefetch(replicas)
        distributed = super().distribute_datasets_from_function(lambda context: dealt)
        inputs.assume_full_batches(distributed)
        return distributed

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset], options: Any = None
    ) -> Iterable[Any]:
        """With a policy every replica is an input pipeline of its own: it reads, in its thread, what is made for it."""
        count = self.num_replicas_in_sync
        contexts = [tf.distribute.InputContext(count, replica, count) for replica in range(count)]
        distribute = functools.partial(super().distribute_datasets_from_function, dataset_fn, options)

        def synchronous() -> Any:
            distributed = distribute()
            if tf.executing_eagerly():
                inputs.set_length(distributed, inputs.steps_of(distributed, count))
            return distributed

        if self._engine is None or options is not None or not tf.executing_eagerly():
            whole = synchronous()
        else:
            whole = self._engine.distribute_own([dataset_fn(context) for context in contexts], synchronous)
        if self._averaging is not None and options is None and tf.executing_eagerly():
            stock = whole
            whole = self._averaging.distribute_own(dataset_fn(tf.distribute.InputContext(1, 0, count)), lambda: stock)
        if self._warming is None or not tf.executing_eagerly():
            return whole
        if isinstance(whole, ReplicaDatasetFromFunction):
            return self._warming.distribute(whole, whole.datasets)
        groups = splitting.groups_of(dataset_fn(tf.distribute.InputContext(1, 0, count)), count)
        return self._warming.distribute(whole, [groups])

    def gather(self, value: Any, axis: int) -> Any:
        """Puts the values of all replicas together along `axis`, as `tf.distribute.Strategy.gather` does."""
        # The stock method traces a function of collectives at each call.
        return tf.nest.map_structure(lambda leaf: self._gather_one(leaf, axis), value)

    def _gather_one(self, value: Any, axis: int) -> Any:
        parts = self.experimental_local_results(value)
        context = tf.distribute.get_replica_context()
        is_on_replica = context is not None and context.strategy is self
        is_plain = all(isinstance(part, tf.Tensor) and part.shape.rank != 0 for part in parts)
        if is_on_replica or not is_plain or len(parts) != self.num_replicas_in_sync:
            return super().gather(value, axis)
        with tf.device(self.extended.worker_devices[0]):
            return tf.concat(parts, axis)


def _grouped(devices: Any, cross_device_ops: Any, devices_per_replica: int) -> Sequence[Sequence[str]]:
    if cross_device_ops is not None:
        raise ValueError(
            f"MirroredStrategy(devices_per_replica={devices_per_replica}): each part of the model is reduced among the "
            f"devices that hold it; leave cross_device_ops away. Received: cross_device_ops={cross_device_ops!r}"
        )
    found = _devices.of_machine(devices)
    _devices.check_count(devices_per_replica, found, "MirroredStrategy")
    return replicas.grouped(found, devices_per_replica)
