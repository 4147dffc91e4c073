# SPDX-License-Identifier: Apache-2.0
"""The least size of coded entries, with which tests compare messages."""

from __future__ import annotations

import math


def entropy_bits(density: float) -> float:
    """Returns the entropy of one gap and its sign at random positions of this density, in bits."""
    if density >= 1:
        return 1.0
    return 1 - math.log2(density) - (1 - density) / density * math.log2(1 - density)
