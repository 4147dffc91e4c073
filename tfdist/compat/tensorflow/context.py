# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's context: the runtime's state in this process, its global seed, and the cluster's coordination service.

There is no public way: `tf.random` sets the seed and does not return it. No public function tells whether the runtime
has begun. The coordination service, which keeps text under keys for all workers, is reached through the context alone.
"""

from __future__ import annotations

import collections
import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import cross_device_utils
from tensorflow.python.eager import context
from tensorflow.python.framework import random_seed

from tfdist.compat import patching
from tfdist.compat.tensorflow.coordinator import CHIEF_JOB
from tfdist.compat.tensorflow.variables import ResourceVariable, is_clock_variable

NEEDS = (
    "tensorflow.python.eager.context:Context.abort_collective_ops, configure_coordination_service",
    "tensorflow.python.eager.context:Context.delete_config_key_value, get_config_key_value, get_task_states",
    "tensorflow.python.eager.context:Context.report_error_to_cluster, set_config_key_value",
    "tensorflow.python.eager.context:context, global_seed",
    "tensorflow.python.framework.random_seed:DEFAULT_GRAPH_SEED, get_seed(op_seed)",
    "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher._ordering_token",
)


_drawn_seed: int | None = None


def global_seed() -> int | None:
    """The seed that `tf.random.set_seed` was given last, or None."""
    return context.global_seed()


def set_drawn_seed(seed: int) -> None:
    """Sets the global seed for random operations without a seed of their own, where the program has set none.

    The others have the seeds of a program without a global seed: `Dataset.shuffle(seed=3)` has its order on one device.
    TensorFlow would mix the two seeds, so its function for that is replaced, once in a process.
    """
    global _drawn_seed
    _drawn_seed = seed
    patching.once(random_seed, "get_seed", _without_drawn_seed)
    if global_seed() != seed:
        tf.random.set_seed(seed)


def is_drawn_seed(seed: int | None) -> bool:
    """Returns True for the seed that `set_drawn_seed` has set."""
    return seed is not None and seed == _drawn_seed


def _without_drawn_seed(original: Callable[[Any], Any], op_seed: Any) -> Any:
    current = context.global_seed() if tf.executing_eagerly() else tf.compat.v1.get_default_graph().seed
    seeds = original(op_seed)
    is_own = op_seed is not None and is_drawn_seed(current)
    return (random_seed.DEFAULT_GRAPH_SEED, seeds[1]) if is_own else seeds


def has_begun() -> bool:
    """Returns True if TensorFlow's runtime is initialized; then it can't join a cluster any more."""
    count = tf.config.threading.get_inter_op_parallelism_threads()
    try:
        # Refused then.
        tf.config.threading.set_inter_op_parallelism_threads(count + 1)
    except RuntimeError:
        return True
    tf.config.threading.set_inter_op_parallelism_threads(count)
    return False


def made_before() -> str:
    """Describes the variables that are alive in this process, or else the largest tensor; "" if there is none."""
    if found := _variables():
        return f"variable {found[0]!r}" + (f" and {len(found) - 1} more" if found[1:] else "")
    tensors = [each for each in _alive(tf.Tensor) if hasattr(each, "numpy")]
    largest = max(tensors, key=lambda each: each.shape.num_elements(), default=None)
    return "" if largest is None else f"a tensor of shape {tuple(largest.shape)} and dtype {largest.dtype.name}"


def configure_coordination(
    leader: str, jobs: Mapping[str, int], start_timeout_secs: float, heartbeat_timeout_secs: float
) -> None:
    """Makes the runtime, which has not begun, join a coordination service.

    Args:
      leader: the task that runs the service, such as "/job:worker/replica:0/task:0".
      jobs: for each job how many tasks it has.
      start_timeout_secs: longest wait for the start of all tasks.
      heartbeat_timeout_secs: for how long a task may be silent before it is taken for dead.
    """
    coordination = tf.compat.v1.ConfigProto().experimental.coordination_config
    for job, count in jobs.items():
        coordination.coordinated_job_list.add(name=job, num_tasks=count)
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=leader,
        cluster_register_timeout_in_ms=int(start_timeout_secs * 1000),
        heartbeat_timeout_in_ms=int(heartbeat_timeout_secs * 1000),
        coordinated_jobs=[*coordination.coordinated_job_list],
    )


def set_key(key: str, text: str) -> None:
    """Puts text under a key of the service.

    Raises:
      tf.errors.OpError: there is some already, or the service does not answer.
    """
    context.context().set_config_key_value(key, text)


def get_key(key: str, timeout_ms: int) -> str:
    """The text under a key, which is waited for.

    Raises:
      tf.errors.DeadlineExceededError: there was no value before the timeout.
      tf.errors.OpError: the service does not answer.
    """
    return context.context().get_config_key_value(key, timeout_ms)


def delete_key(key: str) -> None:
    """Removes the text under a key, if there is some."""
    context.context().delete_config_key_value(key)


def errors_of_tasks(jobs: Mapping[str, int]) -> dict[str, str]:
    """Errors of tasks that the coordination service knows of, by "job:index".

    Args:
      jobs: for each job how many tasks it has.

    Raises:
      tf.errors.OpError: the service does not answer.
    """
    names = [f"{job}:{index}" for job, count in jobs.items() for index in range(count)]
    states = context.context().get_task_states(list(jobs.items()))
    return {name: str(state) for name, state in zip(names, states, strict=True) if state is not None}


def report_error(message: str) -> None:
    """Makes pending calls of the other tasks raise `tf.errors.AbortedError` with this message."""
    context.context().report_error_to_cluster(tf.errors.ABORTED, message)


def abort_collectives(message: str) -> None:
    """Makes this process' pending and later collectives raise `tf.errors.AbortedError` with this message."""
    context.context().abort_collective_ops(tf.errors.ABORTED, message)


