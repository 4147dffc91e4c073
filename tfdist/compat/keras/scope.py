# SPDX-License-Identifier: Apache-2.0
"""Variables, layers, seeds and loops of a program, inside and outside of a strategy's scope."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sysconfig
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import backprop

from tfdist.compat import patching
from tfdist.compat.keras import layers, optimizers, placement
from tfdist.compat.tensorflow import graphs, replicas, variables

NEEDS = (
    "keras:Variable._initialize",
    "keras.src.random.seed_generator:global_seed_generator",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._distribution_strategy",
    "tensorflow.python.eager.backprop:_handle_or_self",
)


# Former variables are kept: functions that were traced with one read it as long as they live.
_FORMER = "_tfdist_former_values"
_MOVING = threading.Lock()


def belongs_to(strategy: Any, variable: Any) -> bool:
    """Returns True if a variable, of Keras or TensorFlow, was made in the strategy's scope, or is yet to be made."""
    value = variables.tf_variable(variable)
    # A variable in shards has no strategy of its own, unlike its shards. An attribute of its class, because one that a
    # metric's variable lacks would be looked for on the sum over all workers: a collective.
    return value is None or hasattr(type(value), "variables") or variables.strategy_of(value) is strategy


def check_made_in_scope(strategy: Any, variables: Iterable[Any]) -> None:
    """Raises ValueError, with its name, if one of these variables was made outside of the scope."""
    for variable in variables:
        if not belongs_to(strategy, variable):
            name = getattr(variable, "path", None) or variable.name
            raise ValueError(
                "The model, its optimizer and its metrics must be made in the scope of "
                f"{type(strategy).__name__}. Put the lines that make them, and model.compile, under `with "
                f"strategy.scope():`. Received: variable {name!r}, made outside of it{_at_line_of(variable)}"
            )


@tf.autograph.experimental.do_not_convert
def move_variable(strategy: Any, variable: Any) -> None:
    """Gives a Keras variable a TensorFlow variable of the strategy, with the value that it has; from anywhere.

    Args:
      strategy: on several workers, all of them call this alike.
      variable: one of the strategy stays as it is.
    """
    with _MOVING:
        value = variables.tf_variable(variable)
        if belongs_to(strategy, variable):
            return
        # In a graph, and on a replica, variables can't be made.
        graphs.call_outside(_make_moved, strategy, variable, value)


def _make_moved(strategy: Any, variable: Any, value: Any) -> None:
    with strategy.scope():
        variable._initialize(value.numpy())
    patching.setdefault(variable, _FORMER, list).append(value)


@tf.autograph.experimental.do_not_convert
def move_to_part(strategy: Any, variable: Any, part: int) -> None:
    """Moves a Keras variable to the devices of a part of replicas that span devices, with the value that it has.

    A variable of a parameter server stays there, and is read to the devices of the part.

    Functions that were traced with the variable are not to be called any more.

    Args:
      strategy: on several workers, all of them call this alike.
      variable: of this part already, it stays as it is.
      part: the part.
    """
    if placement.part_of(variable) == part:
        return
    parts = replicas.parts_of(strategy)
    if parts is not None and not parts.hold_variables:
        placement.give(variable, part)
        return
    value = variables.tf_variable(variable)
    with strategy.scope(), placement.placed(part):
        variable._initialize(value.numpy())


# Remembers the line of the user's program at which a layer was made, or an optimizer built, for messages about it.
#
# Keras keeps no stack. What was made before the first strategy has no line.


_lines: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
# Directories of files that are not the user's: the standard library, and what is installed.
_LIBRARIES = tuple(
    f"{path}{os.sep}"
    for path in (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        *(pathlib.Path(module.__file__ or "").parent for module in (tf, keras)),
        pathlib.Path(__file__).parents[2],
    )
)
# Python's own loaders, and the code that AutoGraph writes.
_GENERATED = ("<frozen", "__autograph_generated_file")


def remember_lines() -> None:
    """Remembers the line of the program that creates a layer, or builds an optimizer, from now on."""
    layers.after_making(_remember_line)
    patching.once(keras.optimizers.Optimizer, "build", _remembering)


