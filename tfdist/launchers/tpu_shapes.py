# SPDX-License-Identifier: Apache-2.0
"""Computes the numbers of chips and hosts of a TPU slice from its type or topology.

Source: Google's pages "TPU versions" and "Plan TPUs in GKE". The number in a type counts TensorCores (two per chip) up
to v4 and for v5p, and chips for v5e and v6e.
"""

from __future__ import annotations

import dataclasses
import math
import re

from tfdist.launchers.requests import LaunchError


@dataclasses.dataclass(frozen=True)
class _Generation:
    """Properties of one generation of TPU chips.

    Attributes:
      cores_per_unit: cores per chip if the number in a type counts cores; 1 if it counts chips.
      dimensions: number of dimensions of a topology.
      chips_per_host: number of chips per host in a slice of several hosts.
      single: numbers of chips of the slices with one host.
    """

    cores_per_unit: int
    dimensions: int
    chips_per_host: int
    single: tuple[int, ...]


_V4 = _Generation(cores_per_unit=2, dimensions=3, chips_per_host=4, single=(4,))
_LITE = _Generation(cores_per_unit=1, dimensions=2, chips_per_host=4, single=(1, 4, 8))
_TYPES = {
    "v2": _Generation(cores_per_unit=2, dimensions=2, chips_per_host=4, single=(4,)),
    "v3": _Generation(cores_per_unit=2, dimensions=2, chips_per_host=4, single=(4,)),
    "v4": _V4,
    "v5p": _V4,
    "v5litepod": _LITE,
    "v6e": _LITE,
}
# Generations by GKE's names, in the label cloud.google.com/gke-tpu-accelerator of a node pool.
_ACCELERATORS = {
    "tpu-v4-podslice": _V4,
    "tpu-v5p-slice": _V4,
    "tpu-v5-lite-podslice": _LITE,
    "tpu-v6e-slice": _LITE,
}
_MAX_CHIPS = 16384
_TOPOLOGY = re.compile(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Slice:
    """A TPU slice: number of its chips, and number of its hosts."""

    chips: int
    hosts: int

    @property
    def chips_per_host(self) -> int:
        """Number of chips of each host."""
        return self.chips // self.hosts


def from_type(text: str) -> Slice:
    """Returns the slice of a Cloud TPU type, such as v4-32 or v5litepod-16.

    Raises:
      LaunchError: there is no such type.
    """
    name, _, number = text.rpartition("-")
    if name not in _TYPES or not (number.isascii() and number.isdigit() and 0 < len(number) < 6):
        known = ", ".join(f"{each}-N" for each in _TYPES)
        raise LaunchError(f"--accelerator_type is not known; use one of {known}. Received: {text!r}")
    generation = _TYPES[name]
    chips, rest = divmod(int(number), generation.cores_per_unit)
    if rest or not chips:
        raise LaunchError(f"--accelerator_type has no such size: {name} counts 2 cores a chip. Received: {text!r}")
    return _slice(generation, chips, f"--accelerator_type={text}")


def from_topology(accelerator: str, topology: str, chips_per_host: int = 0) -> Slice:
    """Returns the slice of a GKE node pool with this topology.

    Args:
      accelerator: the label cloud.google.com/gke-tpu-accelerator.
      topology: the label cloud.google.com/gke-tpu-topology, such as 2x2x2.
      chips_per_host: number of chips of the machine type; 0 for the usual number.

    Raises:
      LaunchError: there is no such accelerator or topology.
    """
    if accelerator not in _ACCELERATORS:
        raise LaunchError(
            f"--accelerator is not known; use one of {', '.join(_ACCELERATORS)}. Received: {accelerator!r}"
        )
    generation = _ACCELERATORS[accelerator]
    parts = topology.split("x")
    if not _TOPOLOGY.fullmatch(topology) or len(parts) != generation.dimensions:
        example = "x".join("224"[: generation.dimensions])
        raise LaunchError(
            f"--topology is invalid for {accelerator}, which has {generation.dimensions} dimensions; write {example}. "
            f"Received: {topology!r}"
        )
    return _slice(generation, math.prod(map(int, parts)), f"--topology={topology}", chips_per_host)


def _slice(generation: _Generation, chips: int, what: str, chips_per_host: int = 0) -> Slice:
    usual = chips if chips in generation.single else generation.chips_per_host
    each = chips_per_host or usual
    if chips > _MAX_CHIPS or chips % each or each not in (1, 4, 8) or (each == 8 and chips > each):
        raise LaunchError(
            f"{what} makes no whole hosts of {each} chips; use a topology that exists, or another --chips_per_host. "
            f"Received: {chips} chips"
        )
    return Slice(chips, chips // each)
