# SPDX-License-Identifier: Apache-2.0
"""Probability distributions of injected delays.

    distribution = lognormal(mean=0.2, s=1.0)
    distribution.draw(seed=0, replica=3, attempt=17)  # seconds

A draw depends on the seed, the replica and its attempt alone, and not on the process or the order of the draws. So the
simulator of `tfdist.policies` can use the same delays as a real run.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import random
import statistics
import warnings
from collections.abc import Callable, Mapping
from typing import Any

_NORMAL = statistics.NormalDist()
_BITS = 52


@dataclasses.dataclass(frozen=True)
class DelayDistribution:
    """A distribution of delays, built by one of the functions of this module.

    Attributes:
      name: name of the function.
      parameters: arguments of the function.
    """

    name: str
    parameters: Mapping[str, float]
    _secs: Callable[[float, int], float] = dataclasses.field(repr=False, compare=False)

    def draw(self, seed: int, replica: int, attempt: int) -> float:
        """Returns the delay of the `attempt`-th contribution (from 0) of `replica`, in seconds."""
        # A text seeds Python's generator alike in every process; a number computed from the three may collide.
        bits = random.Random(f"{seed}:{replica}:{attempt}").getrandbits(_BITS)
        return self._secs((bits + 0.5) / 2**_BITS, attempt)

    def to_dict(self) -> dict[str, Any]:
        """Returns the distribution as JSON data, such as {"distribution": "constant", "secs": 0.1}."""
        return {"distribution": self.name, **self.parameters}

    @classmethod
    def from_dict(cls, given: Any) -> DelayDistribution:
        """Builds the distribution that `to_dict` returned.

        Raises:
          ValueError: the name or the parameters of the distribution are unknown.
        """
        known = f"use one of {', '.join(map(_signature, _BUILDERS.values()))}. Received: {given!r}"
        parameters = dict(given) if isinstance(given, Mapping) else {}
        if "law" in parameters:
            text = 'the key "law" of injected delays is now "distribution", and will not be read in the next version'
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        name = str(parameters.pop("distribution", parameters.pop("law", None)))
        if name not in _BUILDERS:
            raise ValueError(
                f'a distribution is an object such as {{"distribution": "constant", "secs": 0.1}}; {known}'
            )
        build = _BUILDERS[name]
        if parameters.keys() != inspect.signature(build).parameters.keys():
            raise ValueError(f"{name!r} takes {', '.join(inspect.signature(build).parameters)}; {known}")
        return build(**parameters)


def constant(secs: float) -> DelayDistribution:
    """Constant: always `secs` seconds."""
    _check("constant", {"secs": secs}, secs=0)
    return DelayDistribution("constant", {"secs": secs}, lambda uniform, attempt: float(secs))


def lognormal(mean: float, s: float) -> DelayDistribution:
    """Lognormal: exp(mu + s Z), Z standard normal, mu such that the mean is `mean` seconds. Moderate stragglers.

    Args:
      mean: seconds, > 0.
      s: standard deviation of the logarithm, >= 0.
    """
    _check("lognormal", {"mean": mean, "s": s}, mean=None, s=0)
    mu = math.log(mean) - s * s / 2
    return DelayDistribution(
        "lognormal", {"mean": mean, "s": s}, lambda uniform, attempt: math.exp(mu + s * _NORMAL.inv_cdf(uniform))
    )


def pareto(mean: float, a: float) -> DelayDistribution:
    """Pareto, type I: x_m U^(-1/a), U uniform, x_m = mean (a - 1) / a. A heavy tail.

    Args:
      mean: seconds, > 0.
      a: exponent of the tail, > 1; up to 2 the variance is infinite.
    """
    _check("pareto", {"mean": mean, "a": a}, mean=None, a=None)
    if not a > 1:
        raise ValueError(f"pareto(a=...): there is a mean only for a > 1. Received: a={a!r}")
    least = mean * (a - 1) / a
    return DelayDistribution(
        "pareto", {"mean": mean, "a": a}, lambda uniform, attempt: least * (1 - uniform) ** (-1 / a)
    )


def stalls(secs: float, every: int) -> DelayDistribution:
    """Stalls: `secs` seconds for each `every`-th contribution of a replica, 0 for the others.

    Args:
      secs: seconds, >= 0.
      every: 1 or more; with 3, attempts 2, 5, 8, ... take longer.
    """
    _check("stalls", {"secs": secs, "every": every}, secs=0, every=None)
    if not isinstance(every, int):
        raise ValueError(f"stalls(every=...) must be an integer. Received: every={every!r}")
    return DelayDistribution(
        "stalls",
        {"secs": secs, "every": every},
        lambda uniform, attempt: float(secs) if attempt % every == every - 1 else 0.0,
    )


_BUILDERS: dict[str, Callable[..., DelayDistribution]] = {
    builder.__name__: builder for builder in (constant, lognormal, pareto, stalls)
}


def _check(builder: str, parameters: Mapping[str, Any], **least: float | None) -> None:
    """Raises ValueError unless each parameter is a finite number of at least `least`; above 0 if `least` is None."""
    for name, value in parameters.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        bound = least[name]
        if not is_number or value < 0 or (bound is None and value == 0):
            wanted = "greater than 0" if bound is None else f"of at least {bound}"
            raise ValueError(f"{builder}({name}=...) must be a number {wanted}. Received: {name}={value!r}")


def _signature(builder: Callable[..., DelayDistribution]) -> str:
    return f"{builder.__name__}({', '.join(inspect.signature(builder).parameters)})"
