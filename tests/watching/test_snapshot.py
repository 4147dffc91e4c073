# SPDX-License-Identifier: Apache-2.0
"""The numbers that `tfdist watch` shows are those of the log, and its screen fits the terminal."""

from __future__ import annotations

import io
import math

import hypothesis
import logs
import made
import numpy as np
import pytest
from rich.console import Console

from tfdist.telemetry.update_log import (
    Contributions,
    EventKind,
    Events,
    Groups,
    Header,
    Outcome,
    Timeline,
    Updates,
    read_logs,
)
from tfdist.watching import screen, snapshot
from tfdist.watching.snapshot import Lanes

ACCEPTED, DROPPED, LOST = Outcome.ACCEPTED, Outcome.DROPPED, Outcome.LOST


def timeline(updates: list[tuple], gradients: list[tuple], events: list[tuple] = (), workers: int = 3) -> Timeline:
    """Builds a timeline of rows (step, time, opened, wait, examples, phase, count) and of rows as in a log."""
    names = tuple(f"worker:{index}" for index in range(workers))
    return Timeline(
        job="job",
        headers={"run1/policy/updates": Header("job", "chief:0", names, "S", ("P()",), 1e9)},
        workers=names,
        origin_secs=1e9,
        groups=Groups.empty(workers),
        updates=Updates.of(**_columns(Updates, updates)),
        contributions=Contributions.of(**_columns(Contributions, gradients)),
        events=Events.of(**_columns(Events, events)),
    )


def _columns(kind, rows):
    names = [name for name in kind.DTYPES if name not in kind.OPTIONAL]
    return dict(zip(names, zip(*rows, strict=True) if rows else [[]] * len(names), strict=True))


# Worker 2 is last each time: 0.4 s after worker 1 in the first update, and dropped in the second.
UPDATES = [(1, 1.0, 1.0, 0.8, 96, 1, 3), (2, 1.5, 0.5, 0.2, 64, 0, 3)]
GRADIENTS = [
    (0, -1.0, -0.8, ACCEPTED, 0, 1.0, 0.0),
    (1, -1.0, -0.4, ACCEPTED, 0, 1.0, 0.0),
    (2, -1.0, 0.0, ACCEPTED, 0, 1.0, 0.0),
    (0, -0.4, -0.2, ACCEPTED, 1, 1.0, 0.1),
    (1, -0.5, 0.0, ACCEPTED, 0, 1.0, 0.0),
    (2, -0.5, -0.25, DROPPED, 1, 0.0, 0.0),
]


def test_rates_percentiles_and_costs_are_those_of_the_log():
    taken = snapshot.take(timeline(UPDATES, GRADIENTS))
    assert (taken.step, taken.updates, taken.is_warmup, taken.window_secs) == (2, 2, False, 1.5)
    assert (taken.updates_per_sec, taken.examples_per_sec) == pytest.approx((2 / 1.5, 160 / 1.5))
    assert taken.wait == pytest.approx(1.0 / 1.5)
    rows = {row.name: row for row in taken.workers}
    assert [row.name for row in taken.workers] == ["worker:2", "worker:1", "worker:0"]
    # Two others waited 0.4 s for it, and 0.25 s of its computation were dropped.
    assert rows["worker:2"].cost == pytest.approx((2 * 0.4 + 0.25) / 1.5)
    assert rows["worker:1"].cost == pytest.approx(0.2 / 1.5)
    assert (rows["worker:2"].accepted, rows["worker:2"].dropped, rows["worker:2"].staleness_max) == (1, 1, 0)
    assert (rows["worker:0"].p50_secs, rows["worker:1"].p95_secs) == pytest.approx((0.2, 0.6))
    assert (rows["worker:0"].staleness_mean, rows["worker:0"].staleness_max) == (0.5, 1)
    shares = [(row.compute, row.wait, row.held) for row in (rows["worker:0"], rows["worker:1"])]
    assert np.allclose(np.array(shares) * 1.5, [(0.4, 1.0, 0.1), (1.1, 0.4, 0.0)])


def test_a_window_leaves_out_what_is_older():
    taken = snapshot.take(timeline(UPDATES, GRADIENTS), window_secs=0.4)
    assert (taken.updates, taken.window_secs, taken.updates_per_sec) == (2, 0.5, 2.0)
    assert {row.name: row.accepted for row in taken.workers} == {"worker:0": 2, "worker:1": 2, "worker:2": 1}


def test_states_say_who_computes_waits_and_is_lost_or_late():
    # In the middle of the first step, worker 0 had delivered its gradient.
    taken = snapshot.take(timeline(UPDATES[:1], GRADIENTS[:3]))
    states = {row.name: row.state for row in taken.workers}
    assert states == {"worker:0": "waiting", "worker:1": "computing", "worker:2": "computing"}
    assert taken.is_warmup
    later = [(step, 1.5 + step, 1.0, 0.0, 0, 0, 1) for step in range(3, 9)]
    events = [(2.0, 2, EventKind.LOST, "gone"), (3.0, 1, EventKind.LOST, "gone"), (4.0, 1, EventKind.RETURNED, "back")]
    ticks = [(0, -1.0, 0.0, ACCEPTED, 0, 1.0, 0.0)] * 6
    taken = snapshot.take(timeline([*UPDATES, *later], [*GRADIENTS, *ticks], events))
    assert {row.name: row.state for row in taken.workers} == {
        "worker:0": "computing",
        "worker:1": "computing",
        "worker:2": "lost",
    }
    assert {row.name: row.late_secs for row in taken.workers} == pytest.approx(
        {"worker:0": 0.0, "worker:1": 8.0, "worker:2": 0.0}
    )
    assert taken.workers[0].name == "worker:2"
    assert taken.events[0][1:] == ("worker:1", EventKind.RETURNED, "back")


