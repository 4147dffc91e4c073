# SPDX-License-Identifier: Apache-2.0
"""Traced functions of a train step whose replicas are the devices of one process.

    contribute    on a replica's device    reads its copies of the variables, computes; the result goes to the first
                                           replica's device
    update        on all devices           adds up on the first replica's device, then applies to every copy

Of replicas that span devices, each part goes to the device that has the part in the first replica.
The contributions of an update are on one device, in the order of the replicas. So the update is the same function for
any contributors, and its sum does not depend on the order of arrival.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compat import (
    concrete_calls,
    following_devices,
    optimizer_patches,
    optimizer_variables,
    replica_parts,
    replica_writes,
)
from tfdist.data import splitting
from tfdist.step import copies, global_losses, one_replica
from tfdist.step.contribution import Contribution, add_up
from tfdist.step.packing import Packing
from tfdist.step.split_train_step import SplitTrainStep

# Device that reads the batch, and cuts it into parts.
_HOST = "/device:CPU:0"


class ThreadedStep:
    """A Keras train step, traced for a `MirroredStrategy`.

    Args:
      strategy: the strategy in whose scope it is traced.
      step: a model's bound `train_step`.
      element_spec: the structure of `tf.TypeSpec`s of a replica's input.
      is_whole: True if the input is the whole batch, from which the replica takes its part.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, step: Callable[..., Any], element_spec: Any, is_whole: bool = True
    ) -> None:
        self._strategy = strategy
        self._devices: Sequence[str] = strategy.extended.worker_devices
        self._spec = element_spec
        self._is_whole = is_whole
        self._user_step = step
        divisor = 1 if global_losses.has_own_loss(step) else len(self._devices)
        self._step = SplitTrainStep(step, len(self._devices), loss_divisor=divisor, can_take_maxima=True)
        self._template: Contribution | None = None
        # Devices of a flat contribution.
        self._homes: list[str] = []
        flat = tf.nest.flatten(element_spec, expand_composites=True)
        replicas = [
            self._step.settled(lambda replica=replica: one_replica.trace(strategy, self._on_replica(replica), flat))
            for replica in range(len(self._devices))
        ]
        self._contribute = [concrete_calls.bare(replica) for replica in replicas]
        self._specs = [tf.TensorSpec(t.shape, t.dtype) for t in replicas[0].outputs]
        self._packing = Packing()
        # By the number of contributions.
        self._updates: dict[int, Callable[..., Any]] = {}

    def prepare(self, num_contributions: int) -> None:
        """Traces the update from this number of contributions, unless it was; `dtypes` are known afterwards."""
        if num_contributions not in self._updates:
            specs = self._specs * num_contributions
            self._updates[num_contributions] = concrete_calls.bare(
                one_replica.trace(self._strategy, self._update, specs)
            )

    @property
    def dtypes(self) -> list[tf.DType]:
        """The dtypes of the flat logs."""
        return self._packing.dtypes

    def rebuild(self, flat: Sequence[Any]) -> Any:
        """Packs flat logs into the structure of the step's result."""
        return self._packing.rebuild(flat)

    def contribute(self, replica: int, batch: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Computes a replica's flat contribution from its flat input."""
        return self._contribute[replica](*batch)

    def update(self, contributions: Sequence[Sequence[tf.Tensor]]) -> list[np.ndarray]:
        """Makes an update from contributions, and returns the flat logs after it."""
        self.prepare(len(contributions))
        update = self._updates[len(contributions)]
        return self._packing.unpack(update(*[tensor for each in contributions for tensor in each]))

    # What is traced.

    def _on_replica(self, replica: int) -> Callable[..., list[tf.Tensor]]:
        def contribute(*flat: tf.Tensor) -> list[tf.Tensor]:
            with tf.device(_HOST):
                part, rows, whole = tf.nest.pack_sequence_as(self._spec, flat, expand_composites=True), None, None
                if self._is_whole:
                    part, rows, whole = splitting.cut(part, replica, len(self._devices)), splitting.rows(part), part
            with (
                tf.device(self._devices[replica]),
                tf.distribute.ReplicaContext(self._strategy, replica),
                global_losses.counted_as_one(self._strategy, self._user_step),
            ):
                compute = following_devices.of_strategy(self._strategy, self._step.contribute)
                contribution = self._template = compute(part, rows, whole)
            flat = tf.nest.flatten(contribution, expand_composites=True)
            self._homes = [self._home(tensor) for tensor in flat]
            return [replica_parts.to_device(*each) for each in zip(flat, self._homes, strict=True)]

        return contribute

    def _home(self, tensor: tf.Tensor) -> str:
        """Returns the first replica's device for the part of the model that a tensor is of."""
        parts = replica_parts.of(self._strategy)
        return parts.groups[0][parts.part_of(tensor)] if parts else self._devices[0]

    def _update(self, *flat: tf.Tensor) -> list[tf.Tensor]:
        size = len(self._specs)
        if replica_parts.of(self._strategy):
            homes = itertools.cycle(self._homes)
            flat = tuple(replica_parts.to_device(*each) for each in zip(flat, homes, strict=False))
        parts = [flat[start : start + size] for start in range(0, len(flat), size)]
        contributions = [tf.nest.pack_sequence_as(self._template, part, expand_composites=True) for part in parts]
        with one_replica.replica_on(self._strategy, self._devices[0]), _updating_all(self._step.model):
            return following_devices.of_strategy(self._strategy, self._apply)(contributions)

    def _apply(self, contributions: Sequence[Contribution]) -> list[tf.Tensor]:
        total = add_up(contributions)
        self._step.update(total, num_contributions=len(contributions), assign=copies.assign_all)
        for variable, count in zip(self._step.counters, total.counts, strict=True):
            # A metric's value is the sum over its copies.
            copies.copies_of(variable)[0].assign_add(tf.cast(count, variable.dtype))
        return self._packing.pack(self._step.logs(total))


@contextlib.contextmanager
def _updating_all(model: Any) -> Iterator[None]:
    """Context in which `optimizer.apply`, called on one replica with the sum over all, updates every copy."""
    changes: list[tuple[Any, str, Any]] = []
    for optimizer in optimizer_patches.optimizers_of(model):
        changes += optimizer_patches.without_merge_call(optimizer)
    with optimizer_patches.attributes(changes), _written_everywhere(_variables_of(model)):
        yield


@contextlib.contextmanager
def _written_everywhere(variables: Iterable[Any]) -> Iterator[None]:
    """Context in which an assignment on one replica writes all copies, also of variables without aggregation."""
    changed = [variable for variable in variables if variable.aggregation == tf.VariableAggregation.NONE]
    with replica_writes.aggregated(changed, tf.VariableAggregation.ONLY_FIRST_REPLICA):
        yield


def _variables_of(model: Any) -> list[Any]:
    """Returns the mirrored variables that optimizers may write."""
    variables = list(model.trainable_variables)
    for optimizer in optimizer_patches.optimizers_of(model):
        for part in optimizer_variables.parts_of(optimizer):
            variables += [*part.variables, *(optimizer_variables.trained_by(part) if part.built else [])]
    mirrored = [getattr(variable, "value", variable) for variable in variables]
    return list({id(variable): variable for variable in mirrored if hasattr(variable, "values")}.values())
