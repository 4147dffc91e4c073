# SPDX-License-Identifier: Apache-2.0
"""TensorBoard's event files, one in each run directory, written by a thread.

Files of single tasks have the same format under a name that TensorBoard doesn't list: the page and `tfdist watch` read
them. So one training is few runs.

`tf.summary` isn't used: its operations run in the caller's thread, and under parameter servers beside the cluster's. An
event file is a TFRecord file of `Event` protos.
"""

from __future__ import annotations

import atexit
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.telemetry import scalar_files

FLUSH_SECS = 2.0
_CLOSE_SECS = 20.0
# Points that wait for a disk that does not answer; beyond that the oldest are left out.
_MOST_PENDING = 10_000
_MARK = scalar_files.MARK
# Runs that others may write, too: programs of their own, and Keras' TensorBoard callback.
_SHARED = (("",), ("train", "validation"))

# Returns the values of an event, in the writer's thread.
Values = Callable[[], Sequence[Any]]
_numbers = itertools.count()


class EventWriters:
    """Writes the events of several run directories of one log directory. Any thread may call it.

    `add` never waits for the disk. An error of the disk, or a directory that vanishes, is one warning; with the next
    flush another file is begun.

    Args:
      directory: log directory of TensorBoard; any path of `tf.io.gfile`.
      warn: receives a line when the disk fails.
      flush_secs: time between two writes.
    """

    def __init__(
        self,
        directory: str,
        warn: Callable[[str], object],
        flush_secs: float = FLUSH_SECS,
    ) -> None:
        self.directory = directory
        self._flush_secs = flush_secs
        self._warn = warn
        # Guards `_pending`; the other one the files.
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._pending: list[tuple[str, int, float, Values]] = []
        self._files: dict[str, _EventFile] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfdist telemetry", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add(self, run: str, step: int, values: Values) -> None:
        """Adds an event to the file of a run; `values` is called later, in the writer's thread."""
        with self._lock:
            self._pending.append((run, step, time.time(), values))
            del self._pending[:-_MOST_PENDING]

    def flush(self) -> None:
        """Writes what was added; waits for the disk."""
        with self._writing:
            with self._lock:
                pending, self._pending = self._pending, []
            changed = set()
            for run, step, wall_time, values in pending:
                try:
                    found = values()
                except Exception as error:
                    self._warn(f"Telemetry: a point of {run or 'the run'} is left out: {' '.join(str(error).split())}")
                    continue
                try:
                    summary = tf.compat.v1.Summary(value=found)
                    if summary.value:
                        self._file(run).write(tf.compat.v1.Event(wall_time=wall_time, step=step, summary=summary))
                        changed.add(run)
                except Exception as error:
                    # Telemetry never ends a training, whatever a file system raises.
                    self._failed(run, error)
            for run in changed & self._files.keys():
                try:
                    self._files[run].flush()
                except Exception as error:
                    self._failed(run, error)

    def close(self) -> None:
        """Writes what was added, closes all files and ends the thread; may be called again."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECS)
        if self._thread.is_alive():
            self._warn(f"Telemetry: the disk of {self.directory} did not answer for {_CLOSE_SECS:g} s")
        atexit.unregister(self.close)

    def _run(self) -> None:
        while not self._ended.wait(self._flush_secs):
            self.flush()
        self.flush()
        with self._writing:
            for run in list(self._files):
                try:
                    self._files.pop(run).close()
                except Exception as error:
                    self._failed(run, error)

    def _file(self, run: str) -> _EventFile:
        file = self._files.get(run)
        if file is not None and file.is_gone():
            self._failed(run, FileNotFoundError(f"{file.path} has vanished"))
            file = None
        if file is None:
            is_listed = scalar_files.task_of(run) is None
            file = self._files[run] = _EventFile(_join(self.directory, self._name(run)), is_listed)
        return file

    def _name(self, run: str) -> str:
        """Returns the directory of a run: another one where somebody else writes, because TensorBoard mixes them up."""
        shared = next((names for names in _SHARED if run in names), ())
        if any(_foreign_events(_join(self.directory, each)) for each in shared):
            return f"tfdist_{run}" if run else "tfdist"
        return run

    def _failed(self, run: str, error: Exception) -> None:
        self._files.pop(run, None)
        text = " ".join(str(error).split())
        self._warn(f"Telemetry: {_join(self.directory, run)} can't be written, and is tried again: {text}")


class _EventFile:
    """One event file; begins it.

    Args:
      directory: its run directory, which is made if need be.
      is_listed: True if TensorBoard is to list the run.
    """

    def __init__(self, directory: str, is_listed: bool) -> None:
        tf.io.gfile.makedirs(directory)
        host = socket.gethostname()
        kind = "events.out.tfevents" if is_listed else "scalars"
        name = f"{kind}.{int(time.time()):010d}.{host}.{os.getpid()}.{next(_numbers)}{_MARK}"
        self.path = _join(directory, name)
        self._writer = tf.io.TFRecordWriter(self.path)
        self.write(tf.compat.v1.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def is_gone(self) -> bool:
        """Returns True if somebody has deleted a local file; an object store isn't asked, for its price and time."""
        return "://" not in self.path and not os.path.exists(self.path)  # noqa: PTH110


def _foreign_events(directory: str) -> bool:
    try:
        names = tf.io.gfile.listdir(directory)
    except tf.errors.OpError:
        return False
    return any("tfevents" in name and not name.endswith(_MARK) for name in names)


def _join(directory: str, name: str) -> str:
    return os.path.join(directory, name)  # noqa: PTH118 - may be a gs:// path
