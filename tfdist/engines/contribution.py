# SPDX-License-Identifier: Apache-2.0
"""A Keras train step in two halves: what one replica computes, and what is done once enough replicas have.

    contribute(batch)        on a replica: the user's train_step. It writes nothing: whatever it would have written
                             comes out as a `Contribution`.
    add_up(contributions)    contributions are made so that they add up; how, and where, is the engine's matter
    update(total)            one update of the model from the total, as one device would have made it from all of the
                             examples together
    logs(...)                what Keras is to show after it

So a contribution that is dropped leaves no trace: not in the weights, not in a metric, not in the statistics of a
BatchNormalization. And what happens once per update (clipping, weight decay, loss scaling, EMA, constraints, the count
of iterations) happens in `update`, in the real `optimizer.apply`.

How writes are kept back: `optimizer.apply` is replaced on the optimizer instances while the step is traced, and the
rest of the step runs in a `keras.StatelessScope`, where Keras' variables are read and written in a mapping. Variables
that a metric counts in (aggregation "sum") start at zero there, so that what comes out is what this batch adds.
A `tf.Variable` that is not made by Keras is written at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.engines import sharing, tap

Place = Callable[[Any], contextlib.AbstractContextManager]
Assign = Callable[[Any, tf.Tensor], Any]


class Contribution(NamedTuple):
    """What one replica adds to an update, or the sum of several. A structure for `tf.nest`; all tensors add up.

    Attributes:
      gradients: times `weight`, unless the loss is a sum over examples; one flat list for all optimizers, dense or
        `tf.IndexedSlices`.
      counts: what to add to the variables that metrics count in.
      states: the new values of other variables: floats (statistics of layers) times `weight`; integers (seeds), int64.
      logs: what the step returned that is no metric, times `weight`, float32.
      weight: float32 scalar; the number of examples, or 1 where all replicas are known to have equally many.
      replicas: float32 scalar; 1.
    """

    gradients: list[Any]
    counts: list[tf.Tensor]
    states: list[tf.Tensor]
    logs: list[tf.Tensor]
    weight: tf.Tensor
    replicas: tf.Tensor


@dataclasses.dataclass
class _Layout:
    """What the parts of a contribution belong to; known once the step was traced."""

    # For each call of `apply`: the optimizer, and for each of its variables whether it has a gradient.
    applied: list[tuple[Any, list[Any], list[bool]]] = dataclasses.field(default_factory=list)
    counters: list[Any] = dataclasses.field(default_factory=list)
    states: list[Any] = dataclasses.field(default_factory=list)
    # The step's result, with a number for each leaf that is shipped and a metric's key for the others.
    logs: Any = None


class TrainStep:
    """The two halves of a model's `train_step`.

    Args:
      step: a bound `train_step`, or Keras' wrapper around it.
      total_num_replicas: how many replicas contribute at most.
      loss_divisor: what Keras divides each replica's loss by: `num_replicas_in_sync` of the strategy.
      is_relative: whether a contribution says by how much it changes a state, and not what that becomes: for replicas
        that don't begin with the same values.
    """

    def __init__(
        self, step: Callable[..., Any], total_num_replicas: int, loss_divisor: int = 1, is_relative: bool = False
    ) -> None:
        self._step = step
        self.model: keras.Model = getattr(step, "__self__")  # noqa: B009, Keras' wrapper has it too
        self._total_num_replicas = total_num_replicas
        self._loss_divisor = loss_divisor
        self._is_relative = is_relative
        self._layout = _Layout()
        self._is_sum = _is_sum(self.model)
        # Whether all replicas are known to have equally many examples.
        self._is_even = False

    @property
    def counters(self) -> list[Any]:
        """The variables that `Contribution.counts` belongs to."""
        return self._layout.counters

    def contribute(self, batch: Any, batch_rows: tf.Tensor | None = None) -> Contribution:
        """Computes a replica's contribution from its part of the batch; call it in a graph, in replica context.

        Args:
          batch: the replica's part.
          batch_rows: int64 scalar, the number of examples in all parts together, where that is known. Only with it are
            the metrics of single losses, and of losses that are sums, those of one device.
        """
        layout = self._layout = _Layout()
        gradients: list[Any] = []
        counters = [v for metric in self.model.metrics for v in metric.variables if v.aggregation == "sum"]
        begun_with = self._read_states(counters)
        zeros = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in counters]
        scope = _Recording([*zeros, *begun_with.values()])
        changes = [(o, "apply", _capture(o, layout, gradients)) for o in tap.optimizers_of(self.model)]
        changes += self._loss_trackers(batch, batch_rows)
        with tap.attributes(changes), scope:
            # Keras knows its losses by their ids, which tensors of an earlier trace may have had.
            self.model._clear_losses()
            # An empty Optional is Keras' way to say None.
            result = self._step(tf.nest.map_structure(_none_if_optional, batch))
        written = scope.written()
        counted = {id(variable) for variable in counters}
        layout.counters = [variable for variable in written if id(variable) in counted]
        layout.states = [variable for variable in written if id(variable) not in counted]
        weight = self._weight(batch)
        return Contribution(
            [gradient if self._is_sum else _times(gradient, weight) for gradient in gradients],
            [scope.value_of(variable) for variable in layout.counters],
            [
                _summable(_change(scope.value_of(variable), begun_with.get(id(variable))), weight)
                for variable in layout.states
            ],
            [_times(tf.cast(leaf, tf.float32), weight) for leaf in self._shipped(result, written)],
            tf.convert_to_tensor(weight),
            tf.constant(1.0),
        )

    def _read_states(self, counters: Sequence[Any]) -> dict[int, tuple[Any, tf.Tensor]]:
        """What the states that the step may write are when it begins, by the variable's id; nothing if nobody asks."""
        if not self._is_relative:
            return {}
        metrics = [variable for metric in self.model.metrics for variable in metric.variables]
        counted = {id(variable) for variable in counters}
        states = {id(variable): variable for variable in [*self.model.non_trainable_variables, *metrics]}
        return {key: (v, tf.convert_to_tensor(v)) for key, v in states.items() if key not in counted}

    def _weight(self, batch: Any) -> tf.Tensor | float:
        rows = sharing.rows(batch)
        self._is_even = rows is None or sharing.static_size(batch) is not None
        return 1.0 if self._is_even else tf.cast(rows, tf.float32)

    def _loss_trackers(self, batch: Any, batch_rows: tf.Tensor | None) -> list[tuple[Any, str, Any]]:
        """What lets metrics of losses count as on one device.

        Keras weighs each replica's loss by its examples, which is wrong for sums, and not at all for the losses of
        single outputs.
        """
        rows, num_replicas = sharing.rows(batch), self._total_num_replicas
        if rows is None or not losses(self.model):
            return []
        total = single = None
        if batch_rows is not None:
            total = batch_rows / num_replicas if self._is_sum else None
            single = 1 / num_replicas if self._is_sum else rows / tf.maximum(batch_rows, 1)
        # A replica's sum stands for one of all. Keras has multiplied it by `loss_divisor` already.
        scale = num_replicas / self._loss_divisor if self._is_sum else 1.0
        weights = [(self.model._loss_tracker, total)]
        # One for each loss, or none for a single one.
        weights += [(metric, single) for metric in self.model._compile_loss.metrics]
        return [(metric, "update_state", _weighing(metric, scale, weight, rows)) for metric, weight in weights]

    def _shipped(self, result: Any, written: Sequence[Any]) -> list[Any]:
        """The leaves of the step's result that the metrics can't tell after the update."""
        ids = {id(variable) for variable in written}
        metrics: dict[str, Any] = {}
        for metric in self.model.metrics:
            # A step may leave a metric alone and return a value of its own under the name.
            if any(id(variable) in ids for variable in metric.variables):
                value = metric.result()
                metrics.update(value if isinstance(value, dict) else {metric.name: value})
        shipped: list[Any] = []

        def place(path: tuple[Any, ...], leaf: Any) -> Any:
            if len(path) == 1 and path[0] in metrics:
                return path[0]
            shipped.append(leaf)
            return len(shipped) - 1

        if isinstance(result, dict):
            self._layout.logs = {
                key: place((key,), value)
                if not tf.nest.is_nested(value)
                else tf.nest.map_structure(lambda leaf: place((), leaf), value)
                for key, value in result.items()
            }
        else:
            self._layout.logs = tf.nest.map_structure(lambda leaf: place((), leaf), result)
        return shipped

    # The second half.

    def variables(self) -> list[Any]:
        """The variables that gradients belong to, in the order of `Contribution.gradients`."""
        return [
            variable
            for _, variables, present in self._layout.applied
            for variable, has_gradient in zip(variables, present, strict=True)
            if has_gradient
        ]

    def update(
        self,
        total: Contribution,
        place: Place = lambda variable: contextlib.nullcontext(),
        num_contributions: int | None = None,
        assign: Assign = lambda variable, value: variable.assign(value),
    ) -> None:
        """Updates the model from the sum of contributions; `counts` are left to the engine.

        Args:
          total: the sum of the contributions.
          place: gives the context in which a variable's gradient is scaled, to keep it where the variable is.
          num_contributions: how many they are, where that is known beforehand; it may spare a pass over the gradients.
          assign: gives a variable of `states` its new value.
        """
        factor = self._factor(total, num_contributions)
        gradients = iter(total.gradients)
        for optimizer, variables, present in self._layout.applied:
            scaled: list[Any] = []
            for variable, has_gradient in zip(variables, present, strict=True):
                with place(variable):
                    scaled.append(_times(next(gradients), factor) if has_gradient else None)
            optimizer.apply(scaled, variables)
        for variable, value in zip(self._layout.states, total.states, strict=True):
            assign(variable, (_moved_state if self._is_relative else _mean_state)(variable, value, total))

    def _factor(self, total: Contribution, num_contributions: int | None) -> tf.Tensor | float:
        """What makes the sum of gradients that of one device; float64, for models that are."""
        if self._is_sum or self._is_even:
            count = num_contributions or tf.cast(total.replicas, tf.float64)
            return (self._total_num_replicas if self._is_sum else self._loss_divisor) / count
        return tf.math.divide_no_nan(tf.cast(self._loss_divisor, tf.float64), tf.cast(total.weight, tf.float64))

    def logs(self, total: Contribution, counts: Sequence[tf.Tensor] | None = None) -> Any:
        """What Keras is to show: metrics with what they have counted so far, and other logs of this update's batch.

        Args:
          total: the sum of the contributions.
          counts: the values of `counters`, if reading them gives something else.
        """
        mapping = list(zip(self.counters, counts, strict=True)) if counts is not None else []
        with keras.StatelessScope(mapping) if mapping else contextlib.nullcontext():
            metrics = self.model.get_metrics_result()
        means = [tf.math.divide_no_nan(leaf, total.weight) for leaf in total.logs]
        pick = lambda leaf: metrics[leaf] if isinstance(leaf, str) else means[leaf]  # noqa: E731
        return tf.nest.map_structure(pick, self._layout.logs)


