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


def test_the_doctor_names_the_task():
    config = '{"cluster": {"worker": ["127.0.0.1:9001", "10.1.2.3:9001"]}, "task": {"type": "worker", "index": 0}}'
    done = in_own_network(f"ip link set lo up && TF_CONFIG='{config}' {sys.executable} -m tfdist doctor")
    assert done.returncode == 1
    assert "wrong   worker:1 at 10.1.2.3:9001: [Errno 101] Network is unreachable; check that" in done.stdout


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--ssh=-oConnectTimeout=1", "127.0.0.1 can't be reached (Connection "),
        ("--preflight_secs=1", "127.0.0.1 did not answer within 1 s; check that `ssh 127.0.0.1 true` works"),
    ],
)
def test_a_host_that_never_answers(flag, words):
    if not shutil.which("ssh"):
        pytest.skip("there is no ssh here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = launch("--hosts=127.0.0.1", f"--ssh=-p{port}", flag).split()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"tfdist: {words}")
