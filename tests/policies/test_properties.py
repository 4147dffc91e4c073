# SPDX-License-Identifier: Apache-2.0
"""Properties of backup workers in any order of arrivals, losses and recoveries."""

from __future__ import annotations

import dataclasses
import random

import ledger
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import tfdist
from tfdist.policies import base

_MAX_REPLICAS = 6
_SEEDS = st.integers(0, 2**16)


@dataclasses.dataclass(frozen=True)
class _Gradient:
    replica: int
    local_step: int
    # How often the replica had died before it started this.
    life: int


class _HalfRefused(tfdist.BackupWorkers):
    """Refuses every second replica, and another half in the next step."""

    def accepts(self, replica: int, secs: float) -> bool:
        return (self.step + replica) % 2 == 0


class BackupWorkersMachine(RuleBasedStateMachine):
    """A world that does to a policy what engines may do, and knows for itself what must come of it."""

    spares_are_auto = False
    policy_type = tfdist.BackupWorkers

    @initialize(total=st.integers(1, _MAX_REPLICAS), data=st.data())
    def begin(self, total: int, data: st.DataObject) -> None:
        self.total = total
        if self.spares_are_auto and total > 1:
            self.most = data.draw(st.integers(1, total - 1))
            self.policy = tfdist.BackupWorkers("auto", max_spares=self.most)
        else:
            self.most = data.draw(st.integers(0, total - 1))
            self.policy = self.policy_type(self.most)
        self.policy.begin(total, "MirroredStrategy")
        self.ledger = ledger.Ledger(self.policy)
        self.time = 0.0
        self.step = 0
        self.alive = set(range(total))
        self.lives = [0] * total
        # What travels; also what dead replicas had sent or will never send.
        self.travelling: list[_Gradient] = []
        self.accepted: list[_Gradient] = []
        self.dropped: list[int] = []
        # Replicas whose gradient of this step was dropped.
        self.surplus: set[int] = set()
        self.wanted = self.policy.replicas_to_aggregate

    def _later(self, secs: float = 1.0) -> float:
        self.time += secs
        return self.time

    def _may_change(self) -> None:
        self.wanted = self.policy.replicas_to_aggregate

    def _start(self, replica: int) -> None:
        assert replica in self.alive
        assert replica not in {gradient.replica for gradient in self.accepted}
        gradient = _Gradient(replica, self.policy.started(replica, self._later()), self.lives[replica])
        assert gradient.local_step == self.step
        self.travelling.append(gradient)

    def _arrive(self, gradient: _Gradient, secs: float = 1.0) -> None:
        self.travelling.remove(gradient)
        # The update has enough, or enough others may deliver so that the rule can make this replica a spare.
        others = self.alive - {gradient.replica, *(each.replica for each in self.accepted)} - self.surplus
        is_spare = len(self.accepted) + len(others) >= self.wanted and not self.policy.accepts(gradient.replica, secs)
        dropped = self.policy.update_due or is_spare
        arrival = self.policy.arrived(gradient.replica, gradient.local_step, self._later(secs))
        assert arrival.staleness == self.step - gradient.local_step
        assert arrival.weight == (1.0 if arrival.accepted else 0.0)
        current = gradient.life == self.lives[gradient.replica] and gradient.replica in self.alive
        assert arrival.accepted == (current and gradient.local_step == self.step and not dropped)
        if arrival.accepted:
            self.accepted.append(gradient)
        elif current:
            # What a replica had sent before it was lost was counted then, as lost.
            self.dropped.append(gradient.replica)
            if gradient.local_step == self.step:
                self.surplus.add(gradient.replica)

    def _update(self) -> base.Update:
        update = self.policy.updated(self._later())
        assert len(update.contributors) == len(set(update.contributors)) == self.wanted
        assert all(gradient.local_step == self.step for gradient in self.accepted)
        assert update.contributors == tuple(gradient.replica for gradient in self.accepted)
        assert update.dropped == tuple(self.dropped)
        assert update.staleness == (0,) * self.wanted
        assert update.wait_secs >= 0.0
        assert update.spread_secs >= 0.0
        self.step += 1
        assert update.step == self.step
        self.accepted, self.dropped, self.surplus = [], [], set()
        self._may_change()
        return update

    def _starters(self) -> list[int]:
        return [replica for replica in range(self.total) if self.policy.may_start(replica)]

    def _current(self) -> list[_Gradient]:
        return [g for g in self.travelling if g.replica in self.alive and g.life == self.lives[g.replica]]

    def _all_alive_finish(self, order: random.Random) -> None:
        """Replicas that may start do, and all gradients arrive, in any order; dead replicas say nothing."""
        for replica in self._starters():
            self._start(replica)
        gradients = self._current()
        order.shuffle(gradients)
        for gradient in gradients:
            self._arrive(gradient, order.lognormvariate(0.0, 2.0))

    @rule(data=st.data())
    def starts(self, data: st.DataObject) -> None:
        if starters := self._starters():
            self._start(data.draw(st.sampled_from(starters)))

    @rule(data=st.data())
    def arrives(self, data: st.DataObject) -> None:
        # One that was sent by a replica before its death too; a replica that is back and computes for the same step
        # could not be told from its former life, which is for the engine to prevent.
        sure = [g for g in self.travelling if g in self._current() or not self._computes(g.replica, g.local_step)]
        if sure:
            self._arrive(data.draw(st.sampled_from(sure)))

    def _computes(self, replica: int, local_step: int) -> bool:
        return any(g.replica == replica and g.local_step == local_step for g in self._current())

    @precondition(lambda self: self.policy.update_due)
    @rule()
    def updates(self) -> None:
        self._update()

    @rule()
    def keras_asks(self) -> None:
        self.policy.opened(self._later())

    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        replica = data.draw(st.integers(0, self.total - 1))
        self.policy.lost(replica, self._later())
        self.alive.discard(replica)
        self._forget(replica)
        self._may_change()
        if len(self.accepted) < self.wanted:
            self.surplus = set()

    @rule(data=st.data())
    def returns(self, data: st.DataObject) -> None:
        replica = data.draw(st.integers(0, self.total - 1))
        self.policy.recovered(replica, self._later())
        self.alive.add(replica)
        self._forget(replica)

    def _forget(self, replica: int) -> None:
        self.lives[replica] += 1
        if replica in {gradient.replica for gradient in self.accepted}:
            self.surplus = set()
        self.accepted = [gradient for gradient in self.accepted if gradient.replica != replica]

    @precondition(lambda self: len(self.alive) >= self.wanted)
    @rule(seed=_SEEDS)
    def nobody_waits_for_the_dead(self, seed: int) -> None:
        order = random.Random(seed)
        # First the late arrive, who then start again.
        for _ in range(2):
            if not self.policy.update_due:
                self._all_alive_finish(order)
        assert self.policy.update_due
        self._update()

    @precondition(lambda self: len(self.alive) >= self.wanted)
    @rule(seed=_SEEDS)
    def trains_for_a_while(self, seed: int) -> None:
        order = random.Random(seed)
        for _ in range(10):
            while not self.policy.update_due:
                self._all_alive_finish(order)
            before, update = self.wanted, self._update()
            assert self.spares_are_auto or not update.changes
            assert self.wanted == before or update.changes

    @invariant()
    def the_number_of_gradients_changes_in_updates_and_losses_only_and_within_bounds(self) -> None:
        assert self.policy.replicas_to_aggregate == self.wanted
        assert 1 <= self.total - self.most <= self.wanted <= self.total
        assert self.spares_are_auto or self.wanted == self.total - self.most

    @invariant()
    def the_update_being_collected_is_what_was_accepted(self) -> None:
        assert self.policy.step == self.step
        assert self.policy.contributors == tuple(gradient.replica for gradient in self.accepted)
        assert self.policy.update_due == (len(self.accepted) == self.wanted)

    @invariant()
    def gradients_that_no_update_has_named_are_computed_or_wait(self) -> None:
        unnamed = {(replica, local_step) for (replica, _), local_step in self.ledger.open.items()}
        assert unnamed >= {(gradient.replica, gradient.local_step) for gradient in [*self._current(), *self.accepted]}

    @invariant()
    def whoever_is_alive_and_idle_and_was_not_heard_may_start(self) -> None:
        busy = {gradient.replica for gradient in [*self._current(), *self.accepted]}
        assert set(self._starters()) == self.alive - busy - self.surplus

    @invariant()
    def the_missing_are_named_if_too_few_are_alive(self) -> None:
        dead = set(range(self.total)) - self.alive
        assert set(self.policy.missing()) == (dead if len(self.alive) < self.wanted else set())
        # With auto, that is only so once the cap is reached.
        assert not self.spares_are_auto or len(dead) > self.most or not self.policy.missing()


class AutoSparesMachine(BackupWorkersMachine):
    """The same, with `spares="auto"`."""

    spares_are_auto = True


class OwnRuleMachine(BackupWorkersMachine):
    """The same, with a rule that refuses gradients."""

    policy_type = _HalfRefused


_SETTINGS = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)
TestBackupWorkers = BackupWorkersMachine.TestCase
TestBackupWorkers.settings = _SETTINGS
TestOwnRule = OwnRuleMachine.TestCase
TestOwnRule.settings = _SETTINGS
TestAutoSpares = AutoSparesMachine.TestCase
TestAutoSpares.settings = _SETTINGS
