# SPDX-License-Identifier: Apache-2.0
"""Gives a Python generator's batches to training that Keras has read to build the model.

Under a distribution strategy Keras builds a model from the first batch of a pass of its own over the data, and then
begins anew. A generator can't begin anew: the batches that were read ahead meanwhile, a varying number, are lost. There
is no public way to see such a pass: Keras' data adapter alone holds the generator.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator
from typing import Any

from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

NEEDS = (
    "keras.src.trainers.data_adapters.generator_data_adapter:GeneratorDataAdapter.generator",
    "keras.src.trainers.epoch_iterator:EpochIterator.data_adapter",
)

_END = object()
# A pass to build a model from reads a batch, and a few ahead. A pass that reads more trains, and nothing of it is kept.
_MOST_KEPT = 256


class Replayed:
    """Callable that begins passes; batches that only Keras' model building has read are yielded again.

    Args:
      make: begins a pass; what it yields may be yielded by no later one.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        # A pass that was left may still read ahead, in its thread, when the next has begun.
        self._lock = threading.Lock()
        self._source: Iterator[Any] = iter(())
        self._read: collections.deque[Any] = collections.deque()
        self._is_to_be_given_again = False
        self._trained_on: Iterator[Any] | None = None

    def give_again(self) -> None:
        """Says that the pass that began last was one to build the model from."""
        self._is_to_be_given_again = True

    def __call__(self) -> Iterator[Any]:
        """Begins a pass."""
        with self._lock:
            is_again, self._is_to_be_given_again = self._is_to_be_given_again, False
            if not is_again:
                self._source, self._read = iter(self._make()), collections.deque()
            next_batch = self._take if is_again else self._keep
            return self._batches(next_batch, self._source, self._read)

    def _batches(self, next_batch: Callable[..., Any], source: Iterator[Any], read: Any) -> Iterator[Any]:
        while True:
            with self._lock:
                batch = next_batch(source, read)
            if batch is _END:
                return
            yield batch

    def _keep(self, source: Iterator[Any], read: Any) -> Any:
        batch = next(source, _END)
        if batch is not _END and source is not self._trained_on:
            read.append(batch)
        if len(read) > _MOST_KEPT:
            read.clear()
            self._trained_on = source
        return batch

    def _take(self, source: Iterator[Any], read: Any) -> Any:
        return read.popleft() if read else next(source, _END)


def replay(epoch_iterator: Any) -> None:
    """Replays what building a model reads of a Python generator, if this epoch iterator of Keras has one."""
    adapter = getattr(epoch_iterator, "data_adapter", None)
    if isinstance(adapter, GeneratorDataAdapter):
        adapter.generator = Replayed(adapter.generator)


def built_from(epoch_iterator: Any) -> None:
    """Says that the model was built from the pass of this epoch iterator that began last."""
    generator = getattr(getattr(epoch_iterator, "data_adapter", None), "generator", None)
    if isinstance(generator, Replayed):
        generator.give_again()
