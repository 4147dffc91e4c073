# SPDX-License-Identifier: Apache-2.0
"""Update logs are read back as written, whatever the disk or a stranger does to them, and while they are written."""

from __future__ import annotations

import itertools
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence

import made
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist import _files
from tfdist.policies import Contribution
from tfdist.telemetry.update_log import (
    EventKind,
    Header,
    LogReader,
    LogWriter,
    Timeline,
    UpdateRecord,
    read_logs,
)
from tfdist.telemetry.update_log.columns import (
    FORMAT,
    FULL,
    Contributions,
    Events,
    Groups,
    Scalars,
    Segment,
    Updates,
    of_records,
)


def write(directory: pathlib.Path, rows: Sequence[UpdateRecord], every: int = 0, **options) -> str:
    """Writes a log with a flush after so many updates, or one only."""
    head = options.pop("header", made.header())
    writer = LogWriter(str(directory), head, flush_secs=1e6, **options)
    for number, row in enumerate(rows, 1):
        writer.add(row)
        if every and number % every == 0:
            writer.flush()
    writer.close()
    return writer.directory


def row(step: int, gradients: int = 1) -> UpdateRecord:
    each = [(index, step / 2 - 0.5, step / 2, 0, 0, 1.0, 0.0) for index in range(gradients)]
    return UpdateRecord(step, step / 2, 0.5, 0.0, 0, 0, each)


def as_records(timeline: Timeline) -> list[UpdateRecord]:
    """The inverse of writing, for the updates that are still in detail."""
    updates, gradients, offsets = timeline.updates, timeline.contributions, timeline.updates.offsets
    found = []
    for row, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
        time = updates.time[row].item()
        contributions = []
        for index in range(begin, end):
            worker, start, arrival, *others, _ = (array[index].item() for array in gradients.arrays().values())
            contributions.append(Contribution(worker, time + start, time + arrival, *others))
        columns = (getattr(updates, name)[row].item() for name in ("opened", "wait", "examples", "phase"))
        found.append(UpdateRecord(updates.step[row].item(), time, *columns, contributions))
    return found


@settings(max_examples=40)
@given(made.records(), st.integers(1, 12), st.integers(1, 9))
def test_log_read_back_equals_what_was_written(rows, every, full):
    with tempfile.TemporaryDirectory() as run, pytest.MonkeyPatch.context() as patch:
        patch.setitem(FULL, "contributions", full)
        write(pathlib.Path(run) / "updates", rows, every)
        timeline = read_logs(run)
        assert as_records(timeline) == rows
        assert timeline.header == made.header()
        assert (timeline.num_updates, timeline.left_out) == (len(rows), 0)


@settings(max_examples=60)
@given(made.records())
def test_summary_adds_up_what_was_written(rows):
    with tempfile.TemporaryDirectory() as run:
        write(pathlib.Path(run) / "updates", rows)
        groups = read_logs(run).total()
    each = [gradient for row in rows for gradient in row.contributions]
    assert groups.updates.sum() == len(rows)
    assert groups.wait.sum() == pytest.approx(sum(row.wait for row in rows))
    for worker, outcome in itertools.product(range(made.WORKERS), range(3)):
        count = (groups.accepted, groups.dropped, groups.lost)[outcome][:, worker].sum()
        assert count == sum(g.replica == worker and g.outcome == outcome for g in each)
    for worker in range(made.WORKERS):
        mine = [g for g in each if g.replica == worker]
        assert groups.compute_secs[:, worker].sum() == pytest.approx(sum(g.arrival - g.start for g in mine))
        assert groups.compute_max[:, worker].max(initial=0) == max((g.arrival - g.start for g in mine), default=0)
        assert groups.held_secs[:, worker].sum() == pytest.approx(sum(g.held for g in mine))
        stale = [g.staleness for g in mine if not g.outcome]
        assert groups.staleness_sum[:, worker].sum() == sum(stale)
        assert groups.staleness_max[:, worker].max(initial=0) == max(stale, default=0)


def segment() -> Segment:
    events = Events.of_rows([(1.0, 0, 0, "lost", 0.0)])
    rows = of_records([row(step, 3) for step in range(1, 6)])
    return Segment(7, *rows, events, Scalars.of_rows([(1.0, 2, "loss/train", 0.5)]))


def test_segment_cut_at_any_byte_is_an_error():
    data = segment().encoded()
    assert Segment.decoded(data, 3).first == 7
    for size in range(len(data)):
        with pytest.raises(ValueError, match=r"."):
            Segment.decoded(data[:size], 3)


