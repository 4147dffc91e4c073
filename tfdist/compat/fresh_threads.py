# SPDX-License-Identifier: Apache-2.0
"""Calls a function where no graph is traced and no scope or replica is entered.

TensorFlow keeps all of these by thread, and has no public way out: `tf.init_scope` leads out of graphs, but not out of
a replica, and it stops gradient tapes. What tfdist keeps in a `contextvars.ContextVar` holds in the called function,
too.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


def call(function: Callable[..., _Result], *args: object) -> _Result:
    """Returns, or raises, what `function(*args)` does in a thread of its own, which is waited for."""
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tfdist call") as thread:
        return thread.submit(contextvars.copy_context().run, function, *args).result()
