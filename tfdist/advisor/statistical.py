# SPDX-License-Identifier: Apache-2.0
"""A model of statistical efficiency: how many more examples, or updates, large batches and stale gradients need.

It is a model, apart from the throughput that is measured and simulated, and every output says so.

Large batches (McCandlish et al. 2018, arXiv 1812.06162, equations 2.11 and 2.12): with the critical batch size B_crit,
training with batches of B examples to a given loss needs

    S / S_min = 1 + B_crit / B   updates,   E / E_min = 1 + B / B_crit   examples.

B_crit is estimated by the gradient noise scale at the weights that were profiled. It grows during training, by an order
of magnitude or more, so an estimate at the start is cautious about large batches.

Stale gradients: plain SGD at a step size a and curvature h, with gradients that are t updates old, is stable for a h <
2 sin(pi / (2 (2 t + 1))) (Levin and May 1976, A note on difference-delay equations). So where stability limits the
step size, staleness t needs between 1 and 1 / sin(pi / (2 (2 t + 1))) times as many updates, which is about (2 t + 1)
2 / pi; the middle is the geometric mean of the two.
"""

from __future__ import annotations

import dataclasses
import math

from tfdist.advisor.profile import NoiseScale, Profile

# An interval of at least this ratio says nothing.
_MOST_SPREAD = 10.0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number with the bounds of its interval."""

    value: float
    low: float
    high: float

    @property
    def says_something(self) -> bool:
        """False if the interval is so wide that the number tells nothing."""
        return self.low > 0 and self.high < _MOST_SPREAD * self.low

    def __mul__(self, other: Estimate) -> Estimate:
        return Estimate(self.value * other.value, self.low * other.low, self.high * other.high)

    def __truediv__(self, other: Estimate) -> Estimate:
        return Estimate(self.value / other.value, self.low / other.high, self.high / other.low)


def examples_factor(noise: NoiseScale, batch: float, reference: float) -> Estimate:
    """Ratio of examples to the same loss: those with batches of `batch`, over those with batches of `reference`."""

    def factor(critical: float) -> float:
        if critical == math.inf:
            return 1.0
        return (critical + batch) / (critical + reference) if critical + reference else batch / reference

    # A larger critical batch size makes large batches cost less.
    bounds = sorted((factor(noise.low), factor(noise.high)))
    return Estimate(factor(noise.value), *bounds)


def staleness_factor(staleness: float) -> Estimate:
    """Ratio of updates to the same loss: those from gradients of this mean staleness, over those from fresh ones."""
    most = 1 / math.sin(math.pi / (2 * (2 * staleness + 1)))
    return Estimate(math.sqrt(most), 1.0, most)


def speedup_to_a_loss(
    profile: Profile, speed: Estimate, alone: Estimate, batch: float, staleness: float
) -> Estimate | None:
    """Speedup over one device until the same loss is reached; None if nothing is known of the noise scale.

    Args:
      profile: of one device, with its batch size.
      speed: examples per second.
      alone: those of one device.
      batch: examples of an update.
      staleness: mean staleness of its gradients.
    """
    if profile.noise_scale is None or not profile.noise_scale.is_known:
        return None
    needed = examples_factor(profile.noise_scale, max(batch, profile.batch_size), profile.batch_size)
    return speed / alone / (needed * staleness_factor(staleness))