def line_of_layer(layer: keras.Layer) -> str:
    """Returns the line of the program that made a layer, or a model, such as "train.py:12", or ""."""
    return _lines.get(layer, "")


def _at_line_of(variable: Any) -> str:
    """Returns where the layer of a variable was made, such as "; its layer is made at train.py:12", or ""."""
    lines = [
        (len(owner.variables), line, "layer is made" if isinstance(owner, keras.Layer) else "optimizer is built")
        for owner, line in _lines.items()
        if line and any(each is variable for each in owner.variables)
    ]
    # Models and layers around it have more variables.
    return "; its {2} at {1}".format(*min(lines)) if lines else ""


def _remember_line(layer: keras.Layer) -> None:
    _lines[layer] = _line()


def _remembering(build: Any, self: keras.optimizers.Optimizer, variables: Any) -> None:
    _lines.setdefault(self, _line())
    build(self, variables)


def _line() -> str:
    # Mostly it is near; to look at each place of the program costs time.
    for limit in (12, 36, None):
        places = traceback.StackSummary.extract(traceback.walk_stack(None), limit=limit, lookup_lines=False)
        for place in places:
            name = pathlib.PurePath(place.filename).name
            if not place.filename.startswith(_LIBRARIES) and not name.startswith(_GENERATED):
                return f"{name}:{place.lineno}"
        if limit is None or len(places) < limit:
            break
    return ""


# Builds a layer in the scope in which it was made, wherever it is called for the first time.
#
# A layer that is made in the scope of a strategy is often built later, by its first call. That may be in a user's own
# loop outside of the scope, or while a `tf.function` is traced. Keras makes the weights in the context of the caller,
# so the strategy does not own them. Keras knows the strategy of optimizers and models and not that of layers, and has
# no public seam at the moment of building.


def build_in_scope(
    strategy: tf.distribute.Strategy, redirect: Callable[[tf.distribute.Strategy], contextlib.AbstractContextManager]
) -> None:
    """Makes layers that are created in this strategy's scope from now on build their variables in it.

    Args:
      strategy: the strategy.
      redirect: gives a context in which variables are made in the scope of the strategy that it is given.
    """
    replicas.facts_of(strategy).redirect = redirect
    layers.after_making(_remember_scope)


def _remember_scope(layer: keras.Layer) -> None:
    strategy = tf.distribute.get_strategy()
    if replicas.facts_of(strategy).redirect is not None:
        layers.around_build(layer, functools.partial(_around_building, weakref.ref(strategy)))


def _around_building(made_in: weakref.ref[tf.distribute.Strategy]) -> contextlib.AbstractContextManager:
    strategy = made_in()
    redirect = replicas.facts_of(strategy).redirect
    if redirect is None or tf.distribute.get_strategy() is strategy:
        return contextlib.nullcontext()
    return redirect(strategy)


# Gives replicas the seed generator of the thread that runs them, for `keras.random` without a seed.
#
# Keras keeps that generator in the state of a thread, and TensorFlow traces each replica in a thread of its own. There
# Keras would make another generator; a variable that is made while a step is traced is an error. Keras has no public
# name for the generator.


# The name under which Keras keeps it.
_NAME = "global_seed_generator"


def global_seed() -> keras.random.SeedGenerator | None:
    """The generator of this thread; None if Keras has made none."""
    return layers.of_thread(_NAME)


@tf.autograph.experimental.do_not_convert
def adopt_global_seed(generator: keras.random.SeedGenerator | None) -> None:
    """Makes this the generator of the thread, if it has none."""
    layers.of_thread(_NAME, generator)