# Names of collectives, in part, with words for messages. Of a broadcast, senders and receivers have names of their own.
_KINDS = (("Reduce", "sum"), ("Gather", "gather"), ("Bcast", "broadcast"))
_COLLECTIVE = "Collective"


class CollectiveFunction:
    """A function with collectives; its graph is not kept alive."""

    def __init__(self, graph: Any) -> None:
        self.graph, self.name = weakref.ref(graph), graph.name

    @functools.cached_property
    def collectives(self) -> str:
        """Counts its collectives by kind; "" if its graph is gone."""
        graph = self.graph()
        return "" if graph is None else collectives_of(graph)


def collectives_of(graph: tf.Graph) -> str:
    """Returns how many collectives of which kinds a function's graph has, such as "1 gather, 2 sums".

    Each is counted where it stands in the graph, so this is equal on workers that run the same step.
    """
    described = graph.as_graph_def()
    functions = {each.signature.name: each.node_def for each in described.library.function}
    known: dict[str, collections.Counter[str]] = {}

    def count(name: str) -> collections.Counter[str]:
        if name not in known:
            known[name] = collections.Counter()
            if name.startswith(_COLLECTIVE):
                known[name][next((word for part, word in _KINDS if part in name), name)] = 1
            else:
                known[name] = count_in(functions.get(name, ()))
        return known[name]

    def count_in(nodes: Iterable[Any]) -> collections.Counter[str]:
        found = collections.Counter[str]()
        for node in nodes:
            called = [node.op, *(attr.func.name for attr in node.attr.values() if attr.HasField("func"))]
            for each in (*called, *(each.name for attr in node.attr.values() for each in attr.list.func)):
                found += count(each)
        return found

    counts = count_in(described.node)
    return ", ".join(f"{count} {word}{'s' if count > 1 else ''}" for word, count in sorted(counts.items()))


