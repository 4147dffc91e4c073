# SPDX-License-Identifier: Apache-2.0
"""Sorts the variables of a model and its optimizers: what is averaged, stays a replica's own, or begins anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat import flat_layers, fresh_threads, optimizer_patches, optimizer_variables


@dataclasses.dataclass(frozen=True)
class State:
    """Keras variables of a model and its optimizers, by what an average does to them.

    Attributes:
      parameters: the variables that optimizers update.
      others: further variables that are averaged.
      local: variables that are averaged only when training ends, so that all replicas continue alike.
      reset: variables that are set to a value, each with that value.
    """

    parameters: list[Any]
    others: list[Any]
    local: list[Any]
    reset: list[tuple[Any, float]]

    @property
    def averaged(self) -> list[Any]:
        """All that are averaged, the parameters first."""
        return [*self.parameters, *self.others]


def state(model: keras.Model, optimizer_state: str) -> State:
    """Sorts a model's variables.

    Besides the parameters these are always averaged: statistics of layers; of the optimizers moving averages of the
    parameters, gradients that are being accumulated, and what loss scaling keeps. `iterations` are the same on all
    replicas, because each counts its steps; with loss scaling, which leaves some out, they are averaged.

    Args:
      model: its optimizers were built.
      optimizer_state: what becomes of the optimizers' slots.
    """
    optimizers = optimizer_patches.optimizers_of(model)
    parts = [part for optimizer in optimizers for part in optimizer_variables.parts_of(optimizer)]
    scaling = [part for part in parts if hasattr(part, "inner_optimizer")]
    inner = [part for part in parts if not hasattr(part, "inner_optimizer")]
    parameters = _unique([v for each in inner if each.built for v in optimizer_variables.trained_by(each)])
    others = flat_layers.statistics_of(model)
    slots: list[Any] = []
    for each in scaling:
        own = _identities(each.inner_optimizer.variables)
        others += [variable for variable in each.variables if id(variable) not in own]
        others += [optimizer_variables.iterations_of(part) for part in optimizer_variables.parts_of(each)[1:]]
    for each in inner:
        kept = _kept(each)
        others += kept
        special = _identities(
            [*kept, optimizer_variables.iterations_of(each), optimizer_variables.learning_rate_of(each), *parameters]
        )
        slots += [variable for variable in each.variables if id(variable) not in special]
    slots = [slot for slot in slots if tf.as_dtype(slot.dtype).is_floating]
    if optimizer_state == "average":
        others += slots
    local = slots if optimizer_state == "local" else []
    reset = _reset(inner, slots) if optimizer_state == "reset" else []
    taken = _identities(parameters)
    return State(parameters, [v for v in _unique(others) if id(v) not in taken], local, reset)


def _kept(optimizer: Any) -> list[Any]:
    """Returns the variables of an optimizer that hold parameters or sums of gradients."""
    return [*optimizer_variables.averages_of(optimizer), *optimizer_variables.sums_of(optimizer)]


def _reset(optimizers: Sequence[Any], slots: Sequence[Any]) -> list[tuple[Any, float]]:
    """The slots with what a new optimizer has in them, which for some is not zero."""
    wanted = _identities(slots)
    pairs: list[tuple[Any, float]] = []
    for optimizer in optimizers:
        values = fresh_threads.call(_initial, optimizer)
        if len(values) != len(optimizer.variables):
            raise ValueError(
                "ParameterAveraging(optimizer_state='reset'): what this optimizer begins with can't be found out; use "
                f"'average' or 'local'. Received: optimizer={optimizer!r}"
            )
        pairs += [(v, x) for v, x in zip(optimizer.variables, values, strict=True) if id(v) in wanted]
    return pairs


def _initial(optimizer: Any) -> list[float]:
    """Returns the value of each variable of a new optimizer of this kind, the same for all of its elements."""
    new = type(optimizer).from_config(optimizer.get_config())
    likes = [
        tf.zeros([1] * len(variable.shape), variable.dtype) for variable in optimizer_variables.trained_by(optimizer)
    ]
    variables = [
        keras.Variable(like, dtype=like.dtype.name, name=variable.name)
        for like, variable in zip(likes, optimizer_variables.trained_by(optimizer), strict=True)
    ]
    new.build(variables)
    return [float(tf.reshape(tf.convert_to_tensor(variable), [-1])[0]) for variable in new.variables]


def _identities(variables: Iterable[Any]) -> set[int]:
    return {id(variable) for variable in variables}


def _unique(variables: Iterable[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())
