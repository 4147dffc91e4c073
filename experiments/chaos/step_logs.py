# SPDX-License-Identifier: Apache-2.0
"""Logs of a run's steps: steps that were made again, and steps that were never made. No processes here."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

# Of several lines.
_TAIL_BYTES = 200


@dataclasses.dataclass(frozen=True)
class Account:
    """The steps of a run, over all its attempts.

    Attributes:
      last: the highest number of a step; 0 if none was made.
      skipped: how many steps were not made when a later one was.
      most_repeated: how many steps were made again after that restart after which it was most.
    """

    last: int
    skipped: int
    most_repeated: int


def account(attempts: Sequence[Sequence[int]]) -> Account:
    """Goes through the steps in the order in which they were made.

    An attempt has to begin at a step that follows one that was made, and goes on step by step. Each restart is
    compared with the furthest step of all attempts before, not only of the last one.

    Args:
      attempts: the numbers of each attempt's steps, counted from 1; an attempt may have made none.
    """
    furthest = skipped = most_repeated = 0
    for steps in attempts:
        expected = furthest + 1
        for step in steps:
            skipped += max(0, step - expected)
            most_repeated = max(most_repeated, expected - step)
            furthest = max(furthest, step)
            expected = step + 1
    return Account(furthest, skipped, most_repeated)


@dataclasses.dataclass(frozen=True)
class Step:
    """A line of a log.

    Attributes:
      attempt: which attempt of the job made the step, from 0.
      number: of the step, from 1.
      secs: when, in seconds since 1970.
    """

    attempt: int
    number: int
    secs: float


def parse(text: str) -> list[Step]:
    """The steps in a log; a last line that is not whole is left out, because its writer was killed."""
    lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [Step(int(attempt), int(number), float(secs)) for attempt, number, secs in lines]


def read(folder: pathlib.Path) -> dict[int, list[Step]]:
    """The steps of each attempt that has a log, in order."""
    return {attempt: parse(path.read_text(encoding="utf-8")) for attempt, path in _logs(folder).items()}


def newest(folder: pathlib.Path) -> Step | None:
    """The step that was made last; None before the first. Reads the end of a log only: it is asked often."""
    for path in reversed(list(_logs(folder).values())):
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode()
        # The first line of a tail may be half of one.
        steps = parse(text if size <= _TAIL_BYTES else text.partition("\n")[2])
        if steps:
            return steps[-1]
    return None


def _logs(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    found = {int(path.stem.rpartition("_")[2]): path for path in folder.glob("attempt_*.log")}
    return dict(sorted(found.items()))


def back_secs(steps: Mapping[int, Sequence[Step]], kills: Sequence[float]) -> list[float]:
    """Returns the seconds of each restart, from the kill before it to its first step.

    Args:
      steps: of each attempt, as `read` returns them.
      kills: when tasks were killed whose end makes all tasks start again, in seconds since 1970, in order.
    """
    found = []
    for made in list(steps.values())[1:]:
        before = [secs for secs in kills if made and secs < made[0].secs]
        found += [made[0].secs - before[-1]] if before else []
    return found
