# SPDX-License-Identifier: Apache-2.0
"""Replicas take part in a warmup phase, and after it, as the policy says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tfdist

_FIRST_OF_EPOCH = st.lists(st.booleans(), max_size=60).map(lambda rest: [True, *rest])


def begun(total: int, **options) -> tfdist.Warmup:
    policy = tfdist.Warmup(**options)
    policy.begin(total, "MirroredStrategy")
    return policy


@given(total=st.integers(2, 5), steps=st.integers(1, 12), ramp=st.booleans(), firsts=_FIRST_OF_EPOCH)
def test_a_phase_of_steps_counts_updates(total, steps, ramp, firsts):
    policy = begun(total, steps=steps, ramp=ramp)
    for number, is_first in enumerate(firsts):
        stage = number // steps
        expected = min(total, 1 + stage) if ramp else (total if stage else 1)
        assert policy.taking_part_next(is_first) == expected
        assert policy.opened(is_first) == policy.num_taking_part == expected
        assert policy.is_over == (expected == total)


@given(total=st.integers(2, 5), epochs=st.integers(1, 4), ramp=st.booleans(), firsts=_FIRST_OF_EPOCH)
def test_a_phase_of_epochs_ends_where_an_epoch_begins(total, epochs, ramp, firsts):
    policy = begun(total, epochs=epochs, ramp=ramp)
    epoch = 0
    for is_first in firsts:
        epoch += is_first
        stage = (epoch - 1) // epochs
        expected = min(total, 1 + stage) if ramp else (total if stage else 1)
        assert policy.taking_part_next(is_first) == expected
        assert policy.opened(is_first) == policy.num_taking_part == expected


@given(total=st.integers(2, 5), steps=st.integers(1, 12), ramp=st.booleans(), ahead=st.integers(0, 30))
def test_one_that_is_told_how_far_the_phase_is_goes_on_from_there(total, steps, ramp, ahead):
    told, knows = (begun(total, steps=steps, ramp=ramp) for _ in range(2))
    for number in range(ahead):
        knows.opened(not number)
    told.resume(knows.begun)
    assert told.num_taking_part == knows.num_taking_part
    assert told.opened(False) == knows.opened(False)


def test_before_the_first_update_one_replica_takes_part():
    policy = begun(3, epochs=2)
    assert policy.num_taking_part == 1
    assert not policy.is_over


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "Received: steps=None, epochs=None"),
        ({"steps": 1, "epochs": 1}, "give one of them.* Received: steps=1, epochs=1"),
        ({"steps": 0}, "must be an integer of at least 1. Received: steps=0"),
        ({"epochs": -1}, "epochs=-1"),
        ({"steps": 1.5}, "steps=1.5"),
        ({"epochs": True}, "epochs=True"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        tfdist.Warmup(**options)


def test_a_single_replica_has_nobody_to_join_it():
    with pytest.raises(ValueError, match=r"needs a second replica.*total_num_replicas=1"):
        begun(1, steps=3)
