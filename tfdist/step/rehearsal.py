# SPDX-License-Identifier: Apache-2.0
"""Creates the variables of a step before the step is traced on replicas.

On one device a step may create variables in its first trace: slots of an optimizer, weights of a new layer, a seed
generator. On several replicas, or on workers, it can't. So such a step is traced once for its variables alone, by one
replica, into a graph that is discarded (`compat.keras.models`).
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import patching
from tfdist.compat.keras import models, scope
from tfdist.compat.keras.optimizers import optimizers_of, parts_of, patched_attributes, undone_on_error
from tfdist.compat.tensorflow import graphs, replicas
from tfdist.compat.tensorflow.variables import tf_variable
from tfdist.step import one_replica
from tfdist.step.step import Step

# Each pass creates variables that the previous one could not reach, such as slots of newly created weights.
_MAX_PASSES = 6


def before_keras(strategy: tf.distribute.Strategy, model: keras.Model, step: str) -> None:
    """Builds a model before Keras does: as far as Keras can, and the rest by a rehearsal.

    Keras builds a model by calling it with a batch, only if there is a strategy. This fails for a model without `call`,
    and for a model whose own `train_step` calls it with other arguments than the batch.

    Args:
      strategy: the model's strategy.
      model: the model.
      step: name of the method that will run.
    """

    def build(by_keras: Callable[..., None], batch: Any) -> None:
        refused: Exception | None = None
        is_callable = models.is_callable(model)
        is_called = is_callable and models.is_called(model)
        if is_callable:
            try:
                with undone_on_error(optimizers_of(model)), models.name_scopes_closed():
                    by_keras(data_batch=batch)
            except Exception as error:
                refused = error
        if refused is None and is_called and not may_make_more(model, step):
            return
        failed = before(strategy, getattr(model, step), [batch])
        is_of_its_own = model.built and is_overridden(model, step)
        if refused is not None and failed is not None and not is_of_its_own:
            raise refused
        # Both had a part of a batch. The step may need a whole batch, and may have created all its variables.
        if failed is not None and is_of_its_own and isinstance(failed, ValueError | tf.errors.InvalidArgumentError):
            function, whole = getattr(model, step), _whole(batch, strategy.num_replicas_in_sync)
            if rehearse(strategy, function, [whole], {}, used_by(function)) is None:
                _warn_about_parts(strategy, model, step, failed)

    models.build_instead(model, build)


def _whole(part: Any, num_replicas: int) -> Any:
    """Returns the specs of a batch of which a replica has this part."""

    def of_all(leaf: Any) -> Any:
        spec = _spec(leaf)
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank or spec.shape[0] is None:
            return spec
        return tf.TensorSpec([spec.shape[0] * num_replicas, *spec.shape[1:]], spec.dtype)

    return tf.nest.map_structure(of_all, part)


def _warn_about_parts(strategy: tf.distribute.Strategy, model: keras.Model, step: str, error: Exception) -> None:
    name, replicas = type(strategy).__name__, strategy.num_replicas_in_sync
    if replicas == 1:
        return
    first_line = str(error).partition("\n")[0]
    warnings.warn(
        f"{type(model).__name__}.{step} fails with a part of a batch. {name} divides the first axis of each "
        f"batch among {replicas} replicas: if that is not the axis of the examples, put them there, or use "
        f"ParameterServerStrategy, whose workers take whole batches. Received: {type(error).__name__}: {first_line}",
        RuntimeWarning,
        stacklevel=1,
    )


def before(
    strategy: tf.distribute.Strategy,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    named: Mapping[str, Any] | None = None,
) -> Exception | None:
    """Creates the variables that the first call of `function` would create, if any may be missing.

    Args:
      strategy: the strategy to whose replicas `function` will be given.
      function: a step.
      arguments: its arguments: tensors, arrays or `tf.TypeSpec`s of one replica, and anything else.
      named: keyword arguments.

    Returns:
      The error at which a rehearsal ended; usually the step itself would raise it too.
    """
    named = named or {}
    found = used_by(function, *arguments, *named.values())
    unbuilt = [each for each in found if not is_built(each)]
    needs_seeds = "random" in names_used_by(function) and scope.global_seed() is None
    if not (unbuilt or needs_seeds or any(is_of_a_user(each) for each in found)):
        return None
    # A step that creates nothing is not rehearsed again.
    # With the first layer: another model may have the same classes.
    owner = next((each for each in found if isinstance(each, keras.Layer)), strategy)
    rehearsed = replicas.facts_of(strategy).rehearsed.setdefault(owner, set())
    code = getattr(inner(function), "__code__", None)
    # An id may be that of another object later.
    key = code, frozenset(map(weakref.ref, unbuilt)), len(found)
    if key in rehearsed:
        return None
    rehearsed.add(key)
    return rehearse(strategy, function, arguments, named, found)


def rehearse(
    strategy: tf.distribute.Strategy,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    named: Mapping[str, Any],
    found: Sequence[Any],
) -> Exception | None:
    """Creates the variables that a call of `function` would create; see `before`.

    Returns:
      The error at which it ended; usually the step itself would raise it too.
    """
    optimizers = [each for each in found if isinstance(each, keras.optimizers.Optimizer)]
    # An optimizer builds its parts.
    inner = {id(part) for each in optimizers for part in parts_of(each)[1:]}
    optimizers = [each for each in optimizers if id(each) not in inner]
    # The traced function takes positional arguments only.
    specs = tuple(tf.nest.map_structure(_spec, argument) for argument in (*arguments, *named.values()))
    if Step.of(function).kind == "other":
        function = graphs.converted(function, by_default=True)
    else:
        # As Keras traces it: a Python loop over a data set would have no end in a graph, and no error.
        function = tf.autograph.experimental.do_not_convert(function)
    for _ in range(_MAX_PASSES):
        applied = list[tuple[Any, list[Any]]]()

        def on_replica(*given: Any) -> None:
            changes = [(each, "apply", _noting(each, applied)) for each in optimizers]  # noqa: B023
            replica = one_replica.replica_on(strategy, strategy.extended.worker_devices[0])
            with strategy.scope(), replica, patched_attributes(changes):
                function(*given[: len(arguments)], **dict(zip(named, given[len(arguments) :], strict=True)))

        made, error = models.trace_scratch(strategy.scope, on_replica, specs)
        built = [_build(strategy, *each) for each in applied]
        # Gradients of weights that did not exist yet were None, on which a step may branch.
        if not (made or (error is not None and any(built))):
            return error
    return error


def _noting(optimizer: Any, applied: list[tuple[Any, list[Any]]]) -> Callable[..., None]:
    def apply(grads: Any, trainable_variables: Any = None) -> None:
        del grads
        if trainable_variables is not None:
            applied.append((optimizer, list(trainable_variables)))

    return apply


def _build(strategy: tf.distribute.Strategy, optimizer: Any, variables: list[Any]) -> bool:
    """Builds the optimizer for the variables that it updates; returns False if nothing was built."""
    is_early = any(tf_variable(variable) is None for variable in variables)
    # The step itself raises the error about a variable that was made outside of the scope.
    if optimizer.built or is_early or not all(scope.belongs_to(strategy, each) for each in variables):
        return False
    scope.take_over(strategy, optimizer)
    with tf.init_scope(), strategy.scope(), undone_on_error([optimizer]):
        optimizer.build(variables)
    return True


def _spec(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic):
        return tf.TensorSpec(leaf.shape, leaf.dtype)
    is_tensor = tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable | keras.Variable)
    return tf.type_spec_from_value(leaf) if is_tensor else leaf


# Finds the layers, optimizers and metrics that a function uses: arguments, its object, its closure, globals.


_KERAS = (keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric)
_IN_LAYERS = (*_KERAS, list, tuple, dict)
# Libraries whose objects hold none of a user's.
_LIBRARIES = ("tensorflow", "keras", "tfdist", "numpy", "builtins", "collections", "threading", "pathlib", "weakref")
_MAX_OBJECTS = 3000
_OPTIMIZERS = "optimizers of a step"
_MAX_ITEMS = 200


def used_by(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The Keras layers (models among them), optimizers and metrics that a function can reach."""
    seen: dict[int, Any] = {}
    waiting: list[Any] = [function, *arguments]
    while waiting and len(seen) < _MAX_OBJECTS:
        each = waiting.pop()
        if id(each) not in seen:
            seen[id(each)] = each
            waiting.extend(_within(each))
    return [each for each in seen.values() if isinstance(each, _KERAS)]


