# SPDX-License-Identifier: Apache-2.0
"""Visits of a shop: who sees which item, after which others, and clicks or not. Popularity follows a Zipf law."""

from __future__ import annotations

import numpy as np

USERS, ITEMS, RECENT = 30_000, 32_500, 8
# Frequency of the k-th most popular is in proportion to k ** -EXPONENT.
EXPONENT = 1.05
_TASTES = 8


def zipf(generator: np.random.Generator, count: int, size: tuple[int, ...], exponent: float = EXPONENT) -> np.ndarray:
    """Returns ids below `count`, int64 of shape `size`; ids say nothing about popularity."""
    weights = np.arange(1, count + 1) ** -exponent
    cumulative = np.cumsum(weights) / weights.sum()
    ranks = np.searchsorted(cumulative, generator.random(size))
    return generator.permutation(count)[np.minimum(ranks, count - 1)]


def visits(count: int, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns user [count], item [count] and recent items [count, RECENT], int64, and clicks [count, 1], float32.

    Users and items have hidden tastes; a click is likelier, the closer those of the user and the item are.
    """
    generator = np.random.default_rng(seed)
    users = zipf(generator, USERS, (count,))
    items = zipf(generator, ITEMS, (count, 1 + RECENT))
    of_users = generator.normal(size=(USERS, _TASTES))
    of_items = generator.normal(size=(ITEMS, _TASTES))
    closeness = (of_users[users] * of_items[items[:, 0]]).sum(1) / np.sqrt(_TASTES)
    clicks = generator.random(count) < 1 / (1 + np.exp(-2 * closeness))
    features = {"user": users, "item": items[:, 0], "recent": items[:, 1:]}
    return features, clicks[:, None].astype("float32")
