# SPDX-License-Identifier: Apache-2.0
"""Failures among the workers of a MultiWorkerMirroredStrategy are reported, by name, and end the job."""

from __future__ import annotations

import pathlib
from typing import Any

import process_cluster
import pytest
from process_cluster import needs_mpi

import tfdist
from tfdist import Cluster, Task

VARIABLE = "TFDIST_COMMUNICATION"
pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

TRAINING = """
strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout_secs=60)
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
class At20(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20:
            print("at step 20", flush=True)
            if index == 1:
                misfortune()
x = np.ones((64000, 3), np.float32)
def train():
    model.fit(x, x[:, :1], batch_size=32, verbose=0, callbacks=[At20()])
"""
RAISES = "def misfortune():\n    raise LookupError('my own words')\n"
DIES = "import signal\ndef misfortune():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
HANGS = """
import time
strategy.distribution.agreement.reporter.interval_secs = 6  # for the test; 30 s otherwise
def misfortune():
    time.sleep(1000)
"""


# Each step is a wait that can't end, or one that can; the last ones end all collectives, and a worker.
CALLS_OF_ONE_WORKER = """
import contextlib, time
from tfdist.coordination import worker_waits
worker_waits.PARTED_SECS = 3.5  # for the test; 5 s otherwise
strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout_secs=60, policies=[POLICY])
agreement = strategy.distribution.agreement
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
x = np.ones((16, 3), np.float32)
fit = lambda *callbacks: model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
evaluate = lambda: model.evaluate(x, x[:, :1], verbose=0)
def report_error_of(name, call):
    error = None
    try:
        call()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    report(name, error)
    # The workers have made different numbers of exchanges.
    agreement.count = 1000 * (agreement.count // 1000 + 1)
    # What the first one does next is not for the other's message.
    (shared / f"{name}-{index}").touch()
    while not (shared / f"{name}-{1 - index}").exists():
        time.sleep(0.05)
class Evaluate(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        evaluate()
class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True
if index == 0:
    model.save(shared / "model.keras")
fit(*[keras.callbacks.ModelCheckpoint(shared / "{epoch}.keras")] if index == 0 else [])
model.save(shared / "model.keras")
saved = keras.saving.load_model(shared / "model.keras")
report("saved", int(saved.optimizer.iterations))
report("files", sorted(path.name for path in shared.glob("*.keras")))
if index == 1:
    time.sleep(3.5)
report_error_of("slow", evaluate)
report_error_of("exchange", lambda: evaluate() if index == 0 else model.save(shared / "own.keras"))
report_error_of("gather", lambda: evaluate() if index == 0 else fit())
rate, model.optimizer.learning_rate = float(model.optimizer.learning_rate), 0.001 + index
report_error_of("rate", fit)
model.optimizer.learning_rate = rate
# One in an exchange, and one in a sum, with a policy; else both in sums of the same call.
report_error_of("collective", lambda: fit(*[Evaluate() if POLICY_ELSE else Stop()] if index == 0 else []))
if index == 0:
    (shared / "ended-1").touch()
    report_error_of("ended", evaluate)
"""


@pytest.mark.parametrize("policy", ["", pytest.param("tfdist.BackupWorkers(spares=0)", marks=pytest.mark.slow)])
def test_no_wait_of_one_worker_alone_goes_on(tmp_path: pathlib.Path, policy: str):
    """The chief saves alone, with no wait; a call that needs the others ends with a line that says what they do."""
    found = process_cluster.run(
        CALLS_OF_ONE_WORKER.replace("POLICY_ELSE", repr(bool(policy))).replace("POLICY", policy),
        tmp_path,
        timeout_secs=150,
    )
    for each in found:
        assert each["saved"] == 4 and each["files"] == ["1.keras", "2.keras", "model.keras"]
        assert each["slow"] is None
        in_evaluate = "worker:0 in model.evaluate (comparing the data sets)"
        assert f"{in_evaluate}, and worker:1 in model.save (saving " in each["exchange"]
        assert "worker:0 in model.evaluate, and worker:1 in model.fit" in each["gather"]
        assert "models differ" in each["rate"] and "learning_rate of 0.001 on worker:0, 1.001 on" in each["rate"]
        stopped = "outside of its steps, as by metric.result()), and worker:1 in model.fit (a step of 4 sums)"
        assert (f"{in_evaluate}, and worker:1 in model.fit" if policy else stopped) in each["collective"]
        assert all("same models, calls and steps" in each[name] for name in ("exchange", "gather", "collective"))
    assert "on worker:0 waits for worker:1, which ended; every worker must make" in found[0]["ended"]


@pytest.mark.parametrize("name", ["start_timeout_secs", "stall_timeout_secs"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "5", True, None])
def test_a_timeout_that_is_none_is_refused_at_once(name: str, value: Any):
    with pytest.raises(ValueError, match=f"{name} must be a positive number of seconds. Received: {name}={value!r}"):
        tfdist.MultiWorkerMirroredStrategy(**{name: value})


def test_a_worker_that_never_comes_is_named(tmp_path: pathlib.Path):
    script = """
    try:
        tfdist.MultiWorkerMirroredStrategy(start_timeout_secs=3)
    except TimeoutError as error:
        report("error", str(error))
    """
    with process_cluster.workers(script, tmp_path, started=1) as (worker,):
        assert worker.wait() == 0
        error = worker.found["error"]
    assert "worker:1 at 127.0.0.1:" in error
    assert "connection refused" in error
    assert "Received: start_timeout_secs=3" in error


