# SPDX-License-Identifier: Apache-2.0
"""Local process of one remote task of `tfdist launch ssh`: holds the connection, and forwards signals.

It runs under the same guard as a local task. When the launcher ends for any reason, this process ends, and with it the
connection and the remote task.

    python -m tfdist.launchers.ssh.client LOGIN REMOTE_PYTHON DIRECTORY [SSH_OPTIONS...] -- SCRIPT [ARGUMENTS...]

Variables with the prefix TFDIST_SEND_ are sent to the task, without the prefix.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tfdist import _log
from tfdist.cluster import JOB_SECRET_VARIABLE, NOTICES_VARIABLE
from tfdist.launchers.requests import SENT_PREFIX, shell_code, shell_join
from tfdist.launchers.ssh.task import HEARTBEAT_SECS, NOTICE
from tfdist.launchers.supervise.notices import Reader

_ALSO_SENT = ("TFDIST_ATTEMPT", "TFDIST_TASK_RESTART", JOB_SECRET_VARIABLE)
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SSH_FAILED = 255


def command(login: str, python: str, options: Sequence[str], setup: str = "", *arguments: str) -> list[str]:
    """Returns the ssh command that runs `ssh_task` on a host, without password prompts, and with keepalive messages.

    `setup` is a shell command before it; if it fails, the task does.
    """
    far = shell_join([python, "-P", "-m", "tfdist.launchers.ssh.task", *arguments])
    settings = ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=10", "ServerAliveCountMax=3")
    # ssh uses the first value of an option, so the user's options come first.
    far = f"{setup} && exec {far}" if setup else f"exec {far}"
    return ["ssh", "-T", *options, *(f"-o{setting}" for setting in settings), "--", login, far]


def probe(login: str, options: Sequence[str]) -> list[str]:
    """Returns an ssh command that succeeds if a host accepts a login."""
    # Without a shared connection (ControlMaster), which may be dead.
    settings = ("BatchMode=yes", "ConnectTimeout=5", "ControlPath=none")
    return ["ssh", "-T", *(f"-o{setting}" for setting in settings), *options, "--", login, "true"]


def payload(script: Sequence[str], directory: str, env: Mapping[str, str]) -> bytes:
    """Returns the line with the script, directory and environment of the task for `ssh_task`."""
    sent = {name.removeprefix(SENT_PREFIX): value for name, value in env.items() if name.startswith(SENT_PREFIX)}
    sent |= {name: env[name] for name in _ALSO_SENT if name in env}
    return json.dumps({"script": list(script), "directory": directory, "env": sent}).encode() + b"\n"


def main(arguments: Sequence[str]) -> int:
    """Runs a task on a host; returns its exit code, or 255 if the connection failed."""
    split = arguments.index("--")
    login, python, directory, setup, *options = arguments[:split]
    line = payload(arguments[split + 1 :], directory, os.environ)
    wake = _wake_on_signals()
    notices = Reader(os.environ.get(NOTICES_VARIABLE))
    # A session of its own, so that signals to this process' group don't end ssh, and with it the task.
    ssh = subprocess.Popen(command(login, python, options, setup), stdin=subprocess.PIPE, start_new_session=True)
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
        _log.say(f"the connection to {login} failed or broke (ssh exit code 255)")
    return shell_code(code)


def _wake_on_signals() -> int:
    """Returns a descriptor from which the numbers of signals can be read, including SIGCHLD."""
    wake, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    for signum in (signal.SIGCHLD, *_FORWARDED):
        signal.signal(signum, lambda *_: None)
    return wake


def _send(ssh: subprocess.Popen[bytes], data: bytes) -> None:
    """Writes to the remote side; ignores errors, because `main` detects the end of ssh."""
    with contextlib.suppress(OSError):
        while data and ssh.stdin:
            data = data[os.write(ssh.stdin.fileno(), data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
