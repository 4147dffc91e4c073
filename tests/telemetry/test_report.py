# SPDX-License-Identifier: Apache-2.0
"""The recorder adds up what updates were made of, whoever calls it, and the report can be read."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.policies.base import Update
from tfdist.telemetry.report import Recorder, Report, Sums

REPLICAS = 4
NAMES = [f"worker:{replica}" for replica in range(REPLICAS)]


def update(contributors: Sequence[int] = (), dropped: Sequence[int] = (), **given: float) -> Update:
    return Update(
        step=1,
        contributors=tuple(contributors),
        dropped=tuple(dropped),
        staleness=(0,) * len(contributors),
        wait_secs=given.get("wait_secs", 0.0),
        spread_secs=given.get("spread_secs", 0.0),
        changes=(),
    )


REPLICA = st.integers(0, REPLICAS - 1)
UPDATES = st.lists(
    st.builds(
        update,
        st.lists(REPLICA, unique=True),
        st.lists(REPLICA),
        wait_secs=st.integers(0, 1000),
        spread_secs=st.integers(0, 1000),
    )
)


def recorded(updates: Sequence[Update]) -> Recorder:
    recorder = Recorder(NAMES)
    for each in updates:
        recorder.record(each, examples=8 * len(each.contributors))
    return recorder


@given(UPDATES)
def test_every_gradient_is_counted_once(updates: list[Update]) -> None:
    report = recorded(updates).report()
    assert report.updates == len(updates)
    for replica, name in enumerate(NAMES):
        assert report.accepted[name] == sum(replica in each.contributors for each in updates)
        assert report.dropped[name] == sum(each.dropped.count(replica) for each in updates)
    assert sum(report.staleness.values()) == sum(report.accepted.values())
    assert report.wait_secs == sum(each.wait_secs for each in updates)


@given(UPDATES, UPDATES)
def test_differences_are_what_came_in_between(before: list[Update], after: list[Update]) -> None:
    assert recorded(before + after).sums().since(recorded(before).sums()) == recorded(after).sums()


def test_threads_do_not_lose_counts() -> None:
    recorder, rounds = Recorder(NAMES), 2000
    start = threading.Barrier(REPLICAS)

    def record(replica: int) -> None:
        start.wait()
        for _ in range(rounds):
            recorder.record(update([0], [replica], wait_secs=1.0), examples=2)

    threads = [threading.Thread(target=record, args=(replica,), daemon=True) for replica in range(REPLICAS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    total = REPLICAS * rounds
    assert recorder.sums() == Sums(total, 2 * total, (total, 0, 0, 0), (rounds,) * 4, float(total), 0.0)
    assert recorder.report().bytes_sent == dict.fromkeys(NAMES, 0)
    assert recorder.report().staleness == {0: total}


def test_a_report_can_not_be_changed_and_does_not_change() -> None:
    recorder = recorded([update([0, 1], [2])])
    report = recorder.report()
    recorder.record(update([0]))
    assert (report.updates, report.accepted["worker:0"], report.staleness) == (1, 1, {0: 2})
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.updates = 2  # type: ignore[misc]


def test_a_report_reads_as_a_table() -> None:
    recorder = recorded([update([0, 1], [2], wait_secs=0.5), update([1, 2], wait_secs=1.0)])
    assert str(recorder.report()).splitlines() == [
        "2 updates, waited 1.50 s for gradients (0.7500 s each)",
        "worker    accepted  of updates  dropped  of its gradients",
        "worker:0         1       50.0%        0              0.0%",
        "worker:1         2      100.0%        0              0.0%",
        "worker:2         1       50.0%        1             50.0%",
        "worker:3         0        0.0%        0                 -",
        "gradients by staleness: 0: 4",
    ]


def test_a_report_of_nothing_can_be_read_too() -> None:
    assert str(Recorder([]).report()) == "0 updates, waited 0.00 s for gradients"
    assert str(Recorder(["worker:0"]).report()).splitlines()[2].split() == ["worker:0", "0", "-", "0", "-"]


def test_bytes_are_shown_where_they_are_counted() -> None:
    report = Report(1, {"worker:0": 1}, {"worker:0": 0}, {0: 1}, 0.0, {"worker:0": 12345})
    assert str(report).splitlines()[-1] == "bytes sent: worker:0: 12,345"


def test_the_transfer_is_shown_where_there_is_one() -> None:
    report = Report(0, {}, {}, {}, 0.0, {}, transfer="each variable and gradient sent whole")
    assert str(report).splitlines()[-1] == "transfer: each variable and gradient sent whole"
