# SPDX-License-Identifier: Apache-2.0
"""Has rows of a Keras variable in shards looked up on the servers that have them.

There is no public way: `keras.layers.Embedding` and `keras.ops.take` call `tf.gather` with the Keras variable, and
TensorFlow calls `sparse_read` of a variable there, if it has one. A Keras variable has none, and so is read whole. The
change is permanent, and one of variables in shards alone: any other has no such attribute, as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist.compat import keras_variables

NEEDS = ("keras:Variable._value",)


def install(has_shards: Callable[[Any], bool]) -> None:
    """Gives Keras variables `sparse_read`.

    Args:
      has_shards: returns True for the TensorFlow variables whose rows are to be looked up.
    """

    def sparse_read(variable: Any) -> Callable[..., Any]:
        found = keras_variables.tf_variable(variable)
        if not has_shards(found):
            raise AttributeError("sparse_read")
        return found.sparse_read

    keras.Variable.sparse_read = property(sparse_read)
