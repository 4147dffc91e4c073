# SPDX-License-Identifier: Apache-2.0
"""Threads meet a policy: who may start, what an update is made of, and what happens when somebody is lost or late."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from waiting import Clock

from tfdist.coordination import round_runner as module
from tfdist.coordination.round_runner import RoundRunner
from tfdist.policies.backup_workers import BackupWorkers


class Table:
    """Three replicas, and what they say to the person who watches."""

    def __init__(self, spares: Any = 1, count: int = 3, policy: BackupWorkers | None = None) -> None:
        policy = policy or BackupWorkers(spares)
        policy.begin(count, "Strategy")
        self.clock = Clock()
        self.lines: list[str] = []
        names = [f"worker:{replica}" for replica in range(count)]
        self.runner = RoundRunner(policy, names, 60.0, self.clock, self.lines.append)

    def start(self, replica: int) -> int | None:
        """The local step, or None if it may not start now."""
        asked = iter([False])
        return self.runner.start(replica, lambda: next(asked, True))

    def contribute(self, replica: int, step: int) -> bool:
        accepted = self.runner.arrive(replica, step)
        if accepted:
            self.runner.deliver(replica, step, f"{replica} of {step}")
        return accepted

    def started(self, *replicas: int) -> None:
        for replica in replicas:
            assert self.start(replica) is not None

    def open(self, *replicas: int) -> None:
        """Opens an update, in which these start."""
        self.runner.open()
        self.started(*replicas)


@pytest.fixture(autouse=True)
def polls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECS", 0.001)


@pytest.fixture
def table() -> Table:
    return Table()


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return thread, results


def test_an_update_is_made_of_the_first_in_the_order_of_their_arrival(table: Table) -> None:
    table.open(0, 1, 2)
    assert table.contribute(2, 0)
    assert table.contribute(0, 0)
    assert not table.contribute(1, 0)
    contributions, update = table.runner.collect()
    assert contributions == ["2 of 0", "0 of 0"]
    assert (update.step, update.contributors, update.dropped) == (1, (2, 0), (1,))


def test_nobody_starts_between_updates(table: Table) -> None:
    assert table.start(0) is None
    table.open(0, 1)
    table.contribute(0, 0)
    table.contribute(1, 0)
    table.runner.collect()
    assert table.start(0) is None
    asked = threading.Event()
    thread, results = in_thread(lambda: table.runner.start(0, lambda: asked.set() is not None))
    asked.wait()
    table.runner.wake()
    assert not results
    table.runner.open()
    thread.join()
    assert results == [1]


def test_a_thread_that_is_wanted_elsewhere_is_let_go(table: Table) -> None:
    over = threading.Event()
    thread, results = in_thread(lambda: table.runner.start(0, over.is_set))
    over.set()
    table.runner.wake()
    thread.join()
    assert results == [None]


def test_collect_waits_for_what_is_delivered_not_for_what_is_announced(table: Table) -> None:
    table.open(0, 1)
    table.contribute(0, 0)
    assert table.runner.arrive(1, 0)
    thread, results = in_thread(table.runner.collect)
    assert table.runner.waited_for() == "1 of worker:1, worker:2"
    assert not results
    table.runner.deliver(1, 0, "delivered")
    thread.join()
    assert results[0][0] == ["0 of 0", "delivered"]


# Losses.


def test_the_contribution_of_who_is_lost_is_withdrawn_and_another_takes_its_place(table: Table) -> None:
    table.open(0, 1, 2)
    table.contribute(0, 0)
    table.contribute(1, 0)
    assert not table.contribute(2, 0)
    table.runner.lose(1)
    assert table.start(2) == 0
    table.contribute(2, 0)
    contributions, update = table.runner.collect()
    assert contributions == ["0 of 0", "2 of 0"]
    assert update.contributors == (0, 2)
    assert table.lines == []


def test_what_the_lost_deliver_is_ignored(table: Table) -> None:
    table.open(0, 1, 2)
    assert table.runner.arrive(1, 0)
    table.runner.lose(1)
    table.runner.lose(1)
    table.runner.deliver(1, 0, "from the dead")
    assert not table.contribute(1, 0)
    table.contribute(0, 0)
    table.contribute(2, 0)
    assert table.runner.collect()[0] == ["0 of 0", "2 of 0"]


def test_too_few_alive_is_said_at_once_and_an_error_after_the_timeout(table: Table) -> None:
    table.runner.open()
    table.runner.lose(1)
    assert table.lines == []
    table.runner.lose(2)
    assert len(table.lines) == 1
    assert table.lines[0].startswith("worker:1, worker:2 lost; the other 1 replicas are too few for an update of 2;")
    assert table.lines[0].endswith("or fails after 60 s")
    assert "worker:1 (lost; it has to be started again)" in table.runner.waited_for()
    checks = iter([59.0, 60.0])

    def check() -> None:
        table.clock.now = next(checks)
        # Those who are alive are heard of.
        table.runner.give_up(0)
        table.started(0)
        table.contribute(0, 0)

    with pytest.raises(TimeoutError, match=r"worker:1, worker:2 did not come back within stall_timeout_secs=60;"):
        table.runner.collect(check)


def test_one_that_comes_back_in_time_ends_the_stall(table: Table) -> None:
    table.open(0)
    table.contribute(0, 0)
    table.runner.lose(1)
    table.runner.lose(2)

    def check() -> None:
        if table.clock.now < 50:
            table.clock.now = 50
            table.runner.bring_back(2)
        else:
            table.clock.now = 59
            table.started(2)
            table.contribute(2, 0)

    assert table.runner.collect(check)[1].contributors == (0, 2)


def test_a_delivery_that_takes_too_long_is_given_up(table: Table) -> None:
    table.open(0, 1, 2)
    table.contribute(0, 0)
    assert table.runner.arrive(1, 0)
    assert not table.contribute(2, 0)

    def check() -> None:
        if table.clock.now == 0:
            table.clock.now = 10.5
        elif table.lines:
            table.started(2)
            table.contribute(2, 0)

    assert table.runner.collect(check)[0] == ["0 of 0", "2 of 0"]
    assert table.lines == ["a gradient of worker:1 was not delivered for 10 s; dropped"]
    table.runner.deliver(1, 0, "too late")
    table.open(0, 1)
    table.contribute(0, 1)
    table.contribute(1, 1)
    assert table.runner.collect()[0] == ["0 of 1", "1 of 1"]


def test_a_change_of_the_policy_is_said() -> None:
    table = Table(spares="auto", count=4)
    table.runner.open()
    table.runner.lose(3)
    table.started(0, 1, 2)
    for replica in range(3):
        table.contribute(replica, 0)
    assert len(table.runner.collect()[0]) == 3
    assert table.lines[0].startswith("spares 0 -> 1 of 4 replicas")


# Errors.


@pytest.fixture(params=["an error of a replica", "an error of the check"])
def failed(request: pytest.FixtureRequest, table: Table) -> Table:
    """A table where the first update failed while worker:0 had delivered and the others were computing."""
    error = LookupError("my own words")

    def check() -> None:
        raise error

    with pytest.raises(LookupError) as raised, table.runner.wanted():
        table.started(0, 1, 2)
        table.contribute(0, 0)
        if request.param == "an error of a replica":
            table.runner.fail(1, 0, error)
        table.runner.collect(check)
    assert raised.value is error
    return table


def test_what_was_begun_for_an_update_that_failed_counts_no_more(failed: Table) -> None:
    failed.runner.open()
    # What it had begun before the failure comes only now.
    assert not failed.contribute(2, 0)
    failed.runner.fail(1, 0, LookupError("late words"))
    failed.started(0, 1)
    failed.contribute(0, 0)
    failed.contribute(1, 0)
    contributions, update = failed.runner.collect()
    assert contributions == ["0 of 0", "1 of 0"]
    assert update.step == 1
    assert failed.lines == []


def test_nobody_starts_once_an_update_has_failed(failed: Table) -> None:
    assert failed.start(0) is None


def test_failed_push_of_accepted_gradient_is_raised(table: Table) -> None:
    error = LookupError("damaged")
    with pytest.raises(LookupError) as raised, table.runner.wanted():
        table.started(0, 1, 2)
        assert table.runner.arrive(1, 0)
        table.runner.fail(1, 0, error)
        table.runner.collect()
    assert raised.value is error


@pytest.mark.parametrize("is_end", [True, False])
def test_what_a_late_replica_meets_is_said_and_no_error(table: Table, is_end: bool) -> None:
    table.open(0, 1, 2)
    table.contribute(0, 0)
    table.contribute(1, 0)
    table.runner.collect()
    table.open(0, 1)
    table.contribute(0, 1)
    table.contribute(1, 1)
    # All that counts is there, and not collected yet.
    table.runner.fail(2, 0, LookupError("late words"), is_end)
    assert table.runner.collect()[1].contributors == (0, 1)
    table.open(2, 0)
    table.contribute(2, 2)
    table.contribute(0, 2)
    assert table.runner.collect()[1].contributors == (2, 0)
    assert table.lines == ([] if is_end else ["a late gradient of worker:2 failed: LookupError: late words"])


@pytest.mark.parametrize("fails_in", ["arrived", "start"])
def test_error_of_the_policy_is_raised_by_collect(fails_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = BackupWorkers(spares=1)
    monkeypatch.setattr(policy, fails_in, mock.Mock(side_effect=ZeroDivisionError("of my own policy")))
    table = Table(policy=policy)
    table.runner.open()
    if fails_in == "arrived":
        table.started(0)
        with pytest.raises(ZeroDivisionError) as raised:
            table.contribute(0, 0)
        # As the thread of a replica does with what it meets.
        table.runner.fail(0, 0, raised.value)
    else:
        assert table.start(0) is None
    with pytest.raises(ZeroDivisionError, match="of my own policy"):
        table.runner.collect(lambda: setattr(table.clock, "now", table.clock.now + 30))


def test_an_update_is_made_after_one_whose_hook_has_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = BackupWorkers(spares=1)
    monkeypatch.setattr(policy, "stepped", mock.Mock(side_effect=[ZeroDivisionError("of my own policy"), None]))
    table = Table(policy=policy)
    for expected in (pytest.raises(ZeroDivisionError, match="of my own policy"), contextlib.nullcontext()):
        with expected, table.runner.wanted():
            table.started(0, 1)
            assert table.contribute(0, policy.step) and table.contribute(1, policy.step)
            assert table.runner.collect()[1].contributors == (0, 1)


def test_silence_is_an_error_after_the_timeout(table: Table) -> None:
    table.open(0, 1, 2)

    def check() -> None:
        table.clock.now += 30

    with pytest.raises(TimeoutError, match="waits for 2 of worker:0, worker:1, worker:2, and nothing was heard"):
        table.runner.collect(check)


def test_who_gives_up_may_start_again(table: Table) -> None:
    table.open(0)
    assert table.start(0) is None
    table.runner.give_up(0)
    assert table.start(0) == 0


def test_threads_that_race_give_every_update_its_contributions() -> None:
    table = Table(spares=1, count=4)
    closed = threading.Event()

    def serve(replica: int) -> None:
        while (step := table.runner.start(replica, closed.is_set)) is not None:
            if table.runner.arrive(replica, step):
                table.runner.deliver(replica, step, (replica, step))

    threads = [threading.Thread(target=serve, args=(replica,)) for replica in range(4)]
    for thread in threads:
        thread.start()
    for step in range(200):
        table.runner.open()
        contributions, update = table.runner.collect()
        assert [made_in for _, made_in in contributions] == [step] * 3
        assert tuple(replica for replica, _ in contributions) == update.contributors
        assert len(set(update.contributors)) == 3
    closed.set()
    table.runner.wake()
    for thread in threads:
        thread.join()
