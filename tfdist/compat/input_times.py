# SPDX-License-Identifier: Apache-2.0
"""Observes how long a strategy's own iterators read.

A `tf.function` that trains calls `next` of a distributed iterator, which reads on this worker first, and asks the
other workers for the end of the data after that. Only the first part is input. There is no public way between the two.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

from tensorflow.python.distribute import input_lib

from tfdist.compat import replacing

NEEDS = (
    "tensorflow.python.distribute.input_lib:DistributedIteratorBase.get_next",
    "tensorflow.python.distribute.input_lib:DistributedIteratorBase.get_next_as_optional",
    "tensorflow.python.distribute.input_lib:_SingleWorkerDatasetIteratorBase.get_next_as_list",
    "tensorflow.python.distribute.input_lib:_SingleWorkerDatasetIteratorBase.get_next_as_optional_list",
)

# Takes a function that reads, and returns what it has read.
NoteRead = Callable[[Callable[[], Any]], Any]
_note_read: contextvars.ContextVar[NoteRead | None] = contextvars.ContextVar("_note_read", default=None)


def install() -> None:
    """From now on `note_read` of an iterator's strategy, if it has one, is called with what reads."""
    for name in ("get_next", "get_next_as_optional"):
        replacing.once(input_lib.DistributedIteratorBase, name, _of_strategy)
    for name in ("get_next_as_list", "get_next_as_optional_list"):
        replacing.once(input_lib._SingleWorkerDatasetIteratorBase, name, _noted)


def _of_strategy(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_next(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _note_read.set(getattr(self._strategy, "note_read", None))
        try:
            return original(self, *args, **kwargs)
        finally:
            _note_read.reset(token)

    return get_next


def _noted(original: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        note_read = _note_read.get()
        if note_read is None:
            return original(self, *args, **kwargs)
        return note_read(lambda: original(self, *args, **kwargs))

    return read
