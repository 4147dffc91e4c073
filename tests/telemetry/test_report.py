# SPDX-License-Identifier: Apache-2.0
"""The recorder adds up what updates were made of, whoever calls it, and the report can be read."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import pathlib
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tfdist.coordination.usage import Usage
from tfdist.policies import Contribution, Outcome, Update
from tfdist.telemetry.histogram import Histogram
from tfdist.telemetry.recorder import Recorder
from tfdist.telemetry.report import Interval, Report, with_usage
from tfdist.telemetry.update_log import Contributions, Header, LogWriter, Updates, read_logs
from tfdist.watching import watch
from tfdist.watching.tensorboard import plugin

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
def test_interval_is_what_came_since_the_last_one(before: list[Update], after: list[Update]) -> None:
    recorder = recorded(before)
    recorder.take()
    for each in after:
        recorder.record(each, examples=8 * len(each.contributors))
    assert recorder.take().report(NAMES) == recorded(after).report()
    assert recorder.report() == recorded(before + after).report()


def test_threads_do_not_lose_counts() -> None:
    recorder, rounds = Recorder(NAMES), 2000
    start = threading.Barrier(REPLICAS)

    def record(replica: int) -> None:
        start.wait()
        for _ in range(rounds):
            recorder.record(update([0], [replica], wait_secs=1.0), examples=2)

    with ThreadPoolExecutor(REPLICAS) as pool:
        list(pool.map(record, range(REPLICAS)))
    total = REPLICAS * rounds
    report = recorder.report()
    assert (report.updates, report.examples, report.wait_secs) == (total, 2 * total, float(total))
    assert list(report.accepted.values()) == [total, 0, 0, 0]
    assert list(report.dropped.values()) == [rounds] * 4
    assert recorder.report().bytes_sent == dict.fromkeys(NAMES, 0)
    assert recorder.report().staleness == {0: total}


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


def test_bytes_and_transfer_are_shown_where_they_are_known() -> None:
    report = Report(1, {"worker:0": 1}, {"worker:0": 0}, {0: 1}, 0.0, {"worker:0": 12345})
    assert str(report).splitlines()[-1] == "bytes sent: worker:0: 12,345"
    report = Report(0, {}, {}, {}, 0.0, {}, transfer="each variable and gradient sent whole")
    assert str(report).splitlines()[-1] == "transfer: each variable and gradient sent whole"


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
    made = Update(1, tuple(range(workers)), (3,), staleness, 1.0, 1.0, (), (), (), tuple(gradients), 200.0)
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
            assert recorder.take().times[0]["step"].count == 51
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


# Who is slow.


def steps(own_secs: np.ndarray, input_share: float = 0.5, reduce_secs: float = 1 / 64) -> tuple[Updates, Contributions]:
    """Synchronous steps in which worker i needs own_secs[step, i]; times that float32 holds exactly."""
    own, count = np.round(own_secs * 4096) / 4096, len(own_secs)
    last, late = own.max(1, keepdims=True), np.ptp(own, 1)
    opened = last[:, 0] + reduce_secs
    flat = np.zeros(count)
    updates = Updates.of(
        step=np.arange(count) + 1,
        time=np.cumsum(opened),
        opened=opened,
        wait=late,
        examples=flat,
        phase=flat,
        count=flat + own.shape[1],
        reduce=flat + reduce_secs,
    )
    order = np.argsort(own, axis=1, kind="stable")
    sorted_own, flat = np.take_along_axis(own, order, 1), np.zeros(own.size)
    return updates, Contributions.of(
        worker=order.ravel(),
        start=flat - np.repeat(opened, own.shape[1]),
        arrival=(sorted_own - opened[:, None]).ravel(),
        outcome=flat,
        staleness=flat,
        weight=flat + 1,
        held=flat,
        input=sorted_own.ravel() * input_share,
    )


def report_of(own_secs: np.ndarray, **options: float) -> Report:
    recorder = Recorder([f"worker:{index}" for index in range(own_secs.shape[1])])
    recorder.record_steps(*steps(own_secs, **options))
    return recorder.report()


def noisy(seed: int, num_steps: int, factors: Sequence[float], memory: float = 0.0) -> np.ndarray:
    """Times of workers: gamma noise, of which a part `memory` is that of the step before."""
    random = np.random.default_rng(seed)
    noise = random.gamma(4.0, 0.25, (num_steps, len(factors)))
    for step in range(1, num_steps):
        noise[step] = memory * noise[step - 1] + (1 - memory) * noise[step]
    return 0.02 * noise * np.asarray(factors) + 0.001


@given(st.integers(0, 2**32), st.lists(st.integers(0, 30), max_size=5))
def test_steps_recorded_in_parts_are_those_recorded_at_once(seed: int, ends: list[int]) -> None:
    updates, rows = steps(noisy(seed, 30, [1.0, 5.0, 1.2]))
    recorder, limits = Recorder(["worker:0", "worker:1", "worker:2"]), [0, *sorted(ends), 30]
    for begin, end in itertools.pairwise(limits):
        recorder.record_steps(updates[begin:end], rows[3 * begin : 3 * end])
        assert recorder.updates == end
    assert recorder.report() == report_of(noisy(seed, 30, [1.0, 5.0, 1.2]))


def test_steps_are_added_up_though_nobody_asks() -> None:
    recorder, (updates, rows) = Recorder(["worker:0", "worker:1"]), steps(noisy(1, 64, [1.0, 2.0]))
    kept: list[weakref.ref[np.ndarray]] = []
    for _ in range(200):
        part = updates.replace(time=updates.time.copy())
        kept.append(weakref.ref(part.time))
        recorder.record_steps(part, rows)
    del part
    assert sum(each() is not None for each in kept) < 50
    assert recorder.report().updates == 200 * 64


@given(st.integers(0, 2**32), st.integers(2, 400), st.integers(2, 8), st.sampled_from([0.0, 0.5, 0.8]))
def test_of_equal_workers_none_is_named(seed: int, num_steps: int, workers: int, memory: float) -> None:
    report = report_of(noisy(seed, num_steps, [1.0] * workers, memory))
    assert report.slow is None
    assert report.in_words.startswith("no worker stands out")


@given(st.integers(0, 2**32), st.integers(0, 3))
def test_a_slow_worker_is_named_wherever_it_is(seed: int, slow: int) -> None:
    report = report_of(noisy(seed, 200, [4.0 if index == slow else 1.0 for index in range(4)]))
    assert report.slow is not None and report.slow.names == (f"worker:{slow}",)
    assert report.slow.factor == pytest.approx(4.0, rel=0.4)
    assert report.order[0] == f"worker:{slow}"


def test_a_worker_that_is_slow_by_a_small_part_of_a_step_is_not_named() -> None:
    own = noisy(0, 1000, [1.0, 1.0, 4.0]) / 20
    assert report_of(own, reduce_secs=1 / 1024).slow is not None
    report = report_of(own, reduce_secs=1.0)
    assert report.slow is None
    assert report.in_words == "no worker stands out; 99 % of a step is the all-reduce"


def test_few_values_have_no_upper_limit() -> None:
    few = Histogram()
    for value, low in ((2.0, 0.0), (3.0, 0.0), (2.0, 2.0)):
        few.add_all(np.array([value]))
        assert Interval.of_median(few) == Interval(low, pytest.approx(2.0, rel=0.02), math.inf, few.percentile(95))
    many = Histogram()
    many.add_all(np.full(1000, 0.001))
    # A thousand within a second are no more than four.
    assert Interval.of_median(many, 1.0).high == math.inf > Interval.of_median(many, 2.0).high
    assert few and Interval.of_median(few).is_above(Interval.of_median(many))


def late_of(counts: Sequence[int], secs: Sequence[float], input_share: float = 0.0) -> Report:
    """Updates without the gradients of the last worker, which are dropped."""
    recorder, now = Recorder([f"worker:{index}" for index in range(len(counts))], is_complete=True), 0.0
    for number in range(max(counts)):
        now += 1.0
        ended = [
            Contribution(
                index, now - secs[index], now, Outcome(index == len(counts) - 1), 0, 1.0, 0.5, secs[index] * input_share
            )
            for index, count in reversed([*enumerate(counts)])
            if number < count
        ]
        contributors = tuple(each.replica for each in ended if each.outcome is Outcome.ACCEPTED)
        dropped = tuple(each.replica for each in ended if each.outcome is Outcome.DROPPED)
        made = update(contributors, dropped)
        recorder.record(dataclasses.replace(made, contributions=tuple(ended), time=now))
    return recorder.report()


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "worker:2 has sent 0 gradients, the others 50 (median)"),
        (1, "worker:2 has sent 1 gradient, the others 50 (median)"),
        (3, "worker:2 is 30 times as slow as the median: 100 % of its gradients are dropped"),
    ],
)
def test_worker_with_few_gradients_all_dropped_is_told(count: int, words: str) -> None:
    assert late_of([50, 50, count], [0.01, 0.01, 0.3]).in_words == words
    # One that came late, or comes back, is as fast as the others.
    if count == 3:
        assert late_of([50, 50, count], [0.01, 0.01, 0.01]).in_words == "no worker stands out"


def test_input_of_dropped_gradients_is_named_beside_the_drops() -> None:
    words = late_of([50, 50, 50], [0.01, 0.01, 0.3], input_share=0.9).in_words
    assert (
        words
        == "worker:2 is 30 times as slow as the median: 90 % of its time is input, 100 % of its gradients are dropped"
    )


def test_report_watch_and_page_agree_to_the_digit(tmp_path: pathlib.Path) -> None:
    names = ["worker:0", "worker:1", "worker:2"]
    recorder = Recorder(names, is_complete=True)
    log = LogWriter(str(tmp_path / "policy" / "updates"), Header("job", "worker:0", tuple(names)))
    recorder.sink = log.add_columns
    recorder.record_steps(*steps(noisy(3, 300, [1.0, 5.0, 1.2])))
    log.close()
    report, timeline = recorder.report(), read_logs(tmp_path)
    job = plugin.RecordedJob(timeline)
    of_log = job.report
    times = [f"{name}_secs" for name in ("step", "input", "compute", "rest", "own", "late", "reduce")]
    for field in ("accepted", "wait", *times):
        one, other = (getattr(found, field) for found in (report, of_log))
        assert repr(one) == repr(other) or _rounded(one) == _rounded(other), field
    assert report.in_words == of_log.in_words
    assert report.in_words.startswith("worker:1 is ") and report.in_words.endswith("50 % of its time is input")
    watched = watch.Watched(str(tmp_path), None, 3600.0)
    watched.read()
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(watched.draw(None))
    lines = console.file.getvalue().splitlines()
    assert lines[1] == report.in_words
    assert [row["name"] for row in job.table] == [each.split()[0] for each in lines[4:]] == report.order
    for row in job.table:
        step = report.step_secs[row["name"]]
        assert (row["compute_p50"], row["compute_p95"]) == (step.p50, step.p95)
        assert row["input_p50"] == report.input_secs[row["name"]].p50
        assert row["is_slow"] == (row["name"] == "worker:1")
        assert row["cost_secs"] == pytest.approx(report.cost_secs[row["name"]], rel=1e-5)


def _rounded(found: object) -> object:
    """Numbers to six digits: a log has float32."""
    if isinstance(found, dict):
        return {name: _rounded(each) for name, each in found.items()}
    if dataclasses.is_dataclass(found):
        return [float(f"{each:.5g}") for each in dataclasses.astuple(found)]
    return found
