# SPDX-License-Identifier: Apache-2.0
"""Starts Python programs as forks of a process that has imported TensorFlow, Keras and tfdist, for 3 s of CPU.

A fork is a process of its own, in which TensorFlow's runtime has not begun. Two servers fork in turn: processes of one
seed of hashes iterate over a set of strings in one order, and the tasks of a real cluster don't.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import pathlib
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NoReturn

VARIABLE = "TFDIST_TEST_PREFORK"
_SERVERS = 2
_START_SECS = 120.0


class Process:
    """A forked program, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("r")
        self.pid = int(self._lines.readline() or _fail())
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(None)
            ready = selectors.DefaultSelector()
            with ready:
                ready.register(self._connection, selectors.EVENT_READ)
                if not ready.select(timeout):
                    raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            self.returncode = int(self._lines.readline())
            self._lines.close()
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kills it if it is still running."""
        self.kill()
        self.wait()


def start(path: pathlib.Path, env: Mapping[str, str], output: BinaryIO, cwd: pathlib.Path, index: int = 0) -> Process:
    """Runs a Python file in a fork.

    Args:
      path: the file.
      env: all environment variables.
      output: where standard output and error go.
      cwd: the working directory.
      index: servers are used in turn for consecutive ones.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_START_SECS)
    _connect(connection, f"{os.environ[VARIABLE]}/{index % _SERVERS}")
    request = json.dumps({"path": str(path), "env": dict(env), "cwd": str(cwd)}).encode() + b"\n"
    socket.send_fds(connection, [request[:1]], [output.fileno()])
    connection.sendall(request[1:])
    return Process(connection)


def _fail() -> int:
    """A server has ended, so that it gives no process id: its output says why."""
    logs = pathlib.Path(os.environ[VARIABLE]).glob("*.log")
    raise RuntimeError("no process was started\n" + "\n".join(log.read_text() for log in logs))


def _connect(connection: socket.socket, address: str) -> None:
    """Waits for a server that has just been started."""
    deadline = time.monotonic() + _START_SECS
    while True:
        try:
            return connection.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@contextlib.contextmanager
def servers() -> Iterator[None]:
    """Starts the servers, which import nothing before they are used."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        for index in range(_SERVERS):
            command = [sys.executable, __file__, f"{directory}/{index}"]
            log = stack.enter_context(pathlib.Path(directory, f"{index}.log").open("wb"))
            streams = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
            process = subprocess.Popen(command, start_new_session=True, **streams)
            assert process.stdin is not None
            # A server ends with its standard input.
            stack.callback(process.stdin.close)
            process.wait(_START_SECS)
        os.environ[VARIABLE] = directory
        stack.callback(os.environ.pop, VARIABLE)
        yield


# In the servers.


def _serve(address: str) -> tuple[dict[str, Any], int]:
    """Returns in each fork, with what it is to run and where its output goes."""
    if os.fork():
        # No child of pytest, which then looks for what a test has left only where there is a child.
        os._exit(0)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(address, family=socket.AF_UNIX))
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    _end([each.data[0] for each in selector.get_map().values() if each.data])
                if key.fileobj is not listener:
                    selector.unregister(key.fileobj)
                    _report(key.fd, *key.data)
                    continue
                connection = stack.enter_context(listener.accept()[0])
                request, output = _receive(connection)
                _import()
                pid = os.fork()
                if not pid:
                    return request, output
                os.close(output)
                connection.sendall(f"{pid}\n".encode())
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))


def _receive(connection: socket.socket) -> tuple[dict[str, Any], int]:
    first, (output,), _, _ = socket.recv_fds(connection, 1, 1)
    with connection.makefile("rb") as rest:
        return json.loads(first + rest.readline()), output


def _end(running: list[int]) -> NoReturn:
    """Pytest has ended, by a signal perhaps: so do the programs that it has left."""
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    sys.exit()


def _report(pidfd: int, pid: int, connection: socket.socket) -> None:
    os.close(pidfd)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError), connection:
        connection.sendall(f"{code}\n".encode())


def _import() -> None:
    if "keras" in sys.modules:
        return
    import gc

    # Without threads of its own: a fork has only the thread that forks.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    import tfdist

    for strategy in ("MirroredStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy"):
        getattr(tfdist, strategy)

    gc.collect()
    gc.freeze()


def _become(request: dict[str, Any], output: int, path_of_python: list[str]) -> types.CodeType:
    """Makes of a fork what Python would be that was started with a file; returns the file's code."""
    import numpy as np

    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in ((null, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, standard)
    os.close(null)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    path = pathlib.Path(request["path"])
    sys.path[:] = [str(path.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep), *path_of_python]
    sys.argv[:] = [str(path)]
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(each, "w", closefd=False), write_through=True) for each in (1, 2)
    )
    faulthandler.enable()
    np.random.seed()
    return compile(path.read_text(), str(path), "exec")


if __name__ == "__main__":
    _before = set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    _path = [_entry for _entry in sys.path[1:] if _entry not in _before]
    _code = _become(*_serve(sys.argv[1]), _path)
    _main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(_main)["__file__"] = sys.argv[0]
    exec(_code, vars(_main))