@settings(max_examples=100)
@given(st.data())
def test_segment_with_changed_bytes_is_an_error_or_valid(data):
    whole = bytearray(segment().encoded())
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
        whole[place] = data.draw(st.integers(0, 255))
    try:
        read = Segment.decoded(bytes(whole), 3)
    except ValueError:
        return
    assert read.updates.count.sum() == len(read.contributions)


def test_reader_skips_what_is_damaged_and_says_which(tmp_path, monkeypatch):
    monkeypatch.setitem(FULL, "updates", 10)
    directory = pathlib.Path(write(tmp_path / "updates", [row(step) for step in range(1, 31)]))
    names = sorted(path.name for path in directory.glob("*.npz"))
    assert len(names) == 3
    cut = directory / names[1]
    cut.write_bytes(cut.read_bytes()[:-1])
    (directory / "0000000099.npz").write_bytes(b"no archive")
    (directory / ".x.part").write_bytes(b"half")
    other = tmp_path / "other" / "updates"
    other.mkdir(parents=True)
    (other / "log.json").write_text(json.dumps({"format": FORMAT, "version": 3}))
    reading = LogReader(tmp_path).read()
    assert [each.path for each in reading.skipped] == [
        "other/updates/log.json",
        f"updates/{names[1]}",
        "updates/0000000099.npz",
    ]
    assert "upgrade tfdist" in reading.skipped[0].reason
    assert reading.timelines[0].updates.step.tolist() == [*range(1, 11), *range(21, 31)]


def test_oldest_segments_are_removed_beyond_the_size(tmp_path, monkeypatch):
    monkeypatch.setitem(FULL, "contributions", 100)
    writer = LogWriter(str(tmp_path / "updates"), made.header(), flush_secs=1e6, max_contributions=1000)
    reader = LogReader(tmp_path)
    for step in range(1, 1501):
        writer.add(row(step))
        if step % 7 == 0:
            writer.flush()
        if step % 500 == 0:
            (timeline,) = reader.read().timelines
            assert timeline.num_updates == step // 7 * 7
    writer.close()
    timeline = read_logs(tmp_path)
    assert timeline.num_updates == 1500
    assert 900 <= len(timeline.updates) <= 1000
    assert timeline.updates.step.tolist() == list(range(timeline.left_out + 1, 1501))
    assert len(list((tmp_path / "updates").glob("*.npz"))) <= 11


def test_reader_beside_a_live_writer_sees_a_prefix(tmp_path, monkeypatch):
    monkeypatch.setitem(FULL, "contributions", 8)
    ended, steps = threading.Event(), 600

    def train() -> None:
        write(tmp_path / "updates", [row(step) for step in range(1, steps + 1)], every=3)
        ended.set()

    thread, reader, seen = threading.Thread(target=train, daemon=True), LogReader(tmp_path), 0
    thread.start()
    while not ended.is_set():
        reading = reader.read()
        assert reading.skipped == ()
        for timeline in reading.timelines:
            assert timeline.updates.step.tolist() == list(range(1, len(timeline.updates) + 1))
            assert len(timeline.updates) >= seen
            seen = len(timeline.updates)
    thread.join(60)
    assert len(reader.read().timelines[0].updates) == steps
    assert not reader.read().is_new


KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
import made
from tfdist.telemetry.update_log import LogWriter, UpdateRecord
writer = LogWriter(sys.argv[1], made.header(), flush_secs=1e6)
for step in range(1, 1_000_000):
    writer.add(UpdateRecord(step, step / 2, 0.5, 0.0, 0, 0, [(0, step / 2 - 0.5, step / 2, 0, 0, 1.0, 0.0)]))
    if step % 10 == 0:
        writer.flush()
        print(step, flush=True)
