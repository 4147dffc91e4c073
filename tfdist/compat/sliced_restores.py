# SPDX-License-Identifier: Apache-2.0
"""Restores a variable whose checkpoint is in slices, one for each shard, from all of its slices.

`Trackable._serialize_to_tensors` may return a dictionary of slices in place of a tensor, and TensorFlow saves each
slice on the device that has it. Its restore (TensorFlow 2.21, `TrackableSaveable.restore`) pairs names with tensors one
to one, and so gives the variable its first slice alone. There is no other way to restore by parts, because Keras'
variables define these methods. The change is permanent, and one of variables with several slices only.
"""

from __future__ import annotations

from typing import Any

from tensorflow.python.training.saving import saveable_object_util

from tfdist.compat import replacing

NEEDS = (
    "tensorflow.python.training.saving.saveable_object_util:TrackableSaveable._local_names",
    "tensorflow.python.training.saving.saveable_object_util:TrackableSaveable._trackable",
    "tensorflow.python.training.saving.saveable_object_util:TrackableSaveable.restore",
)


def install() -> None:
    """Changes TensorFlow's restore, once."""
    replacing.once(saveable_object_util.TrackableSaveable, "restore", _from_all_slices)


def _from_all_slices(original: Any) -> Any:
    def restore(saveable: Any, restored_tensors: Any, restored_shapes: Any) -> Any:
        names = saveable._local_names
        if len(names) != 1 or len(saveable.specs) < 2:
            return original(saveable, restored_tensors, restored_shapes)
        slices = {spec.slice_spec: tensor for spec, tensor in zip(saveable.specs, restored_tensors, strict=True)}
        return saveable._trackable._restore_from_tensors({names[0]: slices})

    return restore
