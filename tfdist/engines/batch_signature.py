# SPDX-License-Identifier: Apache-2.0
"""The `element_spec` of a data set that gives handles: the specs of a batch, and a `tf.function` signature of handles.

Programs write `@tf.function(input_signature=[dataset.element_spec])`, and expect their function to take what the data
set gives. Programs and Keras also read the shapes of a batch there. So it is the structure of the batch's specs, which
is taken for the type of the handle where TensorFlow traces a function.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class _TupleSpec(tuple):
    # No slots: the type of the handle is an attribute.

    def __tf_tracing_type__(self, context: Any) -> Any:
        return self.handle_type  # pyright: ignore[reportAttributeAccessIssue]


class _DictSpec(dict):
    def __tf_tracing_type__(self, context: Any) -> Any:
        return self.handle_type  # pyright: ignore[reportAttributeAccessIssue]


def of(element_spec: Any, handle_type: tf.TypeSpec) -> Any:
    """Returns the specs of a batch as a signature of its handle.

    Args:
      element_spec: the structure of `tf.TypeSpec`s of a batch.
      handle_type: the type of the handle.

    Returns:
      The same structure. A spec of one tensor is returned as it is: TensorFlow converts the handle to the tensor.
    """
    if type(element_spec) is tuple:
        signature = _TupleSpec(element_spec)
    elif type(element_spec) is dict:
        signature = _DictSpec(element_spec)
    else:
        return element_spec
    signature.handle_type = handle_type
    return signature
