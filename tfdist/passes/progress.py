# SPDX-License-Identifier: Apache-2.0
"""Functions that begin a data set in the middle, for resuming `fit`, or go on where the last pass over it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.compat import patching
from tfdist.compat.tensorflow import inputs
from tfdist.passes.dataset_graph import DatasetGraph

_RESTART = "_tfdist_restart"
_DISTRIBUTED = "_tfdist_distributed"
_ORDERS = "_tfdist_orders"


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

    def draw_below(self, reads: int) -> None:
        """Draws the orders of shuffles below another one, which draw when the first element is read.

        Args:
          reads: number of iterators from which an element was read.
        """
        shuffle = None if DatasetGraph(self.source).caches else inputs.nearest_shuffle(self.source)
        while shuffle is not None:
            _, below, *_ = inputs.with_sources(shuffle)
            shuffle = inputs.nearest_shuffle(below)
            for _ in range(reads if shuffle is not None else 0):
                iter(below)


@dataclasses.dataclass
class Orders:
    """Numbers of iterators over a shuffle, each of which draws an order.

    Attributes:
      begun: over it and all data sets made of it.
      by_chief: those that the chief has made.
    """

    begun: int = 0
    by_chief: int = 0


def orders_of(dataset: tf.data.Dataset) -> Orders:
    """The numbers that all data sets made of the same shuffle share."""
    return patching.setdefault(inputs.nearest_shuffle(dataset) or dataset, _ORDERS, Orders)


def begin_passes(dataset: tf.data.Dataset, count: int, caches: bool = False) -> None:
    """Makes as many iterators as there were, so that the next one draws the order that comes after theirs.

    Args:
      dataset: a data set, of which each iterator draws another order.
      count: how many iterators to make.
      caches: whether it keeps what it has read, which is in the order of the first pass: that one is read.
    """
    for number in range(count):
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


def distributed_once(dataset: tf.data.Dataset, engine: Any) -> Any:
    """Distributes a data set by `engine.distribute`; one that is given again has the same result.

    So a second `fit` goes on with the orders of its shuffles, as on one device, and sends no data again.
    """
    known = getattr(dataset, _DISTRIBUTED, None)
    if known is None or known[0] is not engine:
        known = engine, engine.distribute(dataset)
        patching.put(dataset, _DISTRIBUTED, known)
    return known[1]


def restart_of(distributed: Any) -> Any:
    """Something with the methods of `Restart`; None if a pass can't begin in the middle."""
    if hasattr(distributed, "after"):
        return distributed
    if isinstance(distributed, tf.data.Dataset):
        return Restart(distributed, lambda rest: rest)
    return getattr(distributed, _RESTART, None)
