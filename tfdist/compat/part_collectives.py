# SPDX-License-Identifier: Apache-2.0
"""Reduces values over replicas that span devices: each part among the devices that hold it.

TensorFlow's all-reduce has one group of devices, the first of each replica, and would fetch the gradients of all parts
to these. Its class is not public, nor is a strategy's own object of it, nor which local devices a strategy of several
workers takes: all GPUs, or the first CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy, cross_device_ops

from tfdist.compat import replica_parts, replicas

NEEDS = (
    "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._initialize_local_devices",
    "tensorflow.python.distribute.cross_device_ops:CollectiveAllReduce._all_reduce",
    "tensorflow.python.distribute.cross_device_ops:CrossDeviceOps.batch_reduce",
    "tensorflow.python.distribute.mirrored_strategy:MirroredExtended._collective_keys",
    "tensorflow.python.distribute.mirrored_strategy:MirroredExtended._communication_options",
    "tensorflow.python.distribute.mirrored_strategy:MirroredExtended._cross_device_ops",
    "tensorflow.python.distribute.mirrored_strategy:MirroredExtended._collective_ops",
)


class PartAllReduce(cross_device_ops.CollectiveAllReduce):
    """An all-reduce for each part.

    Args:
      parts: the devices of this process' replicas.
      num_workers: number of processes.
      options: see `CollectiveAllReduce`.
      keys: see `CollectiveAllReduce`.

    Attributes:
      by_part: the all-reduce of each part; this object itself is that of the first.
    """

    def __init__(self, parts: replica_parts.Parts, num_workers: int, options: Any, keys: Any) -> None:
        size = len(parts.groups) * num_workers
        super().__init__(parts.devices_of(0), size, options, keys)
        self._parts = parts
        others = [
            cross_device_ops.CollectiveAllReduce(parts.devices_of(part), size, options, keys)
            for part in range(1, parts.count)
        ]
        self.by_part: list[Any] = [self, *others]

    def batch_reduce(self, reduce_op: Any, value_destination_pairs: Any, options: Any = None) -> Any:
        """See the stock method: one batch for each part."""
        pairs = list(value_destination_pairs)
        return self._together(
            [value for value, _ in pairs], lambda chosen: self._batch(reduce_op, pairs, chosen, options)
        )

    def _batch(self, reduce_op: Any, pairs: Sequence[Any], chosen: Sequence[int], options: Any) -> Any:
        return super().batch_reduce(reduce_op, [pairs[index] for index in chosen], options)

    def _all_reduce(self, reduce_op: Any, value: Any, replica_id: int, options: Any) -> Any:
        flat = tf.nest.flatten(value)

        def reduce(chosen: Sequence[int]) -> Any:
            given = [flat[index] for index in chosen]
            of_part = self.by_part[self._parts.part_of(given[0])]
            stock = super(PartAllReduce, self)._all_reduce if of_part is self else of_part._all_reduce
            return stock(reduce_op, given, replica_id, options)

        return tf.nest.pack_sequence_as(value, self._together(flat, reduce))

    def _together(self, values: Sequence[Any], reduce: Any) -> list[Any]:
        """Calls a function with the indices of the values of each part; returns all results in order."""
        results: list[Any] = [None] * len(values)
        for chosen in by_part(self._parts, values):
            for index, result in zip(chosen, reduce(chosen), strict=True):
                results[index] = result
        return results


def by_part(parts: replica_parts.Parts | None, values: Sequence[Any]) -> list[list[int]]:
    """Returns the indices of the values of each part that has any, those of the last part first.

    The gradients of the last layers are computed first.
    """
    of_each = [0 if parts is None else parts.part_of(value) for value in values]
    return [[i for i, each in enumerate(of_each) if each == part] for part in sorted(set(of_each), reverse=True)]


def use(strategy: Any, parts: replica_parts.Parts) -> None:
    """Makes a strategy reduce each part among the devices that hold it."""
    extended = strategy.extended
    stock = extended._cross_device_ops
    if not isinstance(stock, cross_device_ops.CollectiveAllReduce):
        return  # Reduces to one device of those that the values are on.
    workers = replicas.worker_count(strategy) if replicas.has_other_workers(strategy) else 1
    operations = PartAllReduce(parts, workers, extended._communication_options, extended._collective_keys)
    extended._cross_device_ops = operations
    if getattr(extended, "_collective_ops", None) is stock:
        extended._collective_ops = operations


def launcher(strategy: Any, part: int) -> Any:
    """Returns what launches the collectives of a part, of workers of one replica each."""
    operations = strategy.extended._cross_device_ops
    (found,) = getattr(operations, "by_part", [operations])[part]._launchers
    return found


@contextlib.contextmanager
def first_devices(devices_per_replica: int, num_cpus: int) -> Iterator[None]:
    """Within this block, a strategy of several workers takes the first device of each replica for its devices.

    Args:
      devices_per_replica: number of devices of a replica.
      num_cpus: number of logical CPUs of a worker, for workers without GPUs.
    """
    owner = collective_all_reduce_strategy.CollectiveAllReduceExtended
    original = owner._initialize_local_devices

    def local_devices(self: Any, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        devices, kind = original(self, cluster_resolver, worker_device)
        if kind == "CPU":
            devices = tuple(f"{worker_device}/device:CPU:{index}" for index in range(num_cpus))
        return tuple(devices[::devices_per_replica]), kind

    owner._initialize_local_devices = local_devices
    try:
        yield
    finally:
        owner._initialize_local_devices = original
