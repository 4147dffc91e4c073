# SPDX-License-Identifier: Apache-2.0
"""Few tensors instead of many, for a way on which each one costs a round trip."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat.tensorflow import replicas

# Copying a tensor of this size costs about as much as sending one more; elements.
_SMALL = 1 << 15


def is_small(spec: Any, most_elements: int = _SMALL) -> bool:
    """True if a tensor of this shape and dtype is sent faster with others than alone."""
    size = spec.shape.num_elements()
    return size is not None and size <= most_elements and spec.dtype not in (tf.string, tf.variant, tf.resource)


class Bundles:
    """Small tensors of one dtype that go from one device to another, as one vector. The others stay as they are.

    Args:
      specs: the tensors, or their specs.
      devices: for each the device it goes to.
      origins: for each the device that it is packed on, "" for the current one; that one for all by default.
      are_apart: whether each stays a tensor of its own, small or not.
    """

    def __init__(
        self,
        specs: Sequence[tf.Tensor | tf.TensorSpec],
        devices: Sequence[str],
        origins: Sequence[str] = (),
        are_apart: bool = False,
    ) -> None:
        groups: dict[tuple[str, str, str], list[int]] = collections.defaultdict(list)
        origins = origins or [""] * len(specs)
        for index, (spec, device, origin) in enumerate(zip(specs, devices, origins, strict=True)):
            kind = spec.dtype.name if is_small(spec) and not are_apart else f"alone {index}"
            groups[device, origin, kind].append(index)
        self._groups = list(groups.values())
        self._shapes = [spec.shape for spec in specs]
        self.devices = [device for device, _, _ in groups]
        self._origins = [origin for _, origin, _ in groups]

    @property
    def are_small(self) -> bool:
        """True if to send all of them costs about as much as the call that asks for it."""
        sizes = [shape.num_elements() for shape in self._shapes]
        return None not in sizes and sum(sizes) <= _SMALL

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The bundles of these tensors; each goes to the device in `devices` of the same index."""
        packed = []
        for group, origin in zip(self._groups, self._origins, strict=True):
            with replicas.on_device(origin):
                flat = [tf.reshape(tensors[index], [-1]) for index in group if len(group) > 1]
                packed.append(tf.concat(flat, 0) if flat else tensors[group[0]])
        return packed

    def send(self, bundles: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Copies the bundles to their devices."""
        sent = []
        for bundle, device in zip(bundles, self.devices, strict=True):
            with tf.device(device):
                sent.append(tf.identity(bundle))
        return sent

    def unpack(self, bundles: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors that were packed, in their order; each stays on the device of its bundle."""
        tensors: dict[int, tf.Tensor] = {}
        for group, bundle, device in zip(self._groups, bundles, self.devices, strict=True):
            if len(group) == 1:
                tensors[group[0]] = bundle
                continue
            with tf.device(device):
                pieces = tf.split(bundle, [self._shapes[index].num_elements() for index in group])
                tensors |= {i: tf.reshape(piece, self._shapes[i]) for i, piece in zip(group, pieces, strict=True)}
        return [tensors[index] for index in range(len(tensors))]
