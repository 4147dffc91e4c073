# SPDX-License-Identifier: Apache-2.0
"""Jobs on hosts with a real sshd, whose links are cut and whose wrappers are killed; `make test-ssh`.

Root alone can make such hosts (`real_ssh.missing`).
"""

from __future__ import annotations

import contextlib
import pathlib
import signal
import subprocess
import time
from collections.abc import Iterator

import launching
import psutil
import pytest
import real_ssh

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.real_ssh, pytest.mark.timeout(600)]

PREAMBLE = """
import os, sys, time
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import numpy as np, tensorflow as tf, keras
import tfdist

class Show(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch, flush=True)
        self.model.stop_training = os.path.exists("over")

def train(strategy, steps):
    x = np.random.default_rng(0).random((640, 4), np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(8).repeat()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(data, epochs=10**6, steps_per_epoch=steps, verbose=0, callbacks=[Show()])
    print("trained", flush=True)
"""
# Each step fetches its logs, so that the lost worker has some that are to be freed.
ON_SERVERS = """
from tfdist.engines import step_queue
step_queue.LOG_INTERVAL_SECS = 0
train(tfdist.ParameterServerStrategy(), 200)
"""
ALL_REDUCE = """
if os.environ["TFDIST_ATTEMPT"] != "0":
    print("again", flush=True)
    sys.exit(0)
train(tfdist.MultiWorkerMirroredStrategy(), 50)
"""


class Launch(launching.Launch):
    """A launcher at work on these hosts."""

    def __init__(self, network: real_ssh.Network, process: subprocess.Popen[str]) -> None:
        super().__init__(process)
        self.network = network

    def tasks(self, host: str) -> list[psutil.Process]:
        """The processes on a host that belong to a task: the script, its guard and what keeps the connection."""
        found = []
        for pid in self.network.pids(host):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if "train.py" in process.cmdline() or "tfdist.launchers.ssh.task" in process.cmdline():
                    found.append(process)
        return found

    def script(self, host: str) -> psutil.Process:
        """The script itself on a host with one task."""
        return next(each for each in self.tasks(host) if each.cmdline()[1:] == ["train.py"])


@pytest.fixture
def network(tmp_path: pathlib.Path) -> Iterator[real_ssh.Network]:
    if reason := real_ssh.missing():
        pytest.skip(reason)
    with real_ssh.hosts(["a", "b", "c"], tmp_path) as made:
        yield made


@pytest.fixture
def launch(network, tmp_path):
    """Starts a job, on a and b or on the hosts given."""
    with contextlib.ExitStack() as stack:

        def start(script: str, *flags: str, hosts: str = "a,b") -> Launch:
            (tmp_path / "train.py").write_text(PREAMBLE + script)
            places = ",".join(network.address(host[0]) + host[1:] for host in hosts.split(","))
            command = launching.command("ssh", *network.flags, f"--hosts={places}")
            process = network.popen(
                [*command, f"--directory={tmp_path}", "--restart_backoff_secs=0", *flags, "train.py"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=tmp_path,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return Launch(network, process)

        yield start


@pytest.mark.parametrize("cut", ["drop", "unplug"])
def test_the_chief_goes_on_without_a_host_that_vanished(launch, network, tmp_path, cut):
    job = launch(ON_SERVERS, "--num_ps=1", "--min_workers=1", "--max_worker_restarts=0", hosts="a,b,c:2")
    job.read_until("epoch 3")
    getattr(network, cut)("b")
    before = time.monotonic()
    # Steps in flight may end one epoch more, and none beyond. The launcher finds out later.
    job.read_until("epoch 5")
    print(f"went on after {time.monotonic() - before:.1f} s")
    assert not [line for line in job.said if "worker:1" in line]
    job.read_until("going on with 1 of 2 workers")
    job.read_until("the launcher has given up worker:1; going on without it")
    (tmp_path / "over").touch()
    job.read_until("trained")
    trained_at = time.monotonic()
    assert job.wait() == 0
    print(f"ended {time.monotonic() - trained_at:.1f} s after training")


def test_a_stopped_worker_on_a_host_that_is_up_is_not_lost(launch, tmp_path):
    job = launch(ON_SERVERS, "--num_ps=1", "--min_workers=1", hosts="a,b,c:2")
    job.read_until("epoch 3")
    worker = job.script("b")
    worker.suspend()
    job.read_until("a step has not completed for 30 s; waiting for worker:1")
    worker.resume()
    (tmp_path / "over").touch()
    job.read_until("trained")
    assert job.wait() == 0
    assert not [line for line in job.lines if "UnavailableError" in line or "worker:1 failed" in line]


def test_a_lost_host_is_named_and_its_tasks_end_by_themselves(launch, network):
    job = launch(ALL_REDUCE, "--max_restarts=0")
    job.read_until("epoch 2")
    network.drop("b")
    job.read_until("failed first")
    assert f"worker:1 failed first (its host {network.address('b')} can't be reached" in job.lines[-1]
    assert not job.tasks("a")
    assert job.wait() == 255
    assert not psutil.wait_procs(job.tasks("b"), timeout=30)[1]


def test_all_tasks_have_ended_when_a_launcher_without_link_says_so(launch, network):
    job = launch(ALL_REDUCE)
    job.read_until("epoch 2")
    network.drop("launcher")
    job.read_until("failed first")
    assert any("no host can be reached: the link of this machine may be down" in line for line in job.said)
    assert [each for host in "ab" for each in job.tasks(host)] == []
    assert job.wait() == 255


@pytest.mark.parametrize("who", ["ssh_task", "sshd"])
def test_a_killed_wrapper_counts_as_a_failure(launch, who):
    job = launch(ALL_REDUCE, "--max_restarts=1")
    job.read_until("epoch 2")
    wrapper = next(each for each in job.tasks("b") if "tfdist.launchers.ssh.task" in each.cmdline())
    victim = wrapper if who == "ssh_task" else next(each for each in wrapper.parents() if "sshd" in each.name())
    victim.send_signal(signal.SIGKILL)
    job.read_until("starting all tasks again")
    assert "(restart 1 of 1)" in job.lines[-1]
    assert job.wait() == 0
