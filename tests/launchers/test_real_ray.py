# SPDX-License-Identifier: Apache-2.0
"""Jobs on a Ray cluster of three raylets on this machine: trainings whose actors are killed, and what stays behind."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import launching
import psutil
import pytest
import real_ray

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

PREAMBLE = """
import os, sys, time
print("pid", os.getpid(), "attempt", os.environ["TFDIST_ATTEMPT"], flush=True)
import numpy as np, tensorflow as tf, keras
import tfdist
"""
ON_SERVERS = """
if os.environ["TFDIST_TASK_RESTART"] != "0":
    open("back", "w").close()
strategy = tfdist.ParameterServerStrategy(start_timeout_secs=100)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((8, 4), np.float32)
data = tf.data.Dataset.from_tensors((x, x[:, :1])).repeat()

class Show(keras.callbacks.Callback):
    before = None

    def on_train_batch_end(self, batch, logs=None):
        print("update", batch, round(time.time(), 3), flush=True)
        time.sleep(0.05)
        if os.path.exists("back"):
            made = strategy.report().accepted["worker:1"]
            self.before = made if self.before is None else self.before
            self.model.stop_training = made > self.before

model.fit(data, steps_per_epoch=10**6, verbose=0, callbacks=[Show()])
print("trained", flush=True)
"""
ALL_REDUCE = """
strategy = tfdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

