# SPDX-License-Identifier: Apache-2.0
"""Refuses, before anything trains, what a `ParameterServerStrategy` or its processes can't use or hold."""

from __future__ import annotations

import collections
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.compat.keras.scope import check_made_in_scope
from tfdist.compat.tensorflow import variables
from tfdist.coordination.usage import Room, Usage
from tfdist.step import scope
from tfdist.step.step import Step


def check_scope(strategy: tf.distribute.Strategy, step: Step) -> None:
    """Refuses a model that has variables of the chief's own, in which workers would overwrite each other's counts.

    Raises:
      ValueError: The model was made outside of the strategy's scope, or its optimizer was built there.
    """
    if step.kind not in ("train", "test"):
        return
    model = step.model
    scope.take_over(strategy, model)
    check_made_in_scope(strategy, (*model.variables, *model.metrics_variables))


def check_shards(step: Step, has_shards: Callable[[Any], bool]) -> None:
    """Refuses to train variables in shards untraced, where their gradients would be lost.

    Raises:
      ValueError: The model has such a variable.
    """
    if step.kind != "train":
        return
    for variable in step.model.trainable_variables:
        if has_shards(variables.tf_variable(variable)):
            raise ValueError(
                "run_eagerly=True can't train variables in shards, such as variable_partitioner has made of "
                f"{variable.path!r}. Compile with run_eagerly=False, or build the strategy without it. "
                "Received: run_eagerly=True"
            )


def check_graph(step: Step, traced: Any) -> None:
    """Refuses a traced step that workers can't run.

    Args:
      step: for the message.
      traced: the concrete function that workers will run.

    Raises:
      ValueError: it uses a data set that was made outside of it.
    """
    fn = step.function
    name = {"predict": "predict_step"}.get(step.kind, getattr(fn, "__name__", str(fn)))
    if any(captured.dtype == tf.variant for captured in traced.captured_inputs):
        raise ValueError(
            f"ParameterServerStrategy: {name} uses a tf.data.Dataset that was made outside of it, where no "
            "worker reads; give it to fit, evaluate or predict together with the other data "
            f"(tf.data.Dataset.zip((data, others))), or make it within {name}. Received: a captured tf.data.Dataset"
        )


def check_colocation(strategy: Any) -> None:
    """Makes optimizers of the strategy refuse to make slots for a variable that was made outside of the scope."""
    variables.replace_colocation(strategy, lambda stock: _checking(strategy, stock))


def _checking(strategy: Any, colocate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def colocate_vars_with(variable: Any) -> Any:
        # A partitioned one has parts of the strategy's.
        is_whole = isinstance(variable, tf.Variable) and not hasattr(variable, "variables")
        if is_whole:
            check_made_in_scope(strategy, [variable])
        return colocate(variable)

    return colocate_vars_with


# Refuses variables that the memory of the parameter servers does not hold, before any of it is allocated.


# Smaller variables are made unchecked: a check is a round trip to all servers.
LEAST_BYTES = 256 << 20


class MemoryCheck:
    """Looks at each large variable before it is made.

    Args:
      partitioner: as the strategy was given it, or None.
      num_ps: number of parameter servers.
      usage: returns the counters of the tasks.
    """

    def __init__(
        self, partitioner: Callable[..., Sequence[int]] | None, num_ps: int, usage: Callable[[], Mapping[str, Usage]]
    ) -> None:
        self._partitioner = partitioner
        self._num_ps = num_ps
        self._usage = usage

    def check(self, name: str, shape: Sequence[int | None], dtype: tf.DType, first: int, is_slot: bool) -> None:
        """Does nothing if the servers have room for a variable.

        Args:
          name: of the variable.
          shape: of the whole.
          dtype: of its elements.
          first: server of the first shard.
          is_slot: True for a variable of an optimizer.

        Raises:
          MemoryError: servers that share a machine, or a control group, may take less than their shares.
        """
        sizes = [size for size in shape if size is not None]
        if len(sizes) < max(1, len(shape)) or math.prod(sizes) * dtype.size < LEAST_BYTES:
            return
        row_bytes = math.prod(sizes[1:]) * dtype.size
        counts = [row_bytes * rows for rows in self._shards(sizes, dtype)]
        shares: collections.Counter[str] = collections.Counter()
        for index, size in enumerate(counts):
            shares[f"ps:{(first + index) % self._num_ps}"] += size
        if self._full(shares) is None:
            return
        # A model that the program has let go may still be there, in cycles of references.
        gc.collect()
        full = self._full(shares)
        if full is not None:
            raise MemoryError(_refusal(name, sizes, shares, *full, is_slot))

    def _full(self, shares: Mapping[str, int]) -> tuple[list[str], Room] | None:
        """Returns servers that share memory without room for their shares, and that memory; None if all have room."""
        found = self._usage()
        tasks_of: dict[str, list[str]] = {}
        rooms: dict[str, Room] = {}
        for task in shares:
            for room in found[task].rooms if task in found else ():
                tasks_of.setdefault(room.key, []).append(task)
                rooms[room.key] = room
        for key, tasks in tasks_of.items():
            if sum(shares[task] for task in tasks) > rooms[key].free_bytes:
                return tasks, rooms[key]
        return None

    def _shards(self, shape: Sequence[int], dtype: tf.DType) -> list[int]:
        """Returns the rows of each shard, as TensorFlow partitions them."""
        counts = self._partitioner(shape=tf.TensorShape(shape), dtype=dtype) if self._partitioner else [1]
        rows, parts = shape[0], max(1, counts[0])
        return [rows // parts + (index < rows % parts) for index in range(parts)]


def _refusal(
    name: str, shape: Sequence[int], shares: Mapping[str, int], tasks: Sequence[str], room: Room, is_slot: bool
) -> str:
    spread = f"{_gb(max(shares.values()))} on each of {len(shares)} parameter servers"
    where = spread if len(shares) > 1 else f"all on {next(iter(shares))}"
    slots = "The optimizer's slots come on top: nothing for SGD, as much again for Adagrad, twice as much for Adam. "
    return (
        f"the {'slot' if is_slot else 'variable'} {name} of shape {tuple(shape)} takes {_gb(sum(shares.values()))}, "
        f"{where}. Of {_gb(room.total_bytes)} of {room.name}, {', '.join(tasks)} may take {_gb(room.free_bytes)} "
        f"together, and need {_gb(sum(shares[task] for task in tasks))}. {'' if is_slot else slots}Use parameter "
        "servers on more machines, shards (tfdist.ShardedTables) if it is whole, or fewer or narrower rows"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
