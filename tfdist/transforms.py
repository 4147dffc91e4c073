# SPDX-License-Identifier: Apache-2.0
"""Gradient transforms: what a gradient becomes on its way from a replica to the update.

A transform is two pure functions, as in optax:

    init(variables)                  -> state
    update(gradients, state, info)   -> (gradients, state)

and a place. A strategy takes a list, `transforms=[...]`, and runs it inside of the traced step:

    where="replica"     on each replica, before its gradient is sent
    where="arrival"     each gradient by itself, once its staleness and weight are known
    where="update"      the sum of the gradients of an update, before the optimizer is given it

At each place a gradient has the size that it would have on one device, without the scale of a `LossScaleOptimizer`. It
is the mean over its examples, or the sum where the loss is a sum. A gradient that a transform returns as it was given
is left as it is, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist import _checks

__all__ = [
    "GradientTransform",
    "Info",
    "chain",
    "clip_by_global_norm",
    "clip_stale",
    "add_noise",
    "centralize",
    "skip_nonfinite",
    "momentum_correction",
    "identity",
    "no_state",
    "map_values",
    "scaled",
    "global_norm",
    "are_finite",
    "in_order",
]

REPLICA, ARRIVAL, UPDATE = PLACES = ("replica", "arrival", "update")

Gradients = list[Any]
State = Any


class Info:
    """Facts about a gradient, for `update`. Each is found when it is first used, and costs nothing otherwise.

    Args:
      step: int64 scalar, the number of times that the optimizer was applied; with `gradient_accumulation_steps` each
        step counts.
      staleness: int64 scalar, the number of updates between the read of the variables and this one. On the replica, and
        where all replicas update at once, 0.
      weight: float32 scalar, the factor that a policy gives this gradient in the sum: at arrival; else 1.
      contributors: int32 scalar, the number of gradients of the update; on the replica the number that is expected.
      examples: int64 scalar, the number of examples behind the gradient; None if the data have no axis of examples.
      replica: int64 scalar, the number of the replica: 0 to n - 1, the same in each run. At an update from several
        gradients 0. Seeds and state begin alike on all replicas: random numbers have to depend on it.
    """

    step: tf.Tensor
    staleness: tf.Tensor
    weight: tf.Tensor
    contributors: tf.Tensor
    examples: tf.Tensor | None
    replica: tf.Tensor

    def __init__(
        self,
        step: Any = 0,
        staleness: Any = 0,
        weight: Any = 1.0,
        contributors: Any = 1,
        examples: Any = None,
        replica: Any = 0,
    ) -> None:
        self._given = {
            "step": (step, tf.int64),
            "staleness": (staleness, tf.int64),
            "weight": (weight, tf.float32),
            "contributors": (contributors, tf.int32),
            "examples": (examples, tf.int64),
            "replica": (replica, tf.int64),
        }
        self._found: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Returns a fact, which may have been given as a function that finds it."""
        if name.startswith("_") or name not in self._given:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value, dtype = self._given[name]
        # A tensor of a conditional can't be used outside of it.
        key = name, None if tf.executing_eagerly() else id(tf.compat.v1.get_default_graph())
        if key not in self._found:
            value = value() if callable(value) else value
            self._found[key] = None if value is None else tf.cast(value, dtype)
        return self._found[key]


def no_state(variables: Sequence[Any]) -> State:
    """Returns the state of a transform that keeps none, `()`: the default of `GradientTransform(init=)`."""
    del variables
    return ()


@dataclasses.dataclass(frozen=True)
class GradientTransform:
    """A transform of gradients. Both functions are pure, and are traced in a `tf.function`.

    Attributes:
      init: `init(variables) -> state`: a structure of tensors, made from the shapes and dtypes of the variables. `()`
        if there is no state.
      update: `update(gradients, state, info) -> (gradients, state)`. Gradients are a list, each a tensor or
        `tf.IndexedSlices`, as is what it returns; state has the same structure, shapes and dtypes. `info` is an `Info`.
      where: "replica", "arrival" or "update".
      name: for messages and checkpoints.

    Raises:
      ValueError: an argument is invalid.
    """

    init: Callable[[Sequence[Any]], State] = no_state
    update: Callable[[Gradients, State, Info], tuple[Gradients, State]] = lambda gradients, state, info: (
        gradients,
        state,
    )
    where: str = "update"
    name: str = ""

    def __post_init__(self) -> None:
        for argument in ("init", "update"):
            if not callable(getattr(self, argument)):
                raise ValueError(
                    f"GradientTransform({argument}=...) must be a function. "
                    f"Received: {argument}={getattr(self, argument)!r}"
                )
        if self.where not in PLACES:
            raise ValueError(
                f'GradientTransform(where=...) must be "replica", "arrival" or "update". Received: where={self.where!r}'
            )

    def __repr__(self) -> str:
        return self.name or f"GradientTransform(where={self.where!r})"


