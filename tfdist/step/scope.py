# SPDX-License-Identifier: Apache-2.0
"""Moves what was made outside of a strategy's scope into it before a model trains, and refuses what can't be moved.

Optimizers without slots, metrics, and variables of losses are moved: variables of the strategy with the same values
replace theirs. So `model.compile` works inside of the scope and outside of it. Weights are not moved, because other
models may share them, nor is an optimizer that was built outside, which has slots for such weights.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.keras import calls, models, placement, scope
from tfdist.compat.keras.optimizers import optimizers_of
from tfdist.compat.tensorflow import graphs, replicas
from tfdist.step import one_replica, rehearsal

_warned: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def begin(strategy: tf.distribute.Strategy, call: calls.Call, alone: str) -> None:
    """Takes over the model of a call that is about to begin, and refuses to train a model of no strategy.

    Args:
      strategy: a strategy of this process.
      call: the call.
      alone: how a model of no strategy would be trained; "" if that is allowed.

    Raises:
      RuntimeError: the model has no strategy, and the call trains.
      ValueError: a replica makes the call; or see `take_over`.
    """
    if tf.distribute.get_strategy() is strategy and not tf.distribute.in_cross_replica_context():
        raise ValueError(
            f"model.{call.kind} uses all replicas by itself: call it outside of strategy.run, or give strategy.run "
            f"model.train_step and the like. Received: model {call.model.name!r}, within strategy.run"
        )
    if call.strategy is strategy:
        optimizer = getattr(call.model, "optimizer", None)
        # Before Keras builds the optimizer. Calls with single batches need nothing from then on.
        if call.kind in ("fit", "evaluate") or (optimizer is not None and not optimizer.built):
            take_over(strategy, call.model, anew=call.kind == "fit")
    elif alone and call.trains and call.strategy is None:
        raise RuntimeError(_without_scope(call, alone))


def warn(call: calls.Call, alone: str) -> None:
    """Warns, once for each model, that a call trains a model of no strategy.

    Called by the method of a strategy that `calls` calls.
    """
    if call.model in _warned:
        return
    _warned.add(call.model)
    warnings.warn(_without_scope(call, alone), RuntimeWarning, stacklevel=4)


def take_over(strategy: tf.distribute.Strategy, model: keras.Model, anew: bool = False) -> None:
    """Moves a model's optimizers, metrics and losses into the scope; on several workers, all of them call this alike.

    Raises:
      ValueError: an optimizer was built outside of the scope.
    """
    rehearsal.note_optimizers(strategy, model, anew)
    for optimizer in optimizers_of(model):
        scope.take_over(strategy, optimizer)
        scope.check_made_in_scope(strategy, optimizer.variables)
    given = [each for each in models.given_metrics(model) if isinstance(each, keras.metrics.Metric)]
    losses = [vars(each).values() for each in tf.nest.flatten(model.loss) if isinstance(each, keras.losses.Loss)]
    of_losses = [value for values in losses for value in values if isinstance(value, keras.Variable)]
    for variable in [*(each for metric in (*model.metrics, *given) for each in metric.variables), *of_losses]:
        if not scope.belongs_to(strategy, variable):
            scope.move_variable(strategy, variable)
            _keep_in_first_copy(strategy, variable)


def _without_scope(call: calls.Call, alone: str) -> str:
    """Returns the message about a call that trains a model of no strategy."""
    line = scope.line_of_layer(call.model)
    return (
        f"model.{call.kind} outside of strategy.scope(): {alone}; put the lines that make the model, and "
        f"model.compile, under `with strategy.scope():`. Received: model {call.model.name!r}, made outside of the "
        f"scope{f' at {line}' if line else ''}"
    )


def _keep_in_first_copy(strategy: tf.distribute.Strategy, variable: Any) -> None:
    """Sets the other copies of a sum over copies to zero: each of them was given the whole value."""
    if one_replica.is_mirrored(variable) and one_replica.is_counter(variable):
        for index, copy in enumerate(one_replica.copies_of(variable)):
            if replicas.in_sync_group(strategy, index) > 0:
                copy.assign(tf.zeros_like(copy))


# Makes a variable in a strategy's scope from anywhere: outside of the scope, and while a function is traced.


# Arguments of a variable creator that `tf.Variable` accepts.
_ARGUMENTS = (
    "initial_value",
    "trainable",
    "name",
    "dtype",
    "synchronization",
    "aggregation",
    "shape",
    "caching_device",
)


def redirected(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager:
    """Returns a context in which variables are made in the strategy's scope, outside of any graph."""
    return _redirected(strategy.scope, contextlib.nullcontext)


def colocating(
    strategy: tf.distribute.Strategy,
    scope: Callable[[], contextlib.AbstractContextManager],
    stock: Callable[[Any], contextlib.AbstractContextManager],
) -> Callable[[Any], contextlib.AbstractContextManager]:
    """Returns a `colocate_vars_with` that works outside of the scope, where an optimizer may be applied first.

    Args:
      strategy: the strategy.
      scope: enters the strategy's scope.
      stock: the strategy's own `colocate_vars_with`.
    """

    def colocate_vars_with(variable: Any) -> contextlib.AbstractContextManager:
        is_in_scope = tf.distribute.get_strategy() is strategy
        return stock(variable) if is_in_scope else _redirected(scope, lambda: stock(variable))

    return colocate_vars_with


def _redirected(
    scope: Callable[[], contextlib.AbstractContextManager], colocate: Callable[[], contextlib.AbstractContextManager]
) -> contextlib.AbstractContextManager:
    def create(_: Any, **arguments: Any) -> Any:
        part = placement.current()

        def make() -> Any:
            with scope(), placement.placed(part), colocate():
                return tf.Variable(**{name: value for name, value in arguments.items() if name in _ARGUMENTS})

        return graphs.call_outside(make)

    return tf.variable_creator_scope(create)
