# SPDX-License-Identifier: Apache-2.0
"""Decides to which copies of a mirrored variable a replica writes.

There is no public way to change how a variable is aggregated once it is made: without aggregation a replica writes to
its own copy, and with that of the first replica to all copies. The aggregation is restored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

NEEDS = ("tensorflow.python.distribute.values:DistributedVariable._aggregation",)


@contextlib.contextmanager
def aggregated(variables: Iterable[Any], aggregation: tf.VariableAggregation) -> Iterator[None]:
    """Within this block, these mirrored variables are aggregated so when a replica assigns to them."""
    before = {id(variable): (variable, variable.aggregation) for variable in variables}
    try:
        for variable, _ in before.values():
            variable._aggregation = aggregation
        yield
    finally:
        for variable, own in before.values():
            variable._aggregation = own