# In which order strategies may be built in one program.
#
# Joining a parameter-server cluster gives this process' devices new incarnations. Two things don't survive it:
#
# * A variable that was made before can still be read, but `assign` to it is lost without a word: TensorFlow writes to a
#   new resource of the same name, and reads the old one.
# * Collectives: whoever used the devices in one (MirroredStrategy, from two devices up) holds the old incarnations, and
#   TensorFlow ends all collectives of the process for good.


_mirrored_trained = False
_joined = False
_joined_after = False
_has_ended = False
# Variables of clusters that were left, by their id, because they can't be hashed.
_lost: dict[int, weakref.ref[ResourceVariable]] = {}


def join_cluster() -> None:
    """Called by ParameterServerStrategy before it starts anything.

    Raises:
      RuntimeError: This process has joined a cluster already, and TensorFlow would abort it later on; or it has
        variables, which could not be written any more.
    """
    if _joined:
        raise RuntimeError(
            "A program can have one ParameterServerStrategy at a time, and this one has built it before: a process of "
            "TensorFlow's belongs to one cluster. Use the first one again, also for further models; or end it with its "
            "close(), or restart the kernel of a notebook, before you build another."
        )
    if _has_ended:
        raise RuntimeError(
            "This program has closed a ParameterServerStrategy, and the tasks of the cluster in TF_CONFIG have ended "
            "with it. Start the job again, or restart the kernel of a notebook."
        )
    if _variables():
        raise RuntimeError(
            "ParameterServerStrategy must be built before the first model or variable: TensorFlow can't write "
            "variables that were made before a process joins a cluster. Move the line that builds "
            "ParameterServerStrategy to the top of the program, or delete what was made before it; in a notebook, "
            f"restart the kernel and run that line first. Received: {made_before()}"
        )


def joined_cluster() -> None:
    """Called by ParameterServerStrategy when it has joined its cluster."""
    global _joined, _joined_after
    _joined, _joined_after = True, _mirrored_trained


def leave_cluster(can_join_again: bool) -> None:
    """Called by ParameterServerStrategy before it leaves its cluster.

    Args:
      can_join_again: False if the tasks of the next cluster would be those that have just ended.
    """
    global _joined, _has_ended
    # Now, because TensorFlow crashes on a later request for the device of a variable on a lost server.
    held = _alive(ResourceVariable)
    lost = [each for each in held if _is_lost(each) or CHIEF_JOB not in each.device]
    _lost.clear()
    _lost.update({id(each): weakref.ref(each) for each in lost})
    _joined, _has_ended = False, not can_join_again


def mirrored_trains() -> None:
    """Called by MirroredStrategy before its replicas exchange anything.

    Raises:
      RuntimeError: A MirroredStrategy was at work before ParameterServerStrategy was built, and none can be since.
    """
    global _mirrored_trained
    if _joined_after:
        raise RuntimeError(
            "MirroredStrategy trained before ParameterServerStrategy was built and can't train after it: TensorFlow's "
            "collectives don't survive joining a cluster. Move the line that builds ParameterServerStrategy above the "
            "first fit, evaluate, predict or run under MirroredStrategy; in a notebook, restart the kernel and run "
            "that line first."
        )
    _mirrored_trained = True


def _variables() -> list[str]:
    """The names of the variables that are alive in this process, but for those that strategies themselves have."""
    gc.collect()
    found = _alive(ResourceVariable, cross_device_utils.CollectiveReplicaLauncher)
    own = {id(each._ordering_token) for each in found if not isinstance(each, ResourceVariable)}
    variables = [each for each in found if isinstance(each, ResourceVariable)]
    variables = [each for each in variables if id(each) not in own and not is_clock_variable(each)]
    return [str(each.name) for each in variables if not _is_lost(each)]


def _alive(*kinds: type) -> list[Any]:
    """The objects of these classes in this process. `isinstance` would ask proxies, of which some raise."""
    return [each for each in gc.get_objects() if issubclass(type(each), kinds)]


def _is_lost(variable: ResourceVariable) -> bool:
    known = _lost.get(id(variable))
    return known is not None and known() is variable