def carrying_global_seed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, which finds the generator of the thread that calls this in any other thread."""
    generator = global_seed()
    # TensorFlow knows a `tf.function` by its type.
    if generator is None or isinstance(function, tf.types.experimental.PolymorphicFunction):
        return function
    function = graphs.converted(function)

    def on_replica(*args: Any, **kwargs: Any) -> Any:
        adopt_global_seed(generator)
        return function(*args, **kwargs)

    return on_replica


# Moves a seed generator that was made outside of a strategy's scope into it, when a replica draws from it first.
#
# A `keras.random.SeedGenerator`, and a layer that has one, such as `Dropout`, is often made before the scope is
# entered. Its state is then one variable, which all replicas advance: each step draws other numbers than on one device,
# and says nothing. In the scope each replica has a copy of its own. Keras has no hook where a generator is used.


def adopt_seed_generators(strategy: tf.distribute.Strategy) -> None:
    """Replaces the variables of seed generators that replicas draw from by variables of the strategy."""
    replicas.facts_of(strategy).adopts_seed_generators = True
    patching.once(keras.random.SeedGenerator, "next", _drawing)


def _drawing(original: Any, self: Any, ordered: bool = True) -> Any:
    context: Any = tf.distribute.get_replica_context()
    # Of a step that each replica makes as a single device.
    is_alone = getattr(context, "is_of_all", False)
    strategy = context.replica_of if is_alone else context and context.strategy
    if strategy is None or not replicas.facts_of(strategy).adopts_seed_generators:
        return original(self, ordered)
    move_variable(strategy, self.state)
    copies = getattr(self.state.value, "values", None) if is_alone else None
    own = [variables.with_tf_variable(self.state, copies[context.index])] if copies else []
    with optimizers.patched_attributes(own):
        return original(self, ordered)


# Lets a loop without `strategy.run` train a model of a strategy, in its scope and outside, as on one device.
#
# Guides on custom loops have no strategy: they call the model, a gradient tape and `optimizer.apply` directly. Each
# step is then a step of one device, with the first replica's copies of the variables. Its update is made on all copies
# of the process. TensorFlow and Keras refuse four parts of it, none of which has a public seam:
#
# - `optimizer.apply` outside of the scope: Keras updates in the context of the caller, not in that of its strategy;
# - `optimizer.apply` in the scope: Keras' `maybe_merge_call` looks for a replica's context, and fails with an
#   AttributeError. All replicas are given the same update there, so nothing has to be merged;
# - a `LossScaleOptimizer`: Keras has all replicas apply together, where there are none;
# - the gradient tape in the scope: a mirrored variable has no `handle` there, though it is read from the first replica.
#
# Each is replaced for good where it would have raised, and for tfdist's strategies.
#
# Several workers would each update their own copies with gradients of their own, which neither TensorFlow nor Keras
# notices outside of the scope: an error.


# Set in a thread while an `apply` that was checked calls another one, as for loss scaling.
_checked = threading.local()


def allow_loops_without_run() -> None:
    """Makes loops without `run` train the models of strategies for which `build_in_scope` was called, on one worker."""
    patching.once(tf.__internal__.distribute.interim, "maybe_merge_call", _merging)
    for owner in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        patching.once(owner, "apply", _applying)
    patching.once(keras.optimizers.LossScaleOptimizer, "scale_loss", _scaling)
    patching.once(backprop, "_handle_or_self", _handle_or_self)


def take_over(strategy: Any, optimizer: Any) -> None:
    """Makes an optimizer that was made outside of the scope one of the strategy, unless it has slots already.

    Replicas would each count its iterations, and slots can't be made for variables of another strategy.
    """
    for each in optimizers.parts_of(optimizer):
        if each.built or each._distribution_strategy is not replicas.default_strategy():
            continue
        for variable in each.variables:
            move_variable(strategy, variable)
        # Past Keras' own __setattr__, which tracks values.
        object.__setattr__(each, "_distribution_strategy", strategy)


def _is_allowed(strategy: Any) -> bool:
    return replicas.facts_of(strategy).redirect is not None


def _merging(original: Any, /, fn: Callable[..., Any], strategy: Any, *args: Any, **kwargs: Any) -> Any:
    if not tf.distribute.in_cross_replica_context():
        return original(fn, strategy, *args, **kwargs)
    return fn(strategy, *args, **kwargs)


# optimizer.apply


def _applying(original: Any, self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    variables = trainable_variables if trainable_variables is None else list(trainable_variables)
    here = _strategy_of_replica()
    if here is not None and getattr(_checked, "by", None) is not here:
        take_over(here, self)
        # In the context of another strategy its slots, and its count of updates, would be written by all replicas.
        own = [] if self._distribution_strategy is here else self.variables
        check_made_in_scope(here, [*(variables or optimizers.trained_by(self)), *own])
        return original(self, grads, variables)
    own = getattr(self, "_distribution_strategy", None)
    # An optimizer that was made outside of the scope updates the variables of a strategy, too.
    strategy = next(filter(_is_allowed, [own, *map(_strategy_of, variables or ())]), None)
    if strategy is None or getattr(_checked, "by", None) is strategy:
        return original(self, grads, variables)
    check_made_in_scope(strategy, variables or optimizers.trained_by(self))
    grads = list(grads)
    _check_gradients(self, strategy, grads)
    take_over(strategy, self)
    if self._distribution_strategy is not strategy:
        return original(self, grads, variables)
    # In the scope there are no replicas that could apply together.
    with checked_apply(strategy), optimizers.patched_attributes(optimizers.scaling_alone(self)):
        if not self.built and variables is not None:
            with tf.init_scope(), strategy.scope():
                self.build(variables)
        return original(self, grads, variables)


@contextlib.contextmanager
def checked_apply(strategy: Any) -> Iterator[None]:
    """Within the block, in the strategy's scope, `optimizer.apply` of this thread is not checked again."""
    _checked.by = strategy
    is_current = tf.distribute.get_strategy() is strategy
    try:
        with contextlib.nullcontext() if is_current else strategy.scope():
            yield
    finally:
        _checked.by = None


