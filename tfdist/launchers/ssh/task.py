# SPDX-License-Identifier: Apache-2.0
"""Remote side of `tfdist launch ssh`: runs one task, and ends it when the launcher requests it or is lost.

Standard input has a line of JSON, then one byte for each signal, and a zero byte every few seconds. So no text must be
quoted for a shell, and no secret is on a command line. The loss of the launcher or its machine is detected.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import tfdist
from tfdist import _log
from tfdist.launchers import environment
from tfdist.launchers.requests import LaunchError, shell_code
from tfdist.launchers.supervise.notices import Notices
from tfdist.launchers.supervise.processes import Supervisor
from tfdist.launchers.supervise.wrapping import about_cluster, write_lines

# The launcher sends a byte at least every `HEARTBEAT_SECS`.
HEARTBEAT_SECS = 5.0
# Together with `_GRACE_SECS` less than the 30 s after which ssh gives up a silent host, so that the task ends before.
_LOST_SECS = 25.0
_GRACE_SECS = 3.0
# Time after which a task without a connection to its launcher has ended, with a margin.
ORPHAN_SECS = _LOST_SECS + _GRACE_SECS + 2.0
# Byte in the stream of signals after which a line for the task follows.
NOTICE = 255
_MAX_LINE = 1 << 24
_PORT_PROBLEMS = {errno.EADDRINUSE: "in use", errno.EACCES: "privileged"}
# The same exit code as of ssh itself when it fails. It is no preemption.
LOST_EXIT_CODE = 255


def main(arguments: Sequence[str]) -> int:
    """Runs the task, or with "--probe" answers the preflight; returns the exit code."""
    line = _read_line(0)
    try:
        asked = json.loads(line)
    except ValueError:
        _log.say("this is the far side of tfdist launch ssh; it is not for use by hand")
        return 2
    if arguments == ["--probe"]:
        sys.stdout.write(json.dumps(probe(asked)) + "\n")
        return 0
    try:
        os.chdir(asked["directory"])
    except OSError as error:
        _log.say(f"can't work in that directory on this host: {error}")
        return 2
    return _run([sys.executable, *asked["script"]], {**os.environ, **asked["env"]})


def probe(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer to the preflight: versions, the time, missing files, ports in use, number of GPUs."""
    directory = pathlib.Path(asked["directory"])
    missing = [str(path) for path in (directory, *(directory / name for name in asked["files"])) if not path.exists()]
    try:
        num_gpus = len(environment.present())
    except LaunchError:
        num_gpus = 0
    return {
        "versions": versions(),
        "time": time.time(),
        "missing": missing,
        "taken": {str(port): problem for port in asked["ports"] if (problem := _port_problem(port))},
        "gpus": num_gpus,
    }


def versions() -> dict[str, str]:
    """Returns the versions that all machines of a job must have in common; a machine that only launches has fewer."""
    found = {"Python": ".".join(map(str, sys.version_info[:2])), "tfdist": tfdist.__version__}
    for name in ("tensorflow", "keras"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _port_problem(port: int) -> str:
    """Returns the reason why no task can listen at a port; "" if the port is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind(("", port))
        except OSError as error:
            return _PORT_PROBLEMS.get(error.errno or 0, error.strerror or str(error))
        return ""


def _read_line(descriptor: int) -> bytes:
    """Reads a line byte by byte, so that the bytes after it stay in the stream."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < _MAX_LINE:
        byte = os.read(descriptor, 1)
        if not byte:
            break
        line += byte
    return bytes(line)


def _run(command: Sequence[str], env: Mapping[str, str]) -> int:
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)  # Signals come from the launcher, through the connection.
    lost = threading.Event()
    with contextlib.closing(Notices()) as notices, Supervisor(on_lines=write_lines) as supervisor:
        task = supervisor.start("task", command, {**env, **notices.env})

        def listen() -> None:
            try:
                # A connection that breaks while output is unread raises an error instead of end of file.
                with contextlib.suppress(OSError):
                    for received in received_from(0):
                        if isinstance(received, str):
                            notices.add(received)
                        else:
                            task.send_signal(received)
            finally:
                lost.set()
                supervisor.wake()

        threading.Thread(target=listen, name="tfdist listen", daemon=True).start()
        ended = supervisor.wait_first_exit()
        if ended is None and lost.is_set():
            supervisor.stop(grace_secs=_GRACE_SECS)
            return LOST_EXIT_CODE
        task.wait()
        about_cluster(task.returncode or 0, env.get("TF_CONFIG", ""), notices)
        return shell_code(task.returncode)


def received_from(descriptor: int) -> Iterator[int | str]:
    """Yields the signals and notices from the launcher, until it is lost."""
    notice: bytearray | None = None
    while True:
        readable, _, _ = select.select([descriptor], [], [], _LOST_SECS)
        data = os.read(descriptor, 4096) if readable else b""
        if not data:
            return
        for byte in data:
            if byte == NOTICE:
                notice = bytearray()
            elif notice is None:
                yield from filter(None, [byte])
            elif byte == ord("\n"):
                yield notice.decode("utf-8", "replace")
                notice = None
            else:
                notice.append(byte)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