class Show(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print("step", int(model.optimizer.iterations.numpy()), flush=True)
        time.sleep(0.2 if os.environ["TFDIST_ATTEMPT"] == "0" else 0)

x, y = np.random.default_rng(0).random((800, 4)).astype("float32"), np.ones((800, 1), "float32")
resume = tfdist.callbacks.Resume(os.path.join(sys.argv[1], "checkpoints"), save_freq=10)
model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[resume, Show()])
print("trained", int(model.optimizer.iterations.numpy()), flush=True)
"""
WAITS = "import time\nprint('up', flush=True)\ntime.sleep(200)\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[real_ray.RayCluster]:
    if reason := real_ray.missing():
        pytest.skip(reason)
    with real_ray.cluster() as made:
        yield made


class Launch(launching.Launch):
    """A launcher at work on Ray."""

    def pid(self, task: str) -> int:
        """The process id that a task has printed."""
        return next(int(line.split()[2]) for line in self.lines if line.startswith(f"[{task}] pid"))


@pytest.fixture
def start(cluster, tmp_path):
    """Starts Python with arguments before and behind a script, with standard error in its standard output."""
    with contextlib.ExitStack() as stack:

        def run(script: str, before: tuple[str, ...], behind: tuple[str, ...]) -> Launch:
            (tmp_path / "train.py").write_text(script)
            command = [sys.executable, *before, "train.py", *behind]
            process = subprocess.Popen(command, cwd=tmp_path, stdout=-1, stderr=subprocess.STDOUT, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return Launch(process)

        yield run
        assert cluster.is_empty()


@pytest.fixture
def launch(cluster, start):
    """Starts a job of the launcher."""

    def run(script: str, *flags: str, arguments: tuple[str, ...] = ()) -> Launch:
        return start(script, ("-m", "tfdist", "launch", "ray", f"--address={cluster.address}", *flags), arguments)

    return run


def actor_of(pid: int) -> psutil.Process:
    """The actor above a script: its guard's parent's parent."""
    return next(each for each in psutil.Process(pid).parents() if "TaskActor" in " ".join(each.cmdline()))


def test_tasks_get_addresses_and_the_copied_directory(launch, tmp_path):
    script = "import os, sys, json, time\nprint(os.environ['TF_CONFIG'], os.getcwd(), *sys.argv[1:], flush=True)\n"
    job = launch(
        script + "sys.exit(3) if json.loads(os.environ['TF_CONFIG'])['task']['type'] == 'ps' else time.sleep(200)",
        "--num_workers=2",
        "--num_ps=1",
        "--copy",
        "--strategy=SPREAD",
        arguments=("--epochs=5", "a b"),
    )
    assert job.wait() == 3
    assert job.lines[-1] == "tfdist: ps:0 failed first (exit code 3); all tasks have ended"
    (line,) = (line for line in job.lines if line.startswith("[ps:0] {"))
    assert line.endswith("--epochs=5 a b") and "-0:2222" not in line and str(tmp_path) not in line


def test_killed_worker_on_servers_returns_while_updates_go_on(launch):
    job = launch(PREAMBLE + ON_SERVERS, "--num_workers=2", "--num_ps=1")
    job.read_until("[worker:1] pid")
    job.read_until("update 40 ")
    killed = time.time()
    actor_of(job.pid("worker:1")).kill()
    job.read_until("[worker:1] pid")
    back_secs = time.time() - killed
    assert job.wait() == 0, job.lines
    times = [float(line.split()[3]) for line in job.lines if line.startswith("[chief:0] update")]
    after = [each for each in times if each > killed]
    assert after[0] - killed < 1 and max(b - a for a, b in itertools.pairwise(after)) < 1
    assert back_secs < 15
    assert any("[worker:1] tfdist: the actor of worker:1 is lost: " in line for line in job.lines)
    assert any("worker:1 failed (exit code 255, failure 1 in a row); starting it again" in line for line in job.said)


def test_killed_worker_of_all_reduce_restarts_all_from_checkpoint(launch, tmp_path):
    job = launch(PREAMBLE + ALL_REDUCE, "--num_workers=2", "--max_restarts=1", arguments=(str(tmp_path),))
    job.read_until("[worker:0] step 25")
    actor_of(job.pid("worker:1")).kill()
    assert job.wait() == 0
    assert "tfdist: worker:1 failed first (exit code 255); ending all tasks" in job.said
    again = job.lines[next(i for i, line in enumerate(job.lines) if "attempt 1" in line) :]
    assert "[worker:0] step 1" not in again and "[worker:0] trained 100" in again
    steps = [int(line.split()[2]) for line in again if line.startswith("[worker:0] step")]
    assert steps[0] > 10 and steps == list(range(steps[0], 101))


@pytest.mark.timeout(600)
def test_killed_worker_of_ray_train_resumes_from_checkpoint(start, cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
    page = pathlib.Path(__file__).parents[2] / "docs" / "coming_from" / "ray_train.md"
    code = page.read_text().partition('title="ray_train.py"\n')[2].partition("```")[0]
    job = start(code.replace("/shared/run1", str(tmp_path)).replace("epochs=5", "epochs=60"), (), ())
    pid = re.search(r"RayTrainWorker pid=(\d+)", job.read_until("Epoch 10/60"))[1]
    psutil.Process(int(pid)).kill()
    assert job.wait() == 0
    assert sum("going on from" in line for line in set(job.lines)) == 1
    first = {line[: line.index(")")] for line in job.lines if "Epoch 1/60" in line}
    losses = {line for line in job.lines if re.search(r"worker:\d of 2 \[", line)}
    assert len(first) == len(losses) == 2 and len({line.partition(" of 2 ")[2] for line in losses}) == 1
    assert not any(line.startswith(tuple(first)) for line in losses)  # Ray Train starts all workers again.


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("num_workers", [2, 20])
def test_nothing_is_left_after_the_launcher_has_ended(signum, num_workers, launch, cluster):
    job = launch(PREAMBLE.partition("import numpy")[0] + WAITS, f"--num_workers={num_workers}")
    pids = []
    if num_workers == 2:
        for _ in range(2):
            job.read_until("] up")
        pids = [job.pid(f"worker:{index}") for index in range(2)]
    else:
        job.read_until("worker:9 wait for resources: missing are CPU 14 (6 of 6 free, 20 asked); they start as")
    job.process.send_signal(signum)
    assert job.wait() == (130 if signum == signal.SIGINT else -9)
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], 10)
    assert not alive


def test_tasks_start_once_a_node_has_joined(launch, cluster):
    job = launch("print('done')", "--num_workers=8")
    job.read_until("wait for resources: missing are CPU 2 (6 of 6 free, 8 asked)")
    cluster.ask("add")
    try:
        assert job.wait() == 0
    finally:
        cluster.ask("end")