def note_optimizers(strategy: tf.distribute.Strategy, model: keras.Model, anew: bool) -> None:
    """Makes the optimizers of a train step that are no attributes of the model, such as globals, a list in one.

    So `optimizers_of` finds them. Those that models of no strategy were compiled with are theirs. Once, or anew.
    """
    kept = models.kept_until_compiled(model)
    if not is_overridden(model, "train_step") or (_OPTIMIZERS in kept and not anew):
        return
    own = [value for kind in type(model).__mro__ if not _is_of_a_library(kind) for value in vars(kind).values()]
    methods = [each for each in own if isinstance(each, types.FunctionType)]
    found = used_by(model.train_step, *methods)
    theirs = [id(getattr(each, "optimizer", None)) for each in found if isinstance(each, keras.Model)]
    in_scope = lambda made: all(scope.belongs_to(strategy, each) for each in made.variables)  # noqa: E731
    own = [o for o in found if isinstance(o, keras.optimizers.Optimizer) and (id(o) not in theirs or in_scope(o))]
    kept[_OPTIMIZERS] = True
    patching.put(model, "_tfdist_optimizers", own)


def names_used_by(function: Callable[..., Any]) -> set[str]:
    """The global names and attributes in a function and in those written within it."""
    code = getattr(inner(function), "__code__", None)
    return {name for each in _codes(code) for name in each.co_names} if code else set()


