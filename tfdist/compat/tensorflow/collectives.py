# SPDX-License-Identifier: Apache-2.0
"""Collectives of one tensor over several workers by TensorFlow, with what makes them quick in a step.

`tf.distribute.Strategy.reduce` leaves two things to be saved where all workers trace the same step. For each execution
it draws a new key, about which the workers ask the first one (`replicas.fixed_keys`). And it always sends a sum around
the ring twice: once to add up, and once for all to have it. A small tensor of a few workers is there sooner if all send
theirs to all, and each adds them up, in the same order. There is no public way to a collective of a strategy's group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy, cross_device_ops

from tfdist.compat.keras import optimizers
from tfdist.compat.tensorflow import replicas

NEEDS = (
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher._all_gather, all_reduce",
    "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._initialize_local_devices",
    "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._get_variable_creator_initial_value",
    "tensorflow.python.distribute.cross_device_ops:CollectiveAllReduce._all_reduce",
    "tensorflow.python.distribute.mirrored_strategy:MirroredExtended._collective_keys, _communication_options",
)


# The part of a message that is sent before the lengths of all messages are known.
HEAD_BYTES = 2**10
# All workers' tensors together; above this the ring sends less.
_GATHERED_BYTES = 2**18
_GATHERED_DTYPES = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


def sum_of(strategy: Any, flat: tf.Tensor) -> tf.Tensor:
    """The sum of a tensor over all workers, in a graph or eagerly; in replica context, of workers of one device each.

    Args:
      strategy: a `MultiWorkerMirroredStrategy` of several workers.
      flat: 1-D, of the same shape on all workers.
    """
    context: Any = tf.distribute.get_replica_context()
    # Outside of any scope there is a context too, of another strategy.
    if context is not None and context.strategy is strategy:
        (total,) = optimizers.sum_over_replicas([flat])
        return total
    parts = replicas.parts_of(strategy)
    home = replicas.worker_device(strategy)
    if parts is not None:
        home = parts.groups[0][0 if tf.executing_eagerly() else parts.part_of(flat)]
    with tf.device(home):
        return tf.distribute.Strategy.reduce(strategy, "SUM", tf.identity(flat), axis=None)


def sum_in_step(strategy: Any, flat: tf.Tensor) -> tf.Tensor:
    """The same, traced in a step that all workers trace alike, of workers with one device each.

    Args:
      strategy: see `sum_of`.
      flat: 1-D, of the same static shape on all workers.
    """
    size, num_workers = flat.shape.num_elements(), replicas.worker_count(strategy)
    if tf.executing_eagerly() or size is None:
        return sum_of(strategy, flat)
    parts = replicas.parts_of(strategy)
    part = parts.part_of(flat) if parts else 0
    launcher, device = launcher_of_parts(strategy, part), strategy.extended.worker_devices[0]
    with replicas.fixed_keys(strategy), tf.device(parts.groups[0][part] if parts else device):
        if not is_gathered(strategy, flat):
            return launcher.all_reduce(tf.identity(flat))
        gathered = launcher._all_gather(tf.identity(flat), None)
        return tf.reduce_sum(tf.reshape(gathered, [num_workers, size]), 0)


def is_gathered(strategy: Any, flat: tf.Tensor) -> bool:
    """True if `sum_in_step` has each worker send this tensor to all others; False if it goes around a ring."""
    size, (device,) = flat.shape.num_elements(), strategy.extended.worker_devices
    if tf.executing_eagerly() or size is None or flat.dtype not in _GATHERED_DTYPES or "CPU" not in device:
        return False
    return size * flat.dtype.size * replicas.worker_count(strategy) <= _GATHERED_BYTES


def gather(strategy: Any, message: tf.Tensor, in_step: bool) -> tf.Tensor:
    """The messages of all workers of one device each, in a graph or eagerly, in any context.

    What fits into `HEAD_BYTES` costs one collective. For longer messages it gives the lengths, and a second one gives
    the rest. That needs a key for each execution, because its shape differs.

    Args:
      strategy: see `sum_of`.
      message: 1-D uint8; each worker has one of its own length.
      in_step: True in a step that all workers trace alike, whose first collective then needs no key for each execution.

    Returns:
      uint8 [workers, longest], each message padded with zeros.
    """
    num_workers = replicas.worker_count(strategy)
    launcher, device = launcher_of_parts(strategy, 0), strategy.extended.worker_devices[0]
    with tf.device(device):
        # TensorFlow gathers no bytes, but integers.
        length = tf.size(message)
        head = tf.concat([[length], _as_integers(_padded(message[:HEAD_BYTES], HEAD_BYTES))], 0)
        with replicas.fixed_keys(strategy) if in_step else replicas.counted_keys(strategy):
            heads = tf.reshape(launcher._all_gather(head, None), [num_workers, 1 + HEAD_BYTES // 4])
        longest, begun = tf.reduce_max(heads[:, 0]), _as_bytes(heads[:, 1:])

        def with_rest() -> tf.Tensor:
            rest = _as_integers(_padded(message[HEAD_BYTES:], (longest - HEAD_BYTES + 3) // 4 * 4))
            with tf.device(device), replicas.counted_keys(strategy):
                rests = launcher._all_gather(rest, None)
            return tf.concat([begun, _as_bytes(tf.reshape(rests, [num_workers, -1]))], 1)

        return tf.cond(longest > HEAD_BYTES, with_rest, lambda: begun)[:, :longest]


def gathered_bytes(lengths: tf.Tensor) -> tf.Tensor:
    """Returns how many bytes `gather` carries from each worker to each other one, for messages so long."""
    longest = tf.reduce_max(lengths)
    return 4 + HEAD_BYTES + tf.maximum((longest - HEAD_BYTES + 3) // 4 * 4, 0)


def _padded(message: tf.Tensor, size: Any) -> tf.Tensor:
    return tf.pad(message, [[0, size - tf.size(message)]])


def _as_integers(message: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tf.reshape(message, [-1, 4]), tf.int32)


def _as_bytes(integers: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.bitcast(integers, tf.uint8), [tf.shape(integers)[0], -1])


# Reduces values over replicas that span devices: each part among the devices that hold it.
#
# TensorFlow's all-reduce has one group of devices, the first of each replica, and would fetch the gradients of all
# parts to these. Its class is not public, nor is a strategy's own object of it. Nor are the local devices of a strategy
# of several workers: all GPUs, or the first CPU.


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

    def __init__(self, parts: replicas.ReplicaDevices, num_workers: int, options: Any, keys: Any) -> None:
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
        pairs, stock = list(value_destination_pairs), super().batch_reduce

        def reduce(chosen: Sequence[int]) -> Any:
            return stock(reduce_op, [pairs[index] for index in chosen], options)

        return self._together([value for value, _ in pairs], reduce)

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


def by_part(parts: replicas.ReplicaDevices | None, values: Sequence[Any]) -> list[list[int]]:
    """Returns the indices of the values of each part that has any, those of the last part first.

    The gradients of the last layers are computed first.
    """
    of_each = [0 if parts is None else parts.part_of(value) for value in values]
    return [[i for i, each in enumerate(of_each) if each == part] for part in sorted(set(of_each), reverse=True)]


def use_parts(strategy: Any, parts: replicas.ReplicaDevices) -> None:
    """Makes a strategy reduce each part among the devices that hold it."""
    extended, stock = strategy.extended, replicas.operations_of(strategy)
    if not isinstance(stock, cross_device_ops.CollectiveAllReduce):
        return  # Reduces to one device of those that the values are on.
    workers = replicas.worker_count(strategy) if replicas.has_other_workers(strategy) else 1
    operations = PartAllReduce(parts, workers, extended._communication_options, extended._collective_keys)
    replicas.replace_operations(strategy, operations)


def launcher_of_parts(strategy: Any, part: int) -> Any:
    """Returns what launches the collectives of a part, of workers of one replica each."""
    operations = replicas.operations_of(strategy)
    (found,) = getattr(operations, "by_part", [operations])[part]._launchers
    return found


def first_devices(devices_per_replica: int, num_cpus: int) -> contextlib.AbstractContextManager:
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

    return optimizers.patched_attributes([(owner, "_initialize_local_devices", local_devices)])


# Broadcasts the initial values of variables whose dtype TensorFlow's broadcast refuses, such as bfloat16 and int8.
#
# Under MultiWorkerMirroredStrategy the chief sends every worker the value that a variable begins with, by a collective
# that takes six dtypes (TensorFlow 2.21). There is no public way: the strategy makes a variable and broadcasts its
# value in one call. Such a value is cast to a wider dtype, which loses nothing, and back.


_TAKEN = frozenset({tf.bool, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64})


def broadcast_all_dtypes(strategy: tf.distribute.Strategy) -> None:
    """Allows variables of all numeric dtypes under a strategy of several workers."""
    extended: Any = strategy.extended
    original = extended._get_variable_creator_initial_value

    def creator_initial_value(
        replica_id: int, device: Any, primary_var: Any, **options: Any
    ) -> Callable[[], tf.Tensor] | tf.Tensor:
        if replica_id != 0:
            # Copies the first replica's value.
            return original(replica_id, device, primary_var, **options)

        def initial_value() -> tf.Tensor:
            value = options["initial_value"]
            with tf.device(device):
                value = value() if callable(value) else value
                # Of a variable that is restored from a checkpoint while it is made.
                value = tf.convert_to_tensor(getattr(value, "wrapped_value", value), options.get("dtype"))
            carrier = _carrier(value.dtype)
            carried = {**options, "initial_value": tf.cast(value, carrier), "dtype": carrier}
            return tf.cast(original(replica_id, device, primary_var, **carried)(), value.dtype)

        return initial_value

    extended._get_variable_creator_initial_value = creator_initial_value


def _carrier(dtype: tf.DType) -> tf.DType:
    """The dtype to send values of `dtype` as: the same where it is taken, or where there is no wider one."""
    if dtype in _TAKEN:
        return dtype
    if dtype.is_floating:
        return tf.float32
    return tf.int64 if dtype.is_integer else dtype


# All-gather of tensors of any dtype, strings and ragged tensors.
#
# TensorFlow's all-gather takes float16, float32, float64, int32 and int64. Other dtypes are cast or bitcast to one of
# these without loss. Strings become their bytes, padded to the longest one of all replicas. A ragged tensor is gathered
# by its parts.


_TAKEN = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
# Of the same size; complex128 gets another axis, of its two parts.
_BITS = {tf.uint32: tf.int32, tf.uint64: tf.int64, tf.complex64: tf.int64, tf.complex128: tf.float64}


def gather_any(stock: Callable[[Any], Any], local: Callable[[Any], tuple[Any, ...]], value: Any) -> Any:
    """Puts the values of all replicas together along the axis that `stock` gathers along.

    Args:
      stock: TensorFlow's all-gather along this axis, of tensors of the dtypes that it takes.
      local: returns the values of this process' replicas.
      value: tensor, `tf.RaggedTensor`, or one for each replica; strings and ragged tensors along axis 0 only.

    Raises:
      ValueError: the value is sparse.
    """

    def each(function: Callable[[Any], Any], given: Any) -> Any:
        parts = [function(one) for one in local(given)]
        return parts[0] if len(parts) == 1 else replicas.values_of_replicas(parts)

    first = local(value)[0]
    if isinstance(first, tf.SparseTensor):
        raise ValueError(
            "A SparseTensor can't be gathered from several workers; return tf.sparse.to_dense(...) of it, as from "
            f"predict_step. Received: {first.dtype.name}, shape {first.shape}"
        )
    if isinstance(first, tf.RaggedTensor):
        values = gather_any(stock, local, each(lambda ragged: ragged.values, value))
        lengths = stock(each(lambda ragged: ragged.row_lengths(), value))
        return tf.RaggedTensor.from_row_lengths(values, lengths, validate=False)
    if not isinstance(first, tf.Tensor) or first.dtype in _TAKEN:
        return stock(value)
    dtype = first.dtype
    if dtype == tf.string:
        # With an empty one, so that there is a longest one.
        flat = each(lambda strings: tf.concat([tf.reshape(strings, [-1]), [""]], 0), value)
        longest = each(lambda strings: tf.reduce_max(tf.strings.length(strings), keepdims=True), flat)
        width = tf.maximum(tf.reduce_max(stock(longest)), 1)
        codes = stock(each(lambda strings: _bytes(strings, width), value))
        return tf.strings.reduce_join(tf.gather([b"", *(bytes([code]) for code in range(256))], codes), -1)
    if dtype in _BITS:
        return tf.bitcast(stock(each(lambda tensor: tf.bitcast(tensor, _BITS[dtype]), value)), dtype)
    other = tf.float32 if dtype.is_floating else tf.int32
    return tf.cast(stock(each(lambda tensor: tf.cast(tensor, other), value)), dtype)


def _bytes(strings: tf.Tensor, width: tf.Tensor) -> tf.Tensor:
    """Returns int32 codes with one axis more: bytes plus 1, and 0 behind the end."""
    codes = tf.cast(tf.io.decode_raw(strings, tf.uint8, fixed_length=width), tf.int32)
    return tf.where(tf.range(width) < tf.strings.length(strings)[..., None], codes + 1, 0)
