# SPDX-License-Identifier: Apache-2.0
"""Devices of replicas that span several devices: which device holds which part of the model, in each replica.

A strategy computes on the first device of each replica, and knows no others. There is no public way to a device's full
name, by which a tensor of a graph says where it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import device_util

from tfdist.compat import own_attributes

NEEDS = (
    "tensorflow.python.distribute.device_util:resolve",
    "tensorflow.python.distribute.mirrored_strategy:MirroredExtended._create_variable",
    "tensorflow.python.distribute.values:DistributedValues._devices",
)

_ATTRIBUTE = "_tfdist_parts"


@dataclasses.dataclass(frozen=True)
class Parts:
    """The devices of this process' replicas.

    Attributes:
      groups: for each replica, the devices of its parts, by full names. Of workers of parameter servers: one replica,
        by names without a job, which are devices of whichever worker runs the step.
      hold_variables: False if the devices only compute, and the variables are on parameter servers.
    """

    groups: tuple[tuple[str, ...], ...]
    hold_variables: bool = True

    @property
    def count(self) -> int:
        """Number of parts, which is the number of devices of a replica."""
        return len(self.groups[0])

    def devices_of(self, part: int) -> tuple[str, ...]:
        """Returns the devices that hold a part, in the order of the replicas."""
        return tuple(group[part] for group in self.groups)

    def part_on(self, device: str) -> int | None:
        """Returns the part that a device holds; None for any other device."""
        return next((group.index(device) for group in self.groups if device in group), None)

    def part_of(self, value: Any) -> int:
        """Returns the part on whose device a tensor, or a value of all replicas, is; 0 if it is on none of them."""
        first = getattr(value, "values", value)
        # The values of sparse gradients are one tensor.
        first = first[0] if isinstance(first, Sequence) else first
        return self.part_on(getattr(first, "device", "") or "") or 0


class OnDevices:
    """Stands for the devices of a part where a strategy makes a variable beside another variable.

    Args:
      devices: of all replicas.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = tuple(devices)


def of_any_worker(kind: str, count: int) -> Parts:
    """Returns the parts of workers of parameter servers, of which each runs functions that are traced once for all.

    Args:
      kind: "GPU" or "CPU".
      count: number of devices of a worker.
    """
    return Parts((tuple(f"/device:{kind}:{index}" for index in range(count)),), hold_variables=False)


def homes_of(strategy: Any, tensors: Sequence[Any]) -> list[str]:
    """Returns for each tensor the device of its part, if a strategy has replicas that span devices; else ""."""
    parts = of(strategy)
    devices = [getattr(tensor, "device", "") or "" for tensor in tensors]
    return [device if parts and parts.part_on(device) is not None else "" for device in devices]


def full_names(devices: Sequence[str]) -> list[str]:
    """Returns the full names of devices of this process."""
    return [device_util.resolve(device) for device in devices]


def siblings(first: str, count: int) -> tuple[str, ...]:
    """Returns the full names of a device and of those that follow it in the numbering, `count` in all."""
    spec = tf.DeviceSpec.from_string(first)
    index = spec.device_index or 0
    return tuple(spec.replace(device_index=index + each).to_string() for each in range(count))


def grouped(devices: Sequence[str], devices_per_replica: int) -> tuple[tuple[str, ...], ...]:
    """Groups devices to replicas, in their order."""
    starts = range(0, len(devices), devices_per_replica)
    return tuple(tuple(devices[start : start + devices_per_replica]) for start in starts)


def span(strategy: tf.distribute.Strategy, parts: Parts) -> None:
    """Says that the replicas of a strategy span these devices."""
    own_attributes.put(strategy, _ATTRIBUTE, parts)


def of(strategy: Any) -> Parts | None:
    """Returns the devices of a strategy's replicas; None where each has one device."""
    return own_attributes.of(strategy, _ATTRIBUTE)


def on(device: Any) -> contextlib.AbstractContextManager[Any]:
    """Context in which operations are placed on a device; it changes nothing if that is "" or None."""
    return tf.device(device) if device else contextlib.nullcontext()


def to_device(value: Any, device: str) -> Any:
    """Returns a tensor, or the tensors of a sparse gradient, copied to a device unless they are on it."""
    if value.device == device:
        return value
    with tf.device(device):
        return tf.nest.map_structure(tf.identity, value, expand_composites=True)
