# SPDX-License-Identifier: Apache-2.0
"""Devices of replicas that span several of them: checks of `devices_per_replica`, and which devices a replica has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist import _checks
from tfdist.compat.keras import placement
from tfdist.compat.tensorflow import collectives, replicas


def check_devices_per_replica(devices_per_replica: Any, strategy: str) -> None:
    """Raises ValueError unless the argument is a positive integer."""
    if not _checks.is_count(devices_per_replica, at_least=1):
        raise ValueError(
            f"{strategy}(devices_per_replica=...): must be an integer of at least 1. Received: "
            f"devices_per_replica={devices_per_replica!r}"
        )


def check_names(devices: Any) -> None:
    """Checks the names of the devices of a MirroredStrategy: with one that is not there, the first step never ends.

    Raises:
      ValueError: it is no list of names, or this process has no such device.
    """
    if devices is None:
        return
    if isinstance(devices, str) or not isinstance(devices, Iterable) or not all(isinstance(n, str) for n in devices):
        raise ValueError(
            'MirroredStrategy(devices=...): must be a list of names, such as ["GPU:0", "GPU:1"]. '
            f"Received: devices={devices!r}"
        )
    specs = [tf.DeviceSpec.from_string(each.name) for each in tf.config.list_logical_devices()]
    found = {(spec.device_type, spec.device_index) for spec in specs}
    for name in devices:
        spec = tf.DeviceSpec.from_string(name)
        is_here = spec.job in (None, "localhost") and spec.device_index is not None
        if is_here and (spec.device_type, spec.device_index) not in found:
            known = ", ".join(f"{kind}:{index}" for kind, index in sorted(found))
            raise ValueError(
                f"MirroredStrategy(devices=...): this process has no device {name}; it has {known}. To try several "
                "devices without GPUs, divide the CPU by tf.config.set_logical_device_configuration before. "
                f"Received: devices={devices!r}"
            )


def of_machine(devices: Sequence[str] | None) -> list[str]:
    """Returns the full names of devices of this process: all GPUs by default, or all CPUs where there are none."""
    if not devices:
        found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        devices = [each.name for each in found]
    return replicas.full_names(devices)


def check_worker(devices_per_replica: int) -> None:
    """Raises ValueError if `devices_per_replica` does not divide the devices of this worker; starts no runtime."""
    if devices_per_replica > 1:
        check_count(devices_per_replica, _count("GPU") or _count("CPU"), "MultiWorkerMirroredStrategy")


@contextlib.contextmanager
def of_worker(strategy: tf.distribute.Strategy, devices_per_replica: int) -> Iterator[None]:
    """Makes each replica of a strategy of several workers span several devices; it is built within this block."""
    if devices_per_replica == 1:
        yield
        return
    with collectives.first_devices(devices_per_replica, _count("CPU")):
        yield
    firsts = strategy.extended.worker_devices
    span(strategy, [replicas.siblings(first, devices_per_replica) for first in firsts])


def served_cpus(devices_per_replica: int) -> int:
    """Returns the number of logical CPUs that the server of a worker needs: those that this program has configured."""
    return _count("CPU") if devices_per_replica > 1 else 1


def check_embedded(devices_per_replica: int, num_workers: int) -> None:
    """Raises ValueError if the workers of an embedded cluster will not have the devices; starts no runtime."""
    # Processes of their own: they have the machine's GPUs, and not the logical ones of this program.
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    kind, count = ("GPU", num_gpus) if num_gpus else ("CPU", _count("CPU"))
    _check_servers(devices_per_replica, kind, [count] * num_workers)


def span_workers(strategy: tf.distribute.Strategy, devices_per_replica: int, num_workers: int) -> None:
    """Makes the computation of each worker of parameter servers span several of its devices.

    Args:
      strategy: is connected to its workers.
      devices_per_replica: number of devices of a worker that compute a step.
      num_workers: number of workers.

    Raises:
      ValueError: a worker does not have the devices.
    """
    if devices_per_replica == 1:
        return
    kind = str(tf.DeviceSpec.from_string(strategy.extended.worker_devices[0]).device_type)
    specs = [tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices(kind)]
    tasks = [spec.task for spec in specs if spec.job == "worker"]
    _check_servers(devices_per_replica, kind, [tasks.count(worker) for worker in range(num_workers)])
    # Without a job: devices of whichever worker runs a function, which is traced once for all.
    devices = tuple(f"/device:{kind}:{index}" for index in range(devices_per_replica))
    replicas.facts_of(strategy).parts = replicas.ReplicaDevices((devices,), hold_variables=False)
    placement.allow_placed_layers()


def _check_servers(devices_per_replica: int, kind: str, counts: Sequence[int]) -> None:
    """Raises ValueError if a worker's devices can't be divided into replicas.

    Args:
      devices_per_replica: the argument.
      kind: "GPU" or "CPU".
      counts: of each worker, its devices of this kind.
    """
    for worker, count in enumerate(counts):
        if count == 0 or count % devices_per_replica:
            fitting = " or ".join(str(each) for each in range(1, count + 1) if count % each == 0) or "1"
            raise ValueError(
                f"ParameterServerStrategy(devices_per_replica={devices_per_replica}): does not divide the number of "
                f"devices of worker:{worker}; use {fitting}, or give the worker other devices: GPUs, or logical CPUs, "
                "which its script makes by tf.config.set_logical_device_configuration before it builds the strategy. "
                f"Received: worker:{worker} with {count} {kind}{'' if count == 1 else 's'}"
            )


def _count(kind: str) -> int:
    """Returns the number of logical devices of a kind, without starting TensorFlow's runtime."""
    physical = tf.config.list_physical_devices(kind)
    return sum(len(tf.config.get_logical_device_configuration(each) or [None]) for each in physical)


def check_count(devices_per_replica: int, devices: int | Sequence[str], strategy: str) -> None:
    """Raises ValueError if `devices_per_replica` does not divide the number of devices."""
    count = devices if isinstance(devices, int) else len(devices)
    if count % devices_per_replica:
        fitting = [str(each) for each in range(1, count + 1) if count % each == 0]
        shown = f"{count} devices" if isinstance(devices, int) else f"{count} devices: {', '.join(devices)}"
        other = "hide devices with CUDA_VISIBLE_DEVICES or tf.config.set_visible_devices"
        if strategy == "MirroredStrategy":
            other = "give it other devices"
        raise ValueError(
            f"{strategy}(devices_per_replica={devices_per_replica}): does not divide the number of devices; use "
            f"{' or '.join(fitting)}, or {other}. Received: {shown}"
        )


def span(strategy: tf.distribute.Strategy, groups: Sequence[Sequence[str]]) -> None:
    """Makes each replica of a strategy span several devices.

    Args:
      strategy: computes on the first device of each group.
      groups: for each replica of this process, the full names of its devices.
    """
    parts = replicas.ReplicaDevices(tuple(tuple(group) for group in groups))
    replicas.facts_of(strategy).parts = parts
    placement.allow_placed_layers()
    collectives.use_parts(strategy, parts)
    placement.follow_devices(strategy)
