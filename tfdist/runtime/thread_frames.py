# SPDX-License-Identifier: Apache-2.0
"""The frames of all threads.

CPython 3.11 collects garbage when `sys._current_frames` makes its dictionary, while it holds the lock on the list of
threads. What is collected may wait for Python's lock, as objects of TensorFlow do when they are freed; whoever has that
lock may be starting a thread, and wait for the list. Neither ever goes on. So nothing is collected meanwhile.
"""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

_lock = threading.Lock()


def by_thread() -> dict[int, FrameType]:
    """Returns the innermost frame of each thread, by the thread's identity."""
    with _lock:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if was_enabled:
                gc.enable()


def of(thread: threading.Thread) -> FrameType | None:
    """Returns the innermost frame of a thread; None if it does not run."""
    return by_thread().get(thread.ident or 0)
