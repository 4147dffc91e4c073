# SPDX-License-Identifier: Apache-2.0
"""The policies of asynchronous training: what holds in any order of events, and what was published of them."""

from __future__ import annotations

import collections
import math
import random
from collections.abc import Callable
from typing import Any

import ledger
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfdist
from tfdist.planning.simulation import simulate_policy
from tfdist.planning.simulation.event_loop import Costs, EventLoop
from tfdist.policies import Outcome
from tfdist.policies.asynchronous import Asynchronous


def _new(updates: int = 1, bound: int | None = None, drop: int | None = None) -> Asynchronous:
    return Asynchronous(
        tfdist.SoftSync(updates),
        tfdist.StalenessScaling(),
        None if drop is None else tfdist.DropStale(drop),
        None if bound is None else tfdist.BoundedStaleness(bound),
    )


def _machine(total: int, *args: int | None, **kwargs: int | None) -> Asynchronous:
    policy = _new(*args, **kwargs)  # type: ignore[arg-type]
    policy.begin(total, "ParameterServerStrategy")
    return policy


@settings(max_examples=300, deadline=None)
@given(
    total=st.integers(1, 6),
    updates=st.integers(1, 6),
    bound=st.none() | st.integers(1, 5),
    drop=st.none() | st.integers(0, 5),
    seed=st.integers(0, 2**32),
)
def test_in_any_order_of_arrivals_losses_and_recoveries(
    total: int, updates: int, bound: int | None, drop: int | None, seed: int
) -> None:
    draw, updates = random.Random(seed), min(updates, total)
    policy = _machine(total, updates, bound, drop)
    named = ledger.Ledger(policy)
    # What the world knows: replica -> local step of what it computes; numbers of what was accepted and not used yet.
    computing: dict[int, int] = {}
    waiting: dict[int, tuple[int, int]] = {}
    alive, step, told, time = set(range(total)), 0, collections.Counter(), 0.0
    arrivals = collections.Counter()
    for _ in range(200):
        time += 1.0
        if policy.update_due and draw.random() < 0.7:
            made = policy.updated(time)
            assert len(made.contributors) == updates
            for replica, staleness, weight, number in zip(
                made.contributors, made.staleness, made.weights, made.numbers, strict=True
            ):
                assert waiting.pop(number) == (replica, step - staleness)
                assert weight == 1 / max(1, staleness)
                assert bound is None or staleness <= bound
                assert drop is None or staleness <= drop
            told.update(made.contributors)
            told.update(made.dropped)
            step += 1
            assert made.step == policy.step == step
            if drop is not None:
                waiting = {n: each for n, each in waiting.items() if step - each[1] <= drop}
            assert set(policy.waiting) == set(waiting)
            continue
        startable = [r for r in range(total) if policy.may_start(r)]
        # Somebody can always do something: no deadlock.
        assert startable or computing or policy.update_due or not alive
        action = draw.random()
        if action < 0.45 and startable:
            replica = draw.choice(startable)
            assert replica in alive and replica not in computing
            computing[replica] = policy.started(replica, time)
            assert computing[replica] == step
        elif action < 0.9 and computing:
            replica = draw.choice(sorted(computing))
            local_step = computing.pop(replica)
            arrivals[replica] += 1
            wanted = policy.is_wanted(replica, local_step)
            arrival = policy.arrived(replica, local_step, time)
            assert arrival.accepted == wanted == (drop is None or step - local_step <= drop)
            if arrival.accepted:
                waiting[arrival.number] = (replica, local_step)
        elif action < 0.95 and alive:
            replica = draw.choice(sorted(alive))
            alive.discard(replica)
            computing.pop(replica, None)
            policy.lost(replica, time)
            assert policy.missing() == (() if alive else tuple(range(total)))
        elif len(alive) < total:
            replica = draw.choice(sorted(set(range(total)) - alive))
            alive.add(replica)
            policy.recovered(replica, time)
    # Each gradient was used, or dropped, once at most.
    assert all(told[replica] <= arrivals[replica] for replica in range(total))
    unnamed = collections.Counter(replica for replica, _ in named.open)
    assert unnamed >= collections.Counter([*computing, *(replica for replica, _ in waiting.values())])
    for replica in range(total):
        assert told[replica] == named.outcomes[replica, Outcome.ACCEPTED] + named.outcomes[replica, Outcome.DROPPED]


@pytest.mark.parametrize("bound", [1, 2, 4, 8])
def test_a_slow_worker_holds_the_others_back_at_the_bound(bound: int) -> None:
    policy = _new(bound=bound)
    found = simulate_policy(policy, lambda replica, attempt: 10.0 if replica == 0 else 1.0, 400, 4)
    assert max(max(update.staleness) for update in found.updates) == bound
    # In the 10 s that the slow one needs, as many updates as the bound allows are made; then its own, and those of the
    # others that were held back meanwhile.
    assert (bound + 1) / 10 <= found.updates_per_sec * 1.01 <= (bound + 1 + 3) / 10 * 1.02
    assert sum(each.held for update in found.updates for each in update.contributions) > 0


@pytest.mark.parametrize("slow", range(4))
@pytest.mark.parametrize("bound", [1, 2])
def test_where_few_may_start_everybody_has_a_turn(bound: int, slow: int) -> None:
    found = simulate_policy(_new(bound=bound), lambda replica, attempt: 10.0 if replica == slow else 1.0, 400, 4)
    assert min(found.accepted) >= 60
    # The others wait for the slow one, which hardly waits itself, whatever its number.
    assert found.accepted[slow] * 10.0 >= 0.9 * found.seconds


