# SPDX-License-Identifier: Apache-2.0
"""The sizes of the models that are measured; without TensorFlow, for contenders that have none."""

from __future__ import annotations

import dataclasses
import itertools


@dataclasses.dataclass(frozen=True)
class Size:
    """A stack of dense layers.

    Attributes:
      features: width of the input.
      layers: widths of the layers; the last one is the output.
      batch: examples in one step of one replica, or in one closure.
      sleep_secs: by worker, for how long each of its steps sleeps after it has read the variables, as if an accelerator
        computed; the last one counts for all that are not there. Empty for not at all.
    """

    features: int
    layers: tuple[int, ...]
    batch: int = 32
    sleep_secs: tuple[float, ...] = ()

    @property
    def parameters(self) -> int:
        widths = (self.features, *self.layers)
        return sum((fan_in + 1) * fan_out for fan_in, fan_out in itertools.pairwise(widths))


SIZES = {
    "tiny": Size(10, (32, 1)),
    "1M": Size(256, (768, 1024, 10)),
    "25M": Size(1024, (4096, 4096, 1000)),
    "deep": Size(64, (*[64] * 40, 10)),
    "0.1 s": Size(10, (32, 1), sleep_secs=(0.1,)),
    "1 s": Size(10, (32, 1), sleep_secs=(1.0,)),
    "uneven": Size(10, (32, 1), sleep_secs=(0.1, 0.1, 0.1, 1.0)),
}
