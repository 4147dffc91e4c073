# SPDX-License-Identifier: Apache-2.0
"""A dispatcher of the tf.data service, in whatever state, never stops Python in a worker that waits for its chief.

The chief is a socket here: a worker sees no more of it until it writes its mark.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import programs
import psutil
import pytest
from waiting import wait_until

from tfdist import Cluster, ClusterError, Task
from tfdist.cluster import DATA_SERVICE_VARIABLE, JOB_SECRET_VARIABLE
from tfdist.launchers.supervise.processes import PortReservation
from tfdist.serving import data_worker
from tfdist.serving.task import done_mark

SECRET = "a-secret-of-this-test"
DISPATCHER = """
import sys
from tfdist.compat.tensorflow import servers
servers.skip_package_init()
from tensorflow.python.data.experimental.service import server_lib
server = server_lib.DispatchServer(server_lib.DispatcherConfig(port=int(sys.argv[1])))
print("up", flush=True)
while True:
    if line := sys.stdin.readline():
        while server._num_workers() < 1:
            pass
        print("registered", flush=True)
"""


class Setting:
    """One worker, its chief and its dispatcher."""

    def __init__(self, stack: contextlib.ExitStack, directory: pathlib.Path) -> None:
        self.stack = stack
        self._directory = directory
        reserved = stack.enter_context(PortReservation(4))
        chief, worker, ps, self.service = reserved.ports
        jobs = {"chief": {0: f"127.0.0.1:{chief}"}, "worker": {0: f"127.0.0.1:{worker}"}, "ps": {0: f"127.0.0.1:{ps}"}}
        self.cluster = Cluster(jobs, Task("worker", 0))
        self.chief = stack.enter_context(socket.create_server(("127.0.0.1", chief)))
        self._chief_was_asked = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()
        self.worker: programs.Program | None = None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.chief.accept()[0].close()
                self._chief_was_asked.set()

    def start_worker(self) -> programs.Program:
        """Returns once the worker has seen its chief."""
        env = {
            "TF_CONFIG": self.cluster.to_tf_config(),
            DATA_SERVICE_VARIABLE: f"127.0.0.1:{self.service}",
            JOB_SECRET_VARIABLE: SECRET,
        }
        self.worker = self.stack.enter_context(programs.serving(env, self._directory))
        assert self._chief_was_asked.wait(60), self.worker.output
        return self.worker

    def dispatcher(self) -> subprocess.Popen[str]:
        """A real one, in a process of its own."""
        command = [sys.executable, "-c", DISPATCHER, str(self.service)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.stack.callback(_end, process)
        assert process.stdout.readline() == "up\n"
        return process

    def end_chief(self) -> None:
        self.chief.shutdown(socket.SHUT_RDWR)
        self.chief.close()

    def finish_chief(self) -> None:
        """Does what TensorFlow does on the worker's machine when the chief is done."""
        mark = done_mark(self.cluster, self.cluster.task)
        mark.parent.mkdir()
        mark.write_text("done")


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def setting(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    monkeypatch.setenv(JOB_SECRET_VARIABLE, SECRET)
    with contextlib.ExitStack() as stack:
        yield Setting(stack, tmp_path)


# The states of a dispatcher that a worker can meet. Each leaves the worker with it.


def absent(setting: Setting) -> None:
    setting.start_worker()


def silent(setting: Setting) -> None:
    """Accepts connections, and says nothing."""
    server = setting.stack.enter_context(socket.create_server(("127.0.0.1", setting.service)))
    worker = setting.start_worker()
    with server.accept()[0]:
        pass  # The look of the worker itself.
    setting.stack.enter_context(server.accept()[0])
    assert worker.process.poll() is None


def stopped(setting: Setting) -> None:
    """The kernel accepts connections for a process that stands still."""
    setting.dispatcher().send_signal(signal.SIGSTOP)
    worker = setting.start_worker()
    wait_until(lambda: any("tfdist.serving.data_worker" in " ".join(process.cmdline()) for process in worker.family()))


def registered(setting: Setting) -> subprocess.Popen[str]:
    dispatcher = setting.dispatcher()
    setting.start_worker()
    assert ask(dispatcher) == "registered\n"
    return dispatcher


def killed(setting: Setting) -> None:
    """Dies while it is used."""
    dispatcher = registered(setting)
    dispatcher.kill()
    dispatcher.wait()


def late(setting: Setting) -> None:
    """Comes up after the worker."""
    setting.start_worker()
    assert ask(setting.dispatcher()) == "registered\n"


def ask(dispatcher: subprocess.Popen[str]) -> str:
    dispatcher.stdin.write("registered?\n")
    dispatcher.stdin.flush()
    return dispatcher.stdout.readline()


STATES = [absent, silent, stopped, registered, killed, late]


def every_state(*fast: Callable[[Setting], object]) -> pytest.MarkDecorator:
    """All of them; those that are not `fast` show again what these show."""
    marks = {state: () if state in fast else (pytest.mark.slow,) for state in STATES}
    return pytest.mark.parametrize(
        "state", [pytest.param(state, marks=marks[state], id=state.__name__) for state in STATES]
    )


@pytest.mark.processes
@pytest.mark.timeout(120)
@every_state(absent, stopped)
def test_a_worker_ends_when_its_chief_is_done(setting: Setting, state: Callable[[Setting], object]) -> None:
    state(setting)
    setting.finish_chief()
    assert setting.worker.wait(30) == 0, setting.worker.output
    assert_nothing_is_left(setting)


@pytest.mark.processes
@pytest.mark.timeout(120)
@every_state(silent)
def test_a_worker_ends_when_its_chief_is_lost(setting: Setting, state: Callable[[Setting], object]) -> None:
    state(setting)
    setting.end_chief()
    assert setting.worker.wait(60) == 75, setting.worker.output
    assert_nothing_is_left(setting)


@pytest.mark.processes
@pytest.mark.timeout(120)
@every_state(absent, killed)
def test_a_worker_handles_sigterm(setting: Setting, state: Callable[[Setting], object]) -> None:
    """The first SIGTERM has the worker end with its chief; the second one has its usual effect."""
    state(setting)
    setting.worker.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not catches(setting.worker.process.pid, signal.SIGTERM))
    assert setting.worker.process.poll() is None, setting.worker.output
    setting.worker.process.send_signal(signal.SIGTERM)
    assert setting.worker.wait(30) == -signal.SIGTERM, setting.worker.output
    assert_nothing_is_left(setting)


