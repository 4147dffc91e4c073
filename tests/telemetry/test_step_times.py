# SPDX-License-Identifier: Apache-2.0
"""Times of synchronous steps: what is read from the graph, and which replica, input or sum it blames."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tfdist
from tfdist.step.step_times import StepClock
from tfdist.telemetry.report import Report
from tfdist.telemetry.update_log import Contributions, Updates, read_logs
from tfdist.watching.tensorboard import plugin

X = np.random.default_rng(0).random((8, 4), np.float32)
Y = X.sum(1, keepdims=True)
STEPS = 50
SECS = st.integers(1, 1000).map(lambda value: value / 1024)


@given(st.lists(st.lists(st.tuples(SECS, SECS, SECS), min_size=3, max_size=3), min_size=1), SECS)
def test_waits_are_differences_of_durations_and_no_clock_is_compared(rows: list, reduce: float) -> None:
    """Each worker sees the others' durations, and the ends of sums on its own clock, which may be anything."""
    times, end, read = StepClock(3, 1, "/device:CPU:0"), 1e6, []
    for parts in rows:
        busy = [sum(each) for each in parts]
        end += max(busy) + reduce
        read.append([end, max(busy) + reduce - busy[1], 1.0, *np.ravel(parts)])
    updates, gradients = times._steps(np.array(read))
    assert updates.step.tolist() == [*range(1, len(rows) + 1)]
    for number, parts in enumerate(rows):
        busy = [sum(each) for each in parts]
        assert updates.wait[number] == pytest.approx(max(busy) - min(busy), abs=1e-6)
        assert updates.reduce[number] == pytest.approx(reduce, abs=1e-6)
        for worker, start, arrival, read_secs in zip(
            *(getattr(gradients, name)[3 * number :][:3] for name in ("worker", "start", "arrival", "input")),
            strict=True,
        ):
            _, reading, compute = parts[worker]
            assert -updates.reduce[number] - arrival == pytest.approx(max(busy) - busy[worker], abs=1e-6)
            assert arrival - start == pytest.approx(reading + compute, abs=1e-6)
            assert read_secs == pytest.approx(reading)
        if number:
            assert updates.opened[number] == pytest.approx(max(busy) + reduce, abs=1e-6)


@given(st.lists(st.tuples(SECS, SECS, SECS), min_size=2, max_size=2), st.integers(1, 9), st.booleans())
def test_steps_of_one_sum_share_its_times_equally(parts: list, steps: int, begins: bool) -> None:
    times, busy = StepClock(2, 0, "/device:CPU:0"), [sum(each) for each in parts]
    in_sum = 0.5 + max(busy) - busy[0]
    updates, gradients = times._steps(np.array([[1e6, in_sum, -steps if begins else steps, *np.ravel(parts)]]))
    assert times.take()[0] == 0 and len(updates) == steps
    np.testing.assert_allclose(updates.reduce, 0.5 / steps, atol=1e-6)
    np.testing.assert_allclose(np.diff(updates.time), (max(busy) + 0.5) / steps, atol=1e-6)
    # The last one waits for all.
    assert not updates.wait[:-1].any() and updates.wait[-1] == pytest.approx(max(busy) - min(busy), abs=1e-6)
    for worker, (_, reading, compute) in enumerate(parts):
        own = gradients[gradients.worker == worker]
        np.testing.assert_allclose(own.arrival - own.start, (reading + compute) / steps, atol=1e-6)


def test_steps_that_the_graph_has_no_room_for_are_counted() -> None:
    times = StepClock(2, None, "/device:CPU:0")
    times.capacity = 4
    count, rows, *_ = times.variables()
    rows.assign(tf.ones_like(rows))
    count.assign(3)
    untimed, updates, _ = times.take()
    assert (untimed, len(updates)) == (0, 3)
    count.assign(13)
    untimed, updates, _ = times.take()
    assert (untimed, updates.step.tolist()) == (6, [10, 11, 12, 13])
    assert [len(each) for each in times.take()[1:]] == [0, 0]


