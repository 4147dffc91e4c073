# SPDX-License-Identifier: Apache-2.0
"""Update logs are read back as written, in detail or in sums, whatever the disk or a stranger does to them."""

from __future__ import annotations

import itertools
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import made
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.policies import Contribution
from tfdist.telemetry.update_log import (
    EventKind,
    LocalFiles,
    LogReader,
    LogWriter,
    read_logs,
    records,
    segments,
    summary,
    writer,
)
from tfdist.telemetry.update_log.columns import Contributions, Events, Groups, Updates
from tfdist.telemetry.update_log.timeline import Timeline


def write(directory: pathlib.Path, rows: Sequence[records.UpdateRecord], every: int = 0, **options) -> str:
    """Writes a log with a flush after so many updates, or one only."""
    head = options.pop("header", made.header())
    writer = LogWriter(str(directory), head, flush_secs=1e6, **options)
    for number, row in enumerate(rows, 1):
        writer.add(row)
        if every and number % every == 0:
            writer.flush()
    writer.close()
    return writer.directory


def as_records(timeline: Timeline) -> list[records.UpdateRecord]:
    """The inverse of writing, for the updates that are still in detail."""
    updates, gradients, offsets = timeline.updates, timeline.contributions, timeline.updates.offsets
    found = []
    for row, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
        time = updates.time[row].item()
        contributions = [
            Contribution(
                each.worker.item(),
                time + each.start.item(),
                time + each.arrival.item(),
                each.outcome.item(),
                each.staleness.item(),
                each.weight.item(),
                each.held.item(),
            )
            for each in (gradients[index] for index in range(begin, end))
        ]
        columns = (getattr(updates, name)[row].item() for name in ("opened", "wait", "examples", "phase"))
        found.append(records.UpdateRecord(updates.step[row].item(), time, *columns, contributions))
    return found


@settings(max_examples=40)
@given(made.records(), st.integers(1, 12))
def test_log_read_back_equals_what_was_written(rows, every):
    with tempfile.TemporaryDirectory() as run:
        write(pathlib.Path(run) / "updates", rows, every)
        timeline = read_logs(run)
        assert as_records(timeline) == rows
        assert timeline.header == made.header()
        assert timeline.num_updates == len(rows)


def equal(one: Groups, other: Groups) -> None:
    for name, values in one.arrays().items():
        assert values.dtype == getattr(other, name).dtype
        np.testing.assert_allclose(values, getattr(other, name), rtol=1e-6, err_msg=name)


@settings(max_examples=60)
@given(made.records(), st.integers(1, 6), st.integers(1, 6))
def test_summary_of_summaries_equals_summary(rows, small, factor):
    with tempfile.TemporaryDirectory() as run:
        write(pathlib.Path(run) / "updates", rows)
        whole = read_logs(run)
    updates, gradients = whole.updates, whole.contributions
    groups = summary.summarize(updates, gradients, summary.buckets(updates.step, small), made.WORKERS)
    coarse = summary.regroup(groups, summary.buckets(groups.first_step, small * factor))
    starts = summary.buckets(updates.step, small * factor)
    equal(coarse, summary.summarize(updates, gradients, starts, made.WORKERS))
    if rows:
        each = [gradient for row in rows for gradient in row.contributions]
        total = whole.total()
        for worker, outcome in itertools.product(range(made.WORKERS), range(3)):
            count = (total.accepted, total.dropped, total.lost)[outcome][0, worker]
            assert count == sum(g.replica == worker and g.outcome == outcome for g in each)
        for worker in range(made.WORKERS):
            mine = [g for g in each if g.replica == worker]
            assert total.compute_secs[0, worker] == pytest.approx(sum(g.arrival - g.start for g in mine))
            assert total.compute_max[0, worker] == max((g.arrival - g.start for g in mine), default=0)
            assert total.held_secs[0, worker] == pytest.approx(sum(g.held for g in mine))
            stale = [g.staleness for g in mine if not g.outcome]
            assert total.staleness_sum[0, worker] == sum(stale)
            assert total.staleness_max[0, worker] == max(stale, default=0)
        assert total.updates.item() == len(rows)
        assert total.wait.item() == pytest.approx(sum(row.wait for row in rows))


