# SPDX-License-Identifier: Apache-2.0
"""The wrapper around a script: which signals it forwards, and that the script ends with it."""

import signal
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.processes
SCRIPT = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("ready", flush=True)
signal.pause()
"""
WRAPPER = """
import sys
from tfdist.launchers.supervise import wrapping
command = [sys.executable, "-c", sys.argv[1]]
sys.exit(wrapping.run_wrapped(command, {{}}, on_signal={}))
"""


@pytest.fixture
def wrapped():
    """Starts a script behind a wrapper that asks `on_signal`; gives the wrapper and the script once it is ready."""
    started = []

    def start(on_signal="None", script=SCRIPT):
        command = [sys.executable, "-c", WRAPPER.format(on_signal), script]
        wrapper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(wrapper)
        assert wrapper.stdout.readline() == "ready\n"
        ((child,),) = (guard.children() for guard in psutil.Process(wrapper.pid).children())
        return wrapper, child

    yield start
    for wrapper in started:
        wrapper.kill()
        wrapper.communicate()


def test_a_script_is_killed_with_its_wrapper(wrapped):
    wrapper, child = wrapped()
    wrapper.kill()
    child.wait(60)
    assert not child.is_running()


def test_a_signal_is_forwarded_and_the_exit_code_comes_back(wrapped):
    wrapper, _ = wrapped("lambda number: True")
    wrapper.send_signal(signal.SIGTERM)
    assert wrapper.wait(60) == 75


def test_a_signal_that_the_script_has_already_is_not_forwarded(wrapped):
    wrapper, child = wrapped("lambda number: print('noted', number, flush=True)")
    wrapper.send_signal(signal.SIGTERM)
    assert wrapper.stdout.readline() == f"noted {int(signal.SIGTERM)}\n"
    child.send_signal(signal.SIGUSR1)  # Had SIGTERM been forwarded, the script would have ended with 75 by then.
    assert wrapper.wait(60) == 128 + signal.SIGUSR1
