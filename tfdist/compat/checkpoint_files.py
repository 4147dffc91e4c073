# SPDX-License-Identifier: Apache-2.0
"""Lets several workers write one `tf.train.Checkpoint` to one directory at once.

TensorFlow's workers write parts of the same names there, of which one removes the other's. All ways to save a
checkpoint meet in a private class; there is no public one that `tf.train.CheckpointManager` goes through.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint

from tfdist.compat import replacing


def install(task: str) -> None:
    """Has this process write each checkpoint under a name of its own, and put it in its place when it is whole.

    The workers' checkpoints are alike, so it does not matter whose is there in the end.

    Args:
      task: tells the workers apart, such as "worker:1".
    """
    replacing.once(checkpoint.TrackableSaver, "save", lambda original: _staging(original, task))


def _staging(original: Callable[..., Any], task: str) -> Callable[..., Any]:
    def save(self: Any, file_prefix: Any, *args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly() or not isinstance(file_prefix, str | os.PathLike):
            return original(self, file_prefix, *args, **kwargs)
        prefix = os.fspath(file_prefix)
        staged = f"{prefix}.of-{task.replace(':', '-')}"
        written = original(self, staged, *args, **kwargs)
        # A number may have been added. The index comes last: with it the checkpoint is complete.
        added = _text(written)[len(staged) :]
        paths = tf.io.gfile.glob(f"{staged}{added}.*")
        for path in sorted(paths, key=lambda path: path.endswith(".index")):
            tf.io.gfile.rename(path, prefix + path[len(staged) :], overwrite=True)
        return tf.constant(prefix + added)

    return save


def _text(path: Any) -> str:
    return path.numpy().decode() if isinstance(path, tf.Tensor) else os.fspath(path)
