# SPDX-License-Identifier: Apache-2.0
"""The `element_spec` of a data set that gives handles: the specs of a batch, and a `tf.function` signature of handles.

Programs write `@tf.function(input_signature=[dataset.element_spec])`, and expect their function to take what the data
set gives. Programs and Keras also read the shapes of a batch there, and map over it with `keras.tree` and `tf.nest`.
So it is a plain structure of specs. TensorFlow has no public seam between a signature and the types that a function is
traced for: a plain tuple of specs always means a tuple of tensors. So each spec of a batch remembers the handle that it
is a part of, and a signature, or an argument of `get_concrete_function`, that has all specs of a batch in their
structure is replaced by the type of the handle.
"""

from __future__ import annotations

import copy
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import function_type_utils, polymorphic_function

from tfdist.compat import replacing

NEEDS = (
    "tensorflow.python.eager.polymorphic_function.function_type_utils:make_function_type(input_signature)",
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function.get_concrete_function",
)

# An attribute of a spec: (type of the handle, structure of the batch, index among its specs).
_PART = "_tfdist_part_of_batch"


def of(element_spec: Any, handle_type: tf.TypeSpec) -> Any:
    """Returns the specs of a batch as a signature of its handle.

    Args:
      element_spec: the structure of `tf.TypeSpec`s of a batch.
      handle_type: the type of the handle.

    Returns:
      The same structure. A spec of one tensor is returned as it is: TensorFlow converts the handle to the tensor.
    """
    if not tf.nest.is_nested(element_spec):
        return element_spec
    replacing.once(function_type_utils, "make_function_type", _typing)
    replacing.once(polymorphic_function.Function, "get_concrete_function", _concrete)
    parts = []
    for index, spec in enumerate(tf.nest.flatten(element_spec)):
        parts.append(copy.copy(spec))
        setattr(parts[-1], _PART, (handle_type, element_spec, index))
    return tf.nest.pack_sequence_as(element_spec, parts)


def _typing(original: Any) -> Any:
    def make_function_type(python_function: Any, input_signature: Any) -> Any:
        return original(python_function, _with_handles(input_signature))

    return make_function_type


def _concrete(original: Any) -> Any:
    def get_concrete_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *_with_handles(args), **_with_handles(kwargs))

    return get_concrete_function


def _with_handles(signature: Any) -> Any:
    """A signature in which each structure of the specs of a whole batch is the type of its handle."""
    handle_type = _handle_type(signature)
    if handle_type is not None:
        return handle_type
    if type(signature) in (list, tuple):
        return type(signature)(map(_with_handles, signature))
    if type(signature) is dict:
        return {key: _with_handles(value) for key, value in signature.items()}
    return signature


def _handle_type(structure: Any) -> tf.TypeSpec | None:
    if not isinstance(structure, list | tuple | dict):
        return None
    parts: list[Any] = [getattr(spec, _PART, ()) for spec in tf.nest.flatten(structure)]
    if not parts or not all(parts):
        return None
    handle_type, whole, _ = parts[0]
    if [index for _, _, index in parts] != list(range(len(parts))) or any(part[0] != handle_type for part in parts):
        return None
    try:
        tf.nest.assert_same_structure(structure, whole)
    except (ValueError, TypeError):
        return None
    return handle_type
