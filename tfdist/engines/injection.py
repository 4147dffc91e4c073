# SPDX-License-Identifier: Apache-2.0
"""Where tests slow replicas down: the one call that every engine makes before a contribution is computed.

    injection.before_contribution(replica=2, attempt=17)

Unless something is installed it does nothing. `tfdist.testing.Delays` installs delays, and so does the environment
variable TFDIST_TEST_DELAYS, which is read when the first contribution begins.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable

# Called with the replica and its attempt.
Hook = Callable[[int, int], None]

VARIABLE = "TFDIST_TEST_DELAYS"

_lock = threading.RLock()


def before_contribution(replica: int, attempt: int) -> None:
    """Called in the thread that computes a replica's contribution, before it starts.

    Args:
      replica: its number among all replicas of the job, from 0.
      attempt: how many contributions this replica has started before, from 0.

    Raises:
      ValueError: TFDIST_TEST_DELAYS can't be read.
    """
    _hook(replica, attempt)


def install(hook: Hook) -> None:
    """Has `hook` called from now on; it takes the place of what the environment asks for.

    Raises:
      RuntimeError: another one is installed.
    """
    global _hook
    with _lock:
        if _hook not in (_nothing, _first):
            raise RuntimeError("delays are injected already; stop the others first")
        _hook = hook


def uninstall(hook: Hook) -> None:
    """Nothing is called any more, if `hook` was."""
    global _hook
    with _lock:
        if _hook == hook:
            _hook = _nothing


def _nothing(replica: int, attempt: int) -> None:
    pass


def _first(replica: int, attempt: int) -> None:
    """Looks into the environment, once, and goes on with what is installed then."""
    global _hook
    with _lock:
        if _hook == _first:
            if text := os.environ.get(VARIABLE):
                # By name: engines know nothing of the tests, and a run without the variable loads nothing of them.
                importlib.import_module("tfdist.testing.delay_injection").Delays.from_json(text, VARIABLE).start()
            else:
                _hook = _nothing
    _hook(replica, attempt)


_hook: Hook = _first
