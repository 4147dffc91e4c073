# SPDX-License-Identifier: Apache-2.0
"""Values that a writer of an update log is given: the header, one record for each update, and the kinds of events."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

FORMAT = "tfdist update log"
VERSION = 2
MAX_WORKERS = 2**16


class EventKind(enum.IntEnum):
    """Kind of an event."""

    LOST = 0
    RETURNED = 1
    POLICY_CHANGED = 2
    PHASE_CHANGED = 3
    RESUMED = 4
    RESTARTED = 5
    VALIDATION = 6
    CHECKPOINT = 7
    FINISHED = 8


class UpdateRecord(NamedTuple):
    """One update, with the gradients since the previous update. All times are seconds on the clock of the log.

    Attributes:
      step: `optimizer.iterations` after the update, or the number of updates.
      time: time at which the update was made.
      opened: time from the opening of the step to the update.
      wait: time for which the update waited for gradients.
      examples: number of examples in the gradients that entered; 0 if unknown.
      phase: 0: all replicas train; 1: the warmup phase.
      contributions: tuples with the fields of `policies.Contribution`, in that order; the last one may be left away.
      reduce: seconds from the last arrival to the end of the all-reduce; 0 if unknown.
    """

    step: int
    time: float
    opened: float
    wait: float
    examples: int
    phase: int
    contributions: Sequence[tuple[Any, ...]]
    reduce: float = 0.0


@dataclasses.dataclass(frozen=True)
class Header:
    """Content of `log.json`.

    Attributes:
      job: identifier that all logs of one training have in common.
      writer: task that writes the log, such as "chief:0".
      workers: names of the workers; contributions have indices into them.
      strategy: class name of the strategy.
      policies: `repr` of each policy.
      origin_secs: Unix time of second 0 of all times in the log.
      simulated: True if no real cluster made the log.
    """

    job: str
    writer: str
    workers: tuple[str, ...]
    strategy: str = ""
    policies: tuple[str, ...] = ()
    origin_secs: float = 0.0
    simulated: bool = False

    def __post_init__(self) -> None:
        if not 0 < len(self.workers) <= MAX_WORKERS:
            raise ValueError(
                f"an update log has 1 to {MAX_WORKERS} workers. Received: a Header with {len(self.workers)}"
            )
        if len(set(self.workers)) < len(self.workers):
            raise ValueError(
                "workers of an update log have different names. Received: a Header with the same one twice"
            )

    def to_json(self) -> bytes:
        """Returns the content of `log.json`."""
        values = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return (json.dumps(values, indent=1) + "\n").encode()

    @staticmethod
    def from_json(data: bytes) -> Header:
        """Parses the content of `log.json`.

        Raises:
          ValueError: it is no header of an update log, or of another version.
        """
        values = json.loads(data)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f'log.json has no "format": "{FORMAT}"')
        version = values.get("version")
        if version != VERSION:
            is_newer = isinstance(version, int) and version > VERSION
            remedy = "upgrade tfdist" if is_newer else "use the tfdist that wrote it"
            raise ValueError(f"it is of version {version!r} of the format, not {VERSION}; {remedy} to read it")
        fields = {each.name for each in dataclasses.fields(Header)}
        known: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if name in fields
        }
        try:
            return Header(**known)
        except TypeError as error:
            raise ValueError(f"log.json lacks a value: {error}") from None
