# SPDX-License-Identifier: Apache-2.0
"""Errors of the user's step, and lost tasks, in the engine over workers made of threads."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import tensorflow as tf
from fake_cluster import Batch, FakeProgram, running_engine
from fake_passes import Gate, Pass, all_of
from waiting import wait_until

from tfdist.compat.tensorflow import coordinator
from tfdist.engines import step_queue

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("as_in_keras_loops")]


# Errors of the user's step.


def test_error_of_what_follows_updates_reaches_the_caller() -> None:
    def follow(update: Any) -> None:
        raise OSError("no space for the log")

    with running_engine(1, on_update=follow) as (engine, cluster):
        passed = Pass(engine, cluster, [1])
        passed.iterator.take_handle(1)
        with pytest.raises(OSError, match="no space for the log"):
            engine.step(passed.program, [], passed.iterator.feed, True, is_update=True)
            engine.barrier(writes=False)


def test_an_error_of_steps_that_a_raised_call_has_left_is_in_no_later_one() -> None:
    gate = Gate()

    def work(batch: Batch) -> None:
        if batch.position:
            gate()
            raise ValueError("my own message")

    with running_engine(1) as (engine, cluster):
        passed = Pass(engine, cluster, [6], work=work)
        passed.step()
        passed.step()
        gate.wait_for(1)
        # As a callback does, or Ctrl-C.
        engine.end_call(KeyboardInterrupt())
        gate.open()
        assert Pass(engine, cluster, [3]).run()[-1] == 3


def test_an_error_of_a_call_reaches_its_caller() -> None:
    def fail() -> None:
        raise ZeroDivisionError("by my own step")

    with running_engine(1) as (engine, cluster):
        with pytest.raises(ZeroDivisionError, match="by my own step"):
            engine.call(FakeProgram(cluster, fail), [], None)
        assert int(engine.call(FakeProgram(cluster, lambda: 4), [], None)[0]) == 4


def test_of_several_errors_the_first_is_raised_and_the_others_do_not_come_later() -> None:
    def fail() -> None:
        raise ValueError("again and again")

    with running_engine(2) as (engine, cluster):
        for _ in range(4):
            engine.start(FakeProgram(cluster, fail), [], None)
        with pytest.raises(ValueError, match="again and again"):
            engine.barrier(writes=False)
        engine.barrier(writes=False)


def test_a_step_that_outlives_the_error_of_another_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_queue, "_ERROR_GRACE_SECS", 0.0)
    with running_engine(2) as (engine, cluster):
        slow, next_slow = Gate(), Gate()

        def fail() -> None:
            raise ValueError("my own message")

        late = engine.start(FakeProgram(cluster, lambda: slow() or 1), [], None)
        slow.wait_for(1)
        with pytest.raises(ValueError, match="my own message"):
            engine.call(FakeProgram(cluster, fail), [], None)
        running = engine.start(FakeProgram(cluster, lambda: next_slow() or 2), [], None)
        next_slow.wait_for(1)
        slow.open()
        late.result(timeout=30)
        waiting = threading.Thread(target=engine.barrier, args=(False,))
        waiting.start()
        waiting.join(timeout=0.05)
        assert waiting.is_alive(), "the barrier took the late step for the one that is under way"
        next_slow.open()
        assert int(engine.wait_for(running)[0]) == 2
        waiting.join(timeout=30)
        assert not waiting.is_alive(), "the barrier waits for a step that is done"


# Lost tasks.


def test_a_step_of_a_lost_worker_is_made_by_another() -> None:
    with running_engine(2) as (engine, cluster):
        cluster.lose(0)
        program = FakeProgram(cluster, coordinator.current_worker)
        assert {int(engine.call(program, [], None)[0]) for _ in range(10)} == {1}
        cluster.bring_back(0)


def test_a_worker_that_comes_back_is_no_longer_called_lost() -> None:
    with running_engine(1) as (engine, cluster):
        cluster.lose(0)
        started = engine.start(FakeProgram(cluster, lambda: 1), [], None)
        wait_until(lambda: "worker:0 (lost" in engine.waited_for())
        cluster.bring_back(0)
        engine.wait_for(started)
        assert "lost" not in engine.waited_for()


def test_an_error_in_what_is_told_of_a_worker_that_is_back_is_raised_and_the_worker_goes_on() -> None:
    def on_loss(worker: int, is_lost: bool) -> None:
        if not is_lost:
            raise OSError("the disk is full")

    with running_engine(1, poll_secs=0.02) as (engine, cluster):
        engine.follow_losses(on_loss)
        cluster.lose(0)
        started = engine.start(FakeProgram(cluster, lambda: 1), [], None)
        wait_until(lambda: "worker:0 (lost" in engine.waited_for())
        cluster.bring_back(0)
        with pytest.raises(OSError, match="the disk is full"):
            engine.wait_for(started)
            engine.barrier(writes=False)
        assert int(engine.call(FakeProgram(cluster, lambda: 2), [], None)[0]) == 2


@pytest.mark.parametrize("found_by", ["a step", "the coordinator"])
@pytest.mark.parametrize("known", ["total and shares", "nothing"])
def test_own_data_of_a_lost_worker_end_with_a_warning(known: str, found_by: str) -> None:
    """Other workers can't read them: steps under way end, the loop ends, and a warning names the missing batches."""
    with running_engine(2, poll_secs=0.02) as (engine, cluster):
        passed = Pass(engine, cluster, [4, 3], known, can_move=False)
        cluster.lose(0) if found_by == "a step" else cluster.find_dead(0)
        with pytest.warns(RuntimeWarning, match="worker:0 was lost") as warned:
            passed.run()
            engine.barrier(writes=False)
        assert sorted(passed.batches) == all_of([0, 3])
        cluster.bring_back(0)
        expected = "4 of its 7 batches" if known == "total and shares" else "an unknown number of batches"
        assert [expected in str(warning.message) for warning in warned] == [True]


