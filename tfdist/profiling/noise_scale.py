# SPDX-License-Identifier: Apache-2.0
"""Gradient noise scale from squared norms of gradients at two batch sizes.

With G the true gradient and S the trace of the covariance of an example's gradient, E|G_B|^2 = |G|^2 + S / B. So, from
the squared norms at a small size b and a big one B (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1),

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)
    S     = (|G_b|^2 - |G_B|^2) / (1 / b - 1 / B)
    B_simple = S / |G|^2

Both are unbiased, their ratio is not; so it is taken of the means over many batches, and its interval is found by
leaving out each batch in turn (jackknife).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tfdist.advisor.profile import NoiseScale

# Of a normal distribution, for an interval of 90 %.
_QUANTILE = 1.645


def estimate(norms: Sequence[tuple[float, float]], small: float, big: float) -> NoiseScale | None:
    """Estimates the noise scale.

    Args:
      norms: of each batch, the mean of |G_b|^2 over its parts, and |G_B|^2.
      small: b, examples of a part.
      big: B, examples of a batch.

    Returns:
      None with fewer than two batches, or if no gradient is left after the noise.
    """
    if len(norms) < 2 or small >= big:
        return None
    sums = [sum(each) for each in zip(*norms, strict=True)]
    value = _ratio(sums[0], sums[1], small, big)
    if not math.isfinite(value):
        return None
    # Of the logarithm, whose distribution is closer to a normal one.
    left_out = [_ratio(sums[0] - mine, sums[1] - theirs, small, big) for mine, theirs in norms]
    if not all(0 < each < math.inf for each in left_out) or value <= 0:
        return NoiseScale(max(value, 0.0), 0.0, math.inf, len(norms))
    logs = [math.log(each) for each in left_out]
    middle, count = sum(logs) / len(logs), len(logs)
    deviation = math.sqrt((count - 1) / count * sum((each - middle) ** 2 for each in logs))
    factor = math.exp(min(_QUANTILE * deviation, 700.0))
    return NoiseScale(value, value / factor, value * factor, len(norms))


def _ratio(small_norm: float, big_norm: float, small: float, big: float) -> float:
    squared = (big * big_norm - small * small_norm) / (big - small)
    trace = (small_norm - big_norm) / (1 / small - 1 / big)
    return trace / squared if squared > 0 else math.inf
