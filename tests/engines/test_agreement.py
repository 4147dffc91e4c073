# SPDX-License-Identifier: Apache-2.0
"""State that an agreement's threads share: waits, their failures, and the published end of a worker."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import threading

import pytest
import tensorflow as tf
from overlapping import in_thread

from tfdist.cluster import Task
from tfdist.coordination import lost_servers, stalls
from tfdist.coordination.worker_waits import PARTED_SECS, STEP, WorkerStatus, step_of
from tfdist.engines.agreement import Agreement

TASKS = [Task("worker", 0), Task("worker", 1)]


@pytest.fixture
def agreement() -> Agreement:
    """Agreement of worker:1 without a cluster; its threads are not started."""
    return Agreement(TASKS[1], TASKS)


def test_status_after_the_end_is_not_published(agreement: Agreement, monkeypatch: pytest.MonkeyPatch):
    posted: list[str] = []
    monkeypatch.setattr(agreement, "post", lambda key, text: posted.append(text))
    monkeypatch.setattr(agreement, "peek", lambda key: None)
    monkeypatch.setattr(agreement, "service_answers", lambda: True)
    monkeypatch.setattr(agreement, "lost", dict)
    own = WorkerStatus("worker:1", "model.fit", blocked_secs=PARTED_SECS)
    monkeypatch.setattr(agreement, "state", lambda *_: (own, TASKS[:1]))
    agreement._look()
    agreement.end()
    # Of the thread that has begun to look before the end.
    agreement._look()
    assert len(posted) == 2 and "has ended" in posted[-1]


def test_worker_that_saw_the_parting_first_tells_others_by_its_end(
    agreement: Agreement, monkeypatch: pytest.MonkeyPatch
):
    """The other worker may look only then: its collective fails as soon as the process of this one is gone."""
    own = WorkerStatus("worker:1", "model.fit", blocked_secs=PARTED_SECS, part=step_of("1 sum"))
    other = WorkerStatus("worker:0", "model.fit", blocked_secs=PARTED_SECS, part=step_of("2 sums"))
    secs = itertools.count(PARTED_SECS)
    status_of_other = lambda key: dataclasses.replace(other, blocked_secs=next(secs)).to_json()  # noqa: E731
    monkeypatch.setattr(agreement, "peek", status_of_other)
    monkeypatch.setattr(agreement, "post", lambda key, text: None)
    monkeypatch.setattr(agreement, "service_answers", lambda: True)
    monkeypatch.setattr(agreement, "lost", dict)
    monkeypatch.setattr(agreement, "state", lambda *_: (own, TASKS[:1]))
    with agreement.joint():
        wait = agreement.current_wait()
        for _ in range(2):
            agreement._look()
    assert wait is not None
    assert type(wait.failure) is RuntimeError and "in model.fit (a step of 1 sum)" in str(wait.failure)
    late = Agreement(TASKS[0], TASKS)
    ended = WorkerStatus("worker:1", ended=f"worker:1 ended with RuntimeError: {wait.failure}").to_json()
    monkeypatch.setattr(late, "peek", lambda key: ended)
    reset = tf.errors.UnavailableError(None, None, "recvmsg:Connection reset by peer")
    assert str(wait.failure) in str(late.failure_behind(reset))


def test_failure_of_a_wait_that_is_over_ends_no_other_wait(agreement: Agreement):
    with agreement.joint("one"):
        looked_at = agreement.current_wait()
    assert looked_at is not None
    looked_at.failure = ConnectionError("worker:0 has ended")
    with agreement.joint("another"):
        agreement.check()
        with agreement.joint("inner"):
            agreement.current_wait().failure = ConnectionError("worker:0 has ended")
            with pytest.raises(ConnectionError, match="worker:0"):
                agreement.check()


def test_worker_whose_host_refuses_connections_is_lost_at_once(monkeypatch: pytest.MonkeyPatch):
    """The service waits for its heartbeats for 10 s."""
    own = WorkerStatus("worker:1", "model.fit", "comparing the data sets")
    with socket.create_server(("127.0.0.1", 0)) as server:
        agreement = Agreement(TASKS[1], TASKS, {TASKS[0]: f"127.0.0.1:{server.getsockname()[1]}"})
        monkeypatch.setattr(agreement, "lost", dict)
        monkeypatch.setattr(agreement, "peek", lambda key: None)
        assert agreement._loss(own, TASKS[:1]) is None
    found = str(agreement._loss(own, TASKS[:1]))
    assert (
        found.startswith("model.fit (comparing the data sets) will never end") and "worker:0 (the connection" in found
    )


def test_reason_that_keras_quotes_in_its_own_error_is_found(agreement: Agreement, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agreement, "failure", reason := ConnectionError("worker:0 has ended"))
    assert agreement.failure_behind(TypeError("Error when deserializing class 'Dropout'")) is None
    assert agreement.failure_behind(TypeError(f"Exception encountered: is aborted by: {reason}\nThe error")) is reason


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (tf.errors.InternalError(None, None, "Collective instance 124 expected type 0 and"), "different collectives"),
        (tf.errors.InvalidArgumentError(None, None, "Shape mismatch in the collective instance 9."), "same models"),
    ],
)
def test_error_of_a_collective_is_told_in_one_line(agreement: Agreement, error: tf.errors.OpError, words: str):
    found = agreement.failure_behind(error)
    assert found is not None and words in str(found) and "\n" not in str(found)


def test_lost_connection_is_to_the_worker_that_is_found_soon(agreement: Agreement, monkeypatch: pytest.MonkeyPatch):
    """A process that ends closes its connections first."""
    reset, gone = tf.errors.UnavailableError(None, None, "Connection reset by peer"), iter([[], ["worker:0"]])
    monkeypatch.setattr(agreement, "peek", lambda key: None)
    monkeypatch.setattr(agreement, "lost", dict)
    monkeypatch.setattr(lost_servers, "refused", lambda addresses: next(gone, []))
    assert "worker:0 (the connection to it" in str(agreement.failure_behind(reset))
    # Its host may refuse nothing.
    assert "worker:0 (the connection to it" in str(agreement.failure_behind(reset))
    assert agreement.failure_behind(tf.errors.UnavailableError(None, None, "busy")) is None
    # Another connection may be meant: this worker answers.
    with socket.create_server(("127.0.0.1", 0)) as server:
        agreement._addresses["worker:0"] = f"127.0.0.1:{server.getsockname()[1]}"
        assert agreement.failure_behind(reset) is None
    # A quorum server knows of which worker it has lost the connection.
    found = str(agreement.failure_behind(ConnectionError("lost"), ["worker:0"]))
    assert found.startswith("a sum over all workers will never come") and "worker:0 (the connection to it" in found


def test_function_with_a_collective_is_known_by_the_line_that_calls_it(agreement: Agreement):
    """A thread is in it at each call, also when it is traced no more; and not in a function without collectives."""
    found: list[tuple[str, str, int]] = []

    def look_at(thread: threading.Thread) -> None:
        state, awaited = agreement.state(stalls.of(thread))
        found.append((state.call, state.part, len(awaited)))

    def look() -> None:
        in_thread(lambda: look_at(threading.main_thread()))

    @tf.function
    def train_step() -> None:
        agreement.note_traced(tf.compat.v1.get_default_graph())
        tf.py_function(look, [], [])

    @tf.function
    def read() -> None:
        tf.py_function(look, [], [])

    for _ in range(2):
        train_step()
        read()
    assert found == [("train_step", STEP, 1), ("", "", 0)] * 2


def test_worker_that_traces_does_not_wait_and_is_counted_whole(agreement: Agreement):
    """A slow worker looked at halfway through a trace was taken for one whose step has fewer collectives."""
    found: list[str] = []

    def look() -> None:
        in_thread(lambda: found.append(agreement.state(stalls.of(threading.main_thread()))[0].part))

    @tf.function
    def train_step(value: tf.Tensor) -> tf.Tensor:
        for _ in range(2):
            agreement.note_traced(tf.compat.v1.get_default_graph())
            look()
            value = tf.raw_ops.CollectiveReduceV2(
                input=value, group_size=1, group_key=1, instance_key=1, ordering_token=[], merge_op="Add", final_op="Id"
            )
        tf.py_function(look, [], [])
        return value

    with contextlib.suppress(tf.errors.OpError):
        train_step(tf.ones([2]))
    assert found == ["", "", step_of("2 sums")]