def inner(function: Any) -> Any:
    """The Python function behind decorators, `functools.partial` and binding."""
    while True:
        if isinstance(function, tf.types.experimental.PolymorphicFunction):
            function = function.python_function
        elif isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function


def is_built(found: Any) -> bool:
    """Returns True if a layer with its sublayers, or an optimizer, is built."""
    if isinstance(found, keras.Layer):
        return all(layer.built or not models.is_callable(layer) for layer in models.layers_of(found))
    return not isinstance(found, keras.optimizers.Optimizer) or found.built


def may_make_more(model: keras.Model, step: str) -> bool:
    """Returns True if a step may create variables besides those that Keras creates by building model and loss.

    Args:
      model: a model that Keras has just built.
      step: the name of its method.
    """
    if any(is_overridden(model, name) for name in (step, "compute_loss", "compute_metrics")):
        return True
    # Keras builds it by a call with training=False.
    return step == "train_step" and any(
        "training" in inspect.signature(layer.call).parameters and not is_of_keras(type(layer))
        for layer in models.layers_of(model)
    )


def is_overridden(model: keras.Model, name: str) -> bool:
    """Returns True if this model overrides a method of `keras.Model`."""
    return getattr(type(model), name) is not getattr(keras.Model, name) or name in vars(model)


def is_of_a_user(found: Any) -> bool:
    """Returns True if a layer or a sublayer is of a class outside of Keras."""
    layers = models.layers_of(found) if isinstance(found, keras.Layer) else ()
    return not all(is_of_keras(type(layer)) for layer in layers)


def is_of_keras(kind: type) -> bool:
    """Returns True for a class of Keras."""
    return kind.__module__.split(".")[0] == "keras"


def is_all_of_keras(instance: Any, function: Callable[..., Any] | None) -> bool:
    """Returns True if a loss or metric, and the function that it wraps, if any, are Keras' own."""
    is_function = function is None or (getattr(function, "__module__", None) or "").startswith("keras.")
    return is_function and is_of_keras(type(instance))


def has_keras_metrics_only(model: keras.Model) -> bool:
    """Returns True if a train step updates metrics as Keras does, and only those of Keras: none reads another variable.

    A metric, or a step, of the user's may read the model's weights, or what it has counted so far.
    """
    return not any(is_overridden(model, name) for name in ("train_step", "compute_metrics")) and all(
        is_all_of_keras(metric, models.function_of(metric)) for metric in model.metrics
    )


def _within(each: Any) -> Iterator[Any]:
    if isinstance(each, types.ModuleType | type | str | bytes | int | float | None):
        return
    if isinstance(each, dict):
        yield from list(each.values())[:_MAX_ITEMS]
    elif isinstance(each, list | tuple | set | frozenset):
        yield from list(each)[:_MAX_ITEMS]
    elif isinstance(each, types.FunctionType):
        yield from _of_function(each)
    elif callable(each) and inner(each) is not each:
        yield inner(each)
        yield getattr(each, "__self__", None)
        yield from (*each.args, *each.keywords.values()) if isinstance(each, functools.partial) else ()
    elif isinstance(each, keras.Layer):
        held = vars(each).values()
        yield from (value for value in held if isinstance(value, _IN_LAYERS) or not _is_of_a_library(type(value)))
    elif not _is_of_a_library(type(each)):
        yield from list(getattr(each, "__dict__", {}).values())[:_MAX_ITEMS]


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    yield getattr(function, "__wrapped__", None)
    # The cell of a name that is not defined yet is empty.
    enclosed = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    if _is_of_a_library(function):
        # Keras' step of `predict` encloses its model.
        yield from (each for each in enclosed if isinstance(each, keras.Layer) and not is_built(each))
        return
    yield from enclosed
    yield from function.__defaults__ or ()
    # Not names of attributes, which globals may have, too.
    read = [each for code in _codes(function.__code__) for each in dis.get_instructions(code)]
    names = dict.fromkeys(each.argval for each in read if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    yield from (function.__globals__[name] for name in names if name in function.__globals__)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_of_a_library(made: Any) -> bool:
    return (made.__module__ or "").split(".")[0] in _LIBRARIES
