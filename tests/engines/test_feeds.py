# SPDX-License-Identifier: Apache-2.0
"""Feeds of workers that go on by themselves: each part is computed once, whichever worker is lost."""

from __future__ import annotations

import random

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.engines.streams import ChiefStreamFeed, WorkerStreamFeed
from tfdist.passes.worker_pass import WorkerFeed


class World:
    """Shares of batches that are numbered (share, position), read through iterators as on workers."""

    cardinality = tf.data.UNKNOWN_CARDINALITY
    marks_end = False

    def __init__(self, sizes: list[int], can_move: bool = True) -> None:
        self.sizes = sizes
        self.can_move = can_move
        self.feed = WorkerStreamFeed(WorkerFeed(self, 1))  # type: ignore[arg-type]
        self._own = [self.iterate_piece(1, worker, 0, 1) for worker in range(len(sizes))]
        self.used: list[tuple[int, int]] = []

    def share(self, worker: int) -> None:
        return None

    def share_sizes(self) -> list[None]:
        return [None] * len(self.sizes)

    def iterate_piece(self, opened: object, share: int, start: int, step: int) -> object:
        return iter([(share, position) for position in range(start, self.sizes[share], step)])

    def step(self, worker: int, is_lost: bool = False) -> bool:
        """Makes a step of `worker`; returns False if there was nothing to do."""
        source = self.feed.take(worker, self._own[worker])
        if source is None:
            return False
        part = next(source, None)
        if is_lost:
            self.lose(worker)
        elif part is None:
            self.feed.ended(worker)
        else:
            self.used.append(part)
            self.feed.used(worker)
        return True

    def lose(self, worker: int) -> None:
        """Loses a worker, which is back at once."""
        self.feed.release(worker)
        self._own[worker] = self.iterate_piece(1, worker, self.feed._feed._position(worker), 1)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5), seed=st.integers(0, 2**32), can_move=st.booleans())
def test_every_batch_is_used_once_whoever_is_lost(sizes: list[int], seed: int, can_move: bool) -> None:
    draw, world = random.Random(seed), World(sizes, can_move)
    for _ in range(60):
        world.step(draw.randrange(len(sizes)), is_lost=draw.random() < 0.2)
    for worker in range(len(sizes)):
        world.lose(worker)
    # One worker is enough for what is left, if it can be moved.
    for worker in [0] if can_move else range(len(sizes)):
        while world.step(worker):
            pass
    assert sorted(world.used) == [(share, part) for share, size in enumerate(sizes) for part in range(size)]


def test_own_share_comes_before_one_without_a_reader() -> None:
    world = World([2, 2, 2])
    while world.step(1):
        pass
    assert world.used == [(1, 0), (1, 1), (0, 0), (0, 1), (2, 0), (2, 1)]


def test_rest_of_a_lost_worker_is_divided_among_the_living() -> None:
    world = World([5, 1, 1])
    for worker in (0, 1, 2):
        world.step(worker)
    world.feed.release(0)
    for worker in (1, 2) * 4:
        world.step(worker)
    assert world.used[3:] == [(0, 1), (0, 2), (0, 3), (0, 4)]
    assert not world.feed.has_more(1)


def test_lost_worker_that_is_back_goes_on_with_its_own_share() -> None:
    world = World([3, 3])
    world.step(0)
    world.lose(0)
    world.step(0)
    while world.step(1):
        pass
    assert world.used == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


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
