# SPDX-License-Identifier: Apache-2.0
"""Tells whether a traced operation is part of a function given to a `tf.data.Dataset`, such as that of `map`.

There is no public way: TensorFlow's public graphs don't say which construct they are the body of.
"""

from __future__ import annotations

from tfdist.compat import enclosing_graphs

_PREFIX = "Dataset_"


def is_traced() -> bool:
    """Returns True while a function is traced that runs for each element of a data set."""
    return any(getattr(graph, "name", "").startswith(_PREFIX) for graph in enclosing_graphs.enclosing())