def test_segment_cut_at_any_byte_is_an_error():
    updates, contributions = made.columns(5, 3)
    events = Events.of(event_time=[1.0], event_worker=[0], event_kind=[0], event_text=["lost"])
    detail = segments.Detail(7, updates, contributions, events)
    for kind, segment in (("detail", detail), ("summary", detail.summarized(3))):
        data = segments.encode(segment)
        read = segments.decode(kind, data, 3)
        assert read.first == 7
        for size in range(len(data)):
            with pytest.raises(ValueError, match=r"."):
                segments.decode(kind, data[:size], 3)


@settings(max_examples=300)
@given(st.data())
def test_segment_with_changed_bytes_is_an_error_or_valid(data):
    updates, contributions = made.columns(5, 3)
    whole = bytearray(segments.encode(segments.Detail(0, updates, contributions, Events.empty())))
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
        whole[place] = data.draw(st.integers(0, 255))
    try:
        read = segments.decode("detail", bytes(whole), 3)
    except ValueError:
        return
    assert isinstance(read, segments.Detail)
    assert read.updates.count.sum() == len(read.contributions)


def test_reader_skips_what_is_damaged_and_says_which(tmp_path):
    rows = [
        records.UpdateRecord(step, step / 2, 0.5, 0.0, 0, 0, [(0, step / 2 - 0.5, step / 2, 0, 0, 1.0, 0.0)])
        for step in range(1, 31)
    ]
    directory = pathlib.Path(write(tmp_path / "updates", rows, every=10))
    names = sorted(path.name for path in directory.glob("*.npz"))
    assert len(names) == 3
    cut = directory / names[1]
    cut.write_bytes(cut.read_bytes()[:-1])
    (directory / "detail-0000000099.npz").write_bytes(b"no archive")
    (directory / ".x.part").write_bytes(b"half")
    other = tmp_path / "other" / "updates"
    other.mkdir(parents=True)
    (other / "log.json").write_text(json.dumps({"format": records.FORMAT, "version": 2}))
    reading = LogReader(tmp_path).read()
    assert [each.path for each in reading.skipped] == [
        "other/updates/log.json",
        f"updates/{names[1]}",
        "updates/detail-0000000099.npz",
    ]
    assert "upgrade tfdist" in reading.skipped[0].reason
    assert reading.timelines[0].updates.step.tolist() == [*range(1, 11), *range(21, 31)]


def block(first: int, num_updates: int, workers: int = 4) -> segments.Detail:
    updates, contributions = made.columns(num_updates, workers, seed=first)
    shifted = updates.replace(step=updates.step + first, time=updates.time + 0.1 * first)
    return segments.Detail(first, shifted, contributions, Events.empty())


def test_disk_holds_few_files_and_all_sums_while_a_log_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "MAX_UPDATES", 100)
    monkeypatch.setattr(writer, "_MAX_SUMMARIES", 8)
    head = made.header(workers=tuple("abcd"))
    log = writer.Store.begin(str(tmp_path / "updates"), head, LocalFiles(), max_contributions=2000)
    reader, first, accepted, most = LogReader(tmp_path), 0, 0, 0
    for size in [7] * 700 + [100] * 100:
        new = block(first, size)
        first, accepted = first + size, accepted + int((new.contributions.outcome == 0).sum())
        log.append(new)
        log.tidy()
        most = max(most, len(list((tmp_path / "updates").iterdir())))
    (timeline,) = reader.read().timelines
    assert timeline.num_updates == first
    assert timeline.total().accepted.sum() == accepted
    assert len(timeline.contributions) <= 2000
    assert most < 50
    assert (timeline.updates.step == np.arange(first + 1 - len(timeline.updates), first + 1)).all()
    assert timeline.groups.last_step.max() == first - len(timeline.updates)
    assert timeline.groups.updates.max() > summary.GROUP_STEPS


