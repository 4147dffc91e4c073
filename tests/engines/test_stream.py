# SPDX-License-Identifier: Apache-2.0
"""Who starts first where a policy lets only some of those start who wait."""

from __future__ import annotations

import threading
import time

import pytest

import tfdist
from tfdist.engines.stream import Stream
from tfdist.policies.asynchronous import Asynchronous

pytestmark = pytest.mark.timeout(60)


def _until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_one_that_waits_longest_starts_first():
    """A bound of 1 lets two of four be under way; the others come to their turn in the order in which they came."""
    policy = Asynchronous(bounded=tfdist.BoundedStaleness(1))
    policy.begin(4, "a test")
    stream = Stream(policy, [f"worker:{replica}" for replica in range(4)], 30.0)
    started: list[int] = []
    local_steps: dict[int, int] = {}
    is_over = threading.Event()

    def wait_to_start(replica: int) -> None:
        local_step = stream.start(replica, is_over.is_set)
        if local_step is not None:
            local_steps[replica] = local_step
            started.append(replica)

    threads = []
    for replica in (2, 0, 3, 1):
        threads.append(threading.Thread(target=wait_to_start, args=(replica,), daemon=True))
        threads[-1].start()
        _until(lambda replica=replica: replica in stream._queue or replica in started)
    _until(lambda: len(started) == 2)
    assert started == [2, 0]
    assert stream._queue == [3, 1]
    for _ in range(2):
        # Who has given one goes to the end of the queue, and whoever is first in it starts.
        given = started[-2]
        with stream.wanted():
            stream.hand_over(given, local_steps[given], "gradient")
            stream.collect()
        stream.applied()
        count = len(started)
        _until(lambda count=count: len(started) == count + 1)
    assert started == [2, 0, 3, 1]
    is_over.set()
    stream.wake()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_one_that_has_nothing_left_to_compute_from_keeps_nobody_waiting():
    policy = Asynchronous(bounded=tfdist.BoundedStaleness(1))
    policy.begin(3, "a test")
    stream = Stream(policy, [f"worker:{replica}" for replica in range(3)], 30.0)
    assert stream.start(0, lambda: False) == 0
    stream.end(0, lambda: False)
    is_over = threading.Event()
    waiting = threading.Thread(target=stream.start, args=(0, is_over.is_set), daemon=True)
    waiting.start()
    _until(lambda: stream._queue == [0])
    assert stream.start(1, lambda: False) == 0
    is_over.set()
    stream.wake()
    waiting.join(30)
    assert not waiting.is_alive()
