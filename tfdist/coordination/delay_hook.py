# SPDX-License-Identifier: Apache-2.0
"""Hook with which tests slow replicas down: every engine calls it before it computes a contribution.

    delay_hook.before_contribution(replica=2, attempt=17)

By default the call does nothing. `tfdist.testing.Delays` installs delays, and so does the environment variable
TFDIST_TEST_DELAYS, which is read when the first contribution begins.
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
    """Calls the installed hook. Runs in the thread that computes a replica's contribution, before it starts.

    Args:
      replica: index among all replicas of the job, from 0.
      attempt: number of contributions that this replica has started before.

    Raises:
      ValueError: TFDIST_TEST_DELAYS is invalid.
    """
    if installed is not no_delay:
        installed(replica, attempt)


def set_hook(hook: Hook) -> None:
    """Installs `hook`, which takes precedence over the environment variable.

    Raises:
      RuntimeError: another hook is installed.
    """
    global installed
    with _lock:
        if installed not in (no_delay, _read_environment):
            raise RuntimeError("delays are injected already; stop the others first")
        installed = hook


def uninstall(hook: Hook) -> None:
    """Removes `hook`, if it is the installed one."""
    global installed
    with _lock:
        if installed == hook:
            installed = no_delay


def no_delay(replica: int, attempt: int) -> None:
    """The hook that does nothing; who sees that it is installed need not call it."""


def _read_environment(replica: int, attempt: int) -> None:
    """Installs the delays of the environment variable, if it is set, at the first contribution; then calls the hook."""
    global installed
    with _lock:
        if installed == _read_environment:
            if text := os.environ.get(VARIABLE):
                # Imported by name: runtime must not depend on testing, and a run without the variable doesn't load it.
                importlib.import_module("tfdist.testing.delay_injection").Delays.from_json(text, VARIABLE).start()
            else:
                installed = no_delay
    installed(replica, attempt)


installed: Hook = _read_environment
