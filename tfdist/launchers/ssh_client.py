# SPDX-License-Identifier: Apache-2.0
"""The near side of one task of `tfdist launch ssh`: keeps the connection, and passes signals on.

It runs as a local process in place of the task, under the same guard as a local task would: whatever ends the launcher
ends it, the connection with it, and thereby the task on the other side.

    python -m tfdist.launchers.ssh_client LOGIN REMOTE_PYTHON DIRECTORY [SSH_OPTIONS...] -- SCRIPT [ARGUMENTS...]

Variables whose name starts with TFDIST_SEND_ are those of the task, without that.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tfdist.cluster import NOTICES_VARIABLE
from tfdist.launchers.notices import Reader
from tfdist.launchers.requests import SENT_PREFIX
from tfdist.launchers.ssh_task import HEARTBEAT_SECS, NOTICE

_ALSO_SENT = ("TFDIST_ATTEMPT", "TFDIST_TASK_RESTART", "TFDIST_JOB_SECRET")
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SSH_FAILED = 255


def command(login: str, python: str, options: Sequence[str], *arguments: str) -> list[str]:
    """What runs the far side on a host: never asks for a password, and notices a dead connection."""
    far = shlex.join([python, "-P", "-m", "tfdist.launchers.ssh_task", *arguments])
    settings = ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=10", "ServerAliveCountMax=3")
    # The first value of an option counts, so the user's come first.
    return ["ssh", "-T", *options, *(f"-o{setting}" for setting in settings), "--", login, f"exec {far}"]


def probe(login: str, options: Sequence[str]) -> list[str]:
    """What succeeds if a host takes a login."""
    # A connection that is kept for several sessions (ControlMaster) may be a dead one.
    settings = ("BatchMode=yes", "ConnectTimeout=5", "ControlPath=none")
    return ["ssh", "-T", *(f"-o{setting}" for setting in settings), *options, "--", login, "true"]


def payload(script: Sequence[str], directory: str, env: Mapping[str, str]) -> bytes:
    """The line that tells the far side what to run."""
    sent = {name.removeprefix(SENT_PREFIX): value for name, value in env.items() if name.startswith(SENT_PREFIX)}
    sent |= {name: env[name] for name in _ALSO_SENT if name in env}
    return json.dumps({"script": list(script), "directory": directory, "env": sent}).encode() + b"\n"


def main(arguments: Sequence[str]) -> int:
    """Runs a task on a host; returns its exit code, or 255 if the connection failed."""
    split = arguments.index("--")
    login, python, directory, *options = arguments[:split]
    line = payload(arguments[split + 1 :], directory, os.environ)
    wake = _wake_on_signals()
    notices = Reader(os.environ.get(NOTICES_VARIABLE))
    # A session of its own: what is sent to this process' group is not for ssh, whose end would be that of the task.
    ssh = subprocess.Popen(command(login, python, options), stdin=subprocess.PIPE, start_new_session=True)
    try:
        _send(ssh, line)
        while ssh.poll() is None:
            readable, _, _ = select.select([wake], [], [], HEARTBEAT_SECS)
            arrived = os.read(wake, 4096) if readable else b"\0"
            _send(ssh, bytes(number for number in arrived if number in (0, *_FORWARDED)))
            _send(ssh, b"".join(bytes([NOTICE]) + line.encode() + b"\n" for line in notices.new_lines()))
    finally:
        ssh.kill()
        ssh.wait()
    code = ssh.returncode
    if code == _SSH_FAILED:
        sys.stderr.write(f"tfdist: the connection to {login} failed or broke (ssh exit code 255)\n")
    return code if code >= 0 else 128 - code


def _wake_on_signals() -> int:
    """A descriptor on which the numbers of signals arrive, that of SIGCHLD too."""
    wake, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    for signum in (signal.SIGCHLD, *_FORWARDED):
        signal.signal(signum, lambda *_: None)
    return wake


def _send(ssh: subprocess.Popen[bytes], data: bytes) -> None:
    """Writes to the far side; that ssh has ended shows elsewhere."""
    with contextlib.suppress(OSError):
        while data and ssh.stdin:
            data = data[os.write(ssh.stdin.fileno(), data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
