# SPDX-License-Identifier: Apache-2.0
"""Functions that begin a distributed data set in the middle, for resuming `fit`; the strategies register them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat import patching
from tfdist.passes.dataset_graph import DatasetGraph

_RESTART = "_tfdist_restart"


@dataclasses.dataclass(frozen=True)
class Restart:
    """A data set of which each pass, of one iterator, can be begun in the middle.

    Attributes:
      source: what is iterated over in this process.
      distribute: makes of the rest of `source` what was made of the whole.
    """

    source: tf.data.Dataset
    distribute: Callable[[tf.data.Dataset], Any]

    def after(self, passes: int, batches: int) -> Any:
        """Returns the rest of a pass.

        Each new iterator of a shuffle draws another order, also in derived data sets. So as many iterators are made as
        there were before the interruption: then the rest has the order that it would have had.

        Args:
          passes: number of iterators that were made before the iterator to continue with.
          batches: number of batches of this iterator that are done.

        Returns:
          A distributed data set whose first iterator continues the pass.
        """
        if passes:
            begin_passes(self.source, passes, DatasetGraph(self.source).caches)
        return self.distribute(self.source.skip(batches) if batches else self.source)


def begin_passes(dataset: tf.data.Dataset, count: int, caches: bool, begun: int = 0) -> None:
    """Makes as many iterators as there were, so that the next one draws the order that comes after theirs.

    Args:
      dataset: a data set, of which each iterator draws another order.
      count: how many iterators to make.
      caches: whether it keeps what it has read, which is in the order of the first pass: that one is read.
      begun: how many iterators it had before.
    """
    for number in range(begun, begun + count):
        if caches and not number:
            read(dataset)
        else:
            iter(dataset)


def read(dataset: tf.data.Dataset) -> None:
    """Reads a data set to its end, and forgets it; within the default device."""
    dataset.reduce(tf.constant(0, tf.int64), lambda count, *_: count + 1)


def remember(distributed: Any, source: Any, distribute: Callable[[Any], Any]) -> Any:
    """Returns `distributed`, which `distribute` has made of `source`, such that `restart_of` finds that out."""
    if isinstance(source, tf.data.Dataset) and distributed is not source:
        patching.put(distributed, _RESTART, Restart(source, distribute))
    return distributed


def restart_of(distributed: Any) -> Any:
    """Something with the method `after` of `Restart`; None if a pass can't begin in the middle."""
    if hasattr(distributed, "after"):
        return distributed
    if isinstance(distributed, tf.data.Dataset):
        return Restart(distributed, lambda rest: rest)
    return getattr(distributed, _RESTART, None)
