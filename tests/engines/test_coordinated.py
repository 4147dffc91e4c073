# SPDX-License-Identifier: Apache-2.0
"""The engine over workers made of threads: nothing is lost, nothing counted twice, nothing waits for ever."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from fake_cluster import FakeProgram, running_engine
from fake_passes import Gate, Pass, all_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.engines import step_queue

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("as_in_keras_loops")]


# The window.


def test_no_more_steps_are_under_way_than_the_window_holds() -> None:
    with running_engine(2) as (engine, cluster):
        gate = Gate()
        program = FakeProgram(cluster, lambda: gate())
        for _ in range(engine.window):
            engine.start(program, [], None)
        waiting = threading.Thread(target=engine.step, args=(program, [], None, False))
        waiting.start()
        gate.wait_for(2)
        waiting.join(timeout=0.05)
        assert len(engine._queue.pending) == engine.window
        gate.open()
        waiting.join(timeout=30)
        assert not waiting.is_alive()


def test_a_step_does_not_wait_for_the_ones_before() -> None:
    with running_engine(2) as (engine, cluster):
        gate = Gate()
        passed = Pass(engine, cluster, [5, 5], work=lambda batch: gate() if batch.position else None)
        assert [passed.step() >= 1 for _ in range(4)] == [True] * 4
        gate.open()
        passed.run()
        assert sorted(passed.batches) == all_of([5, 5])


# What comes back.


def test_results_of_start_are_told_apart() -> None:
    with running_engine(3) as (engine, cluster):
        program = FakeProgram(cluster, lambda number: number)
        started = [engine.start(program, [n], None) for n in range(30)]
        assert [int(engine.wait_for(result)[0]) for result in started] == list(range(30))


def test_the_first_step_of_a_pass_has_logs_and_the_last_has_those_of_all() -> None:
    with running_engine(2) as (engine, cluster):
        logs = Pass(engine, cluster, [7, 7]).run()
        assert len(logs) == 14
        assert logs[0] >= 1
        assert logs[-1] == 14


def test_without_need_of_logs_the_first_step_does_not_wait_either() -> None:
    with running_engine(2) as (engine, cluster):
        gate = Gate()
        program = FakeProgram(cluster, lambda: gate() or 7)
        assert [engine.step(program, [], None, False, waits=lambda: False) for _ in range(4)] == [None] * 4
        gate.wait_for(2)
        gate.open()
        assert [int(value) for value in engine.step(program, [], None, True) or ()] == [7]


def test_logs_are_fetched_only_when_they_are_due() -> None:
    now = [0.0]
    with running_engine(1, clock=lambda: now[0]) as (engine, cluster):
        passed = Pass(engine, cluster, [100])
        for _ in range(10):
            passed.step()
        engine.barrier(writes=False)
        assert passed.program.fetched == 1
        now[0] += step_queue.LOG_INTERVAL_SECS
        passed.step()
        engine.barrier(writes=False)
        assert passed.program.fetched == 2
        assert passed.step() == 11


def test_logs_of_before_a_write_by_the_chief_are_never_shown_after_it() -> None:
    with running_engine(1) as (engine, cluster):
        passed = Pass(engine, cluster, [100])
        for _ in range(5):
            passed.step()
        engine.barrier(writes=True)
        passed.batches.clear()  # as resetting a metric does
        assert passed.step() == 1


def test_logs_of_another_program_are_not_shown() -> None:
    with running_engine(1) as (engine, cluster):
        first, second = (Pass(engine, cluster, [4]) for _ in range(2))
        assert first.run()[-1] == 4
        # No variable was written in between: a model without metrics resets none.
        assert second.step() == 1


# The chief's reads and writes.


def test_a_barrier_waits_for_every_step_before_it() -> None:
    with running_engine(3) as (engine, cluster):
        done = []
        program = FakeProgram(cluster, lambda number: done.append(number) or 0)
        for number in range(40):
            engine.start(program, [number], None)
        engine.barrier(writes=False)
        assert sorted(done) == list(range(40))


def test_a_barrier_inside_a_step_does_not_wait_for_the_step_itself() -> None:
    with running_engine(1) as (engine, cluster):
        program = FakeProgram(cluster, lambda: engine.barrier(writes=True) or 7)
        assert int(engine.call(program, [], None)[0]) == 7


def test_those_who_hold_up_the_steps_are_named() -> None:
    with running_engine(2) as (engine, cluster):
        gate = Gate()
        started = [engine.start(FakeProgram(cluster, lambda: gate() or 0), [], None) for _ in range(2)]
        gate.wait_for(2)
        named = engine.waited_for()
        gate.open()
        for result in started:
            engine.wait_for(result)
        assert named == "worker:0, worker:1"
        assert "worker:" not in engine.waited_for()


# The end of the data.


def test_asking_beyond_the_end_says_so_each_time() -> None:
    with running_engine(2) as (engine, cluster):
        passed = Pass(engine, cluster, [1, 1], "nothing")
        assert len(passed.run()) == 2
        for _ in range(3):
            with pytest.raises((StopIteration, tf.errors.OutOfRangeError)):
                next(iter(passed.iterator))


def test_a_call_beyond_the_end_says_so() -> None:
    with running_engine(2) as (engine, cluster):
        passed = Pass(engine, cluster, [1, 0], "nothing")
        assert int(engine.call(passed.program, [], passed.iterator.decide(by_chief=False))[0]) == 1
        with pytest.raises(tf.errors.OutOfRangeError):
            engine.call(passed.program, [], passed.iterator.decide(by_chief=False))


def test_steps_of_two_passes_by_turns_do_not_wait_for_each_other() -> None:
    shares = {"first": [1, 8], "second": [8, 1]}
    with running_engine(2) as (engine, cluster):
        passes = [Pass(engine, cluster, share) for share in shares.values()]
        for _ in range(9):
            for passed in passes:
                passed.step()
        engine.barrier(writes=False)
        assert [sorted(passed.batches) for passed in passes] == [all_of(share) for share in shares.values()]


# Whatever the workers do.

SHARES = st.lists(st.integers(0, 12), min_size=1, max_size=4)
SPEEDS = st.lists(st.integers(0, 3), min_size=4, max_size=4)


@settings(max_examples=150, deadline=None)
@given(SHARES, SPEEDS, st.sampled_from(["total and shares", "nothing"]), st.integers(1, 3))
def test_any_speeds_and_shares_and_passes(shares: list[int], speeds: list[int], known: str, passes: int) -> None:
    def work(batch: Any) -> None:
        time.sleep(speeds[batch.worker] * 2e-4)  # how long that worker computes

    with running_engine(len(shares)) as (engine, cluster):
        for _ in range(passes):
            passed = Pass(engine, cluster, shares, known, work)
            logs = passed.run()
            assert collections.Counter(passed.batches) == collections.Counter(all_of(shares))
            assert len(logs) == sum(shares)
            # Where the end can't be foreseen, no step is known to be the last one.
            assert known == "nothing" or not logs or logs[-1] == sum(shares)
            engine.barrier(writes=True)


@settings(max_examples=100, deadline=None)
@given(SHARES, SPEEDS, st.integers(0, 50), st.sampled_from(["total and shares", "nothing"]))
def test_an_error_anywhere_is_raised_once_and_the_next_pass_is_whole(
    shares: list[int], speeds: list[int], bad: int, known: str
) -> None:
    batches = all_of(shares)

    def work(batch: Any) -> None:
        time.sleep(speeds[batch.worker] * 2e-4)
        if bad < len(batches) and batch == batches[bad]:
            raise ValueError("my own message")

    with running_engine(len(shares)) as (engine, cluster):
        expectation = pytest.raises(ValueError, match=r"^my own message$")
        with expectation if bad < len(batches) else contextlib.nullcontext():
            Pass(engine, cluster, shares, known, work).run()
        passed = Pass(engine, cluster, shares, known)
        passed.run()
        assert sorted(passed.batches) == batches


def test_numbers_come_back_as_they_are() -> None:
    with running_engine(1) as (engine, cluster):
        (value,) = engine.call(FakeProgram(cluster, lambda: np.float32(0.1)), [], None)
        assert value.dtype == np.float32


def test_close_may_be_called_again() -> None:
    with running_engine(1) as (engine, cluster):
        assert Pass(engine, cluster, [2]).run()
        for _ in range(2):
            engine.close()
            engine.barrier()
