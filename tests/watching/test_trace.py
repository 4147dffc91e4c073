# SPDX-License-Identifier: Apache-2.0
"""`tfdist trace` writes what the Trace Event Format asks for, and the numbers in it are those of the log."""

from __future__ import annotations

import collections
import gzip
import itertools
import json
import pathlib

import logs
import numpy as np
import pytest

from tfdist import cli
from tfdist.telemetry.update_log import Outcome, Timeline, read_logs
from tfdist.watching import trace


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A log directory with three runs, one of which has two jobs."""
    path = tmp_path_factory.mktemp("logs")
    logs.write_synchronous(path / "backup", 4, 60, spares=1, slow={2: 2.5})
    logs.write_asynchronous(path / "async", 3, 80)
    logs.write_synchronous(path / "twice", 2, 10, job="first", origin_secs=3e9)
    logs.write_synchronous(path / "twice", 2, 10, job="second", origin_secs=3e9 + 100)
    return path


def traced(directory: pathlib.Path, tmp_path: pathlib.Path, *flags: str) -> dict:
    assert cli.main(["trace", str(directory), "-o", str(tmp_path / "trace.json"), *flags]) == 0
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]
    return json.loads((tmp_path / "trace.json").read_text())


def check_format(whole: dict) -> None:
    """Checks what the Trace Event Format demands of the phases M, X, i and C, and that slices of a lane are apart."""
    assert whole["displayTimeUnit"] in ("ms", "ns")
    names, lanes = {}, collections.defaultdict(list)
    for event in whole["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            key = {"process_labels": "labels", "thread_sort_index": "sort_index"}.get(event["name"], "name")
            names[event["name"], event["pid"], event["tid"]] = event["args"][key]
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0
        elif event["ph"] == "i":
            assert event["s"] in ("t", "p", "g")
        else:
            assert event["ph"] == "C"
            assert all(isinstance(value, int | float) for value in event["args"].values())
        assert ("process_name", event["pid"], 0) in names
        lanes[event["pid"], event["tid"], event["name"] if event["ph"] == "C" else ""].append(event)
    for (pid, tid, _), events in lanes.items():
        assert ("thread_name", pid, tid) in names
        stamps = [event["ts"] for event in events]
        assert stamps == sorted(stamps)
        slices = [event for event in events if event["ph"] == "X"]
        for before, after in itertools.pairwise(slices):
            # A nanosecond is the unit of the file.
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


def slices(whole: dict, name: str, pid: int = 1) -> list[dict]:
    return [e for e in whole["traceEvents"] if e["ph"] == "X" and e["name"].startswith(name) and e["pid"] == pid]


def secs(events: list[dict]) -> float:
    return sum(event["dur"] for event in events) / 1e6


def test_a_trace_keeps_the_format_and_has_the_times_of_the_log(directory: pathlib.Path, tmp_path: pathlib.Path):
    whole = traced(directory, tmp_path, "--run=backup")
    check_format(whole)
    timeline: Timeline = read_logs(directory / "backup")
    gradients, outcome = timeline.contributions, timeline.contributions.outcome
    computed = np.float64(gradients.arrival - gradients.start).sum()
    assert secs(slices(whole, "compute")) == pytest.approx(computed, rel=1e-4)
    assert len(slices(whole, "compute (dropped)")) == np.sum(outcome == Outcome.DROPPED) > 10
    instants = collections.Counter(event["name"] for event in whole["traceEvents"] if event["ph"] == "i")
    assert instants["update"] == 60
    assert instants["gradient dropped"] == np.sum(outcome == Outcome.DROPPED)
    assert instants["lost"] == instants["phase changed"] == 1
    labels = [e["args"]["name"] for e in whole["traceEvents"] if e["name"] in ("process_name", "thread_name")]
    assert labels == ["backup MultiWorkerMirroredStrategy", "updates", *(f"worker:{index}" for index in range(4))]
    waits = -gradients.arrival[outcome == Outcome.ACCEPTED].astype(np.float64).sum()
    assert secs(slices(whole, "wait")) == pytest.approx(waits, rel=1e-4)


def test_held_workers_and_counters_are_in_the_trace(directory: pathlib.Path, tmp_path: pathlib.Path):
    whole = traced(directory, tmp_path, "--run=async")
    check_format(whole)
    timeline = read_logs(directory / "async")
    assert secs(slices(whole, "held")) == pytest.approx(float(timeline.contributions.held.sum()), rel=1e-4)
    counters = collections.defaultdict(list)
    for event in whole["traceEvents"]:
        if event["ph"] == "C":
            counters[event["name"]].extend(event["args"].values())
    assert max(counters["staleness max"]) == timeline.contributions.staleness.max()
    assert np.mean(counters["updates/s"]) == pytest.approx(80 / (timeline.span[1] - timeline.span[0]), rel=1e-3)


def test_steps_choose_a_part_and_jobs_of_a_run_are_processes(
    directory: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
    whole = traced(directory, tmp_path, "--from_step=5", "--to_step=8")
    check_format(whole)
    steps = [event["args"]["step"] for event in whole["traceEvents"] if event["name"] == "update"]
    assert steps == [5, 6, 7, 8] * 2
    # The run that began last, by default; its second job is 100 s later.
    assert min(e["ts"] for e in slices(whole, "compute", 2)) == pytest.approx(100e6, rel=1e-2)
    assert "8 of 20 updates, steps 5 to 8; --from_step and --to_step choose others" in capsys.readouterr().err


def test_of_a_large_log_the_last_updates_are_written(
    directory: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(trace, "_MAX_GRADIENTS", 30)
    whole = traced(directory, tmp_path, "--run=async")
    check_format(whole)
    assert [e["args"]["step"] for e in whole["traceEvents"] if e["name"] == "update"] == list(range(51, 81))
    assert "30 of 80 updates, steps 51 to 80; --from_step and --to_step choose others" in capsys.readouterr().err


def test_a_name_with_gz_is_compressed(directory: pathlib.Path, tmp_path: pathlib.Path):
    path = tmp_path / "trace.json.gz"
    assert cli.main(["trace", "--run=async", f"--output={path}", str(directory)]) == 0
    check_format(json.loads(gzip.decompress(path.read_bytes())))


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ([], 2, "tfdist trace needs a file to write; name it with -o trace.json"),
        (["-o", "."], 2, "-o names a directory"),
        (["-o", "no/where.json"], 2, "-o names a file in a directory that does not exist"),
        (["-o", "t.json", "--from_step=9", "--to_step=3"], 2, "--from_step is after --to_step"),
        (["-o", "t.json", "--from_step=x"], 2, "--from_step must be an integer"),
        (
            ["-o", "t.json", "--from_step=999"],
            1,
            "no update is between these steps; the log has steps 1 to 10 in detail",
        ),
        (["-o", "t.json", "--run=none"], 1, "there is no update log of the run 'none' below"),
        (["-o", "t.json", "more"], 2, "tfdist trace takes one log directory"),
    ],
)
def test_wrong_arguments_are_one_line(directory, tmp_path, monkeypatch, capsys, flags, code, words):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["trace", str(directory), *flags]) == code
    line = capsys.readouterr().err
    assert line.startswith(f"tfdist: {words}") and line.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(directory, tmp_path, monkeypatch):
    (tmp_path / "trace.json").write_text("old")

    def fail(*_):
        yield "half"
        raise OSError("disk full")

    monkeypatch.setattr(trace, "encoded", fail)
    assert cli.main(["trace", str(directory), "-o", str(tmp_path / "trace.json")]) == 2
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("trace.json", "old")]
