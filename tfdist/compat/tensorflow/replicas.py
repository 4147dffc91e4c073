# SPDX-License-Identifier: Apache-2.0
"""Replicas of TensorFlow's strategies: their numbers, devices, writes, values, and the keys by which they meet."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, distribute_utils, values

from tfdist.compat import patching
from tfdist.compat.tensorflow import graphs, variables

NEEDS = (
    "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._cross_device_ops",
    "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended._host_cross_device_ops",
    "tensorflow.python.distribute.distribute_lib:ReplicaContextBase._replica_id",
    "tensorflow.python.distribute.distribute_lib:get_update_replica_id",
    "tensorflow.python.distribute.mirrored_strategy:MirroredExtended._get_replica_id_in_sync_group, _collective_ops",
    "tensorflow.python.distribute.distribute_utils:regroup",
    "tensorflow.python.distribute.values:PerReplicaSpec._value_specs",
    "tensorflow.python.distribute.cross_device_ops:CollectiveAllReduce._launchers",
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher._group_key, _next_instance_key",
)


# Of the stock class, whose subclasses may replace it.
_count_of: Callable[[Any], int] = tf.distribute.Strategy.num_replicas_in_sync.fget  # pyright: ignore
_FACTS = "_tfdist_facts"


@dataclasses.dataclass
class StrategyFacts:
    """Facts about a strategy for rooms below `strategy.distribution`, which stock strategies don't have.

    Attributes:
      parts: the devices of its replicas; None where each replica has one device.
      redirect: given the strategy, returns a context in which variables are made in its scope; None of strategies that
        are not tfdist's: it is left to Keras where a layer makes its variables.
      adopts_seed_generators: True if seed generators that its replicas draw from get variables in its scope.
      counts_as_one_replica: True while a Keras step is traced: `num_replicas_in_sync` is 1 there.
      content: see `inputs.content`.
      rehearsed: keys of the steps whose variables were created, by the step's first layer.
    """

    parts: ReplicaDevices | None = None
    redirect: Callable[[Any], contextlib.AbstractContextManager] | None = None
    adopts_seed_generators: bool = False
    counts_as_one_replica: bool = False
    content: tf.Variable | None = None
    rehearsed: weakref.WeakKeyDictionary[Any, set[Any]] = dataclasses.field(default_factory=weakref.WeakKeyDictionary)


def facts_of(strategy: Any) -> StrategyFacts:
    """Returns the facts about a strategy, to be read or changed; those about None are the defaults."""
    return StrategyFacts() if strategy is None else patching.setdefault(strategy, _FACTS, StrategyFacts)


def current() -> int:
    """The index of the replica that runs here, among those of this process; in replica context."""
    return tf.distribute.get_replica_context()._replica_id


def in_sync_group(strategy: Any, index: int) -> Any:
    """The number among all replicas of the one that has this index in this process."""
    return strategy.extended._get_replica_id_in_sync_group(index)


def count(strategy: Any) -> int:
    """Returns the number of replicas of a strategy, also while `num_replicas_in_sync` is replaced by 1."""
    return _count_of(strategy)


def has_other_workers(strategy: Any) -> bool:
    """Returns True if the strategy has replicas in other processes."""
    # Some strategies of one replica have no `worker_devices`.
    return count(strategy) > 1 and worker_count(strategy) > 1


def worker_count(strategy: Any) -> int:
    """Returns the number of processes of a `MultiWorkerMirroredStrategy`."""
    return count(strategy) // len(strategy.extended.worker_devices)


def worker_index(strategy: Any) -> int:
    """Returns the index of this process in a `MultiWorkerMirroredStrategy`."""
    return in_sync_group(strategy, 0) // len(strategy.extended.worker_devices)


def worker_device(strategy: Any) -> str:
    """The task of this process in the cluster, for `tf.device`."""
    spec = tf.DeviceSpec.from_string(strategy.extended.worker_devices[0])
    return tf.DeviceSpec(spec.job, spec.replica, spec.task).to_string()


@functools.cache
def default_strategy() -> tf.distribute.Strategy:
    """The strategy that is current outside of any scope, as a thread that has just begun is."""
    return graphs.call_outside(tf.distribute.get_strategy)


def is_updating() -> bool:
    """Returns True inside of a function that `extended.update` calls."""
    return distribute_lib.get_update_replica_id() is not None


# Devices of replicas that span several devices: which device holds which part of the model, in each replica.
#
# A strategy computes on the first device of each replica, and knows no others. There is no public way to a device's
# full name, by which a tensor of a graph says where it is.


@dataclasses.dataclass(frozen=True)
class ReplicaDevices:
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


def homes_of(strategy: Any, tensors: Sequence[Any]) -> list[str]:
    """Returns for each tensor the device of its part, if a strategy has replicas that span devices; else ""."""
    parts = parts_of(strategy)
    devices = [getattr(tensor, "device", "") or "" for tensor in tensors]
    return [device if parts and parts.part_on(device) is not None else "" for device in devices]


def full_names(devices: Sequence[str]) -> list[str]:
    """Returns the full names of devices of this process; begins TensorFlow's runtime."""

    def resolved(device: str) -> str:
        with tf.init_scope(), tf.device(device):
            return tf.zeros([]).device

    return [*map(resolved, devices)]


