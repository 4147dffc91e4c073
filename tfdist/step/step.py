# SPDX-License-Identifier: Apache-2.0
"""Distinguishes Keras' own steps from other functions given to `strategy.run`.

Keras hands in `model.train_step` and `model.test_step` as bound methods, and for `predict` a function of its own around
`model.predict_step`. A recognised step may overlap with other steps. Any other function runs alone, so a step that is
not recognised costs time and changes no result.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import functools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import keras
import tensorflow as tf

from tfdist import _log
from tfdist.compat import patching
from tfdist.compat.keras import models
from tfdist.compat.tensorflow import graphs, python_operation
from tfdist.passes import handle as handles


def classify(fn: Callable[..., Any]) -> str:
    """Returns "train", "test", "predict" or "other"."""
    model, fn = model_of(fn), getattr(fn, "__wrapped__", fn)
    if model is not None:
        return {"train_step": "train", "test_step": "test"}.get(fn.__name__, "other")
    return "predict" if "make_predict_function" in getattr(fn, "__qualname__", "") else "other"


def model_of(fn: Callable[..., Any]) -> keras.Model | None:
    """Returns the model that `fn` is a method of, or None."""
    owner = getattr(getattr(fn, "__wrapped__", fn), "__self__", None)
    return owner if models.is_trainer(owner) else None


def make_predict_function(model: keras.Model) -> Callable[[Any], Any]:
    """Returns the function of a batch that `predict` runs on a replica; `classify` knows it by its name, as Keras'."""

    def predict(data: Any) -> Any:
        # Keras has empty Optionals for None.
        given = tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)
        return model.predict_step(given)

    return predict


def runs_eagerly(fn: Callable[..., Any]) -> bool:
    """Returns True if `fn` is a method of a model compiled with `run_eagerly=True`."""
    model = model_of(fn)
    return model is not None and model.run_eagerly


def traced_with(fn: Callable[..., Any]) -> dict[Any, Any] | None:
    """Returns the cache of a Keras step's traces, an attribute of the function that Keras has made of the step.

    So the cache ends with the model, and when the model is compiled again: then Keras makes a new function of a bound
    method that compares equal to the previous one.

    Returns:
      The same dictionary until then; None if `fn` is no step of Keras', or if Keras has made nothing of it, as in a
      custom loop.
    """
    kind = classify(fn)
    function = getattr(getattr(fn, "__self__", None), f"{kind}_function", None)
    return None if function is None else patching.setdefault(function, "_tfdist_traced", dict)


def check_for_workers(fn: Callable[..., Any], asynchronous: bool) -> None:
    """Refuses models that can't train on several workers, and builds the optimizer.

    Variables can't be created while a step is traced, so the optimizer creates its own before.

    Args:
      fn: The function given to `strategy.run`.
      asynchronous: True if each worker updates the model on its own.

    Raises:
      ValueError: The model was compiled with something that has no meaning here.
    """
    model: Any = getattr(fn, "__self__", None)
    kind = classify(fn)
    if (kind in ("train", "test") and model.jit_compile) or graphs.is_compiled_by_xla(fn):
        raise ValueError(
            "jit_compile=True cannot hold under ParameterServerStrategy: the variables are on other machines, where "
            "XLA can't reach them. "
            "Use model.compile(..., jit_compile=False). Received: jit_compile=True"
        )
    if kind != "train":
        return
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    if asynchronous and getattr(inner, "gradient_accumulation_steps", None):
        raise ValueError(
            "gradient_accumulation_steps with loss scaling cannot hold under asynchronous ParameterServerStrategy: the "
            "workers share one loss scale. Use mixed_bfloat16, or policies=[tfdist.BackupWorkers(spares=0)], which "
            f"makes training synchronous. Received: gradient_accumulation_steps={inner.gradient_accumulation_steps}"
        )
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)


def steps_per_execution(fn: Callable[..., Any]) -> int:
    """Returns how many train steps of its model Keras asks for at a time; 1 for any other function."""
    return int(getattr(model_of(fn), "steps_per_execution", 1)) if classify(fn) == "train" else 1


def accumulates(fn: Callable[..., Any]) -> Any:
    """Returns the optimizer of a train step if it accumulates gradients, else None."""
    optimizer = getattr(model_of(fn), "optimizer", None) if classify(fn) == "train" else None
    return optimizer if getattr(optimizer, "gradient_accumulation_steps", None) else None


# Keys of a user's functions, equal for equal functions, so that a new `lambda` in each iteration is traced once.
#
# `strategy.run(lambda batch: step(*batch), args=(batch,))` in a loop makes a function in each iteration. Two of them
# are
# equal if they have the same code, which reads only arguments and names, and if these names refer to the same
# functions,
# layers, variables or numbers. Any other function is equal to itself only: the objects it reads may have changed.