def test_an_evaluator_works_alone_whether_it_is_listed_or_not(tmp_path: pathlib.Path):
    """No other task of its cluster is running."""
    script = """
    for name in ("listed", "unlisted"):
        os.environ["TF_CONFIG"] = os.environ[name]
        strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout_secs=3)
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        x = np.ones((8, 3), np.float32)
        model.fit(x, x[:, :1], verbose=0)
        report(name, model.evaluate(x, x[:, :1], verbose=0))
        model.save(shared / f"{name}.keras")
    """
    workers = {"worker": {0: "127.0.0.1:1", 1: "127.0.0.1:2"}}
    clusters = {"listed": {**workers, "evaluator": {0: "127.0.0.1:3"}}, "unlisted": workers}
    env = {name: Cluster(jobs, Task("evaluator", 0)).to_tf_config() for name, jobs in clusters.items()}
    env["TF_CONFIG"] = env["listed"]
    with process_cluster.workers(script, tmp_path, started=1, env=env) as (evaluator,):
        assert evaluator.wait() == 0, evaluator.output
        assert evaluator.found["listed"] >= 0 and evaluator.found["unlisted"] >= 0
    assert all((tmp_path / f"{name}.keras").exists() for name in clusters)


def test_ctrl_c_ends_the_wait_for_a_worker(tmp_path: pathlib.Path):
    # The line that is waited for comes from the rendezvous itself.
    script = "from tfdist.coordination import rendezvous\n"
    script += "rendezvous._SAY_EVERY_SECS = 0.2\n"
    script += "rendezvous._log.say = lambda line: print(line, flush=True)\n"
    script += "rendezvous.meet(cluster, 300)"
    with process_cluster.workers(script, tmp_path, started=1) as (worker,):
        worker.wait_for_output("waiting for worker:1")
        worker.interrupt()
        assert worker.wait() != 0


@pytest.mark.parametrize("kind", ["tensorflow", pytest.param("mpi", marks=[needs_mpi, pytest.mark.slow])])
def test_an_exception_of_one_worker_reaches_all_in_its_own_words(tmp_path: pathlib.Path, kind: str):
    with process_cluster.workers(TRAINING + RAISES + "train()", tmp_path, env={VARIABLE: kind}) as running:
        assert [worker.wait() for worker in running] == [1, 1]
        outputs = [worker.output for worker in running]
    assert "LookupError: my own words" in outputs[1].splitlines()[-1]
    assert "worker:1 ended with LookupError: my own words" in outputs[0]


def test_an_exception_of_the_chief_outside_of_a_step_reaches_all_in_its_own_words(tmp_path: pathlib.Path):
    """The service with which they hear of it ends with the chief."""
    script = TRAINING + RAISES + "misfortune() if index == 0 else train()"
    with process_cluster.workers(script, tmp_path) as running:
        assert [worker.wait() for worker in running] == [1, 1]
        assert "worker:0 ended with LookupError: my own words" in running[1].output.splitlines()[-1]


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("tensorflow", ""),
        pytest.param("tensorflow", "BackupWorkers(spares=0)", marks=pytest.mark.slow),
        # Its step has the collectives of one without a policy.
        pytest.param("tensorflow", "ParameterAveraging(every_steps=3)", marks=pytest.mark.slow),
        pytest.param("mpi", "", marks=needs_mpi),
    ],
)
def test_killed_worker_is_named_by_each_other_in_one_line(tmp_path: pathlib.Path, kind: str, policy: str):
    policies = f"start_timeout_secs=60, policies=[{policy and 'tfdist.' + policy}])"
    script = TRAINING.replace("start_timeout_secs=60)", policies) + DIES + "train()"
    with process_cluster.workers(script, tmp_path, env={VARIABLE: kind}) as running:
        assert [worker.wait(60) for worker in running] == [1, -9]
        last = running[0].output.splitlines()[-1]
    assert last.startswith("ConnectionError: a sum over all workers will never come, as some have ended or failed: ")
    assert "worker:1 (" in last
    assert kind == "mpi" or last.endswith("go on from a checkpoint with tfdist.callbacks.Resume)")


@pytest.mark.slow  # `test_a_worker_that_hangs_is_named_and_ctrl_c_ends_all` has a worker that stands still.
@needs_mpi
def test_a_chief_that_stands_still_is_named_by_those_who_wait_in_mpi(tmp_path: pathlib.Path):
    """The chief has the service that is asked for the others, and a question without a time limit stops Python."""
    stops = "import signal\ndef misfortune():\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    script = TRAINING.replace("if index == 1", "if index == 0") + stops + "train()"
    with process_cluster.workers(script, tmp_path, env={VARIABLE: "mpi"}) as running:
        assert running[1].wait(60) == 1
        last = running[1].output.splitlines()[-1]
    assert last.startswith("ConnectionError: a sum over all workers will never come")
    assert "worker:0" in last


@pytest.mark.parametrize(
    ("kind", "eagerly"),
    [
        # Those who wait in MPI are in the test before.
        ("tensorflow", False),
        pytest.param("tensorflow", True, marks=pytest.mark.slow),
        pytest.param("mpi", False, marks=[needs_mpi, pytest.mark.slow]),
        pytest.param("mpi", True, marks=[needs_mpi, pytest.mark.slow]),
    ],
)
def test_a_worker_that_hangs_is_named_and_ctrl_c_ends_all(tmp_path: pathlib.Path, kind: str, eagerly: bool):
    training = TRAINING.replace('"mse"', f'"mse", run_eagerly={eagerly}')
    with process_cluster.workers(training + HANGS + "train()", tmp_path, env={VARIABLE: kind}) as running:
        running[0].wait_for_output("has not completed for")
        assert "waiting for worker:1" in running[0].output
        # The first is inside a collective, where Python can't be interrupted unless that is in a thread of its own; the
        # second is in Python.
        for worker in running:
            worker.interrupt()
            assert worker.wait() != 0
        assert eagerly or "interrupted while waiting for worker:1" in running[0].output
