# SPDX-License-Identifier: Apache-2.0
"""Excludes the functions of tfdist from AutoGraph, as those of TensorFlow and Keras are excluded.

AutoGraph rewrites every Python function that is called while a `tf.function`, or a function given to a
`tf.data.Dataset`, is traced, but for those of the libraries in a list of its own. To rewrite `strategy.run` and what
that calls takes seconds. `tf.autograph.experimental.do_not_convert` is no public way out: within what it marks, a
user's step would be left as it is, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import config

NEEDS = (
    "tensorflow.python.autograph.core.config:CONVERSION_RULES",
    "tensorflow.python.autograph.core.config:DoNotConvert",
)

_RULE = config.DoNotConvert("tfdist")


def leave_library() -> None:
    """Adds tfdist to the list, for good. Does nothing if it was called before."""
    if _RULE not in config.CONVERSION_RULES:
        config.CONVERSION_RULES = (*config.CONVERSION_RULES, _RULE)


def converted(function: Callable[..., Any], by_default: bool = False) -> Callable[..., Any]:
    """Returns a user's function as AutoGraph converts it where this is called; what tfdist calls is left as it is.

    Args:
      function: any function; one that is converted already is returned itself.
      by_default: whether it is converted outside of a `tf.function`, too.
    """
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx(), convert_by_default=by_default)
