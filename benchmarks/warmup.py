# SPDX-License-Identifier: Apache-2.0
"""What a step of the warmup phase costs under MultiWorkerMirroredStrategy, against training on one device.

Both train with Keras' `fit` on as many examples per step. A segment is the steps of an epoch; that the phase then gives
all workers the state, which takes the longer the larger the model is, comes once for an epoch, however long it is.
Each process keeps to a core of its own, as if on a machine of its own: what the waiting worker does in a step is not
taken from the one that trains, and the rival has one core too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import arena

ROW, STRATEGY = "warmup", "multi_worker"
_NUM_WORKERS = 2
# A step that takes at most 5 % longer.
_LEAST = 1 / 1.05
_ROUNDS = 7
_SEGMENT_SECS = 3.0

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
      sizes: keys of `models.SIZES`.
      rounds: segments of each contender, if not those of this file.
      segment_secs: how long a segment takes, if not as in this file.
      compare: makes a result of the least ratio wanted, our rates and the rival's, in steps per second by round.
      progress: is told what happens.
    """
    for size in sizes:
        with contextlib.ExitStack() as stack:
            ours = stack.enter_context(arena.Team(f"{STRATEGY}/warmup", size, _NUM_WORKERS, own_cores=True))
            alone = stack.enter_context(arena.Team("one_device/plain", size, own_cores=True))
            for team in (ours, alone):
                progress(f"{ROW} {size}: starting {team.name}")
                team.wait_ready()
                team.calibrate(segment_secs or _SEGMENT_SECS)
            # As many steps for both, so that both reach the end of an epoch as often.
            for team in (ours, alone):
                team.prepare(max(ours.steps, alone.steps))
                team.segment()
            rates = arena.duel(
                [ours, alone],
                rounds or _ROUNDS,
                lambda _: "",
                lambda text, size=size: progress(f"{ROW} {size}: {text}"),
            )
        head = {"row": ROW, "strategy": STRATEGY, "delays": "none", "size": size, "rival": "one device"}
        yield head | compare(_LEAST, rates[ours.name], rates[alone.name])
