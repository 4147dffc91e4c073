# SPDX-License-Identifier: Apache-2.0
"""Replaces a function of TensorFlow or Keras once in a process, where neither has a public seam."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def once(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replaces `owner.name` by `wrap(owner.name)`, unless this `wrap` has replaced it before.

    Args:
      owner: a module or a class.
      name: of a function or a method of it.
      wrap: given the original, returns what takes its place, with the original's name and signature.
    """
    original, mark = getattr(owner, name), f"_tfdist_{wrap.__module__}.{wrap.__qualname__}"
    if not hasattr(original, mark):
        # `wraps` takes over the marks of those who have wrapped the original.
        replacement = functools.wraps(original)(wrap(original))
        setattr(replacement, mark, True)
        setattr(owner, name, replacement)
