# SPDX-License-Identifier: Apache-2.0
"""Backup workers: the first N of n gradients of a step make its update, whatever comes late, dies or returns."""

from __future__ import annotations

import dataclasses

import pytest

import tfdist
from tfdist.policies import base


def _begun(total_num_replicas: int, spares: int) -> tfdist.BackupWorkers:
    policy = tfdist.BackupWorkers(spares=spares)
    policy.begin(total_num_replicas, "MirroredStrategy")
    return policy


def _start(policy: base.Aggregation, *replicas: int, time: float = 0.0) -> None:
    for replica in replicas:
        assert policy.started(replica, time) == policy.step


def _arrive(policy: base.Aggregation, *replicas: int, step: int = 0, time: float = 0.0) -> list[bool]:
    return [policy.arrived(replica, step, time).accepted for replica in replicas]


def _counts(update: base.Update) -> base.Update:
    """The update without its contributions, which test_properties compares with the rest, and its time."""
    return dataclasses.replace(update, contributions=(), time=0.0, opened_secs=0.0)


def test_the_first_n_make_the_update_and_the_rest_is_dropped():
    policy = _begun(4, spares=2)
    assert policy.replicas_to_aggregate == 2
    policy.opened(1.0)
    _start(policy, 0, 1, 2, 3, time=1.0)
    assert policy.arrived(2, 0, 1.5) == base.Arrival(True, 0, 1.0, number=0)
    assert not policy.update_due
    assert policy.arrived(0, 0, 2.0) == base.Arrival(True, 0, 1.0, number=1)
    assert policy.update_due
    assert policy.contributors == (2, 0)
    assert policy.arrived(3, 0, 2.5) == base.Arrival(False, 0, 0.0)
    assert _counts(policy.updated(3.0)) == base.Update(
        1, (2, 0), (3,), (0, 0), 1.0, 0.5, (), weights=(1.0, 1.0), numbers=(0, 1)
    )
    assert policy.step == 1
    assert policy.contributors == ()


def test_a_late_gradient_is_dropped_and_its_replica_starts_again_at_once():
    policy = _begun(2, spares=1)
    _start(policy, 0, 1)
    _arrive(policy, 0)
    policy.updated(1.0)
    assert not policy.may_start(1)
    assert policy.arrived(1, 0, 1.5) == base.Arrival(False, 1, 0.0)
    assert policy.may_start(1)
    assert policy.started(1, 1.5) == 1
    assert _arrive(policy, 1, step=1, time=2.0) == [True]
    assert _counts(policy.updated(2.0)) == base.Update(2, (1,), (1,), (0,), 1.0, 0.0, (), weights=(1.0,), numbers=(1,))


def test_a_replica_gives_a_step_one_gradient_only():
    policy = _begun(3, spares=1)
    _start(policy, 0, 1, 2)
    _arrive(policy, 0)
    assert not policy.may_start(0)
    with pytest.raises(RuntimeError, match="replica 0 may not start in step 0: it has arrived for this step"):
        policy.started(0, 1.0)
    with pytest.raises(RuntimeError, match="replica 1 may not start in step 0: it is computing, since step 0"):
        policy.started(1, 1.0)
    assert _arrive(policy, 0, 1, 2) == [False, True, False]
    assert not policy.may_start(2)
    # A second gradient of replica 0 was never started.
    assert policy.updated(1.0).dropped == (2,)


def test_waiting_counts_from_when_keras_asked():
    policy = _begun(1, spares=0)
    policy.opened(0.0)
    for asked, arrived, made, wait_secs in [(0.0, 2.0, 3.0, 2.0), (10.0, 9.0, 11.0, 0.0), (12.0, 13.0, 14.0, 1.0)]:
        _start(policy, 0, time=asked)
        policy.opened(asked)
        _arrive(policy, 0, step=policy.step, time=arrived)
        assert policy.updated(made).wait_secs == wait_secs


def test_a_lost_replica_is_withdrawn_and_replaced_by_one_that_was_not_needed():
    policy = _begun(3, spares=1)
    _start(policy, 0, 1, 2)
    assert _arrive(policy, 0, 1, 2, time=1.0) == [True, True, False]
    policy.lost(1, 2.0)
    assert not policy.update_due
    assert policy.contributors == (0,)
    assert [policy.may_start(replica) for replica in range(3)] == [False, False, True]
    with pytest.raises(RuntimeError, match="no update was due in step 0: it has 1 of 2 gradients"):
        policy.updated(2.0)
    _start(policy, 2, time=2.0)
    _arrive(policy, 2, time=3.0)
    assert _counts(policy.updated(3.0)) == base.Update(
        1, (0, 2), (2,), (0, 0), 3.0, 2.0, (), weights=(1.0, 1.0), numbers=(0, 2)
    )


def test_replica_that_finds_no_data_drops_no_gradient():
    policy = _begun(2, spares=1)
    _start(policy, 0, 1)
    policy.found_no_data(0)
    assert _arrive(policy, 1) == [True]
    assert [each.replica for each in policy.updated(2.0).contributions] == [1]


@pytest.mark.parametrize("spares", [-1, True, False, 1.0, None, "Auto", "", "2", [1]])
def test_spares_that_are_no_number_are_refused(spares):
    with pytest.raises(ValueError, match=r"BackupWorkers\(spares=\.\.\.\).*Received: spares=") as raised:
        tfdist.BackupWorkers(spares=spares)
    assert repr(spares) in str(raised.value)


def test_spares_that_leave_no_replica_are_refused():
    message = r"leaves no replica of 4 to aggregate .* use spares <= 3\. Received: spares=4, total_num_.*=4"
    with pytest.raises(ValueError, match=message):
        _begun(4, spares=4)


def test_spares_need_a_second_replica():
    with pytest.raises(ValueError, match=r"needs a second replica, and MirroredStrategy has only one.*spares=1"):
        _begun(1, spares=1)
    assert _begun(1, spares=0).replicas_to_aggregate == 1


def test_a_policy_belongs_to_one_strategy():
    policy = tfdist.BackupWorkers(spares=1)
    with pytest.raises(ValueError, match="no replica"):
        policy.begin(0, "MirroredStrategy")
    policy.begin(2, "MirroredStrategy")
    message = r"BackupWorkers\(spares=1\) .*MirroredStrategy with 2 replicas.* Give ParameterServerStrategy a new one"
    with pytest.raises(RuntimeError, match=message):
        policy.begin(2, "ParameterServerStrategy")


def test_calls_that_make_no_sense_are_refused():
    policy = tfdist.BackupWorkers(spares=1)
    assert not policy.update_due
    with pytest.raises(ValueError, match="belongs to no strategy yet"):
        policy.may_start(0)
    policy.begin(2, "MirroredStrategy")
    for replica in (-1, 2):
        with pytest.raises(ValueError, match=f"they are 0 to 1. Received: replica={replica}"):
            policy.started(replica, 0.0)
    _start(policy, 0)
    with pytest.raises(ValueError, match=r"from the future\. Received: local_step=1, step=0"):
        policy.arrived(0, 1, 0.0)
