# SPDX-License-Identifier: Apache-2.0
"""Profiles that tests of the advisor share, with step times drawn from a fixed seed."""

from __future__ import annotations

import random
from typing import Any

from tfdist.planning.profile import MeasuredSteps, Profile


def make(secs: float, dense_bytes: int, s: float = 0.1, batch_size: int = 64, **keywords: Any) -> Profile:
    """A profile whose steps take `secs` on average, lognormal, in proportion to the batch size."""
    draws = random.Random(0)
    steps = [
        MeasuredSteps(size, tuple(secs * size / batch_size * draws.lognormvariate(-s * s / 2, s) for _ in range(100)))
        for size in (batch_size // 2, batch_size, 2 * batch_size)
    ]
    given = {"trainable_bytes": dense_bytes, "device": "GPU", **keywords}
    return Profile(batch_size=batch_size, steps=tuple(steps), dense_bytes=dense_bytes, **given)
