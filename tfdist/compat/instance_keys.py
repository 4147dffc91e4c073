# SPDX-License-Identifier: Apache-2.0
"""Gives collectives the keys by which the workers' parts of one operation find each other.

TensorFlow draws a new key whenever a function is called, and hands it to the operations of that function. Three kinds
of operation need another: one in a function that is called inside a conditional, which the key never reaches; one in a
loop whose shape differs from iteration to iteration, as the operations of one key must all have one shape; and one in a
step that is to be quick: all workers but the first ask the first one about each key that they have not met. There is no
public way to choose a key.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.compat import enclosing_graphs, process_variable

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
_FIRST_FIXED_KEY = 1 << 29
_FIRST_COUNTED_KEY = 1 << 30


class _Keys:
    """The keys of one device's collectives; takes the place of its launcher's `_next_instance_key`."""

    def __init__(self, launcher: Any) -> None:
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
        return self._original()

    def _counted(self) -> tf.Tensor:
        # TensorFlow orders what changes one variable as the program does: all workers count alike.
        with tf.init_scope(), tf.device("CPU:0"):
            if self._counter is None:
                self._counter = process_variable.of(_FIRST_COUNTED_KEY, "collective_key", tf.int32)
        return self._counter.assign_add(1, read_value=True)


def install(strategy: tf.distribute.Strategy) -> None:
    """Gives the collectives of this strategy keys that serve in conditionals too; and see `counted`."""
    for launcher in _launchers(strategy):
        launcher._next_instance_key = _Keys(launcher)


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
    names = ("_cross_device_ops", "_host_cross_device_ops", "_collective_ops")
    operations: list[Any] = [getattr(strategy.extended, name, None) for name in names]
    return list({id(each): each for one in operations for each in getattr(one, "_launchers", ())}.values())


def _in_function_in_control_flow() -> bool:
    in_function = False
    for graph in enclosing_graphs.enclosing():
        is_control_flow = getattr(graph, "is_control_flow_graph", False)
        if is_control_flow and in_function:
            return True
        in_function = in_function or not is_control_flow
    return False
