# SPDX-License-Identifier: Apache-2.0
"""Explains in one line why a batch of a distributed data set can't be read.

TensorFlow wraps what a data set raises into lines about its own operations. In Keras' loops `step_errors` asks the data
set for an explanation. Other loops read the first batch with an iterator of a class that the stock strategy chooses: no
public way gives them another.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

Explain = Callable[[tf.errors.InvalidArgumentError], Exception | None]


def explained(distributed: Any, explain: Explain) -> Any:
    """The distributed data set; it raises what `explain` makes of TensorFlow's error, if anything.

    In Keras' loops with any batch, in others with the first.
    """
    distributed.__class__ = _explaining(type(distributed))
    distributed._tfdist_explain = explain
    return distributed


@functools.cache
def _explaining(kind: Any) -> type:
    def iterate(self: Any) -> Any:
        iterator = kind.__iter__(self)
        if tf.executing_eagerly():
            iterator.get_next = _first_of(iterator, self._tfdist_explain)
        return iterator

    def raised_in_step(self: Any, error: Exception) -> Exception | None:
        return self._tfdist_explain(error) if isinstance(error, tf.errors.InvalidArgumentError) else None

    members = {"__iter__": iterate, "raised_in_step": raised_in_step, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), members)


def _first_of(iterator: Any, explain: Explain) -> Callable[..., Any]:
    # A reference in a circle would keep the iterator, and its threads, until Python collects garbage.
    iterator_of: Any = weakref.ref(iterator)

    def get_next(*args: Any, **kwargs: Any) -> Any:
        del iterator_of().get_next
        try:
            return iterator_of().get_next(*args, **kwargs)
        except tf.errors.InvalidArgumentError as error:
            explanation = explain(error)
            if explanation is None:
                raise
        raise explanation

    return get_next