def siblings(first: str, count: int) -> tuple[str, ...]:
    """Returns the full names of a device and of those that follow it in the numbering, `count` in all."""
    spec = tf.DeviceSpec.from_string(first)
    index = spec.device_index or 0
    return tuple(spec.replace(device_index=index + each).to_string() for each in range(count))


def grouped(devices: Sequence[str], devices_per_replica: int) -> tuple[tuple[str, ...], ...]:
    """Groups devices to replicas, in their order."""
    starts = range(0, len(devices), devices_per_replica)
    return tuple(tuple(devices[start : start + devices_per_replica]) for start in starts)


def parts_of(strategy: Any) -> ReplicaDevices | None:
    """Returns the devices of a strategy's replicas; None where each has one device."""
    return facts_of(strategy).parts


def on_device(device: Any) -> contextlib.AbstractContextManager[Any]:
    """Context in which operations are placed on a device; it changes nothing if that is "" or None."""
    return tf.device(device) if device else contextlib.nullcontext()


def to_device(value: Any, device: str) -> Any:
    """Returns a tensor, or the tensors of a sparse gradient, copied to a device unless they are on it."""
    if value.device == device:
        return value
    with tf.device(device):
        return tf.nest.map_structure(tf.identity, value, expand_composites=True)


# Values of several replicas as one.
#
# There is no public way within a traced function: `experimental_distribute_values_from_function` makes such values only
# where TensorFlow runs eagerly. Its functions get a context, and no tensors of a graph.


def values_of_replicas(parts: Sequence[Any], always_wrap: bool = True) -> Any:
    """Returns a distributed value, or a structure of these, from the values of this process' replicas in order.

    Args:
      parts: a value, or a structure of values, for each replica.
      always_wrap: whether one object that all replicas have becomes a distributed value too.
    """
    return distribute_utils.regroup(tuple(parts), always_wrap=always_wrap)


def first_spec(specs: Any) -> Any:
    """Returns the structure of `tf.TypeSpec`s of the first replica's values, of which `specs` are the specs."""
    return tf.nest.map_structure(
        lambda spec: spec._value_specs[0] if isinstance(spec, values.PerReplicaSpec) else spec, specs
    )


