# SPDX-License-Identifier: Apache-2.0
"""Faults: whom they reach, at which step, that stopped tasks go on in the end, and what can't be reached."""

from __future__ import annotations

import os
import pathlib
import signal
from types import SimpleNamespace
from typing import Any

import process_cluster
import programs
import pytest

from tfdist import Cluster, Task
from tfdist.testing import Faults, continue_task, kill, stop_task

ADDRESSES = {"worker": {0: "127.0.0.1:1", 1: "127.0.0.1:2"}, "ps": {0: "127.0.0.1:3"}}
PIDS = {"worker:0": 100, "worker:1": 101, "ps:0": None}


class Embedded:
    """As much of an embedded cluster as faults need: ps:0 has ended."""

    cluster = Cluster(ADDRESSES, Task("worker", 0))

    def pid(self, task: str) -> int | None:
        return PIDS[task]


def parameter_server(embedded: Any) -> Any:
    return SimpleNamespace(distribution=SimpleNamespace(serving=SimpleNamespace(embedded=embedded)))


def multi_worker(task: str) -> Any:
    agreement = SimpleNamespace(task=task, tasks=("worker:0", "worker:1"))
    return SimpleNamespace(distribution=SimpleNamespace(serving=None, agreement=agreement))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The signals that were sent, to whom."""
    signals: list[tuple[int, int]] = []
    for name in ("kill", "killpg"):
        monkeypatch.setattr(os, name, lambda to, signum: signals.append((to, signum)))
    return signals


@pytest.mark.devices
def test_each_fault_is_its_signal(sent: list[tuple[int, int]]) -> None:
    strategy = parameter_server(Embedded())
    assert all([kill(strategy, "worker:1"), stop_task(strategy, "worker:0"), continue_task(strategy, "worker:0")])
    assert sent == [(101, signal.SIGKILL), (100, signal.SIGSTOP), (100, signal.SIGCONT)]


@pytest.mark.devices
def test_a_task_that_has_ended_is_not_reached(sent: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = parameter_server(Embedded())
    assert not any([kill(strategy, "ps:0"), stop_task(strategy, "ps:0"), continue_task(strategy, "ps:0")])
    assert sent == []

    def gone(*args: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "killpg", gone)
    assert not kill(strategy, "worker:0")


@pytest.mark.devices
def test_on_several_workers_each_kills_only_itself(sent: list[tuple[int, int]]) -> None:
    assert not kill(multi_worker("worker:0"), "worker:1")
    assert sent == []
    assert kill(multi_worker("worker:1"), "worker:1")
    assert sent == [(os.getpid(), signal.SIGKILL)]


@pytest.mark.devices
@pytest.mark.parametrize(
    ("strategy", "named"),
    [
        (parameter_server(Embedded()), "worker:0, worker:1, ps:0. Received: 'worker:7'"),
        (parameter_server(None), "embedded cluster"),
        (multi_worker("worker:0"), "worker:0, worker:1. Received: 'worker:7'"),
        (SimpleNamespace(distribution=SimpleNamespace(serving=None, agreement=None)), "SimpleNamespace"),
        (SimpleNamespace(), "SimpleNamespace"),
    ],
)
def test_what_can_not_be_reached(strategy: Any, named: str) -> None:
    with pytest.raises(ValueError, match="Received: ") as raised:
        kill(strategy, "worker:7")
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.devices
@pytest.mark.parametrize("act", [stop_task, continue_task])
def test_a_stopped_worker_would_hold_up_all_others_for_ever(act: Any) -> None:
    with pytest.raises(ValueError, match="Delays"):
        act(multi_worker("worker:1"), "worker:1")


@pytest.mark.devices
@pytest.mark.parametrize(
    "entry",
    [(1, "kill"), "kill", (-1, "kill", "worker:0"), (1.5, "kill", "worker:0"), (1, "burn", "worker:0"), (1, "kill", 0)],
    ids=repr,
)
def test_schedules_that_make_no_sense(entry: Any) -> None:
    with pytest.raises(ValueError, match="schedule") as raised:
        Faults([entry])
    assert f"Received: {entry!r}" in str(raised.value)


def started(strategy: Any, schedule: list[tuple[int, str, str]]) -> Faults:
    callback = Faults(schedule)
    # What Keras gives it.
    callback.set_model(SimpleNamespace(distribute_strategy=strategy))
    callback.on_train_begin()
    return callback


@pytest.mark.devices
def test_steps_count_from_the_beginning_of_the_fit(sent: list[tuple[int, int]]) -> None:
    schedule = [(7, "kill", "worker:1"), (0, "stop", "worker:0"), (5, "kill", "worker:0"), (5, "continue", "worker:0")]
    callback = started(parameter_server(Embedded()), schedule)
    seen = [len(sent)]
    for epoch in range(2):
        callback.on_epoch_begin(epoch)
        # As with steps_per_execution=2: the second of each pair.
        for batch in (1, 3):
            callback.on_train_batch_end(batch)
            seen.append(len(sent))
    assert seen == [1, 1, 1, 3, 4]
    assert [signum for _, signum in sent] == [signal.SIGSTOP, signal.SIGKILL, signal.SIGCONT, signal.SIGKILL]


@pytest.mark.devices
def test_what_is_still_stopped_goes_on_when_training_ends(sent: list[tuple[int, int]]) -> None:
    callback = started(parameter_server(Embedded()), [(0, "stop", "worker:0"), (0, "stop", "worker:1")])
    callback.on_train_end()
    assert sorted(sent[2:]) == [(100, signal.SIGCONT), (101, signal.SIGCONT)]
    callback.on_train_end()
    assert len(sent) == 4


@pytest.mark.devices
def test_a_task_that_is_not_there_is_an_error_before_training(sent: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="worker:2"):
        started(parameter_server(Embedded()), [(0, "kill", "worker:0"), (1000, "kill", "worker:2")])
    assert sent == []


FAULTY = """
import psutil
strategy = tfdist.ParameterServerStrategy(num_workers=2)
embedded = strategy.distribution.serving.embedded
made = model(strategy)
first = psutil.Process(embedded.pid("worker:1"))
other = psutil.Process(embedded.pid("worker:0"))