def chain(*transforms: GradientTransform) -> GradientTransform:
    """Returns one transform that does what several of one place do, the first one first.

    Raises:
      ValueError: there are none, or they are of different places.
    """
    if len({each.where for each in transforms}) != 1:
        raise ValueError(
            "chain(...) takes transforms of one place; give transforms of several places as a list, transforms=[...]. "
            f"Received: {', '.join(f'{each!r} ({each.where})' for each in transforms) or 'none'}"
        )

    def init(variables: Sequence[Any]) -> State:
        return tuple(each.init(variables) for each in transforms)

    def update(gradients: Gradients, state: State, info: Info) -> tuple[Gradients, State]:
        new = []
        for each, own in zip(transforms, state, strict=True):
            gradients, own = each.update(gradients, own, info)
            new.append(own)
        return gradients, tuple(new)

    return GradientTransform(init, update, transforms[0].where, f"chain({', '.join(map(repr, transforms))})")


# For updates: gradients are dense, or rows.


def map_values(function: Callable[[tf.Tensor], tf.Tensor], gradient: Any) -> Any:
    """Calls a function with the values of a gradient: those of all elements, or those of the rows that it has."""
    # Rows of a table in shards, which stay on the devices of the shards.
    by_shard = getattr(gradient, "map", None)
    if by_shard is not None:
        return by_shard(lambda piece: map_values(function, piece))
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def scaled(gradients: Sequence[Any], factor: Any) -> Gradients:
    """Returns the gradients times a scalar, each in its dtype."""
    return [map_values(lambda values: values * tf.cast(factor, values.dtype), each) for each in gradients]


def global_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns the norm of all gradients together, float32. As in Keras, a row that is there twice counts twice."""
    # One operation for each gradient: on small models they count.
    halves = [tf.nn.l2_loss(tf.cast(values, tf.float32)) for values in _values_of(gradients)]
    return tf.sqrt(2.0 * tf.add_n(halves)) if halves else tf.constant(0.0)


def are_finite(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns True if all values are finite."""
    return tf.reduce_all([True, *(tf.reduce_all(tf.math.is_finite(values)) for values in _values_of(gradients))])


def _values_of(gradients: Sequence[Any]) -> list[tf.Tensor]:
    pieces = [piece for gradient in gradients for piece in getattr(gradient, "pieces", [gradient])]
    return [piece.values if isinstance(piece, tf.IndexedSlices) else piece for piece in pieces]


# Ready ones.


def identity(where: str = "update") -> GradientTransform:
    """Leaves gradients as they are."""
    return GradientTransform(where=where, name=f"identity(where={where!r})")


def clip_by_global_norm(max_norm: float, where: str = "update") -> GradientTransform:
    """Scales the gradients down to a global norm of at most `max_norm`.

    At the update it is what Keras' `global_clipnorm` does on one device. On the replica it bounds what each replica
    contributes.
    """
    _check_positive("clip_by_global_norm", max_norm=max_norm)

    def update(gradients: Gradients, state: State, info: Info) -> tuple[Gradients, State]:
        del info
        return scaled(gradients, _clip_factor(gradients, max_norm)), state

    return GradientTransform(
        update=update, where=where, name=f"clip_by_global_norm(max_norm={max_norm!r}, where={where!r})"
    )


def clip_stale(max_norm: float, staleness: int = 1) -> GradientTransform:
    """Scales gradients of at least this staleness down to a global norm of at most `max_norm`; others stay."""
    _check_positive("clip_stale", max_norm=max_norm, staleness=staleness)

    def update(gradients: Gradients, state: State, info: Info) -> tuple[Gradients, State]:
        known = tf.get_static_value(info.staleness)
        if known is not None and known < staleness:
            return gradients, state
        factor = tf.where(info.staleness >= staleness, _clip_factor(gradients, max_norm), 1.0)
        return scaled(gradients, factor), state

    return GradientTransform(
        update=update, where=ARRIVAL, name=f"clip_stale(max_norm={max_norm!r}, staleness={staleness!r})"
    )


def add_noise(stddev: float, decay: float = 0.0, seed: int = 0, where: str = "update") -> GradientTransform:
    """Adds Gaussian noise of variance stddev^2 / (1 + step)^decay to each value.

    Source: Neelakantan et al. 2015, arXiv 1511.06807, equation 1, with decay = 0.55. The noise depends on seed, step
    and place in the gradient alone, and on the replica where it is added there. Of a table, the rows of the batch get
    it.
    """
    _check_positive("add_noise", stddev=stddev)

    def update(gradients: Gradients, state: State, info: Info) -> tuple[Gradients, State]:
        deviation = stddev / tf.pow(1.0 + tf.cast(info.step, tf.float32), decay / 2)
        key = functools.reduce(_folded, [info.step, info.replica], tf.constant([seed, 0], tf.int64))
        numbers = iter(range(1 << 30))

        def noisy(values: tf.Tensor) -> tf.Tensor:
            noise = tf.random.stateless_normal(tf.shape(values), _folded(key, next(numbers)), dtype=values.dtype)
            return values + noise * tf.cast(deviation, values.dtype)

        return [map_values(noisy, each) for each in gradients], state

    shown = f"stddev={stddev!r}, decay={decay!r}, seed={seed!r}, where={where!r}"
    return GradientTransform(update=update, where=where, name=f"add_noise({shown})")


