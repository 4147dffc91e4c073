# SPDX-License-Identifier: Apache-2.0
"""Scalars and histograms of one point of the Telemetry callback. docs/telemetry.md lists them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.runtime.usage import Usage
from tfdist.telemetry import summaries
from tfdist.telemetry.recorder import Sums, Times

# Charts of the Custom Scalars tab: tags, which are the same in all runs.
LAYOUT = {
    "tfdist: speed": {
        "loss": ["tfdist/logs/loss"],
        "updates per second": ["tfdist/speed/updates_per_sec"],
        "examples per second": ["tfdist/speed/examples_per_sec"],
    },
    "tfdist: time": {
        "a gradient: median, 95th percentile, slowest worker": ["tfdist/time/step_secs.*"],
        "parts of a step, medians": [
            f"tfdist/time/{part}_secs" for part in ("input", "compute", "rest", "wait", "held")
        ],
        "all-reduce, mean": ["tfdist/time/reduce_secs"],
    },
    "tfdist: policy": {
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
    sums: Sums
    counted: Sequence[int] = ()


def job(
    secs: float,
    updates: float,
    examples: float,
    sums: Sums | None,
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
      sums: of the recorder; None if no policy decides about gradients.
      times: of the gradients of each worker that is known here.
      settings: settings of the policy.
      counted: bytes that each worker has sent for each update, where tfdist counts them.
      has_policy: False where each update has a gradient of each worker: counts of gradients say nothing then.
    """
    rates = {"updates": updates, "examples": examples}
    values = [
        summaries.scalar(f"speed/{name}_per_sec", count / secs)
        for name, count in rates.items()
        if secs > 0 and (count or name == "updates")
    ]
    values += [summaries.scalar(f"policy/{name}", value) for name, value in settings.items()]
    if counted:
        values.append(summaries.scalar("network/counted_bytes_per_update", sum(counted) / len(counted)))
    is_decided = sums is not None and sums.updates > 0
    if sums is not None and is_decided:
        values += [
            summaries.scalar("wait/per_update_secs", sums.wait_secs / sums.updates),
            summaries.scalar("wait/first_to_last_secs", sums.spread_secs / sums.updates),
        ]
        if has_policy:
            kinds = {"accepted": sums.accepted, "dropped": sums.dropped, "lost": sums.lost}
            values += [summaries.scalar(f"gradients/{kind}", sum(by) / sums.updates) for kind, by in kinds.items()]
            values.append(summaries.scalar("staleness/mean", sums.staleness / max(1, sum(sums.accepted))))
        if sums.reduce_secs:
            values.append(summaries.scalar("time/reduce_secs", sums.reduce_secs / sums.updates))
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
        summaries.scalar("time/step_secs", whole.step.percentile(50)),
        summaries.scalar("time/step_secs_p95", whole.step.percentile(95)),
        summaries.scalar("time/step_secs_slowest", slowest),
        summaries.histogram("time/steps", whole.step),
    ]
    if whole.input.count:
        kinds = {"input": whole.input, "compute": whole.compute, "rest": whole.rest}
        values += [summaries.scalar(f"time/{kind}_secs", found.percentile(50)) for kind, found in kinds.items()]
    if is_decided and whole.wait.count:
        values.append(summaries.scalar("time/wait_secs", whole.wait.percentile(50)))
    if is_decided and has_policy:
        values.append(summaries.scalar("time/held_secs", whole.held.mean))
        if whole.staleness:
            values.append(summaries.counts("staleness/gradients", whole.staleness))
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
    """Returns the directory of a task such as "worker:3"; None for the chief, whose values are those of the job."""
    job, _, index = task.partition(":")
    if job == "worker":
        return f"workers/worker_{int(index):0{max(2, len(str(num_workers - 1)))}d}"
    return f"ps/ps_{index}" if job == "ps" else None