def test_without_a_bound_everybody_goes_at_his_own_pace() -> None:
    found = simulate_policy(_new(), lambda replica, attempt: 10.0 if replica == 0 else 1.0, 3100, 4)
    assert found.updates_per_sec == pytest.approx(3.1, rel=0.01)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 30])
def test_n_softsync_is_about_n_updates_stale(n: int) -> None:
    """Zhang et al. 2015, section 3.1: 30 learners, updates of 30 / n gradients; seldom more than 2n stale."""
    updates = 30 // n
    n = 30 // updates
    law = random.Random(0)
    found = simulate_policy(_new(updates), lambda replica, attempt: law.gauss(1.0, 0.05), 4000, 30)
    ages = [age for update in found.updates[500:] for age in update.staleness]
    assert sum(ages) / len(ages) == pytest.approx(n, abs=max(1.0, 0.15 * n))
    assert sum(age > 2 * n for age in ages) / len(ages) < 1e-2


def test_who_waits_for_no_update_starts_while_others_are_made() -> None:
    policy = _machine(4, updates=2)
    assert [policy.started(replica, 0.0) for replica in (0, 1, 2)] == [0, 0, 0]
    for replica in (0, 1, 2):
        policy.arrived(replica, 0, 1.0)
    # The update of 0 and 1 comes first; the gradient of 2 waits for a later one.
    assert [policy.may_start(replica) for replica in range(4)] == [False, False, True, True]
    with pytest.raises(RuntimeError, match="replica 0 may not start in step 0: it waits for an update"):
        policy.started(0, 1.0)
    policy.updated(1.0)
    assert all(map(policy.may_start, range(4)))


def test_workers_of_equal_pace_do_not_fall_into_step() -> None:
    """With updates that take 7 % of a gradient's time, eight that started together would wait for 56 % each time."""
    policy = _machine(8)
    loop = EventLoop(policy, lambda replica, attempt: 1.0, Costs(update_secs=lambda count: 0.07))
    loop.run(800)
    assert 800 / loop.time > 0.9 * 8 / 1.07


def test_the_last_update_of_a_pass_is_made_of_what_there_is() -> None:
    policy = _machine(3, updates=2)
    assert policy.started(0, 0.0) == 0
    policy.arrived(0, 0, 1.0)
    with pytest.raises(RuntimeError, match=r"no update was due in step 0: 1 of 2 gradients"):
        policy.updated(1.0)
    assert policy.updated(1.0, with_fewer=True).contributors == (0,)


def test_an_update_waits_for_the_gradient_that_the_bound_demands() -> None:
    policy = _machine(2, bound=1)
    assert [policy.started(replica, 0.0) for replica in (0, 1)] == [0, 0]
    policy.arrived(0, 0, 1.0)
    assert policy.updated(1.0).wait_secs == 1.0
    policy.started(0, 1.0)
    policy.arrived(0, 1, 2.0)
    # An update now would leave the gradient of replica 1 too old.
    assert not policy.update_due
    policy.arrived(1, 0, 5.0)
    assert policy.updated(5.0).wait_secs == 4.0


def test_what_a_lost_worker_has_given_counts_and_what_it_computed_does_not() -> None:
    policy = _machine(2, updates=2)
    policy.started(0, 0.0)
    policy.arrived(0, 0, 1.0)
    policy.started(0, 1.0)
    policy.lost(0, 2.0)
    assert not policy.is_wanted(0, 0)
    assert not policy.arrived(0, 0, 3.0).accepted
    policy.started(1, 3.0)
    policy.arrived(1, 0, 4.0)
    assert policy.updated(4.0).contributors == (0, 1)


def test_only_those_who_take_part_start() -> None:
    policy = _machine(3)
    policy.limit(1)
    assert [policy.may_start(replica) for replica in range(3)] == [True, False, False]
    policy.lost(0, 0.0)
    assert [policy.may_start(replica) for replica in range(3)] == [False, True, False]


# Of wrong types on purpose.
ANY: Any = tfdist


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ANY.SoftSync(0), "must be an integer from 1 to the number of workers. Received: updates=0"),
        (lambda: ANY.SoftSync(True), "Received: updates=True"),
        (lambda: ANY.DropStale(-1), "must be an integer of at least 0. Received: max_staleness=-1"),
        (lambda: ANY.BoundedStaleness(0), r"tfdist.BackupWorkers\(spares=0\). Received: bound=0"),
        (lambda: ANY.BoundedStaleness(1.5), "Received: bound=1.5"),
        (lambda: ANY.StalenessScaling("linear"), "Received: rule='linear'"),
        (lambda: ANY.StalenessScaling(lambda staleness: -1.0), "finite weight of 0 or more. Received: -1.0"),
        (lambda: ANY.StalenessScaling(lambda staleness: math.nan), "Received: nan for a staleness of 0"),
        (lambda: ANY.StalenessScaling(lambda staleness: math.inf), "Received: inf"),
        (lambda: ANY.StalenessScaling(lambda staleness: "much"), "Received: 'much'"),
        (lambda: ANY.SoftSync(3).begin(2, "S"), "use updates <= 2. Received: updates=3, total_num_replicas=2"),
    ],
)
def test_numbers_that_make_no_sense_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