@pytest.mark.parametrize("found_by", ["a step", "the coordinator"])
@pytest.mark.parametrize("known", ["total and shares", "nothing"])
@pytest.mark.parametrize("lost_at", [0, 2, 3])
def test_share_of_a_lost_worker_is_used_once_by_others(known: str, found_by: str, lost_at: int) -> None:
    with running_engine(3, poll_secs=0.02) as (engine, cluster), warnings.catch_warnings():
        warnings.simplefilter("error")

        def work(batch: Batch) -> None:
            if batch == Batch(0, lost_at) and coordinator.current_worker() == 0:
                cluster.lose(0)
                cluster.check_alive()

        if found_by == "the coordinator":
            cluster.find_dead(0)
        passed = Pass(engine, cluster, [7, 3, 2], known, work)
        assert len(passed.run()) == 12
        engine.barrier(writes=False)
        assert sorted(passed.batches) == all_of([7, 3, 2])
        # As a pass does that begins while it is lost.
        passed = Pass(engine, cluster, [2, 1, 2], known)
        assert len(passed.run()) == 5
        engine.barrier(writes=False)
        assert sorted(passed.batches) == all_of([2, 1, 2])
        cluster.bring_back(0)


@pytest.mark.parametrize("known", ["total and shares", "nothing"])
def test_a_worker_that_is_back_in_time_goes_on_with_its_share_and_nothing_is_said(known: str) -> None:
    with running_engine(2, poll_secs=0.02) as (engine, cluster), warnings.catch_warnings(record=True) as warned:
        # Else what was said once, in another test, is not said again.
        warnings.simplefilter("always")
        gate = Gate()
        passed = Pass(engine, cluster, [4, 3], known, work=lambda batch: gate() if batch == Batch(1, 1) else None)
        cluster.lose(0)
        loop = threading.Thread(target=passed.run)
        loop.start()
        gate.wait_for(1)
        wait_until(lambda: "worker:0 (lost" in engine.waited_for())
        cluster.bring_back(0)
        wait_until(lambda: sum(batch.worker == 0 for batch in passed.batches) == 4)
        gate.open()
        loop.join(timeout=30)
        engine.barrier(writes=False)
        assert sorted(passed.batches) == all_of([4, 3])
        assert not warned


def test_a_wait_for_a_worker_that_never_comes_back_ends_with_its_name() -> None:
    now = [0.0]
    looks: list[float] = []

    def clock() -> float:
        if now[0] == 1599.0 and threading.current_thread() is threading.main_thread():
            looks.append(now[0])
            # It looks at the clock whenever it has waited, and goes on waiting until the time is over.
            now[0] = 1599.0 if len(looks) < 3 else 1601.0
        return now[0]

    with running_engine(1, clock, poll_secs=0.02, stall_timeout_secs=600.0) as (engine, cluster):
        engine.call(FakeProgram(cluster, lambda: 1), [], None)
        cluster.lose(0)
        now[0] = 1000.0  # between steps no time is counted
        started = engine.start(FakeProgram(cluster, lambda: 1), [], None)
        wait_until(lambda: "lost" in engine.waited_for())
        now[0] = 1599.0
        with pytest.raises(TimeoutError, match=r"600 s; still waiting for worker:0 \(lost.*stall_timeout_secs=600"):
            engine.wait_for(started)
        assert len(looks) == 3
        cluster.bring_back(0)
        assert int(engine.call(FakeProgram(cluster, lambda: 2), [], None)[0]) == 2


def test_a_worker_lost_after_another_is_at_its_end_keeps_nobody_waiting() -> None:
    with running_engine(2, poll_secs=0.02) as (engine, cluster):
        gate = Gate()

        def work(batch: Any) -> None:
            if batch == Batch(0, 1):
                gate()
                cluster.lose(0)
                cluster.check_alive()

        passed = Pass(engine, cluster, [5, 1], work=work)
        loop = threading.Thread(target=passed.run)
        loop.start()
        gate.wait_for(1)
        wait_until(lambda: 1 not in passed.iterator.feed.pieces.held)
        gate.open()
        loop.join(timeout=10)
        stuck = loop.is_alive()
        cluster.bring_back(0)
        loop.join(timeout=30)
        assert not stuck


def test_what_the_coordinator_can_not_mend_is_raised_and_then_forgotten() -> None:
    with running_engine(1, poll_secs=0.02) as (engine, cluster):
        gate = Gate()
        engine.start(FakeProgram(cluster, lambda: gate() or 0), [], None)
        gate.wait_for(1)
        cluster.failure = tf.errors.UnavailableError(None, None, "ps:0 is lost")
        with pytest.raises(tf.errors.UnavailableError, match="ps:0 is lost"):
            engine.barrier(writes=False)
        gate.open()
