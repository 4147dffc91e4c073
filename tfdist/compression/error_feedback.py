# SPDX-License-Identifier: Apache-2.0
"""Keeps the state of a codec from step to step: on each worker, for each optimizer.

    gradients of this worker, weighed by its examples
        --> codec.exchange(gradients, state, transport) --> sums over the workers, the same on all
                                                        --> the new state, of this worker alone

The state is held in variables of this process, which no strategy mirrors. What is in it depends on the codec; most keep
of each gradient what they have not sent so far (error feedback).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import _log
from tfdist.compat.keras.optimizers import (
    check_can_meet,
    indices_of,
    loss_scale_of,
    optimizers_of,
    sum_over_replicas,
    trained_by,
)
from tfdist.compat.tensorflow import variables

GRADIENTS, DIFFERENCES = "gradients", "differences"


@dataclasses.dataclass(frozen=True)
class _Group:
    """The variables whose gradients one call of `apply` is given, and the codec's state for them.

    Attributes:
      kind: "gradients" or "differences" of parameters: what one leaves out is nothing that the other could send.
      optimizer: the number of the optimizer among those of the model.
      variables: index of each among the variables that the optimizer updates.
      specs: of the gradients.
      state: the codec's state by name, in this process.
    """

    kind: str
    optimizer: int
    variables: tuple[int, ...]
    specs: tuple[tf.TensorSpec, ...]
    state: dict[str, tf.Variable]

    def described(self) -> dict[str, Any]:
        """JSON data."""
        return {
            "kind": self.kind,
            "optimizer": self.optimizer,
            "variables": list(self.variables),
            "gradients": [[list(spec.shape), spec.dtype.name] for spec in self.specs],
            "state": [[name, list(each.shape), each.dtype.name] for name, each in sorted(self.state.items())],
        }

    def in_order(self) -> list[tf.Variable]:
        """The state, in the order of the description."""
        return [self.state[name] for name in sorted(self.state)]


class ErrorFeedback:
    """Sums gradients over workers by a codec.

    Args:
      codec: a `tfdist.compression.Codec`.
      transport: carries the state of one worker to all (`num_workers`, `index`, `broadcast`); see
        `tfdist.transport.sums.Messages`.

    Attributes:
      codec: the same.
    """

    def __init__(self, codec: Any, transport: Any) -> None:
        self.codec = codec
        self._transport = transport
        # By optimizer, and by the variables whose gradients it is given together.
        self._states: weakref.WeakKeyDictionary[Any, dict[Any, dict[str, Any]]] = weakref.WeakKeyDictionary()

    def sum(
        self,
        optimizer: Any,
        gradients: Sequence[tf.Tensor],
        variables: Sequence[Any],
        transport: Any,
        kind: str = GRADIENTS,
    ) -> list[tf.Tensor]:
        """Returns the sums over the workers; all call it with gradients of the same variables, in the same order.

        Args:
          optimizer: the Keras optimizer that will apply the sums.
          gradients: dense gradients of static shapes.
          variables: the variable of each.
          transport: of the codec's messages (`tfdist.compression.codec.Transport`).
          kind: see `_Group`. While the optimizer scales the loss, the state is kept for gradients without the scale,
            because it changes; differences have none.
        """
        if not gradients:
            return []
        indices = indices_of(optimizer, variables)
        # One state, also where another loop gives them in another order.
        order = sorted(range(len(indices)), key=lambda position: indices[position])
        sums = self._sum(
            kind, optimizer, [indices[each] for each in order], [gradients[each] for each in order], transport
        )
        in_order = dict(zip(order, sums, strict=True))
        return [in_order[position] for position in range(len(order))]

    def _sum(
        self, kind: str, optimizer: Any, indices: Sequence[int], gradients: Sequence[tf.Tensor], transport: Any
    ) -> list[tf.Tensor]:
        scale = loss_scale_of(optimizer) if kind == GRADIENTS else None
        dtypes = [each.dtype for each in gradients]
        # Half precision has no room for gradients without the scale.
        unscaled = gradients if scale is None else [tf.cast(each, tf.float32) / scale for each in gradients]
        specs = tuple(tf.TensorSpec(gradient.shape, gradient.dtype) for gradient in unscaled)
        state = self._state_of(kind, optimizer, tuple(indices), specs)
        values = {name: variable.read_value() for name, variable in state.items()}
        sums, after = self.codec.exchange(unscaled, values, transport)
        for name, variable in state.items():
            variable.assign(after[name], read_value=False)
        if scale is None:
            return sums
        return [tf.cast(each * scale, dtype) for each, dtype in zip(sums, dtypes, strict=True)]

    def sum_all(self, transport: Any, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Does the same where some gradients are None, which stays, or rows, which are sent as they are.

        In replica context, or in cross-replica context if all gradients are dense.
        """
        return sum_all(lambda dense, of: self.sum(optimizer, dense, of, transport), gradients, variables)

    # Checkpoints.

    def collect(self, model: keras.Model) -> tuple[Any, list[np.ndarray]]:
        """Collects the state of all workers; all workers call it at the same place.

        Returns:
          A description (JSON data; None if the codec has no state, or nothing was sent yet), and the arrays of each
          worker after the other, on the first worker only.
        """
        groups = self._groups_of(optimizers_of(model))
        own = [variable.numpy() for group in groups for variable in group.in_order()]
        if not own:
            return None, []
        found: list[np.ndarray] = []
        # From one worker at a time, and only the first one keeps what it gets.
        for source in range(self._transport.num_workers):
            arrays = self._transport.broadcast(own, source)
            found += [] if self._transport.index else arrays
        described = {"codec": repr(self.codec), "workers": self._transport.num_workers}
        return described | {"groups": [group.described() for group in groups]}, found

    def distribute(self, model: keras.Model, described: Any, arrays: Sequence[np.ndarray]) -> None:
        """Gives each worker its state from a checkpoint; all workers call it, and only the first one has arrays.

        If there are more or fewer workers than when the checkpoint was written, all get equal parts of what those had
        not sent, so that nothing of it is lost. If the checkpoint is of another codec, or of other variables, the state
        is that of the beginning, and a line says so.

        Args:
          model: the model, whose optimizers are built.
          described: what `collect` has returned; None if the checkpoint has no state.
          arrays: likewise.
        """
        optimizers = optimizers_of(model)
        for group in self._groups_of(optimizers):
            self._begin_anew(group)
        if described is None:
            return
        groups = [self._described(optimizers, each) for each in described["groups"]]
        if None in groups:
            if not self._transport.index:
                say_begins_anew(described["codec"], self.codec)
            return
        self._assign([group for group in groups if group], described["workers"], arrays)

    def _assign(self, groups: Sequence[_Group], saved_workers: int, arrays: Sequence[np.ndarray]) -> None:
        variables = [variable for group in groups for variable in group.in_order()]
        count, index = self._transport.num_workers, self._transport.index
        saved = [list(arrays[start : start + len(variables)]) for start in range(0, len(arrays), len(variables))]
        if not index and saved_workers != count:
            saved = [self._shared(groups, saved, count)] * count
        empty = [np.zeros(variable.shape, variable.dtype.as_numpy_dtype) for variable in variables]
        for target in range(count):
            given = self._transport.broadcast(empty if index else saved[target], 0)
            if target == index:
                for variable, array in zip(variables, given, strict=True):
                    variable.assign(array)

    def _shared(self, groups: Sequence[_Group], saved: Sequence[Any], count: int) -> list[np.ndarray]:
        """Returns the state of each of `count` workers, made of that of other workers."""
        names = [(group.kind, name.split("/")[0]) for group in groups for name in sorted(group.state)]
        shared = []
        for (kind, name), arrays in zip(names, zip(*saved, strict=True), strict=True):
            # A gradient's sum must stay; the sum of differences is divided by the number of workers that there are.
            parts = count if kind == GRADIENTS else len(arrays)
            is_unsent = name in self.codec.unsent
            shared.append((np.sum(arrays, axis=0) / parts).astype(arrays[0].dtype) if is_unsent else arrays[0])
        return shared

    def _described(self, optimizers: Sequence[Any], described: Any) -> _Group | None:
        """Returns the group of a description, whose state is made if need be; None if there can be none here."""
        number, indices = described["optimizer"], tuple(described["variables"])
        if number >= len(optimizers):
            return None
        trained = trained_by(optimizers[number])
        specs = tuple(tf.TensorSpec(shape, dtype) for shape, dtype in described["gradients"])
        found = [tuple(trained[index].shape) if index < len(trained) else None for index in indices]
        if found != [tuple(spec.shape) for spec in specs]:
            return None
        kind = described["kind"]
        group = _Group(kind, number, indices, specs, self._state_of(kind, optimizers[number], indices, specs))
        return group if group.described() == described else None

    def _groups_of(self, optimizers: Sequence[Any]) -> list[_Group]:
        return [
            _Group(kind, number, indices, specs, state)
            for number, optimizer in enumerate(optimizers)
            for (kind, indices, specs), state in self._states.get(optimizer, {}).items()
        ]

    def _state_of(
        self, kind: str, optimizer: Any, indices: tuple[int, ...], specs: tuple[tf.TensorSpec, ...]
    ) -> dict[str, tf.Variable]:
        of_optimizer = self._states.setdefault(optimizer, {})
        key = kind, indices, specs
        if key not in of_optimizer:
            with tf.init_scope():
                initial = self.codec.init(specs)
                made = {name: variables.variable_of_process(value, name) for name, value in initial.items()}
            of_optimizer[key] = made
        return of_optimizer[key]

    def _begin_anew(self, group: _Group) -> None:
        for name, value in self.codec.init(group.specs).items():
            group.state[name].assign(value)


