# SPDX-License-Identifier: Apache-2.0
"""Values of TensorBoard's summaries: scalars, histograms and text."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.coordination.usage import Usage
from tfdist.telemetry.histogram import Histogram
from tfdist.telemetry.report import Tally, Times

_PREFIX = "tfdist/"


def scalar(name: str, value: float) -> Any:
    """Returns a scalar with the tag tfdist/<name>."""
    return tf.compat.v1.Summary.Value(tag=_PREFIX + name, simple_value=value)


def histogram(name: str, values: Histogram) -> Any:
    """Returns a histogram of seconds; it must not be empty."""
    return _histogram(
        name,
        min=values.least,
        max=values.most,
        num=values.count,
        sum=values.total,
        sum_squares=values.squares,
        bucket_limit=[0.0, *(limit for limit, _ in values.buckets())],
        bucket=[0, *(count for _, count in values.buckets())],
    )


def counts(name: str, given: collections.Counter[int]) -> Any:
    """Returns a histogram of whole numbers; it must not be empty."""
    rows = sorted(given.items())
    return _histogram(
        name,
        min=rows[0][0],
        max=rows[-1][0],
        num=given.total(),
        sum=sum(value * count for value, count in rows),
        sum_squares=sum(value * value * count for value, count in rows),
        # A bucket ends half a number above.
        bucket_limit=[rows[0][0] - 0.5, *(value + 0.5 for value, _ in rows)],
        bucket=[0, *(count for _, count in rows)],
    )


def _histogram(name: str, **fields: Any) -> Any:
    return tf.compat.v1.Summary.Value(tag=_PREFIX + name, histo=tf.compat.v1.HistogramProto(**fields))


def text(name: str, line: str) -> Any:
    """Returns text for the Text tab; it is shown as it is, not as Markdown."""
    shown = "\n".join("    " + each for each in line.splitlines())
    tensor = tf.make_tensor_proto([shown.encode()], tf.string)
    value = tf.compat.v1.Summary.Value(tag=_PREFIX + name, tensor=tensor)
    value.metadata.plugin_data.plugin_name = "text"
    return value


# Scalars and histograms of one point of the Telemetry callback. docs/telemetry.md lists them.


def job(
    secs: float,
    updates: float,
    examples: float,
    tally: Tally,
    settings: Mapping[str, float],
    counted: Sequence[float],
    has_policy: bool,
) -> list[Any]:
    """Returns the values of the job for an interval.

    Args:
      secs: length of the interval.
      updates: number of updates.
      examples: number of examples in their gradients; 0 if it isn't known.
      tally: of the recorder.
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
    is_decided = tally.updates > 0
    if is_decided:
        values += [
            scalar("wait/per_update_secs", tally.wait_secs / tally.updates),
            scalar("wait/first_to_last_secs", tally.spread_secs / tally.updates),
        ]
        if has_policy:
            kinds = zip(("accepted", "dropped", "lost"), tally.counts.sum(1).tolist(), strict=True)
            values += [scalar(f"gradients/{kind}", count / tally.updates) for kind, count in kinds]
            total = sum(value * count for value, count in tally.staleness.items())
            values.append(scalar("staleness/mean", total / max(1, tally.staleness.total())))
        if tally.reduce.count:
            values.append(scalar("time/reduce_secs", tally.reduce.total / tally.updates))
    return values + _times(tally, is_decided, has_policy)


def _times(tally: Tally, is_decided: bool, has_policy: bool) -> list[Any]:
    """Returns the times of all workers' gradients together."""
    whole = Times()
    for each in tally.times.values():
        whole.merge(each)
    if not whole.step.count:
        return []
    slowest = max(each.step.percentile(50) for each in tally.times.values() if each.step.count)
    values = [
        scalar("time/step_secs", whole.step.percentile(50)),
        scalar("time/step_secs_p95", whole.step.percentile(95)),
        scalar("time/step_secs_slowest", slowest),
        histogram("time/steps", whole.step),
    ]
    kinds = {"input": whole.input, "compute": whole.compute, "rest": whole.rest}
    values += [scalar(f"time/{kind}_secs", found.percentile(50)) for kind, found in kinds.items() if found.count]
    if is_decided and whole.wait.count:
        values.append(scalar("time/wait_secs", whole.wait.percentile(50)))
    if is_decided and has_policy:
        values.append(scalar("time/held_secs", whole.held.mean))
        if tally.staleness:
            values.append(counts("staleness/gradients", tally.staleness))
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
