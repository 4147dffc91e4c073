# SPDX-License-Identifier: Apache-2.0
"""Values of TensorBoard's summaries: scalars, histograms, text, the layout of custom scalars, and hparams.

The last two are protos of the package tensorboard, which need not be installed to write them: they are encoded here.
"""

from __future__ import annotations

import collections
import dataclasses
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from google.protobuf import struct_pb2

from tfdist import _log
from tfdist.coordination.usage import Usage
from tfdist.telemetry.histogram import Histogram
from tfdist.telemetry.recorder import RecorderSums, Times

_PREFIX = "tfdist/"
# Status of a session in the hparams plugin.
SUCCESS, RUNNING = 1, 3


def scalar(name: str, value: float) -> Any:
    """Returns a scalar with the tag tfdist/<name>."""
    return tf.compat.v1.Summary.Value(tag=_PREFIX + name, simple_value=value)


def histogram(name: str, values: Histogram) -> Any:
    """Returns a histogram of seconds; it must not be empty."""
    limits = [0.0, *(limit for limit, _ in values.buckets())]
    counts = [0, *(count for _, count in values.buckets())]
    return _histogram(name, values.least, values.most, values.count, values.total, values.squares, limits, counts)


def counts(name: str, given: collections.Counter[int]) -> Any:
    """Returns a histogram of whole numbers; it must not be empty."""
    rows = sorted(given.items())
    total = sum(value * count for value, count in rows)
    squares = sum(value * value * count for value, count in rows)
    # A bucket ends half a number above.
    limits = [rows[0][0] - 0.5, *(value + 0.5 for value, _ in rows)]
    shares = rows[0][0], rows[-1][0], given.total(), total, squares
    return _histogram(name, *shares, limits, [0, *(count for _, count in rows)])


def _histogram(
    name: str,
    least: float,
    most: float,
    number: int,
    total: float,
    squares: float,
    limits: Sequence[float],
    bucket_counts: Sequence[int],
) -> Any:
    proto = tf.compat.v1.HistogramProto(
        min=least, max=most, num=number, sum=total, sum_squares=squares, bucket_limit=limits, bucket=bucket_counts
    )
    return tf.compat.v1.Summary.Value(tag=_PREFIX + name, histo=proto)


def text(name: str, line: str) -> Any:
    """Returns text for the Text tab; it is shown as it is, not as Markdown."""
    shown = "\n".join("    " + each for each in line.splitlines())
    return _tensor(_PREFIX + name, "text", b"", tf.make_tensor_proto([shown.encode()], tf.string))


def layout(categories: Mapping[str, Mapping[str, Sequence[str]]]) -> Any:
    """Returns the layout of the Custom Scalars tab: by category its charts, by chart regular expressions of tags."""
    content = _varint_field(1, 0)
    for title, charts in categories.items():
        category = _bytes_field(1, title.encode())
        for name, tags in charts.items():
            lines = b"".join(_bytes_field(1, tag.encode()) for tag in tags)
            category += _bytes_field(2, _bytes_field(1, name.encode()) + _bytes_field(2, lines))
        content += _bytes_field(2, category)
    return _tensor("custom_scalars__config__", "custom_scalars", b"", tf.make_tensor_proto(content, tf.string))


def session_start(hparams: Mapping[str, str | float | bool], start_secs: float) -> Any:
    """Returns the hyperparameters of a run, for the HParams tab."""
    session = b""
    for name, value in hparams.items():
        proto = struct_pb2.Value()
        if isinstance(value, bool):
            proto.bool_value = value
        elif isinstance(value, str):
            proto.string_value = value
        else:
            proto.number_value = value
        entry = _bytes_field(1, name.encode()) + _bytes_field(2, proto.SerializeToString())
        session += _bytes_field(1, entry)
    session += _double_field(5, start_secs)
    return _hparams("_hparams_/session_start_info", _bytes_field(3, session))


def session_end(status: int, end_secs: float) -> Any:
    """Returns the end of a run, for the HParams tab."""
    return _hparams(
        "_hparams_/session_end_info", _bytes_field(4, _varint_field(1, status) + _double_field(2, end_secs))
    )


def _hparams(tag: str, data: bytes) -> Any:
    return _tensor(tag, "hparams", _varint_field(1, 0) + data, tf.make_tensor_proto([], tf.float32, (0,)))


def _tensor(tag: str, plugin: str, content: bytes, tensor: Any) -> Any:
    value = tf.compat.v1.Summary.Value(tag=tag, tensor=tensor)
    value.metadata.plugin_data.plugin_name = plugin
    value.metadata.plugin_data.content = content
    return value


# The wire format of protocol buffers: https://protobuf.dev/programming-guides/encoding.


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(0x80 | (number & 0x7F))
        number >>= 7
    return bytes([*found, number])