# These read objects that may change while their names stay the same.
_READS_WITHIN = (
    "LOAD_ATTR",
    "LOAD_METHOD",
    "BINARY_SUBSCR",
    "BINARY_SLICE",
    "GET_ITER",
    "IMPORT_NAME",
    "MAKE_FUNCTION",
)
_WRITES = ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "STORE_SUBSCR")
_UNCHANGING = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    type,
    keras.Layer,
    keras.optimizers.Optimizer,
    keras.metrics.Metric,
    keras.losses.Loss,
    keras.Variable,
    tf.Variable,
    tf.Tensor,
    tf.types.experimental.PolymorphicFunction,
    tf.distribute.Strategy,
)
# Number of traced functions with the same code that are kept; one more logs a warning.
_MOST_KEPT = 8
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_COMPARED = (*_SCALARS, *_UNCHANGING)


@dataclasses.dataclass(frozen=True, eq=False)
class _Same:
    """Holds an object that is equal to itself only. The reference prevents the reuse of its id."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def key_of(function: Callable[..., Any]) -> Hashable:
    """Returns a key that is equal for equal functions."""
    if not isinstance(function, types.FunctionType) or not _reads_names_only(function.__code__):
        return function
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # it refers to a name that is not defined yet
        return function
    known, names = function.__globals__, function.__code__.co_names
    if not all(name in known or hasattr(builtins, name) for name in names):
        return function
    # Looked up one by one: a merged dictionary would be made in every step.
    named = [known[name] if name in known else getattr(builtins, name) for name in names]
    read = [*cells, *named, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if not all(isinstance(each, _COMPARED) for each in read):
        return function
    return function.__code__, *map(_value, read)


class Traced:
    """Limits the number of traced functions that are kept, for loops that make a new function each time."""

    def __init__(self) -> None:
        # By code: for each function, the keys of its traces.
        self._of_code: dict[types.CodeType, dict[Hashable, list[Hashable]]] = {}
        self._told: set[types.CodeType] = set()

    def note(self, function: Callable[..., Any], programs: dict[Any, Any], key: tuple[Hashable, ...]) -> None:
        """Notes a trace of a function, `programs[key]` with `key[0] == key_of(function)`; drops the oldest traces."""
        code = getattr(function, "__code__", None)
        if code is None:
            return
        functions = self._of_code.setdefault(code, {})
        functions.setdefault(key[0], []).append(key)
        if len(functions) <= _MOST_KEPT:
            return
        for old in functions.pop(next(iter(functions))):
            programs.pop(old, None)
        if code not in self._told:
            self._told.add(code)
            _log.say(
                "strategy.run is given a new function of the same code each time, and traces each, which takes "
                f"long; define it once, outside of the loop. Received: {code.co_name}, {code.co_filename}, line "
                f"{code.co_firstlineno}"
            )


def _value(value: Any) -> Hashable:
    # 1 == 1.0 == True, and 0.0 == -0.0.
    return (type(value), repr(value)) if isinstance(value, _SCALARS) else _Same(value)


@functools.cache
def _reads_names_only(code: types.CodeType) -> bool:
    return not any(each.opname in (*_READS_WITHIN, *_WRITES) for each in dis.get_instructions(code))


# Calls an engine's Python function for each batch: by an operation of Keras' graph, or directly outside of graphs.


class StepCalls:
    """Traces steps, and calls a Python function with the traced step for each batch.

    Args:
      trace: traces a model's bound `train_step` for batches like the batch of a handle; its result has the attribute
        `dtypes`, of the results of `make`.
      make: makes the next step, from the result of `trace` and a pass over the data. A bound method: neither this
        object nor a graph keeps its owner alive.
    """

    def __init__(
        self, trace: Callable[[Callable[..., Any], handles.BatchHandle], Any], make: Callable[[Any, Any], list[Any]]
    ) -> None:
        self._trace = weakref.WeakMethod(trace)
        self._make = weakref.WeakMethod(make)
        # The last step of a custom loop outside of graphs.
        self._traced: dict[Any, Any] = {}

    def run(self, step: Callable[..., Any], handle: handles.BatchHandle) -> tuple[Any, list[Any]]:
        """Returns the results of `trace`, and of `make` for the batch of this handle."""
        if tf.executing_eagerly():
            traced = self._outside_of_a_graph(step, handle)
            return traced, self._of(self._make)(traced, handles.registry.find(handle.content))
        traced = self._of(self._trace)(step, handle)
        # TensorFlow never frees Python functions of operations, so they must not hold the model; the graph holds it.
        patching.setdefault(tf.compat.v1.get_default_graph(), "_tfdist_steps", list).append(traced)
        make_of: Any = self._make
        traced_of: Any = weakref.ref(traced)

        def call(number: tf.Tensor) -> list[Any]:
            return make_of()(traced_of(), handles.registry.find(number))

        return traced, python_operation.call(call, [handle.content], traced.dtypes)

    def _outside_of_a_graph(self, step: Any, handle: handles.BatchHandle) -> Any:
        kept, key = traced_with(step), (step, handle.kind.number)
        if kept is None:
            kept = self._traced
            for other in kept.keys() - {key}:
                del kept[other]
        if key not in kept:
            kept[key] = self._of(self._trace)(step, handle)
        return kept[key]

    def _of(self, method: Any) -> Any:
        return method()
