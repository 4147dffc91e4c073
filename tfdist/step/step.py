# SPDX-License-Identifier: Apache-2.0
"""Functions given to `strategy.run`: steps of Keras, with their model, kind and traces, and all others.

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
from collections.abc import Callable, Hashable
from typing import Any

import keras
import tensorflow as tf

from tfdist import _log
from tfdist.compat import patching
from tfdist.compat.keras import calls, models

_KINDS = {"train_step": "train", "test_step": "test"}


class Step:
    """A function given to `strategy.run`; made by a strategy, of what Keras or a loop of the user's own hands in.

    Args:
      function: any function.

    Attributes:
      function: the same, without the `tf.function` that decorates a method.
      model: the model that it is a method of, or wraps a method of; else None.
      kind: "train", "test" or "predict" for a step of Keras; "other".
      is_bound: True for a bound `train_step` or `test_step`, which all replicas can run together.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        function = models.undecorated(function)
        # A bound method hands on the attributes of its function, such as that of a decorator.
        inner = function if isinstance(function, types.MethodType) else getattr(function, "__wrapped__", function)
        owner = getattr(inner, "__self__", None)
        self.function = function
        # Any: callers that use the model of a Keras step know that it has one.
        self.model: Any = owner if isinstance(owner, calls.TRAINER) else None
        if self.model is not None:
            self.kind = _KINDS.get(inner.__name__, "other")
        else:
            self.kind = "predict" if "make_predict_function" in getattr(inner, "__qualname__", "") else "other"
        is_method = self.model is not None and getattr(function, "__self__", None) is self.model
        self.is_bound = is_method and self.kind in ("train", "test")

    @classmethod
    def of(cls, given: Any) -> Step:
        """Returns the step of a function, or `given` if it is one."""
        return given if isinstance(given, cls) else cls(given)

    @property
    def name(self) -> str:
        """For messages."""
        of = f"{type(self.model).__name__}." if self.model is not None else ""
        return of + getattr(self.function, "__name__", str(self.function))

    @property
    def model_in_use(self) -> keras.Model | None:
        """The model that it is a step of; for Keras' function of `predict`, which doesn't say it, that of the call."""
        if self.kind != "predict":
            return self.model
        call = calls.current()
        return call.model if call is not None and call.predicts else None

    @property
    def is_of_keras(self) -> bool:
        """True for Keras' own `train_step` or `test_step`, which no class or instance has replaced."""
        name = getattr(self.function, "__name__", "")
        return self.is_bound and getattr(self.function, "__func__", None) is getattr(keras.Model, name)

    @property
    def runs_eagerly(self) -> bool:
        """True for a method of a model compiled with `run_eagerly=True`."""
        return self.model is not None and self.model.run_eagerly

    @property
    def steps_per_execution(self) -> int:
        """Number of train steps that Keras asks for at a time; 1 for any other function."""
        return int(getattr(self.model, "steps_per_execution", 1)) if self.kind == "train" else 1

    @property
    def accumulating(self) -> Any:
        """The optimizer of a train step if it accumulates gradients, else None."""
        optimizer = getattr(self.model, "optimizer", None) if self.kind == "train" else None
        return optimizer if getattr(optimizer, "gradient_accumulation_steps", None) else None

    @property
    def traces(self) -> dict[Any, Any] | None:
        """The cache of its traces, an attribute of the function that Keras has made of the step, or of the model.

        So the cache ends with the model, and when the model is compiled again: a bound method compares equal then, and
        Keras makes a new function of it. None for any other function.
        """
        model = self.model_in_use if self.is_bound or self.kind == "predict" else None
        if model is None:
            return None
        function = getattr(model, f"{self.kind}_function", None)
        is_made = function is not None
        return patching.setdefault(function, "_tfdist_traced", dict) if is_made else models.kept_until_compiled(model)


