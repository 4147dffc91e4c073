# SPDX-License-Identifier: Apache-2.0
"""Backup workers: the first N of n gradients of a step make its update, whatever comes late, dies or returns."""

from __future__ import annotations

import dataclasses
import random

import pytest

import tfdist
from tfdist.planning.simulation import Simulation, simulate_policy
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


def _auto(total_num_replicas: int, max_spares: int | None = None) -> tfdist.BackupWorkers:
    policy = tfdist.BackupWorkers(spares="auto", max_spares=max_spares)
    policy.begin(total_num_replicas, "MirroredStrategy")
    return policy


def _rounds(policy: base.Aggregation, num_updates: int, secs: list[float]) -> list[base.Update]:
    """Updates for which every replica that may starts, and all arrive; returns them."""
    updates = []
    for _ in range(num_updates):
        for replica in range(len(secs)):
            if policy.may_start(replica):
                policy.started(replica, 0.0)
                policy.arrived(replica, policy.step, secs[replica])
        updates.append(policy.updated(max(secs)))
    return updates


def _changes(updates: list[base.Update]) -> list[tuple[int, str]]:
    return [(update.step, change.text) for update in updates for change in update.changes]


def _gradients_per_sec(simulation: Simulation) -> float:
    return sum(simulation.accepted) / simulation.seconds


def test_one_slow_replica_is_left_out_after_eight_updates():
    policy = _auto(4)
    assert _changes(_rounds(policy, 16, [10.0, 1.0, 1.0, 1.0])) == [
        (8, "spares 0 -> 1 of 4 replicas: 3 gradients expected every 1 s instead of 4 every 10 s")
    ]
    assert (policy.spares, policy.replicas_to_aggregate) == (1, 3)


def test_the_late_ones_count_too():
    # The slow replica recovers. Nobody waits for it, and yet it is seen to be quick, once its window holds enough.
    policy = _auto(4)
    _rounds(policy, 8, [10.0, 1.0, 1.0, 1.0])
    assert policy.spares == 1
    changes = _changes(_rounds(policy, 40, [1.0, 1.0, 1.0, 1.0]))
    assert [text.partition(" of")[0] for _, text in changes] == ["spares 1 -> 0"]


def test_it_stays_if_the_gain_is_small():
    # One more spare would give 3 / 1.00 instead of 4 / 1.38 gradients per second: 3.5 % more.
    assert _changes(_rounds(_auto(4), 40, [1.38, 1.0, 1.0, 1.0])) == []
    assert len(_changes(_rounds(_auto(4), 40, [1.41, 1.0, 1.0, 1.0]))) == 1


@pytest.mark.parametrize(("max_spares", "spares"), [(None, 1), (1, 1), (2, 2), (3, 2)])
def test_the_cap_holds(max_spares: int | None, spares: int):
    policy = _auto(4, max_spares)
    _rounds(policy, 16, [10.0, 5.0, 1.0, 1.0])
    assert policy.spares == spares


@pytest.mark.parametrize(
    "draw",
    [
        lambda law: law.lognormvariate(0.0, 1.0),
        lambda law: 1.0 + law.expovariate(1.0),
        lambda law: law.uniform(0.19, 0.21),
    ],
    ids=["lognormal", "shifted", "steady"],
)
def test_it_is_nearly_as_good_as_the_best_fixed_number(draw):
    def simulated(policy: base.Policy) -> Simulation:
        law = random.Random(1)
        return simulate_policy(policy, lambda replica, attempt: draw(law), 800, 8)

    fixed = [_gradients_per_sec(simulated(tfdist.BackupWorkers(spares))) for spares in range(4)]
    auto = simulated(tfdist.BackupWorkers("auto"))
    assert _gradients_per_sec(auto) > 0.95 * max(fixed)
    # It settles: one change, or hardly more.
    assert len(_changes(list(auto.updates))) <= 5


def test_losses_beyond_the_spares_raise_them_at_once_up_to_the_cap():
    policy = _auto(5)
    for replica in range(5):
        policy.started(replica, 0.0)
    policy.opened(0.0)
    for replica in (0, 1, 2):
        policy.arrived(replica, 0, 1.0)
    policy.lost(3, 2.0)
    assert (policy.spares, policy.missing(), policy.update_due) == (1, (), False)
    policy.lost(4, 3.0)
    assert (policy.spares, policy.missing(), policy.update_due) == (2, (), True)
    update = policy.updated(4.0)
    assert update.changes == (
        base.Change("spares 0 -> 1 of 5 replicas: lost replica 3"),
        base.Change("spares 1 -> 2 of 5 replicas: lost replicas 3, 4"),
    )
    # The loss made it due, not an arrival.
    assert (update.wait_secs, update.spread_secs) == (3.0, 0.0)
    policy.lost(0, 5.0)
    assert (policy.spares, policy.missing()) == (2, (0, 3, 4))


def test_nothing_is_chosen_before_each_replica_was_measured_eight_times():
    policy = _auto(4)
    _rounds(policy, 7, [1.0, 1.0, 1.0, 1.0])
    policy.recovered(0, 0.0)
    ((step, _),) = _changes(_rounds(policy, 20, [10.0, 1.0, 1.0, 1.0]))
    assert step == 7 + 8


def test_those_that_are_lost_are_not_counted_on():
    # 8 replicas of which two are gone and two slow: without the gone, two more spares pay only with a higher cap.
    policy = _auto(8, max_spares=4)
    policy.lost(6, 0.0)
    policy.lost(7, 0.0)
    assert policy.spares == 2
    changes = _changes(_rounds(policy, 8, [5.0, 5.0, 1.0, 1.0, 1.0, 1.0]))
    assert changes[-1] == (8, "spares 2 -> 4 of 8 replicas: 4 gradients expected every 1 s instead of 6 every 5 s")


def test_nothing_is_chosen_from_the_one_that_a_warmup_phase_has_left():
    policy = _auto(2)
    policy.limit(1)
    _rounds(policy, 3, [1.0])
    policy.lost(0, 4.0)
    assert _changes(_rounds(policy, 16, [1.0, 1.0])) == []


def test_a_clock_that_stands_still_changes_nothing():
    assert _changes(_rounds(_auto(4), 40, [0.0] * 4)) == []


@pytest.mark.parametrize("max_spares", [0, -1, True, 1.0, "2"])
def test_a_cap_that_is_no_number_is_refused(max_spares):
    with pytest.raises(ValueError, match=rf"must be an integer of at least 1.*max_spares={max_spares!r}"):
        tfdist.BackupWorkers(spares="auto", max_spares=max_spares)


def test_a_cap_is_for_auto_only():
    with pytest.raises(ValueError, match=r'is for spares="auto" only\. Received: spares=1, max_spares=2'):
        tfdist.BackupWorkers(spares=1, max_spares=2)


def test_auto_needs_replicas_to_spare():
    with pytest.raises(ValueError, match=r"needs a second replica.*Received: spares='auto', total_num_replicas=1"):
        _auto(1)
    with pytest.raises(ValueError, match=r"max_spares=4\) leaves no replica of 4 .*use max_spares <= 3"):
        _auto(4, max_spares=4)
    assert _auto(2).replicas_to_aggregate == 2


def test_it_shows_how_it_was_built():
    assert repr(tfdist.BackupWorkers("auto", max_spares=3)) == "BackupWorkers(spares='auto', max_spares=3)"
