# SPDX-License-Identifier: Apache-2.0
"""Updates of variables in shards: each shard is updated on its parameter server, with its part of the gradient.

Keras updates a variable by a function of it, of its gradient and of slots of the same shape, element by element. So the
function is called once for each shard, and meanwhile the variable and its slots stand for that shard:

    worker                                  parameter server of shard i
      the gradient's rows of shard i  -->     optimizer.update_step(gradient, shard i), slots likewise

An optimizer that is not element by element (`ELEMENTWISE` has those that are) computes the update of the whole on the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.engines.parameter_server import shard_rows
from tfdist.engines.parameter_server.partitioned_variable import Part, PartitionedVariable, updating

# Updates a variable: (variable, function, args, kwargs, group).
Update = Callable[[Any, Callable[..., Any], tuple, dict[str, Any], bool], Any]


def by_shards(stock: Update, is_lazy: Callable[[], bool], is_elementwise: Callable[[], bool]) -> Update:
    """Returns a replacement of `strategy.extended._update` that updates variables in shards one shard at a time.

    Args:
      stock: the strategy's own.
      is_lazy: returns True if an update touches only the rows that have a gradient.
      is_elementwise: returns False within the update of an optimizer that needs the whole variable.
    """

    def update(variable: Any, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], group: bool) -> Any:
        if not isinstance(variable, PartitionedVariable) or not is_elementwise():
            return stock(variable, function, args, kwargs, group)
        parts = _parts(variable.stored, args, is_lazy())
        for index, (shard, (rows, own)) in enumerate(zip(variable.variables, parts, strict=True)):
            part = Part(index, variable.stored.sizes, rows)

            def of_part(_: Any, *own: Any, part: Part = part, **kwargs: Any) -> Any:
                with updating(part):
                    return function(variable, *own, **kwargs)

            stock(shard, of_part, tuple(own), kwargs, group)
        return None

    return update


def _parts(whole: Any, args: Sequence[Any], is_lazy: bool) -> list[tuple[tf.Tensor | None, list[Any]]]:
    """Returns for each shard the rows to update, None for all, and the arguments of the update."""
    by_shard: list[list[Any]] = [[] for _ in whole.sizes]
    rows: list[tf.Tensor | None] = [None] * len(whole.sizes)
    for arg in args:
        print("ARG", type(arg), getattr(arg,"shape",None), getattr(getattr(arg,"indices",None),"op",None) and arg.indices.op.type)
        if isinstance(arg, tf.IndexedSlices):
            pieces: list[Any] = shard_rows.split(shard_rows.merged(arg), whole.starts, whole.sizes)
            if is_lazy:
                rows = [piece.indices for piece in pieces]
                pieces = [piece.values for piece in pieces]
        elif isinstance(arg, tf.Tensor) and arg.shape.rank and arg.shape.is_compatible_with(whole.shape):
            pieces = tf.split(arg, list(whole.sizes))
        else:
            pieces = [arg] * len(whole.sizes)
        for own, piece in zip(by_shard, pieces, strict=True):
            own.append(piece)
    return list(zip(rows, by_shard, strict=True))