class Look(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        step = batch + 1
        if step in (10, 20):
            # The signal has been sent; the kernel acts on it when it can.
            while (other.status() == psutil.STATUS_STOPPED) != (step == 10):
                pass
            print("step", step, flush=True)
        if step == 30:
            first.wait()
            print("killed", flush=True)

faults = [(10, "stop", "worker:0"), (20, "continue", "worker:0"), (30, "kill", "worker:1")]
callbacks = [tfdist.testing.Faults(faults), Look()]
made.fit(tf.data.Dataset.from_tensors((X, Y)).repeat(), steps_per_epoch=200, verbose=0, callbacks=callbacks)
while embedded.pid("worker:1") in (None, first.pid):
    pass
print("iterations", int(made.optimizer.iterations), flush=True)
"""


@pytest.mark.processes
def test_workers_are_stopped_continued_and_killed_while_training_goes_on(tmp_path: pathlib.Path) -> None:
    with programs.running(FAULTY, tmp_path) as program:
        assert program.wait(110) == 0, program.output
        for line in ("step 10", "step 20", "killed", "worker:1 ended with code -9, starting it again"):
            assert line in program.output
        (count,) = [int(line.split()[1]) for line in program.output.splitlines() if line.startswith("iterations")]
        # A step that was under way when its worker was killed may be made twice.
        assert 200 <= count <= 202, program.output


@pytest.mark.processes
def test_a_worker_of_several_kills_itself_at_its_step(tmp_path: pathlib.Path) -> None:
    script = """
    strategy = tfdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((tf.ones((8, 4)), tf.ones((8, 1)))).repeat()

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            report("batches", batch + 1)

    callbacks = [Count(), tfdist.testing.Faults([(7, "kill", "worker:1")])]
    model.fit(data, steps_per_epoch=10**6, verbose=0, callbacks=callbacks)
    """
    with process_cluster.workers(script, tmp_path) as running:
        assert running[1].wait(60) == -signal.SIGKILL, running[1].output
        assert running[1].found == {"batches": 7}
        # The other one waits for it, and then gets an error.
        assert running[0].process.poll() != -signal.SIGKILL
