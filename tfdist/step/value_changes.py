# SPDX-License-Identifier: Apache-2.0
"""Classification of a variable's write by the traced graph: addition, maximum, minimum, or a new value."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

ADDITION, MAXIMUM, MINIMUM, NEW, OTHER = "addition", "maximum", "minimum", "new", "other"

_COPIES = frozenset({"Identity", "Snapshot", "EnsureShape", "StopGradient"})
_ADDITIONS = frozenset({"AddV2", "Add"})
_EXTREMES = {"Maximum": MAXIMUM, "Minimum": MINIMUM}
_SCATTERS = frozenset({"TensorScatterAdd", "TensorScatterSub"})


def kind(value: tf.Tensor, start: tf.Tensor) -> str:
    """Returns the kind of change from `start` to `value`, two tensors of one graph.

    Returns:
      ADDITION: `start + x`; MAXIMUM, MINIMUM: of `start` and `x`; NEW: `x`, where x does not depend on `start`. OTHER:
      not recognised.
    """
    if value is start:
        return ADDITION
    if not depends(value, [start]):
        return NEW
    operation = value.op
    first, *rest = operation.inputs
    if operation.type in _COPIES:
        return kind(first, start)
    if operation.type in _ADDITIONS and depends(rest[0], [start]):
        first, rest = rest[0], [first]
    if operation.type in _ADDITIONS | {"Sub"} | _SCATTERS and not any(depends(each, [start]) for each in rest):
        return ADDITION if kind(first, start) == ADDITION else OTHER
    if operation.type in _EXTREMES:
        return _extreme(_EXTREMES[operation.type], list(operation.inputs), start)
    if operation.type in ("SelectV2", "Select") and not depends(first, [start]):
        kinds = {kind(each, start) for each in rest}
        return kinds.pop() if len(kinds) == 1 else OTHER
    return OTHER


def _extreme(which: str, inputs: list[tf.Tensor], start: tf.Tensor) -> str:
    dependent = [each for each in inputs if depends(each, [start])]
    if len(dependent) == 1 and (_is_copy(dependent[0], start) or kind(dependent[0], start) == which):
        return which
    return OTHER


def _is_copy(value: tf.Tensor, start: tf.Tensor) -> bool:
    """Returns True if `value` is `start`, or `start + 0`, which is the usual read of a Keras variable."""
    while value is not start:
        first, *rest = value.op.inputs
        zero = tf.get_static_value(rest[0]) if rest and value.op.type in _ADDITIONS else None
        if value.op.type not in _COPIES and (zero is None or zero.any()):
            return False
        value = first
    return True


def depends(value: tf.Tensor, starts: Iterable[tf.Tensor]) -> bool:
    """Returns True if `value` is computed from any of `starts`."""
    wanted = {start.ref() for start in starts}
    found, to_do = {value.op}, [value]
    while to_do:
        tensor = to_do.pop()
        if tensor.ref() in wanted:
            return True
        for each in tensor.op.inputs:
            if each.ref() in wanted:
                return True
            if each.op not in found:
                found.add(each.op)
                to_do.append(each)
    return False
