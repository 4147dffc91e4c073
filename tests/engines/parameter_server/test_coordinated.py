# SPDX-License-Identifier: Apache-2.0
"""The engine over workers made of threads: nothing is lost, nothing counted twice, nothing waits for ever."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from fake_cluster import Batch, FakeCluster, FakeDataset, FakeProgram, running_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import wait_until

from tfdist.compat import closures
from tfdist.engines.parameter_server import step_queue, worker_data
from tfdist.engines.parameter_server.engine import CoordinatedEngine
from tfdist.engines.parameter_server.worker_data import WorkerIterator

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _as_in_keras_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes passes take the caller for Keras, whose loop finds the end of the data by a step."""
    monkeypatch.setattr(worker_data.running_loop, "call_frame", lambda frame: frame)


class Pass:
    """One pass over data, driven as Keras drives it; remembers which batches were made by whom.

    Args:
      engine: the engine.
      cluster: its workers.
      shares: batches of each worker.
      known: see `FakeDataset`.
      work: called with the batch at each step, before it counts; may raise.
    """

    def __init__(
        self,
        engine: CoordinatedEngine,
        cluster: FakeCluster,
        shares: list[int],
        known: str = "total and shares",
        work: Callable[[Any], Any] = lambda batch: None,
    ) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._work = work
        self.batches: list[Any] = []
        self.program = FakeProgram(cluster, self._step)
        self.iterator = WorkerIterator(engine, FakeDataset(cluster, shares, known))

    def _step(self, batch: Any, *tensors: Any) -> int:
        self._work(batch)
        with self._lock:
            self.batches.append(batch)
            return len(self.batches)

    def step(self) -> int:
        """One turn of Keras' loop; the logs of it, which are the number of batches."""
        next(self.iterator)
        return int(self._engine.step(self.program, [], self.iterator, last=self.iterator.is_last)[0])

    def run(self) -> list[int]:
        """All turns of Keras' loop; the logs of each."""
        logs = []
        with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
            while True:
                logs.append(self.step())
        return logs


def all_of(shares: list[int]) -> list[Batch]:
    return [Batch(worker, position) for worker, size in enumerate(shares) for position in range(size)]


