# SPDX-License-Identifier: Apache-2.0
"""Creates the variables of a step before the step is traced on replicas.

On one device a step may create variables in its first trace: slots of an optimizer, weights of a layer that was not
called before, a seed generator. On several replicas, or on workers, it can't. So such a step is traced once for its
variables alone, by one replica, into a graph that is discarded (`compat.keras.models`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import patching
from tfdist.compat.keras import models, scope
from tfdist.compat.keras.optimizers import optimizers_of, parts_of, patched_attributes, undone_on_error
from tfdist.compat.tensorflow import graphs
from tfdist.compat.tensorflow.variables import tf_variable
from tfdist.step import keras_steps, one_replica, used_objects

# Each pass creates variables that the previous one could not reach, such as slots of newly created weights.
_MAX_PASSES = 6
_KEPT = "_tfdist_rehearsed"


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
                undone = undone_on_error(optimizers_of(model))
                with undone, models.name_scopes_closed():
                    by_keras(data_batch=batch)
            except Exception as error:
                refused = error
        if refused is None and is_called and not used_objects.may_make_more(model, step):
            return
        failed = before(strategy, getattr(model, step), [batch])
        is_of_its_own = model.built and used_objects.is_overridden(model, step)
        if refused is not None and failed is not None and not is_of_its_own:
            raise refused
        # Both had a part of a batch. The step may need a whole batch, and may have created all its variables.
        if failed is not None and is_of_its_own and isinstance(failed, ValueError | tf.errors.InvalidArgumentError):
            _warn_about_parts(strategy, model, step, failed)

    models.build_instead(model, build)


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
    found = used_objects.used_by(function, *arguments, *named.values())
    unbuilt = [each for each in found if not used_objects.is_built(each)]
    needs_seeds = "random" in used_objects.names_used_by(function) and not scope.is_global_seed_made()
    if not (unbuilt or needs_seeds or any(used_objects.is_of_a_user(each) for each in found)):
        return None
    # A step that creates nothing is not rehearsed again.
    rehearsed = _rehearsed(strategy, found)
    code = getattr(used_objects.inner(function), "__code__", None)
    # An id may be that of another object later.
    key = code, frozenset(map(weakref.ref, unbuilt)), len(found)
    if key in rehearsed:
        return None
    rehearsed.add(key)
    return rehearse(strategy, function, arguments, named, found)


def _rehearsed(strategy: tf.distribute.Strategy, found: Sequence[Any]) -> set[Any]:
    """Returns the record of rehearsals with the first layer of `found`; another model may have the same classes."""
    by_layer = patching.setdefault(strategy, _KEPT, weakref.WeakKeyDictionary)
    owner = next((each for each in found if isinstance(each, keras.Layer)), strategy)
    return by_layer.setdefault(owner, set())


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
    if keras_steps.classify(function) == "other":
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