class Late(keras.layers.Layer):
    """Keeps one replica waiting."""

    def __init__(self, replica: int) -> None:
        super().__init__()
        self.replica = replica

    def call(self, x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        if context is None or not tf.is_tensor(x):
            return x

        def wait(value: np.ndarray, replica: int) -> np.ndarray:
            time.sleep(0.05 if replica == self.replica else 0.0)
            return value

        waited = tf.numpy_function(wait, [x, context.replica_id_in_sync_group], tf.float32)
        return tf.ensure_shape(waited, x.shape)


def trained(
    cpus: list[str],
    late: int = -1,
    input_secs: float = 0.0,
    callbacks: Sequence[Any] = (),
    policies: Sequence[Any] = (),
    steps: int = STEPS,
    **compiled: Any,
) -> Report:
    strategy = tfdist.MirroredStrategy(cpus[:2], policies=policies)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), Late(late), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **compiled)

    def read(x: np.ndarray) -> np.ndarray:
        time.sleep(input_secs)
        return x

    data = tf.data.Dataset.from_tensor_slices((X, Y)).repeat(steps).batch(8)
    data = data.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(read, [x], tf.float32), (8, 4)), y))
    model.fit(data, verbose=0, callbacks=[*callbacks])
    report = strategy.report()
    assert report.updates == steps
    assert report.accepted == {"worker:0": steps, "worker:1": steps}
    return report


@pytest.mark.devices
@pytest.mark.parametrize("steps_per_execution", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_slow_replica_is_named_by_report_and_page(
    cpus: list[str], tmp_path: pathlib.Path, steps_per_execution: int
) -> None:
    callbacks = [tfdist.callbacks.Telemetry(tmp_path)]
    report = trained(cpus, late=1, callbacks=callbacks, steps_per_execution=steps_per_execution)
    assert report.slow is not None and report.slow.names == ("worker:1",)
    assert report.in_words.endswith("of its time is computing")
    assert report.wait["worker:0"].p50 > 0.03 > report.wait["worker:1"].p50
    page = plugin.RecordedJob(read_logs(tmp_path))
    assert page.report.in_words == report.in_words
    assert page.report.order[0] == "worker:1"
    assert page.lanes == [1, 0]


@pytest.mark.devices
def test_slow_replica_between_averages_is_named_without_telemetry(cpus: list[str]) -> None:
    # The last average is of one step alone.
    report = trained(cpus, late=1, policies=[tfdist.ParameterAveraging(2)], steps=81)
    assert report.slow is not None and report.slow.names == ("worker:1",), str(report)
    assert report.in_words.endswith("of its time is computing")
    # Of each step.
    assert 0.04 < report.compute_secs["worker:1"].p50 < 0.1
    assert 0.04 * 81 < report.wait_secs < 0.1 * 81


@pytest.mark.devices
def test_two_threads_collect_each_step_once(cpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = tfdist.MirroredStrategy(cpus[:2])
    counted = strategy.report().updates
    inside: list[threading.Thread] = []

    def take(times: StepClock) -> tuple[int, Updates, Contributions]:
        if inside:
            return 0, Updates.of_rows([]), Contributions.of_rows([])
        inside.append(threading.Thread(target=strategy.distribution.collect))
        inside[0].start()
        inside[0].join(0.2)
        # The other thread waits until the steps are recorded.
        assert inside[0].is_alive()
        return 3, Updates.of_rows([]), Contributions.of_rows([])

    monkeypatch.setattr(StepClock, "take", take)
    strategy.distribution.collect()
    inside[0].join(20)
    assert not inside[0].is_alive() and strategy.report().updates == counted + 3


def test_replicas_that_wait_for_one_input_are_alike(cpus: list[str]) -> None:
    report = trained(cpus, input_secs=0.05)
    assert report.slow is None
    assert report.in_words.startswith("no worker stands out; ") and report.in_words.endswith("of a step is input")
    assert report.input_secs["worker:0"] == report.input_secs["worker:1"]


@pytest.mark.devices
def test_launchers_add_telemetry_to_a_fit(
    cpus: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TFDIST_TELEMETRY", str(tmp_path / "logs"))
    strategy = tfdist.MirroredStrategy(cpus[:2])
    monkeypatch.delenv("TFDIST_TELEMETRY")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    assert (tmp_path / "logs" / "policy" / "updates").is_dir()
    assert capsys.readouterr().err.count(f"tfdist watch {tmp_path / 'logs'}") == 1
    own = tfdist.callbacks.Telemetry(tmp_path / "own")
    model.fit(X, Y, verbose=0, callbacks=own)
    assert (tmp_path / "own" / "policy" / "updates").is_dir()
    assert not (tmp_path / "logs" / "policy" / "updates_2").exists()
