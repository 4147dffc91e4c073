# SPDX-License-Identifier: Apache-2.0
"""Workers start in order where a policy lets only some of the waiting ones start."""

from __future__ import annotations

import threading

import pytest
from waiting import wait_until

import tfdist
from tfdist.coordination.round_runner import StreamRunner
from tfdist.policies.asynchronous import Asynchronous

pytestmark = pytest.mark.timeout(60)


def test_the_one_whose_last_start_is_the_longest_ago_starts_first():
    """A bound of 1 lets two of four be under way; who waits longer, but had a later turn, comes later."""
    policy = Asynchronous(bounded=tfdist.BoundedStaleness(1))
    policy.begin(4, "a test")
    runner = StreamRunner(policy, [f"worker:{replica}" for replica in range(4)], 30.0)
    started: list[int] = []
    local_steps: dict[int, int] = {}
    is_over = threading.Event()
    threads = []

    def wait_to_start(replica: int) -> None:
        local_step = runner.start(replica, is_over.is_set)
        if local_step is not None:
            local_steps[replica] = local_step
            started.append(replica)

    def come(replica: int) -> None:
        count = len(started)
        threads.append(threading.Thread(target=wait_to_start, args=(replica,), daemon=True))
        threads[-1].start()
        wait_until(lambda: replica in runner.waiting or len(started) > count)

    def give(replica: int) -> None:
        count = len(started)
        with runner.wanted():
            runner.hand_over(replica, local_steps[replica], "gradient")
            runner.collect()
        runner.applied()
        wait_until(lambda: len(started) == count + 1)

    for replica in (2, 0, 3, 1):
        come(replica)
    assert started == [2, 0]
    give(2)
    give(0)
    # Of those that had no turn yet, in the order of their numbers.
    assert started == [2, 0, 1, 3]
    come(0)
    come(2)
    assert runner.waiting == {0, 2}
    give(1)
    give(3)
    assert started == [2, 0, 1, 3, 2, 0]
    is_over.set()
    runner.wake()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_one_that_has_nothing_left_to_compute_from_keeps_nobody_waiting():
    policy = Asynchronous(bounded=tfdist.BoundedStaleness(1))
    policy.begin(3, "a test")
    runner = StreamRunner(policy, [f"worker:{replica}" for replica in range(3)], 30.0)
    assert runner.start(0, lambda: False) == 0
    runner.end(0, lambda: False)
    is_over = threading.Event()
    waiting = threading.Thread(target=runner.start, args=(0, is_over.is_set), daemon=True)
    waiting.start()
    wait_until(lambda: runner.waiting == {0})
    assert runner.start(1, lambda: False) == 0
    is_over.set()
    runner.wake()
    waiting.join(30)
    assert not waiting.is_alive()