def catches(pid: int, signum: int) -> bool:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (signum - 1) & 1)


def assert_nothing_is_left(setting: Setting) -> None:
    psutil.wait_procs(setting.worker.family(), timeout=10)
    assert setting.worker.family() == []
    assert not done_mark(setting.cluster, setting.cluster.task).parent.exists()


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_data_worker_that_dies_is_started_again(setting: Setting) -> None:
    registered(setting)
    before = data_workers(setting)
    for process in before:
        process.kill()
    wait_until(lambda: bool(set(data_workers(setting)) - set(before)))
    setting.finish_chief()
    assert setting.worker.wait(30) == 0, setting.worker.output
    assert "the data worker of worker:0 ended with code -9" in setting.worker.output


def data_workers(setting: Setting) -> list[psutil.Process]:
    """Returns the data workers that run, without the guards that have started them."""
    found = []
    for process in setting.worker.family():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            found += [process] if "tfdist.serving.data_worker" in line and "guard.py" not in line else []
    return found


def test_an_environment_that_names_no_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_SERVICE_VARIABLE, "nowhere")
    cluster = Cluster({"worker": {0: "127.0.0.1:1"}}, Task("worker", 0))
    with pytest.raises(ClusterError, match="TFDIST_DATA_SERVICE"), data_worker.run_data_worker(cluster):
        pass


def test_a_job_without_a_data_service_has_no_data_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_SERVICE_VARIABLE, raising=False)
    before = set(threading.enumerate())
    with data_worker.run_data_worker(Cluster({"worker": {0: "127.0.0.1:1"}}, Task("worker", 0))):
        assert set(threading.enumerate()) == before
    assert os.environ.get(DATA_SERVICE_VARIABLE) is None