def add_up(contributions: Sequence[Contribution], place: Sequence[Any] | None = None) -> Contribution:
    """The sum of contributions.

    Args:
      contributions: of one step, all of the same structure.
      place: for each gradient the device to add it up on; where it is by default.
    """
    if len(contributions) == 1:
        return contributions[0]
    devices = iter(place or [None] * len(contributions[0].gradients))
    gradients = [
        _add_on(next(devices), parts) for parts in zip(*(each.gradients for each in contributions), strict=True)
    ]
    rest = [tf.nest.flatten(each._replace(gradients=[])) for each in contributions]
    sums = [tf.add_n(parts) for parts in zip(*rest, strict=True)]
    packed = tf.nest.pack_sequence_as(contributions[0]._replace(gradients=[]), sums)
    return packed._replace(gradients=gradients)


def weigh(contribution: Contribution, weight: tf.Tensor, place: Sequence[Any]) -> Contribution:
    """A contribution whose gradients are multiplied by a weight. What was counted and measured stays as it is.

    Args:
      contribution: of one replica.
      weight: float32 scalar.
      place: for each gradient the device to do it on.
    """
    gradients = []
    for gradient, device in zip(contribution.gradients, place, strict=True):
        with tf.device(device):
            gradients.append(_times(gradient, weight))
    return contribution._replace(gradients=gradients)


