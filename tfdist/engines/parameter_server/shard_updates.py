# SPDX-License-Identifier: Apache-2.0
"""Updates of variables in shards, and of rows: on the parameter server, with what that server needs of the gradient.

Keras updates a variable by a function of it, of its gradient and of slots of the same shape, element by element. So the
function is called once for each shard, and meanwhile the variable and its slots stand for that shard; with `LazyRows`
for the rows of it that have a gradient:

    worker                                  parameter server of shard i
      the gradient's rows of shard i  -->     optimizer.update_step(gradient, part of shard i), slots likewise

Equal ids are added up first. The update of an optimizer that is not element by element is made of the whole, by the
worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.engines.parameter_server import shard_rows
from tfdist.engines.parameter_server.coordinated_variable import CoordinatedVariable
from tfdist.engines.parameter_server.partitioned_variable import PartitionedVariable
from tfdist.engines.parameter_server.updated_part import Part, updating
from tfdist.step.contribution import RowsByShard

# Updates a variable: (variable, function, args, kwargs, group).
Update = Callable[[Any, Callable[..., Any], tuple, dict[str, Any], bool], Any]


def by_shards(stock: Update, is_lazy: bool, is_elementwise: Callable[[], bool]) -> Update:
    """Returns a replacement of `strategy.extended._update`.

    Args:
      stock: the strategy's own.
      is_lazy: True if an update touches only the rows that have a gradient.
      is_elementwise: returns False within the update of an optimizer that needs the whole variable.
    """

    def update(variable: Any, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], group: bool) -> Any:
        if not is_elementwise():
            return stock(variable, function, args, kwargs, group)
        if isinstance(variable, PartitionedVariable):
            shards, sizes = variable.variables, variable.stored.sizes
        elif is_lazy and isinstance(variable, CoordinatedVariable) and _has_rows(args):
            shards, sizes = [variable], (variable.shape[0],)
        else:
            return stock(variable, function, args, kwargs, group)
        for index, (shard, (rows, own)) in enumerate(
            zip(shards, _parts(args, variable.shape, sizes, is_lazy), strict=True)
        ):
            part = Part(index, sizes, rows)

            def of_part(_: Any, *own: Any, part: Part = part, **kwargs: Any) -> Any:
                with updating(part):
                    return function(variable, *own, **kwargs)

            stock(shard, of_part, tuple(own), kwargs, group)
        return None

    return update


def _has_rows(args: Sequence[Any]) -> bool:
    return any(isinstance(arg, tf.IndexedSlices) for arg in args)


def _parts(
    args: Sequence[Any], shape: tf.TensorShape, sizes: Sequence[int], is_lazy: bool
) -> list[tuple[tf.Tensor | None, list[Any]]]:
    """Returns for each shard the rows to update, None for all, and the arguments of the update."""
    by_shard: list[list[Any]] = [[] for _ in sizes]
    rows: list[tf.Tensor | None] = [None] * len(sizes)
    for arg in args:
        if isinstance(arg, tf.IndexedSlices):
            is_split = isinstance(arg, RowsByShard) and arg.sizes == tuple(sizes)
            pieces: list[Any] = (
                arg.map(shard_rows.merged).pieces if is_split else shard_rows.split(shard_rows.merged(arg), sizes)
            )
            if is_lazy:
                rows = [piece.indices for piece in pieces]
                pieces = [piece.values for piece in pieces]
        elif isinstance(arg, tf.Tensor) and arg.shape.rank and arg.shape.is_compatible_with(shape):
            pieces = tf.split(arg, list(sizes))
        else:
            pieces = [arg] * len(sizes)
        for own, piece in zip(by_shard, pieces, strict=True):
            own.append(piece)
    return list(zip(rows, by_shard, strict=True))
