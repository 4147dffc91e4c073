# SPDX-License-Identifier: Apache-2.0
"""A variable in shards begins with the values that the whole variable would have."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest

from tfdist.compat.keras.sharding import ShardInitial

pytestmark = pytest.mark.devices

SHAPE = (1001, 7)
initializers = keras.initializers
INITIALIZERS = [
    initializers.RandomUniform(-2.0, 5.0, seed=1),
    initializers.RandomNormal(mean=1.0, stddev=3.0, seed=2),
    initializers.TruncatedNormal(seed=3),
    initializers.GlorotUniform(seed=4),
    initializers.HeNormal(seed=5),
    initializers.Constant(2.0),
    # Made whole, and cut.
    initializers.Orthogonal(seed=6),
]


def shards_of(initial: ShardInitial, *rows: int) -> np.ndarray:
    return np.concatenate(
        [
            initial(partition_shape=(last - first, 7), partition_offset=(first, 0))
            for first, last in itertools.pairwise(rows)
        ]
    )


@pytest.mark.parametrize("initializer", INITIALIZERS, ids=lambda each: type(each).__name__)
def test_shards_begin_with_the_values_of_the_whole(initializer: keras.initializers.Initializer) -> None:
    # Rows of seven numbers, so that a shard begins within a group of four.
    found = shards_of(ShardInitial(initializer, SHAPE, "float32"), 0, 333, 667, 1001)
    np.testing.assert_array_equal(found, initializer(SHAPE, dtype="float32"))


def test_shards_of_a_seed_generator_share_one_seed() -> None:
    drawn = initializers.RandomNormal(seed=keras.random.SeedGenerator(7))
    expected = initializers.RandomNormal(seed=keras.random.SeedGenerator(7))(SHAPE, dtype="float32")
    np.testing.assert_array_equal(shards_of(ShardInitial(drawn, SHAPE, "float32"), 0, 500, 1001), expected)


def test_a_draw_outside_of_an_initializer_is_keras_own() -> None:
    before = keras.random.uniform((3,), seed=1)
    shards_of(ShardInitial(INITIALIZERS[0], SHAPE, "float32"), 0, 1001)
    np.testing.assert_array_equal(keras.random.uniform((3,), seed=1), before)
