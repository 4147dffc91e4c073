# SPDX-License-Identifier: Apache-2.0
"""Custom loops of every kind that guides write, as functions of a strategy that return numbers.

Each divides the losses of a replica by the global batch, so its numbers under a synchronous strategy
are those of one device. The last batch has another size than the others.
"""

from __future__ import annotations

import pathlib
from typing import Any

import guide_data_loops  # noqa: F401, adds its loops
import guide_update_loops  # noqa: F401, adds its loops
import numpy as np
import tensorflow as tf
from guide_nets import LOOPS, SAVING, same_batches

__all__ = ["NAMES", "SAVING", "run", "same_batches"]

NAMES = [*LOOPS, *SAVING]


def run(name: str, strategy: Any, directory: pathlib.Path) -> list[float]:
    """Runs a loop, and returns all its numbers; those that save write to a directory of their own."""
    if name in LOOPS:
        found = LOOPS[name](strategy)
    else:
        place = directory / f"{name}-{type(strategy).__name__}"
        place.mkdir(parents=True, exist_ok=True)
        found = SAVING[name](strategy, place)
    return [float(number) for leaf in tf.nest.flatten(found) for number in np.ravel(np.asarray(leaf))]
