# SPDX-License-Identifier: Apache-2.0
"""A few random models of `make fuzz` train under MirroredStrategy as on one device."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import keras
import pytest

import tfdist

sys.path.append(str(pathlib.Path(__file__).parent / "fuzz"))
import fuzz_outcome

pytestmark = pytest.mark.devices


@pytest.fixture(autouse=True)
def exact_numbers() -> Iterator[None]:
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    # A policy that an earlier test of this process set, be it the default one, would outweigh floatx.
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


# One shows that the comparison works; `make fuzz` is for many. Seeds 0, 141, 235, 306 and 2422 have every layer, step,
# optimizer, loss, metric and kind of data of the first five, in smaller models.
SLOW = (0, 141, 235, 306, *range(1, 6))
SEEDS = [2422, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_model_trains_as_on_one_device(seed: int, cpus: list[str]):
    assert fuzz_outcome.outcome(seed, tfdist.MirroredStrategy(cpus[:2])) == "agree"