class Gate:
    """Holds steps until it is opened, and says how many arrived."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._arrived = threading.Semaphore(0)

    def __call__(self, batch: Any = None) -> None:
        self._arrived.release()
        assert self._open.wait(30)

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self._arrived.acquire(timeout=30)

    def open(self) -> None:
        self._open.set()


# The window.


def test_no_more_steps_are_under_way_than_the_window_holds() -> None:
    with running_engine(2) as (engine, cluster):
        gate = Gate()
        program = FakeProgram(cluster, lambda: gate())
        for _ in range(engine.window):
            engine.make_room()
            engine.start(program, [], None)
        waiting = threading.Thread(target=engine.make_room)
        waiting.start()
        gate.wait_for(2)
        waiting.join(timeout=0.05)
        assert waiting.is_alive()
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


def test_call_gives_its_own_result() -> None:
    with running_engine(3) as (engine, cluster):
        program = FakeProgram(cluster, lambda number: number * number)
        assert [int(engine.call(program, [n], None)[0]) for n in range(20)] == [n * n for n in range(20)]


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


def test_a_read_by_the_chief_leaves_the_logs_as_they_are() -> None:
    with running_engine(1) as (engine, cluster):
        passed = Pass(engine, cluster, [100])
        passed.step()
        engine.barrier(writes=False)
        passed.step()
        engine.barrier(writes=False)
        assert passed.program.fetched == 1


def test_the_last_step_waits_until_the_slowest_is_done() -> None:
    with running_engine(2) as (engine, cluster):
        gate = Gate()
        passed = Pass(engine, cluster, [1, 3], work=lambda batch: gate() if batch == Batch(0, 0) else None)
        opener = threading.Timer(0.02, gate.open)
        opener.start()
        assert passed.run()[-1] == 4
        opener.join()


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


@pytest.mark.parametrize("known", ["total and shares", "total", "nothing"])
@pytest.mark.parametrize("shares", [[0], [1], [3, 2], [0, 5], [5, 0, 0], [1, 1, 9], [40, 2]])
def test_each_share_is_used_up_exactly(known: str, shares: list[int]) -> None:
    with running_engine(len(shares)) as (engine, cluster):
        passed = Pass(engine, cluster, shares, known)
        logs = passed.run()
        assert sorted(passed.batches) == all_of(shares)
        assert len(logs) == sum(shares)


def test_a_worker_at_its_end_leaves_steps_to_the_others() -> None:
    with running_engine(2) as (engine, cluster):
        gate = Gate()
        passed = Pass(engine, cluster, [1, 6], work=lambda batch: gate() if batch.worker == 1 else None)
        loop = threading.Thread(target=passed.run)
        loop.start()
        gate.wait_for(1)  # worker 1 is held in its first step; everything else is offered to worker 0
        gate.open()
        loop.join(timeout=30)
        assert not loop.is_alive()
        assert sorted(passed.batches) == all_of([1, 6])


def test_one_pass_after_the_other() -> None:
    with running_engine(2) as (engine, cluster):
        for shares in ([3, 1], [0, 2], [5, 5], [2, 0]):
            passed = Pass(engine, cluster, shares)
            assert len(passed.run()) == sum(shares)
            assert sorted(passed.batches) == all_of(shares)


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
        assert int(engine.call(passed.program, [], passed.iterator)[0]) == 1
        with pytest.raises(tf.errors.OutOfRangeError):
            engine.call(passed.program, [], passed.iterator)


def test_steps_of_two_passes_by_turns_do_not_wait_for_each_other() -> None:
    shares = {"first": [1, 8], "second": [8, 1]}
    with running_engine(2) as (engine, cluster):
        passes = [Pass(engine, cluster, share) for share in shares.values()]
        for _ in range(9):
            for passed in passes:
                passed.step()
        engine.barrier(writes=False)
        assert [sorted(passed.batches) for passed in passes] == [all_of(share) for share in shares.values()]


# Errors of the user's step.


def failing_at(bad: Any, message: str = "my own message") -> Callable[[Any], None]:
    def work(batch: Any) -> None:
        if batch == bad:
            raise ValueError(message)

    return work


def test_an_error_reaches_the_caller_once_with_its_own_type_and_message() -> None:
    with running_engine(2) as (engine, cluster):
        passed = Pass(engine, cluster, [10, 10], work=failing_at(Batch(1, 3)))
        with pytest.raises(ValueError, match=r"^my own message$"):
            passed.run()
        engine.barrier(writes=False)
        engine.make_room()


def test_training_works_again_after_an_error() -> None:
    with running_engine(2) as (engine, cluster):
        for position in range(6):
            with pytest.raises(ValueError, match="my own message"):
                Pass(engine, cluster, [6, 6], work=failing_at(Batch(0, position))).run()
            passed = Pass(engine, cluster, [6, 5])
            assert passed.run()[-1] == 11
            assert sorted(passed.batches) == all_of([6, 5])


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


def test_an_error_while_another_worker_is_at_its_end() -> None:
    with running_engine(2) as (engine, cluster):
        with pytest.raises(ValueError, match="my own message"):
            Pass(engine, cluster, [0, 4], work=failing_at(Batch(1, 2))).run()
        assert Pass(engine, cluster, [2, 2]).run()[-1] == 4


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
        program = FakeProgram(cluster, closures.current_worker)
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
def test_a_worker_lost_at_the_end_of_the_data_keeps_nobody_waiting(known: str, found_by: str) -> None:
    """Its share can't be read by others; what was under way ends, the loop with it, and it is said what is missing."""
    with running_engine(2, poll_secs=0.02) as (engine, cluster):
        passed = Pass(engine, cluster, [4, 3], known)
        cluster.lose(0) if found_by == "a step" else cluster.find_dead(0)
        with pytest.warns(RuntimeWarning, match="worker:0 was lost") as warned:
            passed.run()
            engine.barrier(writes=False)
        assert sorted(passed.batches) == all_of([0, 3])
        cluster.bring_back(0)
        expected = "4 of its 7 batches" if known == "total and shares" else "an unknown number of batches"
        assert [expected in str(warning.message) for warning in warned] == [True]


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


def test_a_worker_that_is_back_has_its_share_before_it_takes_the_first_step_of_it() -> None:
    """The other one comes to its end in between, while the worker that is back builds its data again."""
    with running_engine(2, poll_secs=0.02) as (engine, cluster), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        gate = Gate()
        passed = Pass(engine, cluster, [4, 3], work=lambda batch: gate() if batch == Batch(1, 1) else None)
        cluster.lose(0)
        loop = threading.Thread(target=passed.run)
        loop.start()
        gate.wait_for(1)
        wait_until(lambda: "worker:0 (lost" in engine.waited_for())
        with cluster.holding(0):
            cluster.bring_back(0)
            wait_until(lambda: "lost" not in engine.waited_for())
            gate.open()
            wait_until(lambda: passed.iterator.exhausted == {1})
            assert not passed.iterator.ended
        loop.join(timeout=30)
        engine.barrier(writes=False)
        assert sorted(passed.batches) == all_of([4, 3])
        assert not warned


def test_what_a_lost_worker_had_fetched_of_batches_that_are_dealt_out_is_said_to_be_missing() -> None:
    with running_engine(2, poll_secs=0.02) as (engine, cluster):
        passed = Pass(engine, cluster, [3, 4], "total")
        cluster.lose(0)
        with pytest.warns(RuntimeWarning, match=r"3 of its 7 batches. worker:0 was lost; it had fetched"):
            passed.run()
            engine.barrier(writes=False)
        cluster.bring_back(0)


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
        wait_until(lambda: passed.iterator.exhausted == {1})
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


# Whatever the workers do.

SHARES = st.lists(st.integers(0, 12), min_size=1, max_size=4)
SPEEDS = st.lists(st.integers(0, 3), min_size=4, max_size=4)


@settings(max_examples=150, deadline=None)
@given(SHARES, SPEEDS, st.sampled_from(["total and shares", "total", "nothing"]), st.integers(1, 3))
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
        expectation = pytest.raises(ValueError, match="my own message")
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
