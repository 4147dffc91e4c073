# SPDX-License-Identifier: Apache-2.0
"""Bounded histogram of seconds with a fixed relative error.

After Masson, Rim and Lee 2019, DDSketch, arXiv 1908.10693: bucket i has the values in (gamma^(i-1), gamma^i]. With
gamma = (1 + a) / (1 - a), the middle of a bucket is within a fraction a of each of its values. Two histograms are
merged by adding their counts, without another error. Their reference implementation needs protobuf; this is the part
of it that telemetry needs.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

import numpy as np

RELATIVE_ERROR = 0.02
_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_PER_LOG = 1 / math.log(_GAMMA)
# Values outside of these bounds, in seconds, count as the bounds. So there are at most 750 buckets.
LEAST, MOST = 1e-6, 1e7
_ZERO = math.ceil(math.log(LEAST) * _PER_LOG)
_MOST = math.ceil(math.log(MOST) * _PER_LOG)
_SPAN = _MOST - _ZERO + 1


class Histogram:
    """Counts of values of 0 or more. Not thread-safe.

    Attributes:
      count: number of values.
      total: their sum.
      least: the smallest one, exact; infinity if there is none.
      most: the largest one, exact; 0.0 if there is none.
    """

    __slots__ = ("_buckets", "count", "least", "most", "total")

    def __init__(self) -> None:
        self._buckets: collections.Counter[int] = collections.Counter()
        self.count = 0
        self.total = 0.0
        self.least = math.inf
        self.most = 0.0

    def add_all(self, values: np.ndarray) -> None:
        """Adds values; a NaN counts as 0."""
        add_rows([self], np.zeros(len(values), np.int64), values)

    def merge(self, other: Histogram) -> None:
        """Adds all values of another histogram."""
        self._buckets.update(other._buckets)
        self.count += other.count
        self.total += other.total
        self.least = min(self.least, other.least)
        self.most = max(self.most, other.most)

    @property
    def mean(self) -> float:
        """Mean of the values, exact; 0.0 if there is none."""
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """Returns the percentile by the nearest rank, within `RELATIVE_ERROR`; 0.0 if there is no value."""
        rank = max(1, math.ceil(percent / 100 * self.count - 1e-9))
        seen = 0
        for bucket, count in sorted(self._buckets.items()):
            seen += count
            if seen >= rank:
                middle = 0.0 if bucket == _ZERO else 2 * _GAMMA**bucket / (_GAMMA + 1)
                return min(max(middle, self.least), self.most)
        return 0.0

    def buckets(self) -> list[tuple[float, int]]:
        """Returns the upper limit and the count of each bucket that has values, in order."""
        return [(_GAMMA**bucket, count) for bucket, count in sorted(self._buckets.items())]


def add_rows(histograms: Sequence[Histogram], owners: np.ndarray, values: np.ndarray) -> None:
    """Adds each value to the histogram of this index; a few calls of NumPy for all of them."""
    if not len(values):
        return
    values = np.maximum(np.nan_to_num(values.astype(np.float64), nan=0.0), 0.0)
    buckets = np.ceil(np.log(np.clip(values, LEAST, MOST)) * _PER_LOG).astype(np.int64)
    buckets = np.where(values <= LEAST, _ZERO, buckets)
    found, counts = np.unique(owners * _SPAN + buckets - _ZERO, return_counts=True)
    for key, count in zip(found.tolist(), counts.tolist(), strict=True):
        histograms[key // _SPAN]._buckets[key % _SPAN + _ZERO] += count
    total, least, most = np.zeros(len(histograms)), np.full(len(histograms), math.inf), np.zeros(len(histograms))
    np.add.at(total, owners, values)
    np.minimum.at(least, owners, values)
    np.maximum.at(most, owners, values)
    sums = np.bincount(owners, minlength=len(histograms)), total, least, most
    for each, number, of_values, lowest, highest in zip(histograms, *(row.tolist() for row in sums), strict=True):
        each.count += number
        each.total += of_values
        each.least, each.most = min(each.least, lowest), max(each.most, highest)
