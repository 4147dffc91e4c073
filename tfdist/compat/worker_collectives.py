# SPDX-License-Identifier: Apache-2.0
"""Collectives of one tensor over several workers by TensorFlow, with what makes them quick in a step.

`tf.distribute.Strategy.reduce` leaves two things to be saved where all workers trace the same step. For each execution
it draws a new key, about which the workers ask the first one (`instance_keys.fixed`). And it always sends a sum around
the ring twice: once to add up, and once for all to have it. A small tensor of a few workers is there sooner if all send
theirs to all, and each adds them up, in the same order. There is no public way to a collective of a strategy's group.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.compat import instance_keys, optimizer_patches, part_collectives, replica_parts, replicas

NEEDS = (
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher._all_gather",
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher.all_reduce",
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
        (total,) = optimizer_patches.sum_over_replicas([flat])
        return total
    parts = replica_parts.of(strategy)
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
    launcher, device = _launcher(strategy, flat)
    with instance_keys.fixed(strategy), tf.device(device):
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

    What fits into `HEAD_BYTES` costs one collective. Of longer messages the lengths are known after it, and the rest
    follows in a second one, which needs a key for each execution because its shape differs.

    Args:
      strategy: see `sum_of`.
      message: 1-D uint8; each worker has one of its own length.
      in_step: True in a step that all workers trace alike, whose first collective then needs no key for each execution.

    Returns:
      uint8 [workers, longest], each message padded with zeros.
    """
    num_workers = replicas.worker_count(strategy)
    launcher, device = part_collectives.launcher(strategy, 0), strategy.extended.worker_devices[0]
    with tf.device(device):
        # TensorFlow gathers no bytes, but integers.
        length = tf.size(message)
        head = tf.concat([[length], _as_integers(_padded(message[:HEAD_BYTES], HEAD_BYTES))], 0)
        with instance_keys.fixed(strategy) if in_step else instance_keys.counted(strategy):
            heads = tf.reshape(launcher._all_gather(head, None), [num_workers, 1 + HEAD_BYTES // 4])
        longest, begun = tf.reduce_max(heads[:, 0]), _as_bytes(heads[:, 1:])

        def with_rest() -> tf.Tensor:
            rest = _as_integers(_padded(message[HEAD_BYTES:], (longest - HEAD_BYTES + 3) // 4 * 4))
            with tf.device(device), instance_keys.counted(strategy):
                rests = launcher._all_gather(rest, None)
            return tf.concat([begun, _as_bytes(tf.reshape(rests, [num_workers, -1]))], 1)

        return tf.cond(longest > HEAD_BYTES, with_rest, lambda: begun)[:, :longest]


def gathered_bytes(lengths: tf.Tensor) -> tf.Tensor:
    """Returns how many bytes `gather` carries from each worker to each other one, for messages so long."""
    longest = tf.reduce_max(lengths)
    return 4 + HEAD_BYTES + tf.maximum((longest - HEAD_BYTES + 3) // 4 * 4, 0)


def _launcher(strategy: Any, flat: tf.Tensor) -> tuple[Any, str]:
    """Returns the launcher of the collectives of the part that a tensor is of, and its device."""
    parts = replica_parts.of(strategy)
    if parts is None:
        (device,) = strategy.extended.worker_devices
        return part_collectives.launcher(strategy, 0), device
    part = parts.part_of(flat)
    return part_collectives.launcher(strategy, part), parts.groups[0][part]


def _padded(message: tf.Tensor, size: Any) -> tf.Tensor:
    return tf.pad(message, [[0, size - tf.size(message)]])


def _as_integers(message: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tf.reshape(message, [-1, 4]), tf.int32)


def _as_bytes(integers: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.bitcast(integers, tf.uint8), [tf.shape(integers)[0], -1])