def test_a_job_without_an_update_has_no_numbers():
    taken = snapshot.take(timeline([], []))
    assert (taken.updates, taken.step, {row.state for row in taken.workers}) == (0, 0, {"absent"})
    assert math.isnan(taken.updates_per_sec)
    assert drawn(taken, 80, 24)[1].rstrip() == "no update yet"


@hypothesis.given(made.ROWS)
@hypothesis.settings(max_examples=50, deadline=None)
def test_lanes_never_overlap(rows):
    updates, gradients, time = [], [], 0.0
    for step, (_, secs, wait, examples, found) in enumerate(rows, 1):
        time += secs
        updates.append((step, time, secs, wait, examples, 0, len(found)))
        gradients.extend(
            (w, -ago - took, -ago, outcome, stale, 1.0, held) for w, ago, took, outcome, stale, held in found
        )
    whole = timeline(updates, gradients)
    lanes = Lanes.of(whole.updates, whole.contributions)
    assert sorted(lanes.row.tolist()) == list(range(len(gradients)))
    for worker in range(3):
        mine = np.stack([lanes.held, lanes.start, lanes.arrival, lanes.end])[:, lanes.worker == worker]
        assert np.all(np.diff(mine.T.reshape(-1)) >= 0)
    snapshot.take(whole)


# The screen.


def drawn(taken: snapshot.Snapshot, width: int, height: int | None, **options) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, color_system=None)
    console.print(screen.draw(taken, screen.View(width, height, now=taken.last + 5, run="run1", **options)))
    return console.file.getvalue().splitlines()


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Timeline:
    directory = tmp_path_factory.mktemp("many")
    logs.write_synchronous(directory, num_workers=64, num_updates=200, spares=4, slow={7: 3.0, 20: 1.6})
    return read_logs(directory)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (60, 10), (200, 100), (40, 8)])
def test_the_screen_fits_the_terminal_and_counts_hidden_workers(many: Timeline, width: int, height: int):
    lines = drawn(snapshot.take(many), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    shown = [line for line in _rows(lines) if not line.startswith("worker ")]
    if len(shown) < 64:
        assert len(lines) == height
        assert any(line.startswith(f"{64 - len(shown)} more workers") for line in lines)
    if width >= 80:
        # The lost worker, then the slow ones: most of their gradients are dropped.
        assert shown[0].split()[0] == "worker:63"
        assert {line.split()[0] for line in shown[1:3]} == {"worker:7", "worker:20"}
        assert shown[0].split()[1] == "lost"


def _rows(lines: list[str]) -> list[str]:
    """Lines of the table, but for the one in words above it."""
    return [line for line in lines[2:] if line.startswith("worke")]


def test_once_shows_all_workers(many: Timeline):
    assert len(_rows(drawn(snapshot.take(many), 80, None))) == 1 + 64


def test_text_of_a_log_can_not_write_escape_sequences():
    events = [(1.0, -1, EventKind.POLICY_CHANGED, "a\x1b[2Jb [red]c\n")]
    text = "\n".join(drawn(snapshot.take(timeline(UPDATES, GRADIENTS, events)), 80, 24, problems=["x[bold]y"]))
    assert "\x1b" not in text
    assert "a\N{REPLACEMENT CHARACTER}[2Jb [red]c\N{REPLACEMENT CHARACTER}" in text
    assert "skipped x[bold]y" in text


def test_a_terminal_without_unicode_gets_letters():
    line = drawn(snapshot.take(timeline(UPDATES, GRADIENTS)), 80, 24, is_unicode=False)[5]
    assert set(line.split()[-1]) <= set("#.=")


def test_finished_training_is_shown_as_finished_not_as_stalled():
    end = [(9.0, -1, EventKind.FINISHED, "finished")]
    lines = drawn(snapshot.take(timeline(UPDATES, GRADIENTS, end)), 80, 24)
    assert any("finished 5 s ago" in line for line in lines)
    assert {row.state for row in snapshot.take(timeline(UPDATES, GRADIENTS, end)).workers} == {"ended"}
    # The training has gone on, as after a restart.
    later = [*UPDATES, (9, 100.0, 1.0, 0.0, 0, 0, 0)]
    assert snapshot.take(timeline(later, GRADIENTS, end)).ended == ""


def test_columns_without_a_number_are_left_out_at_80_columns():
    accepted = [(worker, -1.0, -0.5, ACCEPTED, 0, 1.0, 0.0) for worker in range(3)]
    lines = drawn(snapshot.take(timeline([(1, 1.0, 1.0, 0.5, 8, 0, 3)], accepted)), 80, 24)
    heading = next(line for line in lines if line.startswith("worker "))
    assert heading.split() == ["worker", "state", "p50", "p95", "accept", "cost", "time"]


def test_a_stalled_job_says_since_when(many: Timeline):
    assert "last 5 s ago" in drawn(snapshot.take(many), 120, 24)[2]
