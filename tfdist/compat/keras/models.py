# SPDX-License-Identifier: Apache-2.0
"""Models of Keras: their layers, how they are built, what they were compiled with, and their losses."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from tfdist.compat import patching
from tfdist.compat.keras import calls, fit, layers
from tfdist.compat.tensorflow import graphs

NEEDS = (
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer._maybe_symbolic_build(self, iterator)",
    "keras.src.backend:compute_output_spec",
    "keras.src.trainers.trainer:Trainer._compile_config, _compile_loss, _compile_metrics, _symbolic_build(data_batch)",
    "keras.src.layers.layer:Layer._flatten_layers, _non_trainable_variables, _loss_ids, _losses",
    "keras.src.metrics.reduction_metrics:MeanMetricWrapper._fn",
    "keras.src.metrics.metric:Metric._metrics",
    "keras.src.trainers.compile_utils:CompileLoss._flat_losses",
    "keras.src.trainers.compile_utils:CompileMetrics._user_metrics, _user_weighted_metrics",
)


_RAGGED = tf.RaggedTensor | tf.RaggedTensorSpec
_SPARSE = tf.SparseTensor | tf.SparseTensorSpec
_NAME_SCOPES = "name_scope_stack"
# Models that `build_model` has called, and that Keras is about to build.
_called: weakref.WeakSet[Any] = weakref.WeakSet()


_BUILD = "_maybe_symbolic_build"
_KEPT = "_tfdist_kept_until_compiled"


def leave_building_to_strategy(model: keras.Model) -> None:
    """From now on Keras leaves the building of this model to `build_model` of its strategy.

    It is called with the model, the distributed data set of the call or a batch, and the name of the step.
    """
    if patching.get(model, _BUILD) is None:
        patching.put_method(model, _BUILD, _build_by_strategy)


def _build_by_strategy(model: Any, iterator: Any = None, data_batch: Any = None) -> None:
    call = calls.current()
    step = "test_step" if call is not None and call.kind in ("evaluate", "test_on_batch") else "train_step"
    model.distribute_strategy.build_model(model, data_batch if iterator is None else fit.data_of(iterator), step)


@tf.autograph.experimental.do_not_convert
def build_model(model: keras.Model, batch: Any) -> None:
    """Builds unbuilt parts of a model, if a batch or its specs have ragged or sparse parts, or metrics are unbuilt."""
    loss, has_metrics, has_dense = model._compile_loss, has_unbuilt_metrics(model), is_dense(batch)
    if has_dense and not has_metrics:
        return
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    if has_dense:
        try:
            with name_scopes_closed():
                predicted = backend.compute_output_spec(model, tf.nest.map_structure(_symbolic, x), training=False)
        except Exception:
            return  # Keras tries the same, and explains the error.
    else:
        # Keras' own tracing knows sparse tensors, but no ragged ones.
        call = tf.function(lambda x: model(x, training=False), autograph=False)
        with keras.StatelessScope():
            predicted = call.get_concrete_function(x).structured_outputs
    x, y, weight, predicted = (tf.nest.map_structure(_symbolic, each) for each in (x, y, weight, predicted))
    if has_metrics:

        def compute(*args: Any, **kwargs: Any) -> Any:
            with Unwritten():
                return model.compute_metrics(*args, **kwargs)

        backend.compute_output_spec(compute, x, y, predicted, sample_weight=weight)
    if loss is not None and not loss.built:
        backend.compute_output_spec(model.compute_loss, x, y, predicted, sample_weight=weight)
    _called.add(model)


@contextlib.contextmanager
def name_scopes_closed() -> Iterator[None]:
    """Closes name scopes that are still open at the end of the block, after an error that is not raised.

    Keras leaves one open whose name is refused by a graph of TensorFlow's: "__net", of a model of a class `_Net`. All
    layers that are made later would have it in their paths.
    """
    count = len(layers.of_thread(_NAME_SCOPES) or [])
    try:
        yield
    finally:
        del (layers.of_thread(_NAME_SCOPES) or [])[count:]


def has_unbuilt_metrics(model: keras.Model) -> bool:
    """Returns True if metrics that were given to `compile` have no variables yet."""
    metrics = model._compile_metrics
    return metrics is not None and not metrics.built


def is_dense(batch: Any) -> bool:
    """Returns True if a batch, or what its specs describe, has no ragged and no sparse tensor."""
    return not any(isinstance(leaf, _RAGGED | _SPARSE) for leaf in tf.nest.flatten(batch))


def build_by_keras(model: keras.Model, batch: Any) -> None:
    """Builds the unbuilt parts of a model as Keras does, from a batch or its specs."""
    tf.autograph.experimental.do_not_convert(model._symbolic_build)(data_batch=batch)


def build_instead(model: keras.Model, build_instead: Callable[[Callable[..., Any], Any], None]) -> None:
    """Makes Keras call `build_instead` the next time that it builds this model from a batch.

    Args:
      model: a model that Keras is about to build.
      build_instead: called with the method that Keras would call, and a batch: arrays, tensors or `KerasTensor`s.
    """
    original = model._symbolic_build

    def build_once(iterator: Any = None, data_batch: Any = None) -> None:
        del iterator
        patching.remove(model, "_symbolic_build")
        # A step of one device is not converted either.
        build_instead(tf.autograph.experimental.do_not_convert(original), data_batch)

    patching.put(model, "_symbolic_build", build_once)


def is_called(model: keras.Model) -> bool:
    """Returns True if Keras calls the model in order to build it, or if `build_model` has just called it."""
    if model in _called:
        _called.discard(model)
        return True
    parts = [*layers_of(model), model._compile_metrics, model._compile_loss]
    return not all(part.built for part in parts if part is not None)


def is_callable(layer: keras.Layer) -> bool:
    """Returns True if a layer, or model, overrides `call`."""
    return type(layer).call not in (keras.Layer.call, keras.Model.call)


class ReadingScope(keras.StatelessScope):
    """A scope in which a variable that was not written has its value: Keras' regularizers take no None for it."""

    def get_current_value(self, variable: Any) -> Any:
        """See `keras.StatelessScope`."""
        value = super().get_current_value(variable)
        return variable._value if value is None else value


