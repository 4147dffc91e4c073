# SPDX-License-Identifier: Apache-2.0
"""Probability distributions of delays: of computing times in the simulator, and of injected delays in real runs.

    distribution = lognormal(mean=0.2, s=1.0)
    distribution.mean                                 # seconds
    distribution.draw(seed=0, replica=3, attempt=17)  # seconds

A draw depends on the seed, the replica and its attempt alone, and not on the process or the order of the draws. So the
simulator can use the same delays as a real run.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist import _checks

_NORMAL = statistics.NormalDist()
_BITS = 52


@dataclasses.dataclass(frozen=True)
class DelayDistribution:
    """A distribution of delays, built by one of the functions of this module.

    Attributes:
      name: name of the function.
      parameters: arguments of the function.
      mean: expected delay in seconds.
      inverse: the quantile in seconds of a number in (0, 1) and the number of the attempt.
    """

    name: str
    parameters: Mapping[str, Any]
    mean: float = dataclasses.field(repr=False, compare=False)
    inverse: Callable[[float, int], float] = dataclasses.field(repr=False, compare=False)

    def draw(self, seed: int, replica: int, attempt: int) -> float:
        """Returns the delay of the `attempt`-th contribution (from 0) of `replica`, in seconds."""
        # A text seeds Python's generator alike in every process; a number computed from the three may collide.
        bits = random.Random(f"{seed}:{replica}:{attempt}").getrandbits(_BITS)
        return self.inverse((bits + 0.5) / 2**_BITS, attempt)

    def to_dict(self) -> dict[str, Any]:
        """Returns the distribution as JSON data, such as {"distribution": "constant", "secs": 0.1}."""
        return {"distribution": self.name, **self.parameters}

    @classmethod
    def from_dict(cls, given: Any) -> DelayDistribution:
        """Builds the distribution that `to_dict` returned.

        Raises:
          ValueError: the name or the parameters of the distribution are unknown.
        """
        parameters = dict(given) if isinstance(given, Mapping) else {}
        build = BUILDERS.get(str(parameters.pop("distribution", None)))
        if build is None or parameters.keys() != inspect.signature(build).parameters.keys():
            signatures = (f"{name}({', '.join(inspect.signature(each).parameters)})" for name, each in BUILDERS.items())
            example = '{"distribution": "constant", "secs": 0.1}'
            known = f"an object such as {example}, of {', '.join(signatures)}"
            raise ValueError(f"a distribution is {known}. Received: {given!r}")
        return build(**parameters)


def constant(secs: float) -> DelayDistribution:
    """Constant: always `secs` seconds."""
    given = _checked("constant", secs=secs)
    return DelayDistribution(*given, float(secs), lambda uniform, attempt: float(secs))


def lognormal(mean: float, s: float) -> DelayDistribution:
    """Lognormal: exp(mu + s Z), Z standard normal, mu such that the mean is `mean` seconds. Moderate stragglers.

    Args:
      mean: seconds, > 0.
      s: standard deviation of the logarithm, >= 0.
    """
    given = _checked("lognormal", mean=mean, s=s)
    mu = math.log(mean) - s * s / 2
    inverse = _NORMAL.inv_cdf
    return DelayDistribution(*given, float(mean), lambda uniform, attempt: math.exp(mu + s * inverse(uniform)))


def exponential(mean: float) -> DelayDistribution:
    """Exponential of mean `mean` seconds, > 0."""
    given = _checked("exponential", mean=mean)
    return DelayDistribution(*given, float(mean), lambda uniform, attempt: -mean * math.log1p(-uniform))


def empirical(samples: Sequence[float]) -> DelayDistribution:
    """Empirical: each of the measured durations `samples`, in seconds and >= 0, with the same probability."""
    given = list(samples) if isinstance(samples, Sequence) and not isinstance(samples, str) else []
    if not given:
        raise ValueError(f"empirical(samples=...) must be a list of durations in seconds. Received: {samples!r}")
    for each in given:
        _checked("empirical", samples=each)
    secs = tuple(sorted(map(float, given)))
    mean, count = statistics.fmean(secs), len(secs)
    return DelayDistribution(
        "empirical", {"samples": secs}, mean, lambda uniform, attempt: secs[min(int(uniform * count), count - 1)]
    )


def pareto(mean: float, a: float) -> DelayDistribution:
    """Pareto, type I: x_m U^(-1/a), U uniform, x_m = mean (a - 1) / a. A heavy tail.

    Args:
      mean: seconds, > 0.
      a: exponent of the tail, > 1; up to 2 the variance is infinite.
    """
    given = _checked("pareto", mean=mean, a=a)
    if not a > 1:
        raise ValueError(f"pareto(a=...): there is a mean only for a > 1. Received: a={a!r}")
    least = mean * (a - 1) / a
    return DelayDistribution(*given, float(mean), lambda uniform, attempt: least * (1 - uniform) ** (-1 / a))


def stalls(secs: float, every: int) -> DelayDistribution:
    """Stalls: `secs` seconds for each `every`-th contribution of a replica, 0 for the others.

    Args:
      secs: seconds, >= 0.
      every: 1 or more; with 3, attempts 2, 5, 8, ... take longer.
    """
    given = _checked("stalls", secs=secs, every=every)
    if not _checks.is_int(every):
        raise ValueError(f"stalls(every=...) must be an integer. Received: every={every!r}")
    return DelayDistribution(
        *given, secs / every, lambda uniform, attempt: float(secs) if attempt % every == every - 1 else 0.0
    )


BUILDERS: dict[str, Callable[..., DelayDistribution]] = {
    builder.__name__: builder for builder in (constant, lognormal, exponential, pareto, empirical, stalls)
}


def _checked(builder: str, **parameters: Any) -> tuple[str, dict[str, Any]]:
    """Returns a distribution's name and parameters; raises ValueError for one that is no number, or too small."""
    for name, value in parameters.items():
        is_above_0 = name in ("mean", "a", "every")
        if not _checks.is_number(value) or value < 0 or (is_above_0 and value == 0):
            wanted = "greater than 0" if is_above_0 else "of at least 0"
            raise ValueError(f"{builder}({name}=...) must be a number {wanted}. Received: {name}={value!r}")
    return builder, parameters
