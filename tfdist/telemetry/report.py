# SPDX-License-Identifier: Apache-2.0
"""`Report`, the result of `strategy.report()`, and its table. No TensorFlow import."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

# Beyond so many workers or tasks a table shows some of them, and their number.
_MOST_ROWS = 8
_MOST_LISTED = 4
_MOST_STALENESS = 12


@dataclasses.dataclass(frozen=True)
class Percentiles:
    """Distribution of some seconds: percentiles within 2 %, mean and maximum exact.

    Attributes:
      count: number of values.
    """

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    most: float


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of `strategy.report()`, counted since the strategy was built. `print` shows a table.

    Attributes:
      updates: number of updates.
      accepted: number of gradients that entered an update, by worker: {"worker:0": 120, ...}.
      dropped: number of dropped gradients, by worker.
      staleness: number of applied gradients by staleness (global step - local step).
      wait_secs: total time for which updates waited for gradients.
      bytes_sent: bytes that the process of each task has sent over TCP, as the kernel counts them: workers, parameter
        servers and chief. Outside of Linux it is `message_bytes`; 0 for the replicas of one process.
      held_secs: time in which a worker had delivered a gradient and was not allowed to start the next, by worker.
      transfer: form in which variables and gradients cross the network, and why; of ParameterServerStrategy.
      examples: number of examples in the accepted gradients; 0 if unknown.
      bytes_received: likewise bytes received.
      step_secs: time from the start of a gradient's computation to its arrival, by worker, where it was measured.
      wait: time from the arrival of an accepted gradient to its update, by worker.
      held: time for which a worker was held back before it started a gradient, by worker.
      lost: number of gradients lost with their worker, by worker.
      losses: number of times that a task was lost, by task; {} if none was.
      returns: number of times that a lost task returned, by task.
      restarts: number of times that a launcher has started this job or a task again, by task.
      phase: "warmup" while fewer than all replicas take part, else "all".
      spares: number of replicas that the current update does not wait for; None without `BackupWorkers`.
      cpu_secs: CPU time of the process of each task, where it is known.
      memory_bytes: resident memory of the process of each task, where it is known.
      message_bytes: bytes of the messages that each worker has sent by `ParameterAveraging` or `Compression`, counted
        where tfdist sends them: without headers and all else that the process sends. 0 under other policies.
    """

    updates: int
    accepted: dict[str, int]
    dropped: dict[str, int]
    staleness: dict[int, int]
    wait_secs: float
    bytes_sent: dict[str, int]
    held_secs: dict[str, float] = dataclasses.field(default_factory=dict)
    transfer: str = ""
    examples: int = 0
    bytes_received: dict[str, int] = dataclasses.field(default_factory=dict)
    step_secs: dict[str, Percentiles] = dataclasses.field(default_factory=dict)
    wait: dict[str, Percentiles] = dataclasses.field(default_factory=dict)
    held: dict[str, Percentiles] = dataclasses.field(default_factory=dict)
    lost: dict[str, int] = dataclasses.field(default_factory=dict)
    losses: dict[str, int] = dataclasses.field(default_factory=dict)
    returns: dict[str, int] = dataclasses.field(default_factory=dict)
    restarts: dict[str, int] = dataclasses.field(default_factory=dict)
    phase: str = "all"
    spares: int | None = None
    cpu_secs: dict[str, float] = dataclasses.field(default_factory=dict)
    memory_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    message_bytes: dict[str, int] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        lines = [self._first()]
        if self.accepted:
            lines += _table(self._gradient_rows())
        if self.staleness:
            counts = [f"{staleness}: {count}" for staleness, count in sorted(self.staleness.items())]
            more = f", ... up to {max(self.staleness)}" if len(counts) > _MOST_STALENESS else ""
            lines.append("gradients by staleness: " + ", ".join(counts[:_MOST_STALENESS]) + more)
        if any(self.held_secs.values()):
            lines.append("held back: " + _listed({name: f"{secs:.2f} s" for name, secs in self.held_secs.items()}))
        lines += self._tasks()
        kinds = {"lost": self.losses, "back": self.returns, "restarted": self.restarts}
        if any(kinds.values()):
            shown = {
                what: _listed({name: f"{count} x" for name, count in each.items()}, _MOST_LISTED)
                for what, each in kinds.items()
            }
            lines.append("; ".join(f"{what}: {text}" for what, text in shown.items() if text))
        if self.transfer:
            lines.append(f"transfer: {self.transfer}")
        return "\n".join(lines)

    def _first(self) -> str:
        each = f" ({self.wait_secs / self.updates:.4f} s each)" if self.updates else ""
        examples = f", {self.examples:,} examples" if self.examples else ""
        spares = "" if self.spares is None else f", spares: {self.spares}"
        phase = "" if self.phase == "all" else f", phase: {self.phase}"
        return f"{self.updates} updates, waited {self.wait_secs:.2f} s for gradients{each}{examples}{spares}{phase}"

    def _gradient_rows(self) -> list[list[str]]:
        rows = [["worker", "accepted", "of updates", "dropped", "of its gradients"]]
        kinds = {"step, ms p50/p95": self.step_secs, "wait, ms": self.wait, "held, ms": self.held}
        kinds = {name: found for name, found in kinds.items() if any(each.most for each in found.values())}
        rows[0] += [*kinds, *(["lost"] if any(self.lost.values()) else [])]
        # Of many, those that cost most: the slowest, and whose gradients were dropped.
        slow = lambda name: (self.dropped.get(name, 0), self.step_secs[name].mean if name in self.step_secs else 0.0)  # noqa: E731
        names = list(self.accepted)
        shown = names if len(names) <= _MOST_ROWS else sorted(names, key=slow, reverse=True)[: _MOST_ROWS - 1]
        for name in shown:
            accepted, dropped = self.accepted[name], self.dropped.get(name, 0)
            row = [name, f"{accepted}", _share(accepted, self.updates), f"{dropped}"]
            row.append(_share(dropped, accepted + dropped))
            row += [_milliseconds(found.get(name)) for found in kinds.values()]
            rows.append(row + ([f"{self.lost[name]}"] if any(self.lost.values()) else []))
        if len(names) > len(shown):
            accepted, dropped = sum(self.accepted.values()), sum(self.dropped.values())
            total = [f"all {len(names)}", f"{accepted}", "", f"{dropped}", _share(dropped, accepted + dropped)]
            rows.append(total + [""] * (len(rows[0]) - len(total)))
        return rows

    def _tasks(self) -> list[str]:
        if not any(self.bytes_received.values()) and not self.memory_bytes:
            counts = {name: f"{count:,}" for name, count in self.bytes_sent.items()}
            return ["bytes sent: " + _listed(counts)] if any(self.bytes_sent.values()) else []
        names = [name for name in dict.fromkeys([*self.bytes_sent, *self.memory_bytes]) if self._is_measured(name)]
        rows = [["task", "bytes sent", "received", "cpu, s", "memory, MB"]]
        for name in names if len(names) <= _MOST_ROWS else names[: _MOST_ROWS - 1]:
            memory = self.memory_bytes.get(name)
            row = [name, f"{self.bytes_sent.get(name, 0):,}", f"{self.bytes_received.get(name, 0):,}"]
            row += [f"{self.cpu_secs[name]:.1f}" if name in self.cpu_secs else "-"]
            rows.append([*row, f"{memory / 1e6:.0f}" if memory else "-"])
        if len(names) > _MOST_ROWS:
            sums = [f"{sum(counts.values()):,}" for counts in (self.bytes_sent, self.bytes_received)]
            memory = f"{sum(self.memory_bytes.values()) / 1e6:.0f}"
            rows.append([f"all {len(names)}", *sums, f"{sum(self.cpu_secs.values()):.1f}", memory])
        return _table(rows)

    def _is_measured(self, name: str) -> bool:
        return name in self.memory_bytes or bool(self.bytes_sent.get(name) or self.bytes_received.get(name))


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table: the first column is aligned at the left, the others at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:{'>' if index else '<'}{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _listed(texts: dict[str, str], most: int = _MOST_ROWS) -> str:
    most = most if len(texts) <= most else _MOST_LISTED
    shown = [f"{name}: {text}" for name, text in list(texts.items())[:most]]
    return ", ".join(shown) + (f", and {len(texts) - len(shown)} more" if len(texts) > len(shown) else "")


def _milliseconds(found: Percentiles | None) -> str:
    return f"{1e3 * found.p50:.1f}/{1e3 * found.p95:.1f}" if found and found.count else "-"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def with_usage(report: Report, usage: dict[str, Any], sent: dict[str, int]) -> Report:
    """Returns a report with the counters of the tasks' processes.

    Args:
      report: the report.
      usage: `runtime.usage.Usage` of each task whose process is known.
      sent: bytes that tfdist has counted itself, for tasks whose kernel counts none.
    """
    zeros = dict.fromkeys(report.bytes_sent, 0)
    counted = {name: usage[name].bytes_sent for name in usage if usage[name].bytes_sent or not sent.get(name)}
    return dataclasses.replace(
        report,
        bytes_sent=zeros | sent | counted,
        bytes_received=zeros | {name: each.bytes_received for name, each in usage.items()},
        cpu_secs={name: each.cpu_secs for name, each in usage.items()},
        memory_bytes={name: each.memory_bytes for name, each in usage.items()},
        message_bytes={name: sent.get(name, 0) for name in report.bytes_sent},
    )