def _strategy_of(variable: Any) -> Any:
    value = variables.tf_variable(variable)
    # A single copy, which a replica may train alone, has the attribute too.
    return variables.strategy_of(value) if _has_copies(value) else None


def _has_copies(variable: Any) -> bool:
    return isinstance(variable, tf.Variable) and isinstance(variable, tf.distribute.DistributedValues)


def _strategy_of_replica() -> Any:
    """The strategy of tfdist in whose replica context this is; or None."""
    strategy = tf.distribute.get_strategy()
    is_replica = _is_allowed(strategy) and not tf.distribute.in_cross_replica_context()
    return strategy if is_replica else None


def _check_gradients(optimizer: Any, strategy: Any, grads: Sequence[Any]) -> None:
    """Raises RuntimeError for gradients by which the copies of a variable would be updated differently."""
    is_of_replicas = any(isinstance(grad, tf.types.experimental.distributed.PerReplica) for grad in grads)
    if is_of_replicas or replicas.has_other_workers(strategy):
        raise RuntimeError(
            "optimizer.apply, called outside of strategy.run, would let the copies of the model drift apart. Call it "
            "in the step: for batch in strategy.experimental_distribute_dataset(dataset): logs = strategy.run(step, "
            f"args=(batch,)). Received: optimizer {optimizer.name!r}, {strategy.num_replicas_in_sync} replicas"
        )


# Loss scaling


def _scaling(original: Any, self: Any, loss: Any) -> Any:
    strategy = getattr(self, "_distribution_strategy", None)
    is_built = self.built or tf.executing_eagerly()
    if not is_built and _is_allowed(strategy) and _strategy_of_replica() is not strategy:
        # Keras takes the initial scale, which would be a constant of the graph.
        raise RuntimeError(
            "LossScaleOptimizer.scale_loss, called outside of strategy.run, needs the optimizer's variables before "
            "the tf.function is traced: call optimizer.build(model.trainable_variables) in the strategy's scope. "
            f"Received: optimizer {self.name!r}, which is not built"
        )
    return original(self, loss)


# The gradient tape


def _handle_or_self(original: Any, x: Any) -> Any:
    variable = variables.tf_variable(x) if isinstance(x, keras.Variable) else x
    # Within `extended.update` there is a replica, though no replica context.
    is_updated = replicas.is_updating()
    is_outside = tf.distribute.in_cross_replica_context() and not is_updated
    if is_outside and _has_copies(variable) and _is_allowed(variables.strategy_of(variable)):
        return next(each for each in variable.values if each.device == variable.device).handle
    return original(x)
