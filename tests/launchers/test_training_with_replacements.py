# SPDX-License-Identifier: Apache-2.0
"""Training goes on while workers are replaced: those that a launcher started, and those of an embedded cluster."""

import os
import signal
import subprocess
import sys

import launching
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

ENV = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}

# The process that is killed is the worker's own; the guard that started it lives.
TRAINING = """
import os, sys, time
import keras, numpy as np, tensorflow as tf
import tfdist

if os.environ["TFDIST_TASK_RESTART"] != "0":
    print("back", flush=True)
print("pid", os.getpid(), flush=True)
strategy = tfdist.ParameterServerStrategy(start_timeout_secs=100)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((8, 4), np.float32)
data = tf.data.Dataset.from_tensors((x, x[:, :1])).repeat()

def fetched(*batch):
    tf.print("fetched", output_stream=sys.stdout)
    return batch

def made():
    return strategy.report().accepted["worker:1"]

class Told(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.steps = batch + 1
        if batch == 50:
            print("training", flush=True)
            self.before = made()
            open("pipe").read()
        # How long TensorFlow takes to meet the new worker is not what is tested: few steps are made meanwhile.
        if batch > 50:
            time.sleep(0.01)
        if batch > 50 and batch % 50 == 0 and made() - self.before > 120:
            self.model.stop_training = True

told = Told()
model.fit(data.map(fetched), steps_per_epoch=100_000, verbose=0, callbacks=[told])
print("iterations", int(model.optimizer.iterations), told.steps, flush=True)
"""


@pytest.mark.slow  # `test_embedded.py` kills a worker, `test_replaced_workers.py` replaces one.
def test_a_killed_worker_of_a_launched_job_joins_the_same_fit(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "train.py").write_text(TRAINING)
    command = launching.command("local", "--num_workers=2", "--num_ps=1", "train.py")
    with subprocess.Popen(command, cwd=tmp_path, env=ENV, stdout=-1, stderr=-1, text=True) as launcher:
        job = launching.Launch(launcher)
        job.read_until("[chief:0] training")
        (pid,) = (int(line.split()[2]) for line in job.lines if line.startswith("[worker:1] pid"))
        os.kill(pid, signal.SIGKILL)
        # The chief goes on when there is a new one; it meets it at any step after that.
        job.read_until("[worker:1] back")
        (tmp_path / "pipe").write_text("go on")
        out, err = launcher.communicate(timeout=200)
        assert launcher.returncode == 0, out + err
    assert "tfdist: worker:1 failed (SIGKILL, exit code 137, failure 1 in a row); starting it again" in err
    ((iterations, steps),) = (map(int, line.split()[2:]) for line in out.splitlines() if "iterations" in line)
    # A step that was under way when its worker was killed may have been made twice: at least once, says TensorFlow.
    assert steps <= iterations <= steps + 2
    assert out.count("[worker:1] fetched") > 100


GIVEN_UP = """
import queue, sys
from tfdist.serving import embedded as serving
from tfdist.launchers.requests import Restarts

said = queue.SimpleQueue()
serving._log.say = said.put
serving._RESTARTS = Restarts(max_worker_restarts=2, restart_backoff_secs=0.001, settled_secs=1000.0)

class Embedded(serving.EmbeddedCluster):
    def _start(self, task):
        code = "print('no data'); raise SystemExit(3)" if str(task) == "worker:1" else "import signal; signal.pause()"
        return self._supervisor.start(str(task), [sys.executable, "-c", code])

embedded = Embedded(2, 1, False)
embedded.keep_alive()
for _ in range(3):
    print(said.get(timeout=60))
print(embedded.pid("worker:1"), embedded.pid("worker:0") is not None)
"""


def test_an_embedded_worker_that_fails_again_and_again_is_given_up():
    done = subprocess.run([sys.executable, "-c", GIVEN_UP], env=ENV, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == [
        "worker:1 ended with code 3, starting it again. no data",
        "worker:1 ended with code 3, starting it again in 0.001 s. no data",
        "worker:1 ended with code 3; it is given up after 3 failures in a row. no data",
        "None True",
    ], done.stderr
