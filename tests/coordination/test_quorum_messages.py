# SPDX-License-Identifier: Apache-2.0
"""Frames between quorum server and workers: packed, parsed, and proofs of the job's secret."""

from __future__ import annotations

import contextlib
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.coordination import quorum_server as wire
from tfdist.coordination.quorum_server import Act, Frames, Kind, ProtocolError, Verdict, WorkerReport

SECRET = b"the secret of this job"
UINT64 = st.integers(0, 2**64 - 1)


@given(st.sampled_from(Act), st.integers(0, 2**32 - 1), UINT64, UINT64, st.floats(0, 1e9))
def test_reports_come_back_as_they_were(act: Act, number: int, step: int, examples: int, secs: float):
    report = WorkerReport(act, number, step, examples, secs)
    assert len(report.pack()) == wire.REPORT_BYTES
    assert WorkerReport.unpack(report.pack()) == report


@given(st.sampled_from(Kind), UINT64, st.binary(max_size=70), UINT64, st.floats(0, 1e9), st.floats(0, 1e9))
def test_verdicts_come_back_as_they_were(
    kind: Kind, step: int, marks: bytes, count: int, wait_secs: float, spread_secs: float
):
    verdict = Verdict(kind, step, marks, count, wait_secs, spread_secs)
    assert len(verdict.pack()) == wire.verdict_bytes(len(marks))
    assert Verdict.unpack(verdict.pack()) == verdict


@given(st.binary(min_size=wire.REPORT_BYTES, max_size=wire.REPORT_BYTES))
def test_any_frame_is_a_report_or_an_error(frame: bytes):
    with contextlib.suppress(ProtocolError):
        assert WorkerReport.unpack(frame).pack() == frame


@given(st.binary(min_size=wire.CLAIM_BYTES, max_size=wire.CLAIM_BYTES))
def test_no_garbage_is_a_claim(data: bytes):
    for claim in (data, wire.MAGIC + data[len(wire.MAGIC) :]):
        with pytest.raises(ProtocolError):
            wire.read_claim(claim, SECRET, 3, bytes(wire.NONCE_BYTES))


@given(st.binary(max_size=200), st.integers(1, 30), st.lists(st.integers(1, 20)))
def test_frames_do_not_depend_on_how_the_bytes_came(data: bytes, size: int, cuts: list[int]):
    frames, taken, start = Frames(), [], 0
    for length in [*cuts, len(data)]:
        frames.feed(data[start : start + length])
        start += length
        taken += frames.take_all(size)
    assert taken == [data[i : i + size] for i in range(0, len(data) - size + 1, size)]


@given(st.integers(1, 70), st.data())
def test_marks_say_who_contributed_and_who_was_dropped(num_workers: int, data: st.DataObject):
    workers = st.integers(0, num_workers - 1)
    contributors = sorted(data.draw(st.sets(workers)))
    dropped = sorted(data.draw(st.lists(workers, max_size=100)))
    verdict = Verdict(Kind.UPDATE, 0, wire.update_marks(num_workers, tuple(contributors), tuple(dropped)))
    assert list(verdict.contributors()) == contributors
    assert list(verdict.dropped()) == dropped


def test_a_proof_is_of_one_side_one_worker_and_one_conversation():
    nonces = [hashlib.sha256(bytes([number])).digest() for number in range(3)]
    claim = wire.claim(SECRET, 1, nonces[0], nonces[1])
    worker, answer = wire.read_claim(claim, SECRET, 3, nonces[0])
    assert worker == 1
    wire.check_answer(answer, SECRET, 1, nonces[0], nonces[1])
    assert SECRET not in claim + answer
    as_another = claim[: len(wire.MAGIC)] + (2).to_bytes(4, "big") + claim[len(wire.MAGIC) + 4 :]
    for wrong, nonce in ((claim, nonces[2]), (as_another, nonces[0])):
        with pytest.raises(ProtocolError, match="secret"):
            wire.read_claim(wrong, SECRET, 3, nonce)
    # What a worker proves is no proof of the server's.
    with pytest.raises(ProtocolError, match="secret"):
        wire.check_answer(claim[-wire.PROOF_BYTES :], SECRET, 1, nonces[0], nonces[1])