def test_reader_survives_files_left_by_a_crash_between_writing_and_removing(tmp_path):
    class NeverRemoves(LocalFiles):
        def remove(self, path: str) -> None:
            pass

    log = writer.Store.begin(str(tmp_path / "updates"), made.header(workers=tuple("abcd")), NeverRemoves(), 2**30)
    for first in range(0, 200, 2):
        log.append(block(first, 2))
        log.tidy()
    reader = LogReader(tmp_path)
    (timeline,) = reader.read().timelines
    assert timeline.updates.step.tolist() == list(range(1, 201))
    # Of a joined segment that is damaged, the short ones are still there.
    joined = max(tmp_path.glob("updates/*.npz"), key=lambda path: path.stat().st_size)
    joined.write_bytes(b"")
    assert LogReader(tmp_path).read().timelines[0].updates.step.tolist() == list(range(1, 201))


def test_reader_reads_new_segments_only(tmp_path):
    class Counting(LocalFiles):
        count = 0

        def read(self, path: str) -> bytes:
            self.count += 1
            return super().read(path)

    files = Counting()
    log = writer.Store.begin(str(tmp_path / "updates"), made.header(workers=tuple("abcd")), LocalFiles(), 2**30)
    reader = LogReader(tmp_path, files)
    assert reader.read().timelines[0].num_updates == 0
    for first in range(0, 10, 2):
        log.append(block(first, 2))
        reading = reader.read()
        assert reading.is_new
        assert reading.timelines[0].num_updates == first + 2
    assert not reader.read().is_new
    assert files.count == 1 + 5


def test_reader_tries_a_segment_again_that_it_could_not_read(tmp_path):
    class Unreachable(LocalFiles):
        is_there = False

        def read(self, path: str) -> bytes:
            if path.endswith(".npz") and not self.is_there:
                raise OSError(110, "Connection timed out")
            return super().read(path)

    writer.Store.begin(str(tmp_path / "updates"), made.header(), LocalFiles(), 2**30).append(block(0, 5, workers=2))
    files = Unreachable()
    reader = LogReader(tmp_path, files)
    (skipped,) = reader.read().skipped
    assert "Connection timed out" in skipped.reason
    files.is_there = True
    reading = reader.read()
    assert (reading.skipped, reading.is_new, reading.timelines[0].num_updates) == ((), True, 5)


def test_logs_of_all_workers_merge_by_step(tmp_path):
    for worker in (2, 10):
        rows = [
            records.UpdateRecord(
                step, step + worker / 8, 1.0, worker / 16, 32, 0, [(0, step - 0.5, step, 0, 0, 1.0, 0)]
            )
            for step in range(1, 6 + worker)
        ]
        # The clock of the second worker began 4 s earlier.
        origin = 100.0 if worker == 2 else 96.0
        shifted = [row._replace(time=row.time + 100 - origin) for row in rows]
        shifted = [
            row._replace(
                contributions=[(0, s + 100 - origin, a + 100 - origin, *rest) for _, s, a, *rest in row.contributions]
            )
            for row in shifted
        ]
        name = f"worker:{worker}"
        head = made.header(writer=name, workers=(name,), origin_secs=origin)
        write(tmp_path / f"worker_{worker}" / "updates", shifted, header=head)
    timeline = read_logs(tmp_path)
    assert timeline.workers == ("worker:2", "worker:10")
    assert timeline.updates.step.tolist() == list(range(1, 16))
    assert timeline.updates.count.tolist() == [2] * 7 + [1] * 8
    assert timeline.updates.examples.tolist() == [64] * 7 + [32] * 8
    start = (
        timeline.origin_secs + np.repeat(timeline.updates.time, timeline.updates.count) + timeline.contributions.start
    )
    np.testing.assert_allclose(start, [100 + s - 0.5 for s in [*np.repeat(range(1, 8), 2), *range(8, 16)]])
    assert (timeline.origin_secs + timeline.updates.time)[:7].tolist() == [100 + s + 10 / 8 for s in range(1, 8)]
    both = read_logs(tmp_path).total()
    assert both.accepted.tolist() == [[7, 15]]


def test_summaries_of_all_workers_merge_by_step(tmp_path):
    for worker in range(2):
        name = f"worker:{worker}"
        head = made.header(writer=name, workers=(name,))
        log = writer.Store.begin(str(tmp_path / name / "updates"), head, LocalFiles(), max_contributions=100)
        for first in range(0, 2000, 200):
            log.append(block(first, 200, workers=1))
            log._finish()
            log.tidy()
    timeline = read_logs(tmp_path)
    assert timeline.num_updates == 2000
    assert len(timeline.updates) == 0
    total = timeline.total()
    assert (total.accepted + total.dropped).tolist() == [[2000, 2000]]