def _add_on(device: Any, parts: Sequence[Any]) -> Any:
    with tf.device(device) if device else contextlib.nullcontext():
        if not isinstance(parts[0], tf.IndexedSlices):
            return tf.add_n(parts)
        values = tf.concat([part.values for part in parts], 0)
        indices = tf.concat([part.indices for part in parts], 0)
        return tf.IndexedSlices(values, indices, parts[0].dense_shape)


def _none_if_optional(leaf: Any) -> Any:
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


def _capture(optimizer: Any, layout: _Layout, gradients: list[Any]) -> Callable[..., Any]:
    def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        grads = list(grads)
        variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
        if not optimizer.built:
            raise ValueError(
                f"policies: the optimizer {optimizer.name!r} must have its variables before a step is traced; call "
                "optimizer.build(variables) after the model is built. Received: an optimizer that was not built"
            )
        layout.applied.append((optimizer, variables, [gradient is not None for gradient in grads]))
        gradients.extend(gradient for gradient in grads if gradient is not None)
        return optimizer.iterations

    return apply


class _Recording(keras.StatelessScope):
    """A scope that remembers which variables were written."""

    def __init__(self, state_mapping: Sequence[tuple[Any, tf.Tensor]]) -> None:
        # Without `collect_losses` what layers add to the loss would be left out.
        super().__init__(state_mapping, collect_losses=True, initialize_variables=False)
        self._graph = tf.compat.v1.get_default_graph()
        self._written: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if getattr(value, "graph", self._graph) is not self._graph:
            raise ValueError(
                "policies: a train_step must not write variables inside of a conditional or a loop, because what it "
                f"writes counts only if its gradient does. Received: a write of {variable.path!r} inside of one"
            )
        self._written[id(variable)] = variable
        super().add_update(update)

    def get_current_value(self, variable: Any) -> Any:
        # Keras asks this of any variable with a regularizer.
        value = super().get_current_value(variable)
        return variable._value if value is None else value

    def written(self) -> list[Any]:
        return list(self._written.values())

    def value_of(self, variable: Any) -> tf.Tensor:
        return tf.convert_to_tensor(self.get_current_value(variable))


