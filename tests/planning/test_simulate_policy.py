# SPDX-License-Identifier: Apache-2.0
"""The simulator, and what backup workers reach in it."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import pytest

import tfdist
from tfdist.planning.simulation import Simulation, simulate_policy
from tfdist.policies import Outcome, base
from tfdist.policies.composition import check_policies


def _one_slow(replica: int, attempt: int) -> float:
    return 10.0 if replica == 0 else 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": [tfdist.SoftSync(2)]}, "policies must be a list of policies such as ["),
        ({"policy": tfdist.SoftSync}, "policies such as [SoftSync(...)]. Received: "),
        ({"durations": lambda replica, attempt: math.nan}, "(durations=...) must be seconds, 0 or more. Received: nan"),
        ({"durations": -1}, "(durations=...) must be seconds, 0 or more. Received: -1"),
        ({"num_updates": 0}, "(num_updates=...) must be an integer of at least 1"),
    ],
)
def test_arguments_that_are_no_simulation_are_refused(options, words):
    given = {"policy": tfdist.BackupWorkers(spares=1), "durations": 0.1, "num_updates": 5, "total_num_replicas": 3}
    with pytest.raises(ValueError, match=re.escape(words)):
        simulate_policy(**{**given, **options})


@pytest.mark.parametrize("durations", [0.1, tfdist.testing.constant(0.1)])
def test_durations_are_also_a_number_or_a_distribution(durations):
    assert simulate_policy(tfdist.BackupWorkers(spares=1), durations, 5, 3).seconds == pytest.approx(0.5)


def test_three_replicas_step_by_step():
    secs = [[3.0, 3.0], [1.0, 3.0, 1.0], [2.0, 0.5, 1.0]]
    simulation = simulate_policy(tfdist.BackupWorkers(spares=1), lambda replica, attempt: secs[replica][attempt], 2, 3)
    assert [(update.time, update.opened_secs) for update in simulation.updates] == [(2.0, 2.0), (5.0, 3.0)]
    counts = {"contributions": (), "time": 0.0, "opened_secs": 0.0}
    assert [dataclasses.replace(update, **counts) for update in simulation.updates] == [
        # Replica 1 had waited for the update since 1 s.
        base.Update(1, (1, 2), (), (0, 0), 2.0, 1.0, (), (1.0, 1.0), (0, 1)),
        # Replica 0 was late for the first update. It began anew at 3 s, and is not done when the second is made at 5 s.
        # Replica 2 had waited since 2.5 s.
        base.Update(2, (2, 1), (0,), (0, 0), 3.0, 2.5, (), (1.0, 1.0), (2, 3)),
    ]
    accepted, dropped = Outcome.ACCEPTED, Outcome.DROPPED
    assert [update.contributions for update in simulation.updates] == [
        ((1, 0.0, 1.0, accepted, 0, 1.0, 0.0, 0.0), (2, 0.0, 2.0, accepted, 0, 1.0, 0.0, 0.0)),
        (
            (0, 0.0, 3.0, dropped, 1, 0.0, 0.0, 0.0),
            (2, 2.0, 2.5, accepted, 0, 1.0, 0.0, 0.0),
            (1, 2.0, 5.0, accepted, 0, 1.0, 1.0, 0.0),
        ),
    ]
    assert simulation.accepted == (0, 2, 2)
    assert simulation.dropped == (1, 0, 0)
    assert simulation.seconds == 5.0
    assert simulation.updates_per_sec == 0.4


def _own(of: type[base.Policy] = tfdist.BackupWorkers, /, **members: object) -> type[Any]:
    return type("Own", (of,), {**members, "__module__": "own"})


def _run(policy: type[Any]) -> Simulation:
    return simulate_policy(policy(1), lambda replica, attempt: 1.0, 2, 3)


@pytest.mark.parametrize("kind", [tfdist.BackupWorkers, tfdist.SoftSync, tfdist.DropStale])
def test_policies_of_all_kinds_are_simulated(kind: type[Any]):
    assert len(_run(kind).updates) == 2


@pytest.mark.parametrize("name", ["replicas_to_aggregate", "accepts", "updated"])
def test_own_policy_without_an_answer_is_named_in_one_line(name: str):
    method = lambda self, *args: None  # noqa: E731
    with pytest.raises(TypeError, match=rf"^Own\.{name} must return [^\n]+\. Received: None$"):
        _run(_own(**{name: property(method) if name == "replicas_to_aggregate" else method}))


def _init(self: Any, name: str, value: object, spares: int) -> None:
    tfdist.BackupWorkers.__init__(self, spares)
    setattr(self, name, value)


class _Unmade(tfdist.BackupWorkers):
    def __init__(self):
        pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: check_policies([_Unmade()], ""), "_Unmade.__init__ must begin with super().__init__(...)"),
        (lambda: _own(accept=lambda self: True), "Own.accept: no strategy calls it; did you mean accepts? Else rename"),
        (
            lambda: _own(may_start=lambda self, replica: False),
            "Own.may_start: strategies ignore an override; rename it, or override replicas_to_aggregate, accepts",
        ),
        (lambda: _own(update_due=property(bool)), "Own.update_due: strategies ignore an override;"),
        (lambda: _own(tfdist.Warmup, begin=int), "Own.begin: strategies ignore an override;"),
        (lambda: _own(tfdist.SoftSync, accepts=int), "Own.accepts: of SoftSync no strategy calls it; derive from Back"),
        (lambda: _own(accepts=lambda self, replica: True), "Own.accepts must take (self, replica, secs)"),
        (lambda: _own(replicas_to_aggregate=lambda self: 2), "Own.replicas_to_aggregate must be a property; write @"),
        (lambda: _run(_own(replicas_to_aggregate=4)), "Own(spares=1): replicas_to_aggregate must be 1 to 3, the repli"),
        (lambda: _run(_own(replicas_to_aggregate=property(str))), "Own.replicas_to_aggregate must return the number"),
        (lambda: _run(_own(updated=lambda self, time: 3)), "Own.updated must return the Update that super().updated("),
        (lambda: _run(_own(accepts=lambda self, replica, secs: secs)), "Own.accepts must return True or False"),
        (lambda: _run(_own(__init__=partialmethod(_init, "lost", 0))), "Own.lost is a method, which an attribute"),
        (lambda: _run(_own(__init__=partialmethod(_init, "durations", {}))), "Own.durations is of Aggregation"),
    ],
)
def test_own_policy_that_could_not_work_is_one_line(make: Callable[[], object], words: str):
    with pytest.raises((TypeError, ValueError)) as caught:
        make()
    assert str(caught.value).startswith(words) and "\n" not in str(caught.value)
    # Names of its own.
    assert _own(note=int, _accept=int, update=int, stats=int, States=dict, states=dict)


def test_of_those_that_arrive_together_the_lowest_number_is_first():
    simulation = simulate_policy(tfdist.BackupWorkers(spares=1), lambda replica, attempt: 1.0, 2, 3)
    # Replica 2 arrives at 1.0 too, just after the update, and starts then.
    assert [update.contributors for update in simulation.updates] == [(0, 1), (0, 1)]
    assert simulation.dropped == (0, 0, 1)


# Both laws have the mean 1.
@pytest.mark.parametrize(
    ("draw", "limit"),
    [(lambda law: math.exp(law.gauss(0.0, 1.0) - 0.5), 0.67), (lambda law: 0.5 * (1.0 - law.random()) ** -0.5, 0.79)],
    ids=["lognormal", "pareto"],
)
def test_six_and_two_spares_reach_the_known_limits(draw: Callable[[random.Random], float], limit: float):
    law = random.Random(1)
    simulation = simulate_policy(tfdist.BackupWorkers(spares=2), lambda replica, attempt: draw(law), 10_000, 8)
    assert simulation.updates_per_sec == pytest.approx(limit, rel=0.02)


def test_a_policy_that_comes_to_need_more_than_there_are_is_an_error():
    more_than_there_are = _own(replicas_to_aggregate=property(lambda self: 2 + self.step))
    with pytest.raises(ValueError, match=r"be 1 to 2, the replicas, in each step\. Received: 3 in step 1"):
        simulate_policy(more_than_there_are(spares=0), _one_slow, 2, 2)
