# SPDX-License-Identifier: Apache-2.0
"""The recorder adds up what updates were made of, whoever calls it, and the report can be read."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.policies import Contribution, Outcome, Update
from tfdist.runtime.usage import Usage
from tfdist.telemetry.recorder import Recorder, Sums
from tfdist.telemetry.report import Report, with_usage

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
    assert recorder.sums() == Sums(
        total, 2 * total, (total, 0, 0, 0), (rounds,) * 4, float(total), 0.0, lost=(0,) * 4, staleness=0
    )
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
        "2 updates, waited 1.50 s for gradients (0.7500 s each), 32 examples",
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


USAGE = {f"worker:{replica}": Usage(1000, 2000, 1.5, 10**8, 0.0) for replica in range(REPLICAS)}


def test_counters_of_processes_are_a_table() -> None:
    report = with_usage(
        recorded([update([0])]).report(), {"worker:0": USAGE["worker:0"], "ps:0": USAGE["worker:1"]}, {}
    )
    assert report.bytes_sent == {"worker:0": 1000, "worker:1": 0, "worker:2": 0, "worker:3": 0, "ps:0": 1000}
    assert str(report).splitlines()[-3:] == [
        "task      bytes sent  received  cpu, s  memory, MB",
        "worker:0       1,000     2,000     1.5         100",
        "ps:0           1,000     2,000     1.5         100",
    ]


def test_messages_stand_in_where_the_kernel_counts_no_bytes() -> None:
    silent = Usage(0, 0, 1.0, 1, 0.0)
    report = with_usage(Recorder(["worker:0"]).report(), {"worker:0": silent}, {"worker:0": 7})
    assert report.bytes_sent == report.message_bytes == {"worker:0": 7}


@pytest.mark.parametrize("workers", [8, 64, 1000])
def test_a_report_stays_on_one_screen(workers: int) -> None:
    names = [f"worker:{replica}" for replica in range(workers)]
    recorder = Recorder(names)
    gradients = [Contribution(r, 0.0, 0.1 + r / 10, Outcome.ACCEPTED, r % 30, 1.0, 0.01) for r in range(workers)]
    staleness = tuple(each.staleness for each in gradients)
    made = Update(
        1, tuple(range(workers)), (3,), staleness, 1.0, 1.0, (), (), (), (0.1,) * workers, tuple(gradients), 200.0
    )
    recorder.record(made)
    for replica in range(workers):
        recorder.changed(replica, True)
        recorder.changed(replica, False)
    usage = dict.fromkeys(names, USAGE["worker:0"])
    report = dataclasses.replace(with_usage(recorder.report(), usage, {}), transfer="whole", restarts={names[0]: 1})
    lines = str(report).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 200
    # Who was dropped, and the slowest, are shown.
    assert any(line.startswith("worker:3 ") for line in lines)
    assert any(line.startswith(f"worker:{workers - 1} ") for line in lines)


def test_times_of_gradients_are_percentiles() -> None:
    recorder = Recorder(NAMES)
    for number in range(100):
        secs = (number + 1) / 100
        accepted = Contribution(0, 10.0, 10.0 + secs, Outcome.ACCEPTED, 0, 1.0, held=0.5)
        dropped = Contribution(1, 9.0, 10.0, Outcome.DROPPED, 1, 0.0, held=0.0)
        lost = Contribution(2, 9.0, 10.0, Outcome.LOST, 1, 0.0, held=0.0)
        recorder.record(dataclasses.replace(update([0], [1]), contributions=(dropped, lost, accepted), time=11.0))
        if number == 50:
            assert recorder.take_times()[0].step.count == 51
    report = recorder.report()
    assert report.step_secs.keys() == {"worker:0", "worker:1"} | {"worker:2"}
    assert report.step_secs["worker:0"].count == 100
    assert report.step_secs["worker:0"].p50 == pytest.approx(0.5, rel=0.03)
    assert report.step_secs["worker:0"].p95 == pytest.approx(0.95, rel=0.03)
    assert report.step_secs["worker:0"].most == 1.0
    assert report.wait["worker:0"].most == pytest.approx(0.99)
    assert report.held["worker:0"].mean == 0.5
    assert report.step_secs["worker:1"].p50 == pytest.approx(1.0, rel=0.02)
    assert report.step_secs["worker:2"].count == 0
    assert report.lost == {"worker:0": 0, "worker:1": 0, "worker:2": 100, "worker:3": 0}


def test_the_transfer_is_shown_where_there_is_one() -> None:
    report = Report(0, {}, {}, {}, 0.0, {}, transfer="each variable and gradient sent whole")
    assert str(report).splitlines()[-1] == "transfer: each variable and gradient sent whole"
