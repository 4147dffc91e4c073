# SPDX-License-Identifier: Apache-2.0
"""Restores a checkpoint into variables that Keras has declared, and creates later.

`tf.train.Checkpoint(model=model).restore(path)` before the model is built restores each variable as soon as a layer
tracks it. On one device the variable exists by then. Under a strategy Keras declares variables in a
`keras.StatelessScope`, which creates them when it ends: TensorFlow raises while it restores a variable without a value,
and the checkpoint's value is lost. So the restore waits until the variable has been created. There is no public seam
at either moment.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.checkpoint import restore as checkpoint_restore

from tfdist.compat import keras_variables, own_attributes, replacing

NEEDS = (
    "keras:Variable._deferred_initialize",
    "tensorflow.python.checkpoint.restore:CheckpointPosition._restore_descendants",
    "tensorflow.python.checkpoint.restore:CheckpointPosition._single_restore(self)",
    "tensorflow.python.checkpoint.restore:CheckpointPosition.trackable",
)

# An attribute of Keras variables: the positions in checkpoints that are yet to be restored into it, in their order.
_WAITING = "_tfdist_waiting_restores"


def wait_for_variables() -> None:
    """Makes restores wait for the variables that Keras has declared. The replaced methods stay replaced."""
    replacing.once(checkpoint_restore.CheckpointPosition, "_single_restore", _restoring)
    replacing.once(keras.Variable, "_deferred_initialize", _creating)


def _restoring(original: Any) -> Any:
    def single_restore(self: Any) -> Any:
        variable = self.trackable
        if not isinstance(variable, keras.Variable) or keras_variables.tf_variable(variable) is not None:
            return original(self)
        own_attributes.setdefault(variable, _WAITING, list).append(self)
        # Restore operations, tensors, Python state and registered savers.
        return (), {}, (), {}

    return single_restore


def _creating(original: Any) -> Any:
    def deferred_initialize(self: Any) -> None:
        original(self)
        waiting = own_attributes.of(self, _WAITING)
        if waiting:
            own_attributes.remove(self, _WAITING)
            with tf.init_scope():
                for position in waiting:
                    position._restore_descendants()

    return deferred_initialize
