# SPDX-License-Identifier: Apache-2.0
"""Sends the rows of a gradient of a variable in shards to the servers of the shards, each row to one server.

    worker                                          parameter server of shard i
      rows of the gradient, of equal ids added up
      split by shard                         -->      adds up the rows of all contributions, and updates shard i

A contribution has an entry for each variable while it is computed and when it is applied, and on the way one for each
shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.engines.parameter_server import shard_rows
from tfdist.engines.parameter_server.partitioned_variable import PartitionedVariable
from tfdist.step.contribution import RowsByShard


class RowPieces:
    """The entries that the gradients of a contribution have on the way.

    Args:
      gradients: of a contribution, dense or `tf.IndexedSlices`.
      targets: optimizer and variable of each.
    """

    def __init__(self, gradients: Sequence[Any], targets: Sequence[tuple[Any, Any]]) -> None:
        # Of each gradient; a single one where the variable isn't in shards, or has a dense gradient.
        self._shards: list[list[Any]] = []
        self.targets: list[tuple[Any, Any]] = []
        for gradient, target in zip(gradients, targets, strict=True):
            variable = target[1].value
            is_split = isinstance(variable, PartitionedVariable) and isinstance(gradient, tf.IndexedSlices)
            self._shards.append(list(variable.variables) if is_split else [variable])
            self.targets += [target] * len(self._shards[-1])
        self.devices = [shard.device for shards in self._shards for shard in shards]

    def split(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns an entry for each shard, from one for each variable."""
        entries: list[Any] = []
        for gradient, shards in zip(gradients, self._shards, strict=True):
            if len(shards) == 1:
                entries.append(gradient)
                continue
            pieces = shard_rows.split(shard_rows.merged(gradient), _sizes(shards))
            # Without the shape, which would be one more tensor to send.
            entries += [tf.IndexedSlices(piece.values, piece.indices) for piece in pieces]
        return entries

    def joined(self, entries: Sequence[Any]) -> list[Any]:
        """Returns an entry for each variable, from one for each shard."""
        left, gradients = iter(entries), []
        for shards in self._shards:
            pieces = [next(left) for _ in shards]
            is_whole = len(shards) == 1
            devices = [shard.device for shard in shards]
            gradients.append(pieces[0] if is_whole else RowsByShard(pieces, _sizes(shards), devices))
        return gradients


def _sizes(shards: Sequence[Any]) -> list[int]:
    return [shard.shape[0] for shard in shards]
