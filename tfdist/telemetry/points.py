# SPDX-License-Identifier: Apache-2.0
"""Scalars and histograms of one point of the Telemetry callback, by run directory. docs/telemetry.md lists them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.runtime.usage import Usage
from tfdist.telemetry import summaries
from tfdist.telemetry.histogram import Histogram
from tfdist.telemetry.recorder import Sums, Times

# Charts of the Custom Scalars tab: regular expressions of tags, which are the same in all runs.
LAYOUT = {
    "tfdist: speed": {
        "examples per second": ["tfdist/speed/examples_per_sec"],
        "updates per second": ["tfdist/speed/updates_per_sec"],
    },
    "tfdist: who is slow": {
        "time of a gradient, median": ["tfdist/time/step_secs"],
        "time of a gradient, 95th percentile": ["tfdist/time/step_secs_p95"],
        "input, median": ["tfdist/time/input_secs"],
        "computing, median": ["tfdist/time/compute_secs"],
        "wait of an accepted gradient, median": ["tfdist/time/wait_secs"],
        "all-reduce, mean": ["tfdist/time/reduce_secs"],
        "held back before a gradient, mean": ["tfdist/time/held_secs"],
        "dropped gradients per update": ["tfdist/gradients/dropped"],
    },
    "tfdist: policy": {
        "wait of an update": ["tfdist/wait/.*"],
        "mean staleness": ["tfdist/staleness/mean"],
        "gradients in an update": ["tfdist/policy/replicas_to_aggregate", "tfdist/policy/spares"],
    },
    "tfdist: machines": {
        "bytes sent per second": ["tfdist/network/sent_bytes_per_sec"],
        "bytes received per second": ["tfdist/network/received_bytes_per_sec"],
        "CPUs in use": ["tfdist/process/cpus"],
        "resident memory": ["tfdist/process/memory_bytes"],
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
    sums: Sums
    counted: Sequence[int] = ()


def speed(secs: float, updates: float, examples: float) -> list[Any]:
    """Returns the values of the run `train`."""
    if secs <= 0:
        return []
    values = [summaries.scalar("speed/updates_per_sec", updates / secs)]
    return values + ([summaries.scalar("speed/examples_per_sec", examples / secs)] if examples else [])


def policy(sums: Sums, times: Mapping[int, Times], settings: Mapping[str, float]) -> list[Any]:
    """Returns the values of the run `policy`, for the updates of an interval."""
    values = [summaries.scalar(f"policy/{name}", value) for name, value in settings.items()]
    if not sums.updates:
        return values
    staleness = collections.Counter[int]()
    for each in times.values():
        staleness.update(each.staleness)
    values += [
        summaries.scalar("wait/per_update_secs", sums.wait_secs / sums.updates),
        summaries.scalar("wait/first_to_last_secs", sums.spread_secs / sums.updates),
        summaries.scalar("gradients/accepted", sum(sums.accepted) / sums.updates),
        summaries.scalar("gradients/dropped", sum(sums.dropped) / sums.updates),
        summaries.scalar("gradients/lost", sum(sums.lost) / sums.updates),
        summaries.scalar("staleness/mean", sums.staleness / max(1, sum(sums.accepted))),
    ]
    if sums.reduce_secs:
        values.append(summaries.scalar("time/reduce_secs", sums.reduce_secs / sums.updates))
    return values + ([summaries.counts("staleness/gradients", staleness)] if staleness else [])


def worker(replica: int, sums: Sums | None, times: Times | None, counted: float | None) -> list[Any]:
    """Returns the values of a worker's run.

    Args:
      replica: index of the worker.
      sums: of the interval; None if no policy decides about gradients.
      times: of its gradients in the interval, if there were any.
      counted: bytes that it has sent for each update, where tfdist counts them.
    """
    values = []
    if sums is not None and sums.updates:
        kinds = {"accepted": sums.accepted, "dropped": sums.dropped, "lost": sums.lost}
        values += [summaries.scalar(f"gradients/{kind}", by[replica] / sums.updates) for kind, by in kinds.items()]
    if counted is not None:
        values.append(summaries.scalar("network/counted_bytes_per_update", counted))
    if times is None or not times.step.count:
        return values
    values += [
        summaries.scalar("time/step_secs", times.step.percentile(50)),
        summaries.scalar("time/step_secs_p95", times.step.percentile(95)),
        summaries.histogram("time/steps", times.step),
    ]
    if times.input.count:
        kinds = {"input": times.input, "compute": times.compute, "rest": times.rest}
        values += [summaries.scalar(f"time/{kind}_secs", found.percentile(50)) for kind, found in kinds.items()]
    if sums is not None:
        values += _of_policy(times)
    return values


def _of_policy(times: Times) -> list[Any]:
    values = [summaries.scalar("time/held_secs", times.held.mean)]
    kinds: dict[str, Histogram] = {"waits": times.wait, "holds": times.held}
    values += [summaries.histogram(f"time/{name}", found) for name, found in kinds.items() if found.count]
    if times.wait.count:
        values.append(summaries.scalar("time/wait_secs", times.wait.percentile(50)))
    if times.staleness:
        mean = sum(value * count for value, count in times.staleness.items()) / times.staleness.total()
        values.append(summaries.scalar("staleness/mean", mean))
        values.append(summaries.counts("staleness/gradients", times.staleness))
    return values


def process(last: Usage | None, now: Usage, secs: float) -> list[Any]:
    """Returns the values of a task's process; rates are those of the `secs` since `last`."""
    values = [
        summaries.scalar("network/sent_bytes", now.bytes_sent),
        summaries.scalar("network/received_bytes", now.bytes_received),
        summaries.scalar("process/memory_bytes", now.memory_bytes),
        summaries.scalar("process/restarts", now.restarts),
    ]
    if last is None or secs <= 0:
        return values
    return [
        *values,
        summaries.scalar("network/sent_bytes_per_sec", (now.bytes_sent - last.bytes_sent) / secs),
        summaries.scalar("network/received_bytes_per_sec", (now.bytes_received - last.bytes_received) / secs),
        summaries.scalar("process/cpus", max(0.0, now.cpu_secs - last.cpu_secs) / secs),
    ]


def run_of(task: str, num_workers: int) -> str | None:
    """Returns the run directory of a task such as "worker:3"; None for the chief, whose run is `policy`."""
    job, _, index = task.partition(":")
    if job == "worker":
        return f"workers/worker_{int(index):0{max(2, len(str(num_workers - 1)))}d}"
    return f"ps/ps_{index}" if job == "ps" else None
