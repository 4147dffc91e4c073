# SPDX-License-Identifier: Apache-2.0
"""Counts of accepted and dropped gradients, staleness and waiting times, and their report. No TensorFlow import."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfdist.policies.base import Update


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of `strategy.report()`, counted since the strategy was built. `print` shows a table.

    Attributes:
      updates: number of updates.
      accepted: number of gradients that entered an update, by worker: {"worker:0": 120, ...}.
      dropped: number of dropped gradients, by worker.
      staleness: number of applied gradients by staleness (global step - local step).
      wait_secs: total time for which updates waited for gradients.
      bytes_sent: bytes that each worker has sent over the network: with `ParameterAveraging` for its averages, with
        `Compression` in training steps (to the parameter servers, if there are any). It is 0 under all other policies,
        and without a policy.
      held_secs: time in which a worker had delivered a gradient and was not allowed to start the next, by worker.
      transfer: form in which variables and gradients cross the network, and why; of ParameterServerStrategy.
    """

    updates: int
    accepted: dict[str, int]
    dropped: dict[str, int]
    staleness: dict[int, int]
    wait_secs: float
    bytes_sent: dict[str, int]
    held_secs: dict[str, float] = dataclasses.field(default_factory=dict)
    transfer: str = ""

    def __str__(self) -> str:
        lines = [f"{self.updates} updates, waited {self.wait_secs:.2f} s for gradients{self._each_wait()}"]
        if self.accepted:
            width = max(len("worker"), *map(len, self.accepted))
            lines.append(f"{'worker':{width}}  accepted  of updates  dropped  of its gradients")
            lines += [self._row(name, width) for name in self.accepted]
        if self.staleness:
            counts = ", ".join(f"{staleness}: {count}" for staleness, count in sorted(self.staleness.items()))
            lines.append(f"gradients by staleness: {counts}")
        if any(self.held_secs.values()):
            lines.append("held back: " + ", ".join(f"{name}: {secs:.2f} s" for name, secs in self.held_secs.items()))
        if any(self.bytes_sent.values()):
            lines.append("bytes sent: " + ", ".join(f"{name}: {count:,}" for name, count in self.bytes_sent.items()))
        if self.transfer:
            lines.append(f"transfer: {self.transfer}")
        return "\n".join(lines)

    def _each_wait(self) -> str:
        return f" ({self.wait_secs / self.updates:.4f} s each)" if self.updates else ""

    def _row(self, name: str, width: int) -> str:
        accepted, dropped = self.accepted[name], self.dropped.get(name, 0)
        shares = _share(accepted, self.updates), _share(dropped, accepted + dropped)
        return f"{name:{width}}  {accepted:8d}  {shares[0]:>10}  {dropped:7d}  {shares[1]:>16}"


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums of a `Recorder` at one time. The difference of two gives the sums of an interval.

    Attributes:
      updates: number of updates.
      examples: number of examples in the accepted gradients; 0 if unknown.
      accepted: number of gradients that entered an update, by replica.
      dropped: number of dropped gradients, by replica.
      wait_secs: sum of the updates' `wait_secs`.
      spread_secs: sum of the times from the first to the last gradient of an update.
    """

    updates: int
    examples: int
    accepted: tuple[int, ...]
    dropped: tuple[int, ...]
    wait_secs: float
    spread_secs: float

    def since(self, before: Sums) -> Sums:
        """Returns the difference between these sums and those of `before`."""
        return Sums(
            updates=self.updates - before.updates,
            examples=self.examples - before.examples,
            accepted=tuple(now - then for now, then in zip(self.accepted, before.accepted, strict=True)),
            dropped=tuple(now - then for now, then in zip(self.dropped, before.dropped, strict=True)),
            wait_secs=self.wait_secs - before.wait_secs,
            spread_secs=self.spread_secs - before.spread_secs,
        )


class Recorder:
    """Adds up the statistics of updates; any thread may call it.

    Args:
      names: names of the replicas in reports, such as "worker:0".
      is_complete: see the attribute.

    Attributes:
      names: names of the replicas in reports.
      is_complete: True if all updates are recorded. A mirrored strategy without a policy that decides about gradients
        records none, or a warmup phase only: each batch of Keras' loop is an update then.
    """

    def __init__(self, names: Sequence[str], is_complete: bool = False) -> None:
        self.names = tuple(names)
        self.is_complete = is_complete
        self._lock = threading.Lock()
        self._updates = 0
        self._examples = 0
        self._accepted = [0] * len(self.names)
        self._dropped = [0] * len(self.names)
        self._staleness: collections.Counter[int] = collections.Counter()
        self._held_secs = [0.0] * len(self.names)
        self._wait_secs = 0.0
        self._spread_secs = 0.0

    def record(self, update: Update, examples: int = 0) -> None:
        """Adds an update.

        Args:
          update: the policy's result.
          examples: number of examples in its gradients; 0 if unknown.
        """
        with self._lock:
            self._updates += 1
            self._examples += examples
            for replica in update.contributors:
                self._accepted[replica] += 1
            for replica in update.dropped:
                self._dropped[replica] += 1
            for replica, secs in enumerate(update.held_secs):
                self._held_secs[replica] += secs
            self._staleness.update(update.staleness)
            self._wait_secs += update.wait_secs
            self._spread_secs += update.spread_secs

    def sums(self) -> Sums:
        """Returns the sums so far."""
        with self._lock:
            return Sums(
                updates=self._updates,
                examples=self._examples,
                accepted=tuple(self._accepted),
                dropped=tuple(self._dropped),
                wait_secs=self._wait_secs,
                spread_secs=self._spread_secs,
            )

    def report(self) -> Report:
        """Returns the sums as a `Report`, with the replicas' names."""
        with self._lock:
            return Report(
                updates=self._updates,
                accepted=dict(zip(self.names, self._accepted, strict=True)),
                dropped=dict(zip(self.names, self._dropped, strict=True)),
                staleness=dict(sorted(self._staleness.items())),
                wait_secs=self._wait_secs,
                bytes_sent=dict.fromkeys(self.names, 0),
                held_secs=dict(zip(self.names, self._held_secs, strict=True)),
            )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
