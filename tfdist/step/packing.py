# SPDX-License-Identifier: Apache-2.0
"""Packing of a step's result into few tensors, for the transfer to Keras' loop."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class Packing:
    """Packs a result into as few tensors as possible, because each costs a round trip: scalars are stacked by dtype.

    `pack` is called while the step is traced, and records the structure for the other methods.
    """

    def __init__(self) -> None:
        self._result: Any = None
        self._scalars: dict[tf.DType, list[int]] = {}
        self._shapes: list[tf.TensorShape] = []
        self.dtypes: list[tf.DType] = []

    @property
    def num_outputs(self) -> int:
        """Number of tensors that `pack` returns."""
        return len(self._scalars) + sum(shape.rank != 0 for shape in self._shapes)

    def pack(self, result: Any) -> list[tf.Tensor]:
        """Packs the tensors of `result`, a structure of tensors, variables and other values."""
        self._result = tf.nest.map_structure(_read_variable, result)
        flat = [leaf for leaf in tf.nest.flatten(self._result, expand_composites=True) if tf.is_tensor(leaf)]
        self.dtypes = [tensor.dtype for tensor in flat]
        self._shapes = [tensor.shape for tensor in flat]
        groups: dict[tf.DType, list[int]] = collections.defaultdict(list)
        for position, tensor in enumerate(flat):
            if tensor.shape.rank == 0:
                groups[tensor.dtype].append(position)
        self._scalars = dict(groups)
        stacked = [tf.stack([flat[i] for i in positions]) for positions in self._scalars.values()]
        return stacked + [tensor for tensor in flat if tensor.shape.rank != 0]

    def unpack(self, outputs: Sequence[tf.Tensor]) -> list[np.ndarray]:
        """Fetches the tensors that `pack` returned; returns the values of the flat result, in order."""
        values = [output.numpy() for output in outputs]
        flat: list[Any] = [None] * len(self.dtypes)
        packed = len(self._scalars)
        for vector, positions in zip(values[:packed], self._scalars.values(), strict=True):
            for value, position in zip(vector, positions, strict=True):
                flat[position] = value
        rest = iter(values[packed:])
        return [next(rest) if value is None else value for value in flat]

    def rebuild(self, flat: Sequence[Any]) -> Any:
        """Returns the structure that was packed, with these values for its tensors."""
        tensors = []
        for value, dtype, shape in zip(flat, self.dtypes, self._shapes, strict=True):
            tensor = tf.convert_to_tensor(value, dtype)
            tensor.set_shape(shape) if not tf.executing_eagerly() else None
            tensors.append(tensor)
        supply = iter(tensors)
        leaves = [
            next(supply) if tf.is_tensor(leaf) else leaf
            for leaf in tf.nest.flatten(self._result, expand_composites=True)
        ]
        return tf.nest.pack_sequence_as(self._result, leaves, expand_composites=True)


def _read_variable(leaf: Any) -> Any:
    """Reads a variable of Keras or TensorFlow: only its value can be sent."""
    return tf.convert_to_tensor(leaf) if hasattr(leaf, "assign") else leaf
