# SPDX-License-Identifier: Apache-2.0
"""Measures a step of the warmup phase under MultiWorkerMirroredStrategy, against training on one device.

Both train with Keras' `fit` on as many examples per step. A segment is the steps of an epoch; that the phase then gives
all workers the state, which takes the longer the larger the model is, comes once for an epoch, however long it is.
Each process keeps to a core of its own, as if on a machine of its own: what the waiting worker does in a step is not
taken from the one that trains, and the rival has one core too.

Both are started several times: with 100 MB of variables, where a process happens to lie in memory makes all its steps
up to a tenth slower or faster, as long as it lives, and one pair would measure that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import arena

ROW, STRATEGY = "warmup", "multi_worker"
_SIZES = ("tiny", "1M", "25M")
_NUM_WORKERS = 2
# A step that takes at most 5 % longer.
_LEAST = 1 / 1.05
_STARTS = 5
_ROUNDS = 3
_SEGMENT_SECS = 2.0

Result = dict[str, Any]
Compare = Callable[[float | None, list[float], list[float]], Result]


def measure(
    sizes: Collection[str],
    rounds: int | None,
    segment_secs: float | None,
    compare: Compare,
    progress: Callable[[str], None],
) -> Iterator[Result]:
    """Measures the row with models of these sizes.

    Args:
      sizes: keys of `models.SIZES`; others than those of this file are left out.
      rounds: segments of each contender after each start, if not those of this file.
      segment_secs: how long a segment takes, if not as in this file.
      compare: makes a result of the least ratio wanted, our rates and the rival's, in steps per second by round.
      progress: is told what happens.
    """
    for size in (size for size in _SIZES if size in sizes):
        ours, alone = [], []
        for start in range(1, _STARTS + 1):
            say = functools.partial(_say, progress, f"{ROW} {size}, start {start} of {_STARTS}")
            rates = _duel(size, rounds or _ROUNDS, segment_secs or _SEGMENT_SECS, say)
            ours += rates[0]
            alone += rates[1]
        head = {"row": ROW, "strategy": STRATEGY, "delays": "none", "size": size, "rival": "one device"}
        yield head | compare(_LEAST, ours, alone)


def _duel(size: str, rounds: int, segment_secs: float, say: Callable[[str], None]) -> list[list[float]]:
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(arena.Team(f"{STRATEGY}/warmup", size, _NUM_WORKERS, own_cores=True))
        alone = stack.enter_context(arena.Team("one_device/plain", size, own_cores=True))
        for team in (ours, alone):
            say(f"starting {team.name}")
            team.wait_ready()
            team.calibrate(segment_secs)
        # As many steps for both, so that both reach the end of an epoch as often.
        for team in (ours, alone):
            team.prepare(max(ours.steps, alone.steps))
            team.segment()
        return list(arena.duel([ours, alone], rounds, lambda _: "", say).values())


def _say(progress: Callable[[str], None], where: str, text: str) -> None:
    progress(f"{where}: {text}")
