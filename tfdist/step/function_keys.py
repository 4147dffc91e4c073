# SPDX-License-Identifier: Apache-2.0
"""Tells whether two functions of a user's are the same, so that a step is not traced anew for each `lambda` of a loop.

`strategy.run(lambda batch: step(*batch), args=(batch,))` in a loop makes a function in each iteration. Two of them do
the same if their code is the same, reads nothing but its arguments and names, and these name the same functions,
layers, variables or numbers. Any other function is the same as itself only: what it reads may have changed.
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

from tfdist.runtime import watch

# What these read may be another thing each time, though the names are the same.
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
# So many functions of the same code are kept, and then it is said that each is traced.
_MOST_KEPT = 8
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_COMPARED = (*_SCALARS, *_UNCHANGING)


@dataclasses.dataclass(frozen=True, eq=False)
class _Same:
    """An object, equal to itself alone, which is kept so that nothing else gets its place in memory."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def key_of(function: Callable[..., Any]) -> Hashable:
    """Something that is equal for functions that are the same."""
    if not isinstance(function, types.FunctionType) or not _reads_names_only(function.__code__):
        return function
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # it names what is not there yet
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
    """Keeps what was traced of functions from growing without bound, where a loop makes a new one each time."""

    def __init__(self) -> None:
        # By code: for each function, the keys of what was traced of it.
        self._of_code: dict[types.CodeType, dict[Hashable, list[Hashable]]] = {}
        self._told: set[types.CodeType] = set()

    def note(self, function: Callable[..., Any], programs: dict[Any, Any], key: tuple[Hashable, ...]) -> None:
        """Notes that `programs[key]` was traced of a function, whose key comes first in it; drops what is too much."""
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
            watch.say(
                "tfdist: strategy.run is given a new function of the same code each time, and traces each, which takes "
                f"long; define it once, outside of the loop. Received: {code.co_name}, {code.co_filename}, line "
                f"{code.co_firstlineno}"
            )


def _value(value: Any) -> Hashable:
    # 1 == 1.0 == True, and 0.0 == -0.0.
    return (type(value), repr(value)) if isinstance(value, _SCALARS) else _Same(value)


@functools.cache
def _reads_names_only(code: types.CodeType) -> bool:
    return not any(each.opname in (*_READS_WITHIN, *_WRITES) for each in dis.get_instructions(code))
