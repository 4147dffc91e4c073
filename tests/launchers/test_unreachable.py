# SPDX-License-Identifier: Apache-2.0
"""Hosts that can't be reached, with the real ssh: said at once, by name, in one line."""

import pathlib
import shutil
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes
ROOT = pathlib.Path(__file__).resolve().parents[2]
NETWORK = ["unshare", "--map-root-user", "--net"]


def in_own_network(shell):
    """Runs a shell command where no other machine is; skips the test where that is not allowed."""
    if not all(map(shutil.which, ("unshare", "ip", "ssh"))):
        pytest.skip("there is no unshare, ip or ssh here")
    if subprocess.run([*NETWORK, "true"], capture_output=True, timeout=20).returncode:
        pytest.skip("this user may make no network namespace")
    return subprocess.run([*NETWORK, "sh", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=60)


def launch(*flags):
    return " ".join([sys.executable, "-m", "tfdist launch ssh --num_workers=1", *flags, "setup.py"])


def test_a_host_without_a_route():
    done = in_own_network(launch("--hosts=10.1.2.3"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "tfdist: 10.1.2.3 can't be reached (ssh: connect to host 10.1.2.3 port 22: Network is"
    )
    assert len(done.stderr.splitlines()) == 1


def test_a_host_that_never_answers():
    if not shutil.which("ssh"):
        pytest.skip("there is no ssh here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        flags = f"--ssh=-p{server.getsockname()[1]}", "--ssh=-oConnectTimeout=1"
        command = launch("--hosts=127.0.0.1", *flags).split()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("tfdist: 127.0.0.1 can't be reached (Connection ")
