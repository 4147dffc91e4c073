# SPDX-License-Identifier: Apache-2.0
"""A fork leaves exit handlers, sockets, and handlers of SIGTERM to the process that it was forked from."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from tfdist import _forks

HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)


def test_fork_has_no_exit_handler_and_socket_of_its_parent() -> None:
    read, write = os.pipe()
    one, other = socket.socketpair()
    _forks.keep(one)
    _forks.at_exit(os.write, write, b"handler")
    try:
        if os.fork() == 0:
            os.write(write, b"closed " if one.fileno() < 0 else b"open ")
            # As Python does at its end.
            sys.modules["atexit"]._run_exitfuncs()
            os._exit(0)
        os.close(one.detach())
        os.wait()
        assert os.read(read, 100) == b"closed "
        assert other.recv(1) == b""
    finally:
        _forks.not_at_exit(os.write)
        other.close()
        os.close(read)
        os.close(write)


@pytest.mark.parametrize("handler", [None, lambda *_: os._exit(3)], ids=["native", "Python's"])
def test_sigterm_to_a_fork_has_the_effect_of_python_handlers(handler: Any) -> None:
    native, before = HANDLER(lambda _: None), signal.getsignal(signal.SIGTERM)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, HANDLER]
    signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
    try:
        # As TensorFlow's runtime does on several workers; Python does not know.
        libc.signal(signal.SIGTERM, native)
        process = multiprocessing.get_context("fork").Process(target=signal.pause)
        process.start()
        process.terminate()
        process.join(30)
        assert process.exitcode == (3 if handler else -signal.SIGTERM)
    finally:
        process.kill()
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("end", "has_failed"),
    [
        ("sys.exit(3)", True),
        ("sys.exit('text')", True),
        ("try: sys.exit(3)\nfinally: _forks.at_exit(int)", True),
        ("raise ValueError", True),
        ("sys.exit()", False),
        ("threading.Thread(target=sys.exit, args=(3,)).start()", False),
    ],
)
def test_exit_handler_is_told_whether_the_program_failed(end: str, has_failed: bool) -> None:
    program = (
        f"import sys, threading\nfrom tfdist import _forks\n_forks.at_exit(lambda: print(_forks.has_failed()))\n{end}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == f"{has_failed}\n"