def sum_all(
    sum_dense: Callable[[Sequence[tf.Tensor], Sequence[Any]], Sequence[tf.Tensor]],
    gradients: Sequence[Any],
    variables: Sequence[Any],
) -> list[Any]:
    """Sums dense gradients by a function of them and their variables, and rows as they are; None stays None.

    In replica context, or in cross-replica context if all gradients are dense.
    """
    if tf.distribute.get_replica_context() is not None:
        check_can_meet()
    dense = [index for index, gradient in enumerate(gradients) if isinstance(gradient, tf.Tensor)]
    sums = sum_over_replicas([None if i in dense else g for i, g in enumerate(gradients)])
    for index in dense:
        # Not known by the gradients of some operations on rows.
        gradients[index].set_shape(variables[index].shape)
    totals = sum_dense([gradients[index] for index in dense], [variables[index] for index in dense])
    for index, total in zip(dense, totals, strict=True):
        sums[index] = total
    return sums


def say_begins_anew(saved: str, codec: Any) -> None:
    """Writes that the state of a checkpoint is that of another codec, or of other variables, and is not used.

    Args:
      saved: repr of the codec of the checkpoint.
      codec: begins with an empty state.
    """
    what = repr(codec) if repr(codec) != saved else "for other variables; it"
    _log.say(f"Compression: the checkpoint has the state of {saved}, {what} begins anew")