def _varint_field(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double_field(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes_field(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


# Scalars and histograms of one point of the Telemetry callback. docs/telemetry.md lists them.


# Charts of the Custom Scalars tab: tags, which are the same in all runs.
LAYOUT = {
    f"{_log.PREFIX}speed": {
        "loss": ["tfdist/logs/loss"],
        "updates per second": ["tfdist/speed/updates_per_sec"],
        "examples per second": ["tfdist/speed/examples_per_sec"],
    },
    f"{_log.PREFIX}time": {
        "a gradient: median, 95th percentile, slowest worker": ["tfdist/time/step_secs.*"],
        "parts of a step, medians": [
            f"tfdist/time/{part}_secs" for part in ("input", "compute", "rest", "wait", "held")
        ],
        "all-reduce, mean": ["tfdist/time/reduce_secs"],
    },
    f"{_log.PREFIX}policy": {
        "wait of an update": ["tfdist/wait/.*"],
        "mean staleness": ["tfdist/staleness/mean"],
        "gradients in an update": ["tfdist/policy/replicas_to_aggregate", "tfdist/policy/spares"],
        "gradients per update": ["tfdist/gradients/.*"],
    },
}


@dataclasses.dataclass(frozen=True)
class Moment:
    """Counts between two batches of a training.

    Attributes:
      secs: time, without that of evaluations.
      batches: batches of Keras' loop.
      sums: of the recorder.
      counted: bytes that each worker has sent, where tfdist counts them.
    """

    secs: float
    batches: int
    sums: RecorderSums
    counted: Sequence[int] = ()


def job(
    secs: float,
    updates: float,
    examples: float,
    sums: RecorderSums,
    times: Mapping[int, Times],
    settings: Mapping[str, float],
    counted: Sequence[float],
    has_policy: bool,
) -> list[Any]:
    """Returns the values of the job for an interval.

    Args:
      secs: length of the interval.
      updates: number of updates.
      examples: number of examples in their gradients; 0 if it isn't known.
      sums: of the recorder.
      times: of the gradients of each worker that is known here.
      settings: settings of the policy.
      counted: bytes that each worker has sent for each update, where tfdist counts them.
      has_policy: False where each update has a gradient of each worker: counts of gradients say nothing then.
    """
    rates = {"updates": updates, "examples": examples}
    values = [
        scalar(f"speed/{name}_per_sec", count / secs)
        for name, count in rates.items()
        if secs > 0 and (count or name == "updates")
    ]
    values += [scalar(f"policy/{name}", value) for name, value in settings.items()]
    if counted:
        values.append(scalar("network/counted_bytes_per_update", sum(counted) / len(counted)))
    is_decided = sums.updates > 0
    if is_decided:
        values += [
            scalar("wait/per_update_secs", sums.wait_secs / sums.updates),
            scalar("wait/first_to_last_secs", sums.spread_secs / sums.updates),
        ]
        if has_policy:
            kinds = {"accepted": sums.accepted, "dropped": sums.dropped, "lost": sums.lost}
            values += [scalar(f"gradients/{kind}", sum(by) / sums.updates) for kind, by in kinds.items()]
            values.append(scalar("staleness/mean", sums.staleness / max(1, sum(sums.accepted))))
        if sums.reduce_secs:
            values.append(scalar("time/reduce_secs", sums.reduce_secs / sums.updates))
    return values + _times(times, is_decided, has_policy)


def _times(times: Mapping[int, Times], is_decided: bool, has_policy: bool) -> list[Any]:
    """Returns the times of all workers' gradients together."""
    whole = Times()
    for each in times.values():
        whole.merge(each)
    if not whole.step.count:
        return []
    slowest = max(each.step.percentile(50) for each in times.values() if each.step.count)
    values = [
        scalar("time/step_secs", whole.step.percentile(50)),
        scalar("time/step_secs_p95", whole.step.percentile(95)),
        scalar("time/step_secs_slowest", slowest),
        histogram("time/steps", whole.step),
    ]
    if whole.input.count:
        kinds = {"input": whole.input, "compute": whole.compute, "rest": whole.rest}
        values += [scalar(f"time/{kind}_secs", found.percentile(50)) for kind, found in kinds.items()]
    if is_decided and whole.wait.count:
        values.append(scalar("time/wait_secs", whole.wait.percentile(50)))
    if is_decided and has_policy:
        values.append(scalar("time/held_secs", whole.held.mean))
        if whole.staleness:
            values.append(counts("staleness/gradients", whole.staleness))
    return values


def process(last: Usage | None, now: Usage, secs: float) -> list[Any]:
    """Returns the values of a task's process; rates are those of the `secs` since `last`."""
    values = [
        scalar("network/sent_bytes", now.bytes_sent),
        scalar("network/received_bytes", now.bytes_received),
        scalar("process/memory_bytes", now.memory_bytes),
        scalar("process/restarts", now.restarts),
    ]
    if last is None or secs <= 0:
        return values
    return [
        *values,
        scalar("network/sent_bytes_per_sec", (now.bytes_sent - last.bytes_sent) / secs),
        scalar("network/received_bytes_per_sec", (now.bytes_received - last.bytes_received) / secs),
        scalar("process/cpus", max(0.0, now.cpu_secs - last.cpu_secs) / secs),
    ]


def run_of(task: str, num_workers: int) -> str | None:
    """Returns the directory of a task such as "worker:3"; None for the chief, whose values are those of the job."""
    job, _, index = task.partition(":")
    if job == "worker":
        return f"workers/worker_{int(index):0{max(2, len(str(num_workers - 1)))}d}"
    return f"ps/ps_{index}" if job == "ps" else None