def _is_sum(model: keras.Model) -> bool:
    """Whether the loss is a sum over the examples rather than a mean."""
    reductions = {getattr(loss, "reduction", "mean") in ("sum", "none", None) for loss in losses(model)}
    if len(reductions) > 1:
        raise ValueError(
            "compile(loss=...): under policies all losses must have one kind of reduction, a sum or a mean, so that a "
            "replica's gradient can be weighed. Received: both kinds"
        )
    return True in reductions


def losses(model: keras.Model) -> list[Any]:
    """The losses given to `compile`, one for each output that has one."""
    compiled = getattr(model, "_compile_loss", None)
    return [loss.loss for loss in getattr(compiled, "_flat_losses", None) or [] if loss.loss is not None]


def _weighing(metric: Any, scale: float, weight: Any, rows: tf.Tensor) -> Callable[..., Any]:
    update_state = metric.update_state

    def update(values: Any, sample_weight: Any = None) -> Any:
        # What layers add to the loss is a mean as a rule, which is no number where there are no examples.
        values = tf.where(rows > 0, values, tf.zeros_like(values))
        values = values if scale == 1.0 else values * tf.cast(scale, values.dtype)
        return update_state(values, sample_weight=sample_weight if weight is None else tf.cast(weight, tf.float32))

    return update


def _times(gradient: Any, factor: Any) -> Any:
    if isinstance(factor, float) and factor == 1.0:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_times(gradient.values, factor), gradient.indices, gradient.dense_shape)
    # Without examples a gradient may be NaN; no share of it is nothing.
    return tf.math.multiply_no_nan(gradient, tf.cast(factor, gradient.dtype))


def _summable(value: tf.Tensor, weight: Any) -> tf.Tensor:
    return _times(value, weight) if value.dtype.is_floating else tf.cast(value, tf.int64)


def _change(value: tf.Tensor, begun_with: tuple[Any, tf.Tensor] | None) -> tf.Tensor:
    """What a state has become, or by how much it changed if it is said what it was."""
    if begun_with is None:
        return value
    before = begun_with[1]
    return value - before if value.dtype.is_floating else tf.cast(value, tf.int64) - tf.cast(before, tf.int64)


def _moved_state(variable: Any, change: tf.Tensor, total: Contribution) -> tf.Tensor:
    """A state after changes by replicas that began with different values."""
    now = tf.convert_to_tensor(variable)
    if change.dtype.is_floating:
        return now + tf.cast(tf.math.divide_no_nan(change, tf.cast(total.weight, change.dtype)), now.dtype)
    return tf.cast(tf.cast(now, tf.int64) + change // tf.cast(total.replicas, tf.int64), now.dtype)


def _mean_state(variable: Any, value: tf.Tensor, total: Contribution) -> tf.Tensor:
    dtype = tf.as_dtype(variable.dtype)
    if value.dtype.is_floating:
        mean = tf.math.divide_no_nan(value, tf.cast(total.weight, value.dtype))
        # Contributions without any example say nothing.
        return tf.cast(tf.where(total.weight > 0, mean, tf.cast(tf.convert_to_tensor(variable), value.dtype)), dtype)
    # Seeds and counts: all replicas of a step began with the same value and came to the same one.
    return tf.cast(value // tf.cast(total.replicas, value.dtype), dtype)