# Gives collectives the keys by which the workers' parts of one operation find each other.
#
# TensorFlow draws new keys whenever a function is called, for one device after the other, for the operations of that
# function. If two threads call functions at once, the devices of one call may get different keys, and the sums of two
# models are mixed. So each thread of a process has keys of its own here. Three kinds of operation need another key: one
# in a function that is called inside a conditional, which the key never reaches; one in a loop whose shape differs from
# iteration to iteration, as the operations of one key must all have one shape; and one in a step that is to be quick:
# all workers but the first ask the first one about each key that they have not met. There is no public way to choose a
# key.


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

    def draw(self, device: object) -> int:
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
      fixed: keys of the device in its group that hold for all executions.
    """

    def __init__(self, launcher: Any, of_threads: _KeysOfThreads | None, fixed: Iterator[int]) -> None:
        self._of_threads = of_threads
        self._lock = threading.RLock()
        self._launcher, self._original = launcher, launcher._next_instance_key
        self._counter: Any = None
        self._fixed = fixed
        self.is_counting = self.is_fixed = False
        self.on_trace: Callable[[Any], object] | None = None

    def __call__(self) -> Any:
        """The key of the collective that is traced now."""
        if self.on_trace is not None and not tf.executing_eagerly():
            *_, function, _ = (None, *graphs.enclosing())
            self.on_trace(function)
        if self.is_counting:
            return self._counted()
        if (self.is_fixed and not tf.executing_eagerly()) or _in_function_in_control_flow():
            return next(self._fixed)
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
        key = self._of_threads.draw(self)
        with tf.device("CPU:0"):
            return tf.constant(key, tf.int32)

    def _counted(self) -> tf.Tensor:
        # TensorFlow orders what changes one variable as the program does: all workers count alike.
        with tf.init_scope(), tf.device("CPU:0"):
            if self._counter is None:
                self._counter = variables.variable_of_process(_FIRST_COUNTED_KEY, "collective_key", tf.int32)
        return self._counter.assign_add(1, read_value=True)


def give_keys(strategy: tf.distribute.Strategy) -> None:
    """Gives the collectives of this strategy keys that serve in conditionals too; and see `counted_keys`."""
    is_alone, fixed = not has_other_workers(strategy), {}
    for launchers in _launchers_by_operations(strategy):
        of_threads = _KeysOfThreads(len(launchers)) if is_alone else None
        for index, launcher in enumerate(launchers):
            if not isinstance(launcher._next_instance_key, _Keys):
                # Operations of the same devices are one group.
                keys = fixed.setdefault((launcher._group_key, index), itertools.count(_FIRST_FIXED_KEY))
                launcher._next_instance_key = _Keys(launcher, of_threads, keys)


def note_traced(strategy: tf.distribute.Strategy, note: Callable[[Any], object]) -> None:
    """Calls `note` with the outermost function's graph, or None, where a collective of this strategy is traced."""
    for launcher in _launchers(strategy):
        launcher._next_instance_key.on_trace = note


def counted_keys(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager[None]:
    """Within this block, each execution of a collective that is traced has a key of its own: shapes may differ."""
    return _set_of_keys(strategy, "is_counting")


def fixed_keys(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager[None]:
    """Within this block, all executions of a collective that is traced have one key.

    They are of one shape then, and all workers trace the same functions in the same order. A collective ends on a
    worker when the others have taken its message, so the next one of this key finds no old message.
    """
    return _set_of_keys(strategy, "is_fixed")


@contextlib.contextmanager
def _set_of_keys(strategy: tf.distribute.Strategy, name: str) -> Iterator[None]:
    keys = [launcher._next_instance_key for launcher in _launchers(strategy)]
    for each in keys:
        setattr(each, name, True)
    try:
        yield
    finally:
        for each in keys:
            setattr(each, name, False)


def operations_of(strategy: Any) -> Any:
    """Object that reduces the values of a strategy's replicas."""
    return strategy.extended._cross_device_ops


def replace_operations(strategy: Any, operations: Any) -> None:
    """Gives a strategy other operations, wherever it has the present ones."""
    extended, stock = strategy.extended, operations_of(strategy)
    extended._cross_device_ops = operations
    if getattr(extended, "_collective_ops", None) is stock:
        extended._collective_ops = operations


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
    for graph in graphs.enclosing():
        is_control_flow = getattr(graph, "is_control_flow_graph", False)
        if is_control_flow and in_function:
            return True
        in_function = in_function or not is_control_flow
    return False
