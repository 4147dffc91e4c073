# SPDX-License-Identifier: Apache-2.0
"""Feeds of workers that go on by themselves: each part is computed once, whichever worker is lost."""

from __future__ import annotations

import random

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.engines.streams import ChiefStreamFeed, ShareFeed, Streams


class World:
    """Shares of parts that are numbered (share, position), read through iterators as on workers."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.forgotten: list[int] = []
        self.feed = ShareFeed(len(sizes), self._open, self.forgotten.append)
        self.used: list[tuple[int, int]] = []

    def _open(self, share: int, position: int) -> object:
        return iter([(share, number) for number in range(position, self.sizes[share])])

    def step(self, worker: int, is_lost: bool = False) -> bool:
        """Makes a step of `worker`; returns False if there was nothing to do."""
        source = self.feed.take(worker)
        if source is None:
            return False
        part = next(source, None)
        if is_lost:
            self.feed.release(worker)
        elif part is None:
            self.feed.ended(worker)
        else:
            self.used.append(part)
            self.feed.used(worker)
        return True


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5), seed=st.integers(0, 2**32))
def test_every_part_of_every_share_is_used_once_whoever_is_lost(sizes: list[int], seed: int) -> None:
    draw, world = random.Random(seed), World(sizes)
    for _ in range(60):
        world.step(draw.randrange(len(sizes)), is_lost=draw.random() < 0.2)
    # One worker is enough for what is left, if the others hold nothing.
    for worker in range(len(sizes)):
        world.feed.release(worker)
    while world.step(0):
        pass
    assert sorted(world.used) == [(share, part) for share, size in enumerate(sizes) for part in range(size)]


def test_a_worker_reads_its_own_share_first_and_goes_on_with_one_that_nobody_reads() -> None:
    world = World([2, 2, 2])
    while world.step(1):
        pass
    assert world.used == [(1, 0), (1, 1), (0, 0), (0, 1), (2, 0), (2, 1)]


def test_a_share_that_another_one_reads_is_left_to_it() -> None:
    world = World([2, 2])
    world.step(0)
    while world.step(1):
        pass
    assert world.used == [(0, 0), (1, 0), (1, 1)]
    world.feed.release(0)
    assert world.forgotten == [0]
    world.step(1)
    assert world.used[-1] == (0, 1)


def test_a_part_that_a_lost_worker_had_taken_is_given_out_again() -> None:
    batches = iter([["a", "b"], ["c", "d"]])

    def read() -> list[str]:
        batch = next(batches, None)
        if batch is None:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        return batch

    feed = ChiefStreamFeed(read)
    assert [feed.take(0), feed.take(1)] == ["a", "b"]
    feed.used(1)
    feed.release(0)
    assert feed.take(1) == "a"
    feed.used(1)
    assert [feed.take(2), feed.take(3), feed.take(1)] == ["c", "d", None]


def test_an_error_of_the_data_is_for_the_worker_that_met_it() -> None:
    def read() -> list[str]:
        raise ValueError("no such file")

    feed = ChiefStreamFeed(read)
    with pytest.raises(ValueError, match="no such file"):
        feed.take(0)


def test_each_stream_ends_for_itself() -> None:
    feed = Streams()
    feed.arrive(0, "first")
    feed.arrive(1, "second")
    feed.ended(0)
    assert [feed.take(0), feed.take(1)] == [None, "second"]
    feed.arrive(1, "second, of a new process")
    assert feed.take(1) == "second, of a new process"