def centralize(where: str = "update") -> GradientTransform:
    """Subtracts from the gradient of each kernel its mean over the inputs of each output.

    Source: Yong et al. 2020, Gradient Centralization, arXiv 2004.01461, equation 1. Kernels have two or more
    dimensions, the last one that of the outputs; other gradients, and rows of tables, stay as they are.
    """

    def centered(gradient: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices) or gradient.shape.rank < 2:
            return gradient
        return gradient - tf.reduce_mean(gradient, range(gradient.shape.rank - 1), keepdims=True)

    def update(gradients: Gradients, state: State, info: Info) -> tuple[Gradients, State]:
        del info
        return [centered(each) for each in gradients], state

    return GradientTransform(update=update, where=where, name=f"centralize(where={where!r})")


def skip_nonfinite(where: str = "update") -> GradientTransform:
    """Replaces all gradients by zeros if a value is not finite; state counts how often.

    On the replica, the others' gradients count. An optimizer with momentum still moves by its momentum.
    """

    def init(variables: Sequence[Any]) -> State:
        del variables
        return tf.constant(0, tf.int64)

    def update(gradients: Gradients, state: State, info: Info) -> tuple[Gradients, State]:
        del info
        is_finite = are_finite(gradients)
        kept = [map_values(lambda values: tf.where(is_finite, values, tf.zeros_like(values)), g) for g in gradients]
        return kept, state + tf.cast(tf.logical_not(is_finite), tf.int64)

    return GradientTransform(init, update, where, f"skip_nonfinite(where={where!r})")


def momentum_correction(momentum: float = 0.9, nesterov: bool = False) -> GradientTransform:
    """Applies momentum on each replica, before the gradient is sent or compressed: u <- momentum u + g, and u is sent.

    Source: Lin et al. 2018, Deep Gradient Compression, arXiv 1712.01887, section 3.2. A codec that keeps a part back
    then keeps velocity back, and not gradients whose momentum is lost. Use plain SGD behind it. With `nesterov`,
    momentum u + g is sent. Rows of tables are sent as they are.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum_correction(momentum=...) must be in [0, 1). Received: momentum={momentum!r}")

    def init(variables: Sequence[Any]) -> State:
        return [tf.zeros(variable.shape, variable.dtype) for variable in variables]

    def update(gradients: Gradients, state: State, info: Info) -> tuple[Gradients, State]:
        del info
        is_row = [isinstance(each, tf.IndexedSlices) for each in gradients]
        new = [
            u if rows else momentum * u + tf.cast(g, u.dtype)
            for u, g, rows in zip(state, gradients, is_row, strict=True)
        ]
        sent = [
            g if rows else tf.cast(momentum * u + tf.cast(g, u.dtype) if nesterov else u, g.dtype)
            for u, g, rows in zip(new, gradients, is_row, strict=True)
        ]
        return sent, new

    shown = f"momentum={momentum!r}, nesterov={nesterov!r}"
    return GradientTransform(init, update, REPLICA, f"momentum_correction({shown})")


def _clip_factor(gradients: Sequence[Any], max_norm: float) -> tf.Tensor:
    # As in Keras, NaN if the norm is not finite.
    norm = global_norm(gradients)
    return tf.where(norm > max_norm, max_norm / norm, 1.0) + (norm - norm)


def _folded(key: Any, number: Any) -> tf.Tensor:
    return tf.random.experimental.stateless_fold_in(key, tf.cast(number, tf.int64))


def _check_positive(name: str, **arguments: float) -> None:
    for argument, value in arguments.items():
        if not _checks.is_number(value, is_finite=False) or not value > 0:
            raise ValueError(f"{name}({argument}=...) must be a number above 0. Received: {argument}={value!r}")


def in_order(transforms: Any) -> tuple[GradientTransform, ...]:
    """Returns the argument of a strategy, a list or None, in the order in which its elements run.

    Raises:
      ValueError: it is no list of transforms.
    """
    is_iterable = isinstance(transforms, Iterable) and not isinstance(transforms, str)
    given: tuple[Any, ...] = tuple(transforms) if is_iterable else () if transforms is None else (transforms,)
    if not (is_iterable or transforms is None) or not all(isinstance(each, GradientTransform) for each in given):
        raise ValueError(
            "transforms must be a list of tfdist.transforms such as [tfdist.transforms.clip_by_global_norm(1.0)]. "
            f"Received: transforms={transforms!r}"
        )
    return tuple(sorted(given, key=lambda each: PLACES.index(each.where)))
