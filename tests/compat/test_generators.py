# SPDX-License-Identifier: Apache-2.0
"""Batches of a Python generator that were read to build a model are given again."""

from __future__ import annotations

from tfdist.compat import generators


def test_a_pass_to_build_from_is_given_again_and_no_other() -> None:
    shared = iter(range(8))
    replayed = generators.Replayed(lambda: shared)
    first = replayed()
    assert [next(first) for _ in range(3)] == [0, 1, 2]
    replayed.give_again()
    second = replayed()
    assert next(second) == 0
    assert next(first) == 3  # read ahead by a pass that was left
    assert [next(second) for _ in range(4)] == [1, 2, 3, 4]
    assert list(replayed()) == [5, 6, 7]


def test_a_pass_that_trains_is_not_kept() -> None:
    replayed = generators.Replayed(lambda: iter(range(1000)))
    assert list(replayed()) == list(range(1000))
    assert not replayed._read
