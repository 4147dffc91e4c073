# SPDX-License-Identifier: Apache-2.0
"""Scalars are read from event files as TensorBoard reads them, while they are being written."""

from __future__ import annotations

import pathlib
import struct

import pytest

from tfdist.telemetry.scalar_files import LOSS, SENT, ScalarFiles, Scalars, task_of
from tfdist.telemetry.update_log import LocalFiles

event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2")
summary_pb2 = pytest.importorskip("tensorboard.compat.proto.summary_pb2")


def record(step: int, **scalars: float) -> bytes:
    values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
    event = event_pb2.Event(wall_time=1e9 + step, step=step, summary=summary_pb2.Summary(value=values))
    data = event.SerializeToString()
    return struct.pack("<QI", len(data), 0) + data + bytes(4)


def latest(found: Scalars) -> dict[str | None, float]:
    return {task_of(folder): tags[SENT][-1].value for folder, tags in found.items() if SENT in tags}


def test_scalars_of_each_task_are_read_as_files_grow(tmp_path: pathlib.Path):
    paths = []
    for index in (2, 13):
        folder = tmp_path / "workers" / f"worker_{index:02d}"
        folder.mkdir(parents=True)
        paths.append(folder / "scalars.1.host.tfdist")
        paths[-1].write_bytes(record(0, loss=1.0))
    (tmp_path / "workers" / "foreign").mkdir()
    (tmp_path / "workers" / "worker_05").write_text("no directory")
    files = ScalarFiles(str(tmp_path), LocalFiles())
    assert files.read() == {}
    paths[0].write_bytes(record(0, loss=1.0) + record(1, **{SENT: 5.0, "other": 7.0}) + record(2, loss=0.5))
    paths[1].write_bytes(record(0, loss=1.0) + record(1, **{SENT: 2.0}) + record(2, **{SENT: 3.0})[:-7])
    assert latest(files.read()) == {"worker:2": 5.0, "worker:13": 2.0}
    with paths[1].open("ab") as file:
        file.write(record(2, **{SENT: 3.0})[-7:])
    with paths[0].open("ab") as file:
        file.write(b"\xff" * 100)
    assert latest(files.read()) == {"worker:2": 5.0, "worker:13": 3.0}


def test_losses_of_both_runs_are_read_with_step_and_time(tmp_path: pathlib.Path):
    for run, loss in (("train", 0.5), ("validation", 0.25)):
        (tmp_path / run).mkdir()
        (tmp_path / run / "events.out.tfevents.1.host.tfdist").write_bytes(record(300, **{LOSS: loss}))
        # Of another writer.
        (tmp_path / run / "events.out.tfevents.2.host").write_bytes(record(300, **{LOSS: 9.0}))
    found = ScalarFiles(str(tmp_path), LocalFiles()).read()
    assert found == {"train": {LOSS: [(1e9 + 300, 300, 0.5)]}, "validation": {LOSS: [(1e9 + 300, 300, 0.25)]}}


def test_run_without_event_files_has_no_values(tmp_path: pathlib.Path):
    assert ScalarFiles(str(tmp_path / "nothing"), LocalFiles()).read() == {}
