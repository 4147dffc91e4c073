# SPDX-License-Identifier: Apache-2.0
"""The far side of `tfdist launch ssh`: runs one task, and ends it when the launcher says so or is gone.

Standard input carries a line of JSON, then a byte for each signal, and a zero every few seconds. So nothing has to be
quoted for a shell, nothing secret is on a command line, and a launcher that was killed, or whose machine has vanished,
is noticed.
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
from tfdist.launchers import gpus
from tfdist.launchers.notices import Notices
from tfdist.launchers.processes import Process, Supervisor
from tfdist.launchers.requests import LaunchError

# The launcher sends a byte at least every `HEARTBEAT_SECS`.
HEARTBEAT_SECS = 5.0
# With the grace, less than the 30 s after which ssh gives up a silent host: by then the tasks there have ended.
_LOST_SECS = 25.0
_GRACE_SECS = 3.0
# For the launcher, and with a margin: by then a task whose launcher can't be reached has ended.
ORPHAN_SECS = _LOST_SECS + _GRACE_SECS + 2.0
# Among the numbers of signals: a line for the task follows.
NOTICE = 255
_MAX_LINE = 1 << 24
_PORT_PROBLEMS = {errno.EADDRINUSE: "in use", errno.EACCES: "privileged"}
# As ssh itself ends when it fails. It is no preemption.
LOST_EXIT_CODE = 255


def main(arguments: Sequence[str]) -> int:
    """Runs the task, or with "--probe" answers what the preflight asks; returns the exit code."""
    line = _read_line(0)
    try:
        asked = json.loads(line)
    except ValueError:
        sys.stderr.write("tfdist: this is the far side of tfdist launch ssh; it is not for use by hand\n")
        return 2
    if arguments == ["--probe"]:
        sys.stdout.write(json.dumps(probe(asked)) + "\n")
        return 0
    try:
        os.chdir(asked["directory"])
    except OSError as error:
        sys.stderr.write(f"tfdist: can't work in that directory on this host: {error}\n")
        return 2
    return _run([sys.executable, *asked["script"]], {**os.environ, **asked["env"]})


def probe(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What the preflight compares: versions, the time, what is missing, which ports are taken."""
    versions = {}
    for name in ("tensorflow", "keras"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    directory = pathlib.Path(asked["directory"])
    missing = [str(path) for path in (directory, *(directory / name for name in asked["files"])) if not path.exists()]
    try:
        num_gpus = len(gpus.present())
    except LaunchError:
        num_gpus = 0
    python = ".".join(map(str, sys.version_info[:2]))
    return {
        "versions": {"Python": python, "tfdist": tfdist.__version__, **versions},
        "time": time.time(),
        "missing": missing,
        "taken": {str(port): problem for port in asked["ports"] if (problem := _port_problem(port))},
        "gpus": num_gpus,
    }


def _port_problem(port: int) -> str:
    """The reason why no task can listen on a port; "" if one can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind(("", port))
        except OSError as error:
            return _PORT_PROBLEMS.get(error.errno or 0, error.strerror or str(error))
        return ""


def _read_line(descriptor: int) -> bytes:
    """Byte by byte: what follows the line is for somebody else."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < _MAX_LINE:
        byte = os.read(descriptor, 1)
        if not byte:
            break
        line += byte
    return bytes(line)


def _run(command: Sequence[str], env: Mapping[str, str]) -> int:
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)  # The launcher decides; its connection tells.
    lost = threading.Event()
    with contextlib.closing(Notices()) as notices, Supervisor(on_lines=_show) as supervisor:
        task = supervisor.start("task", command, {**env, **notices.env})

        def listen() -> None:
            for received in _received(0):
                if isinstance(received, str):
                    notices.add(received)
                else:
                    task.send_signal(received)
            lost.set()
            supervisor.wake()

        threading.Thread(target=listen, name="tfdist listen", daemon=True).start()
        ended = supervisor.wait_first_exit()
        if ended is None and lost.is_set():
            supervisor.stop(grace_secs=_GRACE_SECS)
            return LOST_EXIT_CODE
        task.wait()
        code = task.returncode or 0
        return code if code >= 0 else 128 - code


def _received(descriptor: int) -> Iterator[int | str]:
    """The signals and notices that the launcher sends, until it is gone."""
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


def _show(process: Process, lines: list[str], error: bool) -> None:
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2 if error else 1, data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
