# SPDX-License-Identifier: Apache-2.0
"""The gradient noise scale of made-up gradients whose noise is known."""

from __future__ import annotations

import math
import random

import pytest

from tfdist.planning import measuring


def norms(true: float, noise: float, batches: int, dimensions: int = 200, small: int = 8, parts: int = 4):
    """Squared norms of gradients with |G|^2 = true and trace S = noise, at `small` and at `small * parts` examples."""
    draws = random.Random(0)
    each, deviation = math.sqrt(true / dimensions), math.sqrt(noise / dimensions / small)
    found = []
    for _ in range(batches):
        gradients = [[draws.gauss(each, deviation) for _ in range(dimensions)] for _ in range(parts)]
        whole = [sum(column) / parts for column in zip(*gradients, strict=True)]
        found.append((sum(x * x for gradient in gradients for x in gradient) / parts, sum(x * x for x in whole)))
    return found


@pytest.mark.parametrize("noise", [10.0, 50.0, 200.0])
def test_the_interval_covers_the_true_noise_scale(noise):
    found = measuring.estimate_noise_scale(norms(1.0, noise, 32), 8, 32)
    assert found.low < noise < found.high
    assert found.value == pytest.approx(noise, rel=0.35)


def test_more_batches_make_the_interval_narrower():
    few, many = (measuring.estimate_noise_scale(norms(1.0, 100.0, count), 8, 32) for count in (4, 64))
    assert many.high / many.low < few.high / few.low


@pytest.mark.parametrize("found", [[], [(2.0, 1.0)], [(1.0, 1.0)] * 4, [(4.0, 1.0)] * 4])
def test_too_little_to_estimate_from_gives_none(found):
    assert measuring.estimate_noise_scale(found, 8, 32) is None
