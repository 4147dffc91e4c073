# SPDX-License-Identifier: Apache-2.0
"""Keys of a user's functions, equal for equal functions, so that a new `lambda` in each iteration is traced once.

`strategy.run(lambda batch: step(*batch), args=(batch,))` in a loop makes a function in each iteration. Two of them are
equal if they have the same code, which reads only arguments and names, and if these names refer to the same functions,
layers, variables or numbers. Any other function is equal to itself only: the objects it reads may have changed.
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
