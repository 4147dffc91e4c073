# SPDX-License-Identifier: Apache-2.0
"""Events and times of the update log of Telemetry, as `tfdist watch` and the page read them."""

from __future__ import annotations

import pathlib
import time

import pytest

from tfdist.policies.records import Contribution, Outcome, Update
from tfdist.telemetry.session import LogSink, open_log
from tfdist.telemetry.update_log import EventKind, read_logs
from tfdist.watching.tensorboard.plugin import Jobs

WORKERS = ("worker:0", "worker:1")


def test_log_begins_with_training_and_names_workers_once(tmp_path: pathlib.Path) -> None:
    lines: list[tuple[EventKind, str]] = []
    sink = LogSink(WORKERS, lambda: False, lambda kind, line: lines.append((kind, line)), lambda update: 8)
    began = time.time()
    sink.writer = open_log(
        str(tmp_path / "run" / "policy"),
        is_resumed=False,
        job="job",
        task="chief:0",
        workers=WORKERS,
        strategy="S",
        policies=[],
        max_contributions=1000,
        warn=pytest.fail,
    )
    sink.begin(0, 0, 1)
    now = time.monotonic()
    gradient = Contribution(1, now, now + 0.25, Outcome.ACCEPTED, 0, 1.0, 0.0)
    sink.record(
        Update(1, (1,), (), (0,), 0.2, 0.0, (), contributions=(gradient,), time=now + 0.5, opened_secs=0.5), 8, 1
    )
    sink.event(EventKind.RESTARTED, "restart 2 by the launcher", "worker:1")
    sink.event(EventKind.RESTARTED, "restart 1 by the launcher", "chief:0")
    sink.lost(1, True)
    sink.lost(1, False)
    sink.close()
    ended = time.time()

    timeline = read_logs(tmp_path)
    events = timeline.events
    assert lines == [
        (EventKind.RESTARTED, "worker:1 restart 2 by the launcher"),
        (EventKind.RESTARTED, "chief:0: restart 1 by the launcher"),
        (EventKind.LOST, "worker:1 takes no part any more"),
        (EventKind.RETURNED, "worker:1 takes part again"),
    ]
    assert events.event_worker.tolist() == [1, -1, 1, 1]
    assert [text for text, worker in zip(events.event_text, events.event_worker, strict=True) if "worker" in text] == []
    assert timeline.contributions.arrival[0] - timeline.contributions.start[0] == pytest.approx(0.25, abs=1e-6)

    # Second 0 is the begin of the log, not of the machine.
    assert began <= timeline.origin_secs <= ended
    assert (events.event_time >= 0).all() and (events.event_time <= ended - began).all()
    first_update = pytest.approx(timeline.origin_secs, abs=ended - began)
    assert timeline.origin_secs + timeline.span[0] == first_update
    (job,), _ = Jobs(str(tmp_path)).all()
    summary = job.summary()
    assert (summary["run"], summary["origin_secs"] + summary["begin"]) == ("run", first_update)
