# SPDX-License-Identifier: Apache-2.0
"""Builds a model, its loss and its metrics where Keras' own way fails under a distribution strategy.

Under a strategy Keras takes a batch for that from an iterator of its own, before the first step: the order of a
shuffle, an epoch of a `PyDataset` and the batches of a generator are then not those of one device. So the strategy
builds from the specs of the data, and nothing is read: Keras' `_maybe_symbolic_build` is replaced, once in a process,
and stays as it is for strategies without the method `build_model`.

Keras builds with a stand-in for the batch that has its shape and dtype alone, so that a model which takes a ragged
or sparse tensor finds a dense one. And it keeps what a metric writes, so that a write in one branch of a conditional is
read in the other, which is an error. There is no public way to have it done otherwise: once all is built Keras leaves
it alone.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.trainers.data_adapters import data_adapter_utils

from tfdist.compat import calls, flat_layers, own_attributes, replacing

NEEDS = (
    "keras.src.backend.common.global_state:get_global_attribute",
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer._distribute_strategy",
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer._maybe_symbolic_build(self, iterator)",
    "keras.src.backend.tensorflow.trainer:TFEpochIterator._distributed_dataset",
    "keras.src.backend:compute_output_spec",
    "keras.src.backend:standardize_dtype",
    "keras.src.layers.layer:Layer._call_has_training_arg",
    "keras.src.trainers.data_adapters.data_adapter_utils:unpack_x_y_sample_weight",
    "keras.src.trainers.trainer:Trainer._compile_loss",
    "keras.src.trainers.trainer:Trainer._compile_metrics",
    "keras.src.trainers.trainer:Trainer._compute_loss",
    "keras.src.trainers.trainer:Trainer._symbolic_build(data_batch)",
)

_RAGGED = tf.RaggedTensor | tf.RaggedTensorSpec
_SPARSE = tf.SparseTensor | tf.SparseTensorSpec
_NAME_SCOPES = "name_scope_stack"
# Models that `build` has called, and that Keras is about to build.
_called: weakref.WeakSet[Any] = weakref.WeakSet()


def install() -> None:
    """From now on Keras leaves the building of a model to `build_model` of its strategy, if that has such a method.

    It is called with the model, the distributed data set of the call or a batch, and the name of the step.
    """
    replacing.once(TensorFlowTrainer, "_maybe_symbolic_build", _left_to_strategy)


def _left_to_strategy(original: Callable[..., None]) -> Callable[..., None]:
    def build_before_call(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        build_model = getattr(self._distribute_strategy, "build_model", None)
        if build_model is None:
            original(self, iterator=iterator, data_batch=data_batch)
            return
        call = calls.current()
        step = "test_step" if call is not None and call.kind in ("evaluate", "test_on_batch") else "train_step"
        build_model(self, data_batch if iterator is None else iterator._distributed_dataset, step)

    return build_before_call


@tf.autograph.experimental.do_not_convert
def build(model: keras.Model, batch: Any) -> None:
    """Builds the unbuilt parts of a model, if the batch has ragged or sparse parts or metrics are unbuilt.

    Args:
      model: the model.
      batch: a batch, or its specs.
    """
    loss, has_metrics, has_dense = model._compile_loss, has_unbuilt_metrics(model), is_dense(batch)
    if has_dense and not has_metrics:
        return
    x, y, weight = data_adapter_utils.unpack_x_y_sample_weight(batch)
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
        compute = _without_writes(model.compute_metrics)
        backend.compute_output_spec(compute, x, y, predicted, sample_weight=weight)
    if loss is not None and not loss.built:
        backend.compute_output_spec(model._compute_loss, x, y, predicted, sample_weight=weight, training=False)
    _called.add(model)


@contextlib.contextmanager
def name_scopes_closed() -> Iterator[None]:
    """Closes name scopes that are still open at the end of the block, after an error that is not raised.

    Keras leaves one open whose name is refused by a graph of TensorFlow's: "__net", of a model of a class `_Net`. All
    layers that are made later would have it in their paths.
    """
    count = len(global_state.get_global_attribute(_NAME_SCOPES) or [])
    try:
        yield
    finally:
        del (global_state.get_global_attribute(_NAME_SCOPES) or [])[count:]


def has_unbuilt_metrics(model: keras.Model) -> bool:
    """Returns True if metrics that were given to `compile` have no variables yet."""
    metrics = model._compile_metrics
    return metrics is not None and not metrics.built


def is_dense(batch: Any) -> bool:
    """Returns True if a batch, or what its specs describe, has no ragged and no sparse tensor."""
    return not any(isinstance(leaf, _RAGGED | _SPARSE) for leaf in tf.nest.flatten(batch))


def by_keras(model: keras.Model, batch: Any) -> None:
    """Builds the unbuilt parts of a model as Keras does, from a batch or its specs."""
    tf.autograph.experimental.do_not_convert(model._symbolic_build)(data_batch=batch)


def instead(model: keras.Model, build_instead: Callable[[Callable[..., Any], Any], None]) -> None:
    """Makes Keras call `build_instead` the next time that it builds this model from a batch.

    Args:
      model: a model that Keras is about to build.
      build_instead: called with the method that Keras would call, and a batch: arrays, tensors or `KerasTensor`s.
    """
    original = model._symbolic_build

    def build_once(iterator: Any = None, data_batch: Any = None) -> None:
        del iterator
        own_attributes.remove(model, "_symbolic_build")
        # A step of one device is not converted either.
        build_instead(tf.autograph.experimental.do_not_convert(original), data_batch)

    own_attributes.put(model, "_symbolic_build", build_once)


def is_called(model: keras.Model) -> bool:
    """Returns True if Keras calls the model in order to build it, or if `build` has just called it."""
    if model in _called:
        _called.discard(model)
        return True
    parts = [*flat_layers.layers_of(model), model._compile_metrics, model._compile_loss]
    return not all(part.built for part in parts if part is not None)


def takes_training(layer: keras.Layer) -> bool:
    """Returns True if the layer's `call` has the argument `training`."""
    return layer._call_has_training_arg


def is_callable(layer: keras.Layer) -> bool:
    """Returns True if a layer, or model, overrides `call`."""
    return type(layer).call not in (keras.Layer.call, keras.Model.call)


class Reading(keras.StatelessScope):
    """A scope in which a variable that was not written has its value: Keras' regularizers take no None for it."""

    def get_current_value(self, variable: Any) -> Any:
        """See `keras.StatelessScope`."""
        value = super().get_current_value(variable)
        return variable._value if value is None else value


class Unwritten(Reading):
    """A scope in which variables keep their values."""

    def add_update(self, update: tuple[Any, Any]) -> None:
        """See `keras.StatelessScope`."""


def _without_writes(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with Unwritten():
            return function(*args, **kwargs)

    return call


def _symbolic(leaf: Any) -> Any:
    if isinstance(leaf, keras.KerasTensor) or not hasattr(leaf, "shape"):
        return leaf
    dtype = backend.standardize_dtype(leaf.dtype)
    return keras.KerasTensor(leaf.shape, dtype, sparse=isinstance(leaf, _SPARSE))