def test_jobs_in_one_directory_are_told_apart_and_logs_never_continued(tmp_path):
    row = records.UpdateRecord(1, 1.0, 1.0, 0.0, 0, 0, [])
    write(tmp_path / "updates", [row], header=made.header(job="a"))
    second = write(tmp_path / "updates", [row, row], header=made.header(job="b", origin_secs=2e9))
    assert second.endswith("updates_2")
    assert [each.job for each in LogReader(tmp_path).read().timelines] == ["a", "b"]
    assert read_logs(tmp_path).num_updates == 2
    assert read_logs(tmp_path, job="a").num_updates == 1
    with pytest.raises(ValueError, match="they are of 'a', 'b'"):
        read_logs(tmp_path, job="c")
    with pytest.raises(FileNotFoundError, match="no update log"):
        read_logs(tmp_path / "nowhere")


def test_events_are_read_by_time_with_the_workers_of_all_logs(tmp_path):
    writer = LogWriter(str(tmp_path / "updates"), made.header(), flush_secs=1e6, clock=lambda: 5.0)
    writer.event(EventKind.LOST, "worker:1 died <b>", worker=1)
    writer.flush()
    writer.event(EventKind.RESUMED, "x" * 9999, time=2.0)
    writer.close()
    events = read_logs(tmp_path).events
    assert events.event_time.tolist() == [2.0, 5.0]
    assert events.event_worker.tolist() == [-1, 1]
    assert events.event_kind.tolist() == [EventKind.RESUMED, EventKind.LOST]
    assert events.event_text.tolist() == ["x" * 500, "worker:1 died <b>"]


def test_error_of_the_disk_is_one_warning_and_nothing_is_lost(tmp_path):
    class Failing(LocalFiles):
        is_full = True

        def write(self, path: str, data: bytes) -> None:
            if self.is_full and path.endswith(".npz"):
                raise OSError(28, "No space left on device")
            super().write(path, data)

    files, warnings = Failing(), []
    writer = LogWriter(str(tmp_path / "updates"), made.header(), files, flush_secs=1e6, warn=warnings.append)
    for step in range(1, 4):
        writer.add(records.UpdateRecord(step, float(step), 1.0, 0.0, 0, 0, []))
        writer.flush()
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]
    files.is_full = False
    writer.close()
    assert read_logs(tmp_path).updates.step.tolist() == [1, 2, 3]


def test_memory_is_bounded_while_the_disk_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr("tfdist.telemetry.update_log.writer._MAX_PENDING", 100)
    warnings = []
    writer = LogWriter(str(tmp_path / "updates"), made.header(), flush_secs=1e6, warn=warnings.append)
    writer.flush()
    gradient = (0, 0.0, 0.0, 0, 0, 1.0, 0.0)
    for step in range(1, 1001):
        writer.add(records.UpdateRecord(step, float(step), 1.0, 0.0, 0, 0, [gradient]))
    writer.close()
    kept = read_logs(tmp_path).updates.step
    assert 50 <= len(kept) <= 100
    assert kept[-1] == 1000
    assert "updates were left out" in warnings[0]


def test_update_log_needs_no_tensorflow():
    program = "import sys, tfdist.telemetry.update_log; print({'tensorflow', 'keras'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_links_that_lead_out_of_the_directory_are_not_followed(tmp_path):
    write(tmp_path / "elsewhere" / "updates", [])
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run").symlink_to(tmp_path / "elsewhere")
    assert LogReader(tmp_path / "logs").read().timelines == ()
    shutil.rmtree(tmp_path / "elsewhere")


def test_columns_of_nothing_have_the_dtypes_of_the_format():
    for columns in (Updates, Contributions, Events, Groups):
        assert {name: array.dtype.kind for name, array in columns.empty().arrays().items()} == {
            name: np.dtype(dtype).kind for name, dtype in columns.DTYPES.items()
        }