class Traces:
    """Traces of the steps of one engine, each made once for each key.

    Traces of Keras' steps are with the step. Of other functions, which a loop may make anew in each iteration, a
    limited number is kept.

    Args:
      most_kept: functions of the same code whose traces are kept.
    """

    def __init__(self, most_kept: int = 8) -> None:
        self._most_kept = most_kept
        self._of_loops: dict[Any, Any] = {}
        # By code: for each function, the keys of its traces.
        self._of_code: dict[types.CodeType, dict[Hashable, list[Hashable]]] = {}
        self._told: set[types.CodeType] = set()

    def find(self, step: Step, key: tuple[Hashable, ...], trace: Callable[[], Any]) -> Any:
        """Returns the trace of a step for this key, which `trace` makes if it is new."""
        kept, key = step.traces, (key_of(step.function), *key)
        traces = self._of_loops if kept is None else kept
        if key not in traces:
            traces[key] = trace()
            if kept is None:
                self._note(step.function, key)
        return traces[key]

    def shared(self, step: Step, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns what belongs to all traces of a step's model, or of all custom loops."""
        traces = step.traces
        traces = self._of_loops if traces is None else traces
        if key not in traces:
            traces[key] = make()
        return traces[key]

    def _note(self, function: Callable[..., Any], key: tuple[Hashable, ...]) -> None:
        """Notes a trace of a function; drops those of the oldest functions of the same code."""
        code = getattr(function, "__code__", None)
        if code is None:
            return
        functions = self._of_code.setdefault(code, {})
        functions.setdefault(key[0], []).append(key)
        if len(functions) <= self._most_kept:
            return
        for old in functions.pop(next(iter(functions))):
            self._of_loops.pop(old, None)
        # The methods of several models have one code.
        if code not in self._told and isinstance(function, types.FunctionType):
            self._told.add(code)
            _log.say(
                "strategy.run is given a new function of the same code each time, and traces each, which takes "
                f"long; define it once, outside of the loop. Received: {code.co_name}, {code.co_filename}, line "
                f"{code.co_firstlineno}"
            )


def make_predict_function(model: keras.Model) -> Callable[[Any], Any]:
    """Returns the function of a batch that `predict` runs on a replica; `Step` knows it by its name, as Keras'."""

    def predict(data: Any) -> Any:
        # Keras has empty Optionals for None.
        given = tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)
        return model.predict_step(given)

    return predict


def check_for_workers(step: Step, asynchronous: bool) -> None:
    """Refuses models that can't train on several workers, and builds the optimizer.

    Variables can't be created while a step is traced, so the optimizer creates its own before.

    Args:
      step: the function given to `strategy.run`.
      asynchronous: True if each worker updates the model on its own.

    Raises:
      ValueError: The model was compiled with something that has no meaning here.
    """
    model: Any = None if step.kind == "other" else step.model_in_use
    if model is not None and model.jit_compile:
        raise ValueError(
            "jit_compile=True cannot hold under ParameterServerStrategy: the variables are on other machines, where "
            "XLA can't reach them. "
            "Use model.compile(..., jit_compile=False). Received: jit_compile=True"
        )
    if step.kind != "train":
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


# Keys of a user's functions, equal for equal functions, so that a new `lambda` in each iteration is traced once.
#
# `strategy.run(lambda batch: step(*batch), args=(batch,))` in a loop makes a function in each iteration. Two of them
# are equal if they have the same code, which reads only arguments and names. The names have to refer to the same
# functions, layers, variables or numbers. Any other function is equal to itself only: the objects it reads may have
# changed.


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
    return function.__code__, *map(key_of_value, read)


def key_of_value(value: Any) -> Hashable:
    """Returns a key that is equal for the same object, and for equal scalars of one type."""
    if isinstance(value, types.MethodType):  # A new object each time that it is looked up.
        return value.__func__, _Same(value.__self__)
    if isinstance(value, tf.TensorShape | tf.DType):
        return value
    # 1 == 1.0 == True, and 0.0 == -0.0.
    return (type(value), repr(value)) if isinstance(value, _SCALARS) else _Same(value)


@functools.cache
def _reads_names_only(code: types.CodeType) -> bool:
    return not any(each.opname in (*_READS_WITHIN, *_WRITES) for each in dis.get_instructions(code))