"""


def test_killed_writer_loses_what_it_has_not_flushed_alone(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "updates"), str(pathlib.Path(made.__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        flushed = next(int(line) for line in program.stdout or () if int(line) >= 100)
        program.send_signal(signal.SIGKILL)
        flushed = max([flushed, *(int(line) for line in program.stdout or () if line.endswith("\n"))])
    reading = LogReader(tmp_path).read()
    assert reading.skipped == ()
    steps = reading.timelines[0].updates.step.tolist()
    assert steps == list(range(1, len(steps) + 1))
    assert flushed <= len(steps) <= flushed + 10


def test_reader_tries_a_segment_again_that_it_could_not_read(tmp_path, monkeypatch):
    write(tmp_path / "updates", [row(1)])
    reader, read = LogReader(tmp_path), pathlib.Path.read_bytes

    def unreachable(path: pathlib.Path) -> bytes:
        if path.suffix == ".npz":
            raise OSError(110, "Connection timed out")
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "read_bytes", unreachable)
        (skipped,) = reader.read().skipped
    assert "Connection timed out" in skipped.reason
    reading = reader.read()
    assert (reading.skipped, reading.is_new, reading.timelines[0].num_updates) == ((), True, 1)


def test_logs_of_a_job_follow_each_other_with_all_workers(tmp_path):
    for number, worker in enumerate(("worker:10", "worker:2")):
        # The clock of the second log begins 100 s later, as the log does.
        head = Header("job", worker, (worker,), origin_secs=1000.0 + 100 * number)
        write(tmp_path / "updates", [row(step) for step in range(1 + 5 * number, 6 + 5 * number)], header=head)
    timeline = read_logs(tmp_path)
    assert timeline.workers == ("worker:2", "worker:10")
    assert timeline.updates.step.tolist() == list(range(1, 11))
    assert timeline.contributions.worker.tolist() == [1] * 5 + [0] * 5
    assert timeline.updates.time[[0, 5]].tolist() == [0.5, 103.0]
    assert timeline.total().accepted.tolist() == [[5, 5]]


def test_jobs_in_one_directory_are_told_apart_and_logs_never_continued(tmp_path):
    write(tmp_path / "updates", [row(1)], header=made.header(job="a"))
    second = write(tmp_path / "updates", [row(1), row(2)], header=made.header(job="b", origin_secs=2e9))
    assert second.endswith("updates_2")
    assert [each.job for each in LogReader(tmp_path).read().timelines] == ["a", "b"]
    assert read_logs(tmp_path).num_updates == 2
    assert read_logs(tmp_path, job="a").num_updates == 1
    with pytest.raises(ValueError, match="they are of 'a', 'b'"):
        read_logs(tmp_path, job="c")
    with pytest.raises(FileNotFoundError, match="no update log"):
        read_logs(tmp_path / "nowhere")


def test_events_and_scalars_are_read_by_time(tmp_path):
    writer = LogWriter(str(tmp_path / "updates"), made.header(), flush_secs=1e6, clock=lambda: 5.0)
    writer.event(EventKind.LOST, "worker:1 died <b>", worker=1)
    writer.scalar("loss/train", 10, 0.5)
    writer.flush()
    writer.event(EventKind.RESUMED, "x" * 9999, time=2.0)
    writer.close()
    timeline = read_logs(tmp_path)
    events = timeline.events
    assert events.event_time.tolist() == [2.0, 5.0]
    assert events.event_worker.tolist() == [-1, 1]
    assert events.event_kind.tolist() == [EventKind.RESUMED, EventKind.LOST]
    assert events.event_text.tolist() == ["x" * 500, "worker:1 died <b>"]
    assert [each.tolist() for each in timeline.scalars.arrays().values()] == [[5.0], [10], ["loss/train"], [0.5]]


def test_error_of_the_disk_is_one_warning_and_nothing_is_lost(tmp_path, monkeypatch):
    def full(path: str, *given: object, **options: object) -> None:
        if path.endswith(".npz"):
            raise OSError(28, "No space left on device")

    warnings = []
    with monkeypatch.context() as patch:
        patch.setattr(_files, "write", full)
        writer = LogWriter(str(tmp_path / "updates"), made.header(), flush_secs=1e6, warn=warnings.append)
        for step in range(1, 4):
            writer.add(row(step))
            writer.flush()
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]
    (tmp_path / "updates" / "log.json").write_bytes(made.header().to_json())
    writer.close()
    assert read_logs(tmp_path).updates.step.tolist() == [1, 2, 3]


def test_memory_is_bounded_while_the_disk_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr("tfdist.telemetry.update_log.writer._MAX_PENDING", 100)
    warnings = []
    writer = LogWriter(str(tmp_path / "updates"), made.header(), flush_secs=1e6, warn=warnings.append)
    writer.flush()
    for step in range(1, 1001):
        writer.add(row(step))
    writer.close()
    kept = read_logs(tmp_path).updates.step
    assert 25 <= len(kept) <= 100
    assert kept[-1] == 1000
    assert "updates were left out" in warnings[0]


def test_links_that_lead_out_of_the_directory_are_not_followed(tmp_path):
    write(tmp_path / "elsewhere" / "updates", [])
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run").symlink_to(tmp_path / "elsewhere")
    assert LogReader(tmp_path / "logs").read().timelines == ()


def test_columns_of_nothing_have_the_dtypes_of_the_format():
    for columns in (Updates, Contributions, Events, Scalars, Groups):
        for name, array in columns.concatenated([]).arrays().items():
            assert array.dtype.kind == np.dtype(columns.dtypes()[name]).kind
