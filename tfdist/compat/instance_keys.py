# SPDX-License-Identifier: Apache-2.0
"""Gives collectives the keys by which the workers' parts of one operation find each other.

TensorFlow draws a new key whenever a function is called, for each device one after the other, and hands them to the
operations of that function. Where two threads call functions at once, the devices of one call may get different keys,
and the sums of two models are mixed; so each thread of a process has keys of its own here. Three kinds of operation
need another key: one in a function that is called inside a conditional, which the key never reaches; one in a loop
whose shape differs from iteration to iteration, as the operations of one key must all have one shape; and one in a step
that is to be quick: all workers but the first ask the first one about each key that they have not met. There is no
public way to choose a key.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.compat import enclosing_graphs, process_variable, replicas

NEEDS = (
    "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._cross_device_ops",
    "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._host_cross_device_ops",
    "tensorflow.python.distribute.cross_device_ops:CollectiveAllReduce._launchers",
    "tensorflow.python.distribute.cross_device_utils:CollectiveKeys.get_instance_key",
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher._collective_keys",
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher._device",
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher._group_key",
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher._next_instance_key",
    "tensorflow.python.distribute.mirrored_strategy:MirroredExtended._collective_ops",
)

# Far above what TensorFlow, which counts from 1, draws in any run.
_FIRST_KEY_OF_THREADS = 1 << 28
_FIRST_FIXED_KEY = 1 << 29
_FIRST_COUNTED_KEY = 1 << 30


class _KeysOfThreads:
    """Keys that are drawn when a function is called. The n-th key of a thread is the same for all devices.

    Args:
      num_devices: number of devices, which all draw alike in each thread.
    """

    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices
        self._new = itertools.count(_FIRST_KEY_OF_THREADS)
        self._of_thread = threading.local()

    def draw(self, device: str) -> int:
        """Returns the next key of a device."""
        drawn = self._of_thread.__dict__.setdefault("drawn", collections.defaultdict(int))
        # By number, the key and how many devices are still to draw it.
        waiting = self._of_thread.__dict__.setdefault("waiting", {})
        number = drawn[device]
        drawn[device] += 1
        key, left = waiting.pop(number, None) or (next(self._new), self._num_devices)
        if left > 1:
            waiting[number] = key, left - 1
        return key


class _Keys:
    """The keys of one device's collectives; takes the place of its launcher's `_next_instance_key`.

    Args:
      launcher: TensorFlow's launcher of the device's collectives.
      of_threads: where functions are called in several threads; None in a job of several processes, where one thread at
        a time trains, and all processes draw alike.
    """

    def __init__(self, launcher: Any, of_threads: _KeysOfThreads | None) -> None:
        self._of_threads = of_threads
        self._lock = threading.RLock()
        self._launcher, self._original = launcher, launcher._next_instance_key
        self._counter: Any = None
        self._fixed = itertools.count(_FIRST_FIXED_KEY)
        self.is_counting = self.is_fixed = False

    def __call__(self) -> Any:
        """The key of the collective that is traced now."""
        if self.is_counting:
            return self._counted()
        if self.is_fixed and not tf.executing_eagerly():
            return next(self._fixed)
        if _in_function_in_control_flow():
            return self._launcher._collective_keys.get_instance_key(self._launcher._group_key, self._launcher._device)
        if self._of_threads is None or tf.executing_eagerly():
            return self._original()
        # TensorFlow has the function call this attribute when it is called itself. Two threads may trace at once.
        with self._lock:
            self._launcher._next_instance_key = self._at_call
            try:
                return self._original()
            finally:
                self._launcher._next_instance_key = self

    def _at_call(self) -> Any:
        if self._of_threads is None or not tf.executing_eagerly():
            return self()
        key = self._of_threads.draw(self._launcher._device)
        with tf.device("CPU:0"):
            return tf.constant(key, tf.int32)

    def _counted(self) -> tf.Tensor:
        # TensorFlow orders what changes one variable as the program does: all workers count alike.
        with tf.init_scope(), tf.device("CPU:0"):
            if self._counter is None:
                self._counter = process_variable.of(_FIRST_COUNTED_KEY, "collective_key", tf.int32)
        return self._counter.assign_add(1, read_value=True)


def install(strategy: tf.distribute.Strategy) -> None:
    """Gives the collectives of this strategy keys that serve in conditionals too; and see `counted`."""
    is_alone = not replicas.has_other_workers(strategy)
    for launchers in _launchers_by_operations(strategy):
        of_threads = _KeysOfThreads(len(launchers)) if is_alone else None
        for launcher in launchers:
            if not isinstance(launcher._next_instance_key, _Keys):
                launcher._next_instance_key = _Keys(launcher, of_threads)


@contextlib.contextmanager
def counted(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Within this block, each execution of a collective that is traced has a key of its own: shapes may differ."""
    with _set(strategy, "is_counting"):
        yield


@contextlib.contextmanager
def fixed(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Within this block, all executions of a collective that is traced have one key.

    They are of one shape then, and all workers trace the same functions in the same order. A collective ends on a
    worker when the others have taken what it has sent, so the next one of this key finds nothing of the last.
    """
    with _set(strategy, "is_fixed"):
        yield


@contextlib.contextmanager
def _set(strategy: tf.distribute.Strategy, name: str) -> Iterator[None]:
    keys = [launcher._next_instance_key for launcher in _launchers(strategy)]
    for each in keys:
        setattr(each, name, True)
    try:
        yield
    finally:
        for each in keys:
            setattr(each, name, False)


def _launchers(strategy: tf.distribute.Strategy) -> list[Any]:
    return list({id(each): each for one in _launchers_by_operations(strategy) for each in one}.values())


def _launchers_by_operations(strategy: tf.distribute.Strategy) -> list[list[Any]]:
    """Returns the launchers of all devices, for each of the strategy's kinds of collectives."""
    names = ("_cross_device_ops", "_host_cross_device_ops", "_collective_ops")
    operations: list[Any] = [getattr(strategy.extended, name, None) for name in names]
    # Replicas that span devices have operations for each part.
    operations = [each for one in operations for each in getattr(one, "by_part", [one])]
    return [list(getattr(one, "_launchers", ())) for one in operations]


def _in_function_in_control_flow() -> bool:
    in_function = False
    for graph in enclosing_graphs.enclosing():
        is_control_flow = getattr(graph, "is_control_flow_graph", False)
        if is_control_flow and in_function:
            return True
        in_function = in_function or not is_control_flow
    return False