class Unwritten(ReadingScope):
    """A scope in which variables keep their values."""

    def add_update(self, update: tuple[Any, Any]) -> None:
        """See `keras.StatelessScope`."""


def _symbolic(leaf: Any) -> Any:
    if isinstance(leaf, keras.KerasTensor) or not hasattr(leaf, "shape"):
        return leaf
    dtype = keras.utils.standardize_dtype(leaf.dtype)
    return keras.KerasTensor(leaf.shape, dtype, sparse=isinstance(leaf, _SPARSE))


# Traces a step into a graph that is thrown away, for the variables that it makes.
#
# There is no public way: TensorFlow's public graphs of functions belong to a `tf.function`, which keeps the variables
# made in it for itself. Keras makes variables that it deferred in a `keras.StatelessScope` outside of any scope.


def trace_scratch(
    make: Callable[[], contextlib.AbstractContextManager], function: Callable[..., Any], specs: Any
) -> Any:
    """Calls `function` with placeholders in a graph of its own, and makes the variables that it asks for.

    Args:
      make: gives the context in which variables are made.
      function: called with one argument for each of `specs`; nothing of what it does is run.
      specs: a tuple of structures of `tf.TypeSpec`s, tensors of the calling graph, and anything else.

    Returns:
      (variables made, error): how many, and the exception that `function` raised, or None.
    """
    made = 0

    def lifted(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        with tf.init_scope(), make():
            return next_creator(**kwargs)

    error, count = None, len(layers.deferred())
    try:
        with (
            name_scopes_closed(),
            tf.__internal__.FuncGraph("tfdist_scratch").as_default(),
            tf.variable_creator_scope(lifted),
            Unwritten(collect_losses=True, initialize_variables=False),
        ):
            function(*tf.nest.map_structure(_placeholder, specs))
    except Exception as raised:
        error = raised
    made += len(layers.deferred()) - count
    # Keras creates what was declared at the end of such a scope.
    with tf.init_scope(), make(), keras.StatelessScope():
        pass
    return made, error


def _placeholder(spec: Any) -> Any:
    if not isinstance(spec, tf.TypeSpec):
        return spec
    parts = [
        tf.compat.v1.placeholder(part.dtype, part.shape) if isinstance(part, tf.TensorSpec) else part
        for part in tf.nest.flatten(spec, expand_composites=True)
    ]
    return tf.nest.pack_sequence_as(spec, parts, expand_composites=True)


# The layers that a layer or a model consists of, and the variables that are each layer's own.
#
# There is no public way: `model.layers` has the outermost ones, and `layer.non_trainable_variables` those of metrics
# and seed generators, too.


def layers_of(layer: keras.Layer) -> Iterator[keras.Layer]:
    """The layer itself and all layers that are parts of it."""
    yield from layer._flatten_layers()


def statistics_of(model: keras.Model) -> list[Any]:
    """Float variables, of several copies, that layers update themselves, such as BatchNormalization's statistics."""
    variables = [v for layer in layers_of(model) for v in layer._non_trainable_variables]
    unique = {id(v): v for v in variables if tf.as_dtype(v.dtype).is_floating and hasattr(v.value, "values")}
    return list(unique.values())


# The losses and functions that a Keras model was compiled with, and losses that layers have left.
#
# There is no public way: `model.loss` is the argument of `compile`, in one of a dozen forms. Keras resolves it into an
# object that it keeps to itself, and likewise the metrics of the losses, and a metric's function.


def compiled_losses(model: keras.Model) -> list[Any]:
    """The losses given to `compile`, one for each output that has one."""
    compiled = getattr(model, "_compile_loss", None)
    return [loss.loss for loss in getattr(compiled, "_flat_losses", None) or [] if loss.loss is not None]


def kept_until_compiled(model: keras.Model) -> dict[Any, Any]:
    """Returns a dictionary of the model, which is empty again once the model is compiled anew."""
    # Of a `compile` of the user's own, which may hand on less than it is given, its settings are new at least.
    settings = getattr(model, "_compile_config", None)
    compiled = getattr(model, "optimizer", None), model._compile_loss, model._compile_metrics, settings
    before, kept = patching.get(model, _KEPT, (None, None))
    if kept is None or any(each is not old for each, old in zip(compiled, before, strict=True)):
        kept = dict[Any, Any]()
        patching.put(model, _KEPT, (compiled, kept))
    return kept


def names_of_given_metrics(model: keras.Model) -> list[str]:
    """The names of the metrics, or of their classes, given to `compile`."""
    given = [metric for metric in given_metrics(model) if metric is not None]
    return [each if isinstance(each, str) else getattr(each, "__name__", type(each).__name__) for each in given]


def given_metrics(model: keras.Model) -> list[Any]:
    """The metrics given to `compile`, objects, names or None, also before Keras has built them into the model."""
    compiled = model._compile_metrics
    given = () if compiled is None else (compiled._user_metrics, compiled._user_weighted_metrics)
    return tf.nest.flatten(given)


def function_of(metric: Any) -> Any:
    """The function that a metric is the mean of; None if it wraps none."""
    return getattr(metric, "_fn", None)


def with_function(metric: Any, function: Any) -> tuple[Any, str, Any]:
    """An attribute that has a metric be the mean of another function, as (object, name, value)."""
    return metric, "_fn", function


# Weights of numbers that a mean gets from a step, such as a loss, or from a function given to `compile`.


_WEIGHT = "_tfdist_weight_of_numbers"


def means_in(metrics: Sequence[Any]) -> list[Any]:
    """The metrics among these, and within them, that are a `keras.metrics.Mean`."""
    parts = [part for each in metrics for name in ("_metrics", "metrics") for part in getattr(each, name, ())]
    found = [*(each for each in metrics if isinstance(each, keras.metrics.Mean)), *(means_in(parts) if parts else ())]
    return list({id(each): each for each in found}.values())


def weighed_numbers(mean: Any, weight: Callable[[bool], Any]) -> tuple[Any, str, Any]:
    """An attribute that has a mean weigh a single float that it is given without a weight: (object, name, value).

    Args:
      mean: a `keras.metrics.Mean`.
      weight: called at each update: with True if it is of such a number, for its weight. Where that is 0, the number
        may be NaN.
    """
    # An instance's own `update_state` would not do: a subclass calls that of `Mean`.
    patching.once(keras.metrics.Mean, "update_state", _weighing_numbers)
    return mean, _WEIGHT, weight


def _weighing_numbers(plain: Any, self: Any, values: Any, sample_weight: Any = None) -> Any:
    weight = patching.get(self, _WEIGHT)
    update = functools.partial(plain, self)
    return update(values, sample_weight) if weight is None else update_weighing(update, weight, values, sample_weight)


def update_weighing(
    update_state: Callable[..., Any], weight: Callable[[bool], Any], values: Any, sample_weight: Any = None
) -> Any:
    """Updates a metric, and weighs a single float that comes without a weight; for `weight` see `weighed_numbers`."""
    # An integer is a count, which is summed over the replicas.
    is_number = getattr(values, "shape", None) == () and tf.as_dtype(getattr(values, "dtype", "int32")).is_floating
    found = weight(sample_weight is None and is_number)
    if not is_number:
        return update_state(values, sample_weight)
    known = tf.cast(found if sample_weight is None else sample_weight, tf.float32)
    # Where it is 0, the number may be NaN, as a mean of no examples is.
    values = tf.where(known > 0, values, tf.zeros_like(values))
    return update_state(values, sample_weight=known)


def forget_added(model: keras.Model) -> None:
    """Forgets what layers have added to the loss: Keras knows it by ids, which later tensors may have."""
    for layer in layers_of(model):
        layer._losses.clear()
        layer._loss_ids.clear()


# The losses of a Keras model besides those given to `compile`: penalties of weights and activities, and `add_loss`.
#
# A layer keeps them in a list of its own, which the threads of several replicas share. Replicas meet in `merge_call`,
# such as in `optimizer.apply` or a synchronized BatchNormalization. Then a replica would read the losses of the last
# one.


def losses_kept_by_replica(model: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step, for the thread of each replica, that finds the losses again that it had before a `merge_call`."""
    if isinstance(step, tf.types.experimental.PolymorphicFunction):
        return step
    step = graphs.converted(step)

    @tf.autograph.experimental.do_not_convert
    def on_replica(*args: Any, **kwargs: Any) -> Any:
        context = tf.distribute.get_replica_context()
        merge_call = context.merge_call

        def keeping(*given: Any, **named: Any) -> Any:
            kept = [(layer, list(layer._losses), set(layer._loss_ids)) for layer in layers_of(model)]
            result = merge_call(*given, **named)
            for layer, losses, ids in kept:
                layer._losses[:] = losses
                layer._loss_ids.clear()
                layer._loss_ids.update(ids)
            return result

        patching.put(context, "merge_call", keeping)
        return step(*args, **kwargs)

    return on_replica


# Finds the method of a model that is decorated with `tf.function`.
#
# There is no public way: the instance is an attribute of a stand-in that TensorFlow binds the method to.


def undecorated(function: Any) -> Any:
    """The bound method itself if `function` is one that is decorated with `tf.function`; else `function`."""
    if not isinstance(function, tf.types.experimental.PolymorphicFunction):
        return function
    method: Any = inspect.unwrap(function.python_function)
    target = getattr(getattr(method, "__self__", None), "target", None)
    return function if target is None else types.MethodType(method.__func__, target)
