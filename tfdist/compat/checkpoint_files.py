# SPDX-License-Identifier: Apache-2.0
"""Lets several workers write one `tf.train.Checkpoint` to one directory at once.

TensorFlow's workers write parts of the same names there, of which one removes the other's. All ways to save a
checkpoint meet in a private class; there is no public one that `tf.train.CheckpointManager` goes through.

A checkpoint is two files, an index and the values that it has the checksums of; no file system replaces two at once.
Each worker writes them under names of its own and puts them in their places while it holds a lock of the directory.
Restoring takes the lock too, so that nobody reads the index of one worker with the values of another. Workers that
have the same values leave the first one's files where they are: what a worker has saved does not change under readers
that know of no lock. Their files differ even so, by the names of layers if the workers made different models before.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint

from tfdist.compat import replacing

NEEDS = (
    "tensorflow.python.checkpoint.checkpoint:TrackableSaver.restore(save_path)",
    "tensorflow.python.checkpoint.checkpoint:TrackableSaver.save(file_prefix)",
)

# Another worker holds the lock while it renames two files or reads a checkpoint. A restore that waits for the other
# workers would never let them save, so nobody waits longer than this.
LOCK_SECS = 30.0

# Its entry in a checkpoint, which has names of layers in it.
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


def install(task: str) -> None:
    """Makes this process write each checkpoint under another name, and rename it once it is whole.

    Args:
      task: name of this worker, such as "worker:1".
    """
    replacing.once(checkpoint.TrackableSaver, "save", lambda original: _staging(original, task))
    replacing.once(checkpoint.TrackableSaver, "restore", _undisturbed)


def _staging(original: Callable[..., Any], task: str) -> Callable[..., Any]:
    def save(self: Any, file_prefix: Any, *args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly() or not isinstance(file_prefix, str | os.PathLike):
            return original(self, file_prefix, *args, **kwargs)
        prefix = os.fspath(file_prefix)
        staged = f"{prefix}.of-{task.replace(':', '-')}"
        written = _text(original(self, staged, *args, **kwargs))
        # A number may have been added.
        target = prefix + written[len(staged) :]
        with locked(target, fcntl.LOCK_EX):
            publish(written, target)
        return tf.constant(target)

    return save


def _undisturbed(original: Callable[..., Any]) -> Callable[..., Any]:
    def restore(self: Any, save_path: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(save_path, str | os.PathLike):
            return original(self, save_path, *args, **kwargs)
        with locked(os.fspath(save_path), fcntl.LOCK_SH):
            return original(self, save_path, *args, **kwargs)

    return restore


def publish(written: str, target: str) -> None:
    """Moves a complete checkpoint to its destination; discards it if the one there has the same values."""
    paths = tf.io.gfile.glob(f"{written}.*")
    if _have_same_values(written, target):
        for path in paths:
            tf.io.gfile.remove(path)
        return
    # The index comes last: with it the checkpoint is complete.
    for path in sorted(paths, key=lambda path: path.endswith(".index")):
        tf.io.gfile.rename(path, target + path[len(written) :], overwrite=True)


def _have_same_values(written: str, target: str) -> bool:
    try:
        one, other = tf.train.load_checkpoint(written), tf.train.load_checkpoint(target)
        shapes = one.get_variable_to_shape_map()
        if shapes != other.get_variable_to_shape_map():
            return False
        names = shapes.keys() - {_OBJECT_GRAPH}
        return all(_is_same(one.get_tensor(name), other.get_tensor(name)) for name in names)
    except (tf.errors.OpError, ValueError, RuntimeError):
        # There is no checkpoint yet, or an incomplete one.
        return False


def _is_same(one: Any, other: Any) -> bool:
    # Bytes: NaN is the same as NaN. An array of Python objects has the addresses of its strings as bytes.
    is_plain = isinstance(one, np.ndarray | np.generic) and one.dtype.kind != "O"
    return one.tobytes() == other.tobytes() if is_plain else np.array_equal(one, other)


@contextlib.contextmanager
def locked(prefix: str, kind: int) -> Iterator[None]:
    """Holds the lock of the directory with this checkpoint, where its file system has such locks."""
    try:
        directory = os.open(prefix.rpartition("/")[0] or ".", os.O_RDONLY)
    except OSError:
        # Not on a mounted file system, as gs://.
        yield
        return
    try:
        _lock(directory, kind)
        yield
    finally:
        # Closing lets go of it.
        os.close(directory)


def _lock(directory: int, kind: int) -> None:
    deadline = time.monotonic() + LOCK_SECS
    while True:
        try:
            return fcntl.flock(directory, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        except OSError:
            # Some network file systems have no locks of directories.
            return None


def _text(path: Any) -> str:
    return path.numpy().decode() if isinstance(path, tf.Tensor) else os.fspath(path)
