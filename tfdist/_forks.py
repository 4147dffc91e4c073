# SPDX-License-Identifier: Apache-2.0
"""Exit handlers of a process; keeps from its forks what is its own: these handlers, sockets, handlers of signals.

`multiprocessing` and `os.fork` copy them all. A copied exit handler says that a worker has ended which trains; a copied
socket keeps the connections of a process that has died; a copied handler of SIGTERM, such as that of TensorFlow's
runtime on several workers, makes `Pool.terminate` wait for ever. No TensorFlow import.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

_at_exit: list[Callable[..., Any]] = []
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
# Signals that the forking thread had blocked before.
_blocked = threading.local()
_plain_exit, _has_exit_failed = sys.exit, False


def at_exit(function: Callable[..., Any], *args: Any) -> None:
    """`atexit.register`, for this process and for no fork of it; the function may ask `has_failed`."""
    global _has_exit_failed
    # A program that registers another handler goes on, unless it does so on the way out.
    sys.exit, _has_exit_failed = _exit, _has_exit_failed and isinstance(sys.exception(), SystemExit)
    _at_exit.append(function)
    atexit.register(function, *args)


def _exit(status: Any = None, /) -> NoReturn:
    """Takes the place of `sys.exit`, since at exit Python does not tell with which status it was called."""
    global _has_exit_failed
    # In another thread it ends that thread alone.
    _has_exit_failed |= status not in (None, 0) and threading.current_thread() is threading.main_thread()
    _plain_exit(status)


def has_failed() -> bool:
    """Returns True at the end of a program that has raised, or has called `sys.exit` with another status than 0."""
    return _has_exit_failed or getattr(sys, "last_value", None) is not None


def not_at_exit(function: Callable[..., Any]) -> None:
    """`atexit.unregister`."""
    _at_exit[:] = [each for each in _at_exit if each != function]
    atexit.unregister(function)


def keep(connection: socket.socket) -> socket.socket:
    """Closes the socket in forks of this process; returns it."""
    _sockets.add(connection)
    return connection


def _in_fork() -> None:
    for function in _at_exit:
        atexit.unregister(function)
    _at_exit.clear()
    for connection in list(_sockets):
        # Not `shutdown`, which would end the connection of the parent; nor `close`, which waits for open files of it.
        if connection.fileno() >= 0:
            os.close(connection.detach())
    # Python's own handlers stay. TensorFlow's, which Python does not know of, is replaced by that of Python.
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None:
        signal.signal(signal.SIGTERM, handler)
    _unblock()


def _block() -> None:
    """Delays a SIGTERM to the fork until the handler is replaced."""
    _blocked.before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _blocked.before)


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_in_fork)
