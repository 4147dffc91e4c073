# SPDX-License-Identifier: Apache-2.0
"""Bytes that workers send are read from event files as TensorBoard reads them, while they are being written."""

from __future__ import annotations

import pathlib
import struct

import pytest

from tfdist.watching import sent_bytes

event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2")
summary_pb2 = pytest.importorskip("tensorboard.compat.proto.summary_pb2")


def record(step: int, **scalars: float) -> bytes:
    values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
    event = event_pb2.Event(wall_time=1e9 + step, step=step, summary=summary_pb2.Summary(value=values))
    data = event.SerializeToString()
    return struct.pack("<QI", len(data), 0) + data + bytes(4)


def test_the_latest_value_of_each_worker_is_read_as_files_grow(tmp_path: pathlib.Path):
    paths = []
    for index in (2, 13):
        folder = tmp_path / "workers" / f"worker_{index:02d}"
        folder.mkdir(parents=True)
        paths.append(folder / "events.out.tfevents.1.host.tfdist")
        paths[-1].write_bytes(record(0, loss=1.0))
    (tmp_path / "workers" / "foreign").mkdir()
    (tmp_path / "workers" / "worker_05").write_text("no directory")
    sent = sent_bytes.SentBytes(tmp_path)
    assert sent.read() == {}
    tag = sent_bytes.TAG.decode()
    paths[0].write_bytes(record(0, loss=1.0) + record(1, **{tag: 5.0, "other": 7.0}) + record(2, loss=0.5))
    paths[1].write_bytes(record(0, loss=1.0) + record(1, **{tag: 2.0}) + record(2, **{tag: 3.0})[:-7])
    assert sent.read() == {"worker:2": 5.0, "worker:13": 2.0}
    with paths[1].open("ab") as file:
        file.write(record(2, **{tag: 3.0})[-7:])
    with paths[0].open("ab") as file:
        file.write(b"\xff" * 100)
    assert sent.read() == {"worker:2": 5.0, "worker:13": 3.0}


def test_a_run_without_event_files_has_no_values(tmp_path: pathlib.Path):
    assert sent_bytes.SentBytes(tmp_path / "nothing").read() == {}
