# SPDX-License-Identifier: Apache-2.0
"""Saves and restores a variable in slices, each of which is read from the checkpoint when the one before is written.

`Trackable._serialize_to_tensors` may return a dictionary of slices in place of a tensor, and TensorFlow saves each
slice on the device that has it. There are two defects in its restore (TensorFlow 2.21). `TrackableSaveable.restore`
pairs names with tensors one to one, and so gives the variable its first slice alone. And all slices of a task are read
in one operation, before anything is assigned: beside a table the task has all of it a second time. There is no other
way to restore by parts, because Keras' variables define these methods. The changes are permanent, and ones of variables
with several slices, or with slices of the class `RowsOfShard`, only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import functional_saver, tensor_callable
from tensorflow.python.training.saving import saveable_object_util

from tfdist.compat import replacing

NEEDS = (
    "tensorflow.python.checkpoint.functional_saver:_single_shard_restore(file_prefix, shardable_tensors, options)",
    "tensorflow.python.checkpoint.sharding.sharding_util:ShardableTensor._tensor_save_spec",
    "tensorflow.python.checkpoint.tensor_callable:Callable",
    "tensorflow.python.training.saving.saveable_object_util:TrackableSaveable._local_names",
    "tensorflow.python.training.saving.saveable_object_util:TrackableSaveable._trackable",
    "tensorflow.python.training.saving.saveable_object_util:TrackableSaveable.restore",
)


class RowsOfShard(tensor_callable.Callable):
    """A slice of a variable that is read when it is saved, and written as soon as it has been restored.

    Args:
      read: returns the tensor to save.
      write: writes the restored tensor; returns the operation.
      dtype: of the tensor.
      device: that has it.
    """

    def __init__(self, read: Callable[[], tf.Tensor], write: Callable[[tf.Tensor], Any], dtype: Any, device: str):
        super().__init__(read, dtype=dtype, device=device)
        self.write = write


def install() -> None:
    """Changes TensorFlow's restore, once."""
    replacing.once(saveable_object_util.TrackableSaveable, "restore", _from_all_slices)
    replacing.once(functional_saver, "_single_shard_restore", _one_by_one)


def is_written(tensor: Any) -> bool:
    """Returns True for what a restored slice of `RowsOfShard` is replaced by."""
    return tensor.shape == (0,)


def _from_all_slices(original: Any) -> Any:
    def restore(saveable: Any, restored_tensors: Any, restored_shapes: Any) -> Any:
        names = saveable._local_names
        if len(names) != 1 or len(saveable.specs) < 2:
            return original(saveable, restored_tensors, restored_shapes)
        slices = {spec.slice_spec: tensor for spec, tensor in zip(saveable.specs, restored_tensors, strict=True)}
        return saveable._trackable._restore_from_tensors({names[0]: slices})

    return restore


def _one_by_one(original: Any) -> Any:
    def restore(file_prefix: Any, shardable_tensors: Any, options: Any = None) -> Any:
        rows = [each for each in shardable_tensors if isinstance(each._tensor_save_spec, RowsOfShard)]
        others = [each for each in shardable_tensors if not isinstance(each._tensor_save_spec, RowsOfShard)]
        found = original(file_prefix, others, options) if others else {}
        before: list[Any] = []
        for each in rows:
            with tf.control_dependencies(before):
                [(key, slices)] = original(file_prefix, [each], options).items()
                # None where operations run at once.
                before = [done] if (done := each._tensor_save_spec.write(slices[each.slice_spec])) is not None else []
            with tf.control_dependencies(before):
                found.setdefault(key, {})[each.slice_spec] = tf.zeros([0], each.dtype)
        return found

    return restore
