# SPDX-License-Identifier: Apache-2.0
"""TensorBoard's event files: the thread that writes them, and the values of a point. docs/telemetry.md lists them.

`tf.summary` isn't used: a file in a directory that has vanished takes no point any more, and it says nothing.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist import _forks
from tfdist.coordination.usage import Usage
from tfdist.telemetry.histogram import Histogram
from tfdist.telemetry.report import Tally

_FLUSH_SECS = 2.0
_CLOSE_SECS = 20.0
# Points that wait for a disk that does not answer; beyond that the oldest are left out.
_MOST_PENDING = 10_000
_MARK = ".tfdist"
_PREFIX = "tfdist/"
# Runs that others may write, too: programs of their own, and Keras' TensorBoard callback.
_SHARED = (("",), ("train", "validation"))

# Returns the values of an event, in the writer's thread.
Values = Callable[[], Sequence[Any]]
_numbers = itertools.count()


class EventWriters:
    """Writes the events of several run directories of one log directory. Any thread may call it.

    `add` never waits for the disk. An error of the disk, or a directory that vanishes, is one warning; the next event
    begins another file.

    Args:
      directory: log directory of TensorBoard; any path of `tf.io.gfile`.
      warn: receives a line when the disk fails.
    """

    def __init__(self, directory: str, warn: Callable[[str], object]) -> None:
        self.directory = directory
        self._warn = warn
        # Guards `_pending`; the other one the files.
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._pending: list[tuple[str, int, float, Values]] = []
        # By run the path of its file, and the file.
        self._files: dict[str, tuple[str, tf.io.TFRecordWriter]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfdist telemetry", daemon=True)
        self._thread.start()
        _forks.at_exit(self.close)

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
            for run, step, wall_time, values in pending:
                with self._warning(run):
                    if found := values():
                        summary = tf.compat.v1.Summary(value=found)
                        event = tf.compat.v1.Event(wall_time=wall_time, step=step, summary=summary)
                        self._file(run).write(event.SerializeToString())
            for run in {run for run, *_ in pending} & self._files.keys():
                with self._warning(run):
                    self._files[run][1].flush()

    def close(self) -> None:
        """Writes what was added, closes all files and ends the thread; may be called again."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECS)
        if self._thread.is_alive():
            self._warn(f"Telemetry: the disk of {self.directory} did not answer for {_CLOSE_SECS:g} s")
        _forks.not_at_exit(self.close)

    def _run(self) -> None:
        while not self._ended.wait(_FLUSH_SECS):
            self.flush()
        self.flush()
        with self._writing:
            for run, (_, file) in list(self._files.items()):
                with self._warning(run):
                    file.close()

    @contextlib.contextmanager
    def _warning(self, run: str) -> Iterator[None]:
        """Turns an error into a warning: telemetry ends no training."""
        try:
            yield
        except Exception as error:
            self._files.pop(run, None)
            text = " ".join(str(error).split())
            self._warn(f"Telemetry: {_join(self.directory, run)} can't be written, and is tried again: {text}")

    def _file(self, run: str) -> tf.io.TFRecordWriter:
        """Returns the file of a run, a TFRecord file of `Event` protos; begins it."""
        path, file = self._files.get(run, ("", None))
        # An object store isn't asked, for its price and time.
        if file is not None and "://" not in path and not os.path.exists(path):  # noqa: PTH110
            self._warn(f"Telemetry: {path} has vanished, and another file is begun")
            file = None
        if file is None:
            directory = _join(self.directory, self._name(run))
            tf.io.gfile.makedirs(directory)
            number = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
            path = _join(directory, f"events.out.tfevents.{number}{_MARK}")
            file = tf.io.TFRecordWriter(path)
            file.write(tf.compat.v1.Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
            self._files[run] = path, file
        return file

    def _name(self, run: str) -> str:
        """Returns the directory of a run: another one where somebody else writes, because TensorBoard mixes them up."""
        shared = next((names for names in _SHARED if run in names), ())
        if any(_foreign_events(_join(self.directory, each)) for each in shared):
            return f"tfdist_{run}" if run else "tfdist"
        return run


def _foreign_events(directory: str) -> bool:
    try:
        names = tf.io.gfile.listdir(directory)
    except tf.errors.OpError:
        return False
    return any("tfevents" in name and not name.endswith(_MARK) for name in names)


def _join(directory: str, name: str) -> str:
    return os.path.join(directory, name)  # noqa: PTH118 - may be a gs:// path


def scalar(name: str, value: float) -> Any:
    """Returns a scalar with the tag tfdist/<name>."""
    return tf.compat.v1.Summary.Value(tag=_PREFIX + name, simple_value=value)


def histogram(name: str, least: float, most: float, rows: Sequence[tuple[float, int]]) -> Any:
    """Returns a histogram; `rows` are the upper limit and the count of each bucket, of one at least."""
    limits, counts = zip(*rows, strict=True)
    histo = tf.compat.v1.HistogramProto(min=least, max=most, num=sum(counts), bucket_limit=limits, bucket=counts)
    return tf.compat.v1.Summary.Value(tag=_PREFIX + name, histo=histo)


def text(name: str, line: str) -> Any:
    """Returns text for the Text tab; it is shown as it is, not as Markdown."""
    shown = "\n".join("    " + each for each in line.splitlines())
    tensor = tf.make_tensor_proto([shown.encode()], tf.string)
    value = tf.compat.v1.Summary.Value(tag=_PREFIX + name, tensor=tensor)
    value.metadata.plugin_data.plugin_name = "text"
    return value


def job(
    secs: float,
    updates: float,
    examples: float,
    tally: Tally,
    settings: Mapping[str, float] | None,
    counted: Sequence[float],
) -> list[Any]:
    """Returns the values of the job for an interval.

    Args:
      secs: length of the interval.
      updates: number of updates.
      examples: number of examples in their gradients; 0 if it isn't known.
      tally: of the recorder.
      settings: settings of the policy; None where each update has a gradient of each worker: then their counts say
        nothing.
      counted: bytes that each worker has sent for each update, where tfdist counts them.
    """
    rates = {"updates": updates, "examples": examples}
    values = [
        scalar(f"speed/{name}_per_sec", count / secs)
        for name, count in rates.items()
        if secs > 0 and (count or name == "updates")
    ]
    values += [scalar(f"policy/{name}", value) for name, value in (settings or {}).items()]
    if counted:
        values.append(scalar("network/counted_bytes_per_update", sum(counted) / len(counted)))
    if tally.updates:
        values += [
            scalar("wait/per_update_secs", tally.wait_secs / tally.updates),
            scalar("wait/first_to_last_secs", tally.spread_secs / tally.updates),
        ]
        if settings is not None:
            kinds = zip(("accepted", "dropped", "lost"), tally.counts.sum(1).tolist(), strict=True)
            values += [scalar(f"gradients/{kind}", count / tally.updates) for kind, count in kinds]
            total = sum(value * count for value, count in tally.staleness.items())
            values.append(scalar("staleness/mean", total / max(1, tally.staleness.total())))
        if tally.reduce.count:
            values.append(scalar("time/reduce_secs", tally.reduce.total / tally.updates))
    whole: collections.defaultdict[str, Histogram] = collections.defaultdict(Histogram)
    for times in tally.times.values():
        for kind, each in times.items():
            whole[kind].merge(each)
    step = whole["step"]
    if not step.count:
        return values
    values += [
        scalar("time/step_secs", step.percentile(50)),
        scalar("time/step_secs_p95", step.percentile(95)),
        scalar("time/step_secs_slowest", max(times["step"].percentile(50) for times in tally.times.values())),
        histogram("time/steps", step.least, step.most, step.buckets()),
    ]
    medians = ("input", "compute", "rest", *(["wait"] if tally.updates else []))
    values += [scalar(f"time/{kind}_secs", whole[kind].percentile(50)) for kind in medians if whole[kind].count]
    if tally.updates and settings is not None:
        values.append(scalar("time/held_secs", whole["held"].mean))
        if tally.staleness:
            stale = sorted(tally.staleness.items())
            # A bucket ends half a number above.
            rows = [(value + 0.5, count) for value, count in stale]
            values.append(histogram("staleness/gradients", stale[0][0], stale[-1][0], rows))
    return values


def process(last: Usage | None, now: Usage, secs: float) -> list[Any]:
    """Returns the values of a task's process; rates are those of the `secs` since `last`."""
    values = {
        "network/sent_bytes": now.bytes_sent,
        "network/received_bytes": now.bytes_received,
        "process/memory_bytes": now.memory_bytes,
        "process/restarts": now.restarts,
    }
    if last is not None and secs > 0:
        values |= {
            "network/sent_bytes_per_sec": (now.bytes_sent - last.bytes_sent) / secs,
            "network/received_bytes_per_sec": (now.bytes_received - last.bytes_received) / secs,
            "process/cpus": max(0.0, now.cpu_secs - last.cpu_secs) / secs,
        }
    return [scalar(name, value) for name, value in values.items()]
