# SPDX-License-Identifier: Apache-2.0
"""Lines between quorum server and workers: packed, parsed, and proofs of the job's secret."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.coordination import quorum_server as wire
from tfdist.coordination.quorum_server import Act, Kind, ProtocolError, Verdict, WorkerReport

SECRET = b"the secret of this job"
COUNTS = st.integers(0, 2**64)
SECS = st.floats(0, 1e9)


@given(st.builds(WorkerReport, st.sampled_from(Act), COUNTS, COUNTS, COUNTS, SECS))
def test_reports_come_back_as_they_were(report: WorkerReport):
    assert WorkerReport.unpack(report.pack()) == report


@given(st.builds(Verdict, st.sampled_from(Kind), COUNTS, st.binary(max_size=70), COUNTS, SECS, SECS))
def test_verdicts_come_back_as_they_were(verdict: Verdict):
    assert Verdict.unpack(verdict.pack()) == verdict


@given(
    st.binary(max_size=80)
    | st.lists(st.floats() | st.integers(), max_size=6).map(lambda n: " ".join(map(str, n)).encode())
)
def test_any_line_is_a_message_or_an_error(line: bytes):
    for kind in (WorkerReport, Verdict):
        with contextlib.suppress(ProtocolError):
            found = kind.unpack(line)
            assert kind.unpack(found.pack()) == found


@given(st.binary(max_size=80))
def test_no_garbage_is_a_claim(data: bytes):
    for line in (data, b"tfdist-quorum-3 1 nonce " + data):
        with pytest.raises(ProtocolError):
            wire.read_claim(line, SECRET, 3, "nonce")


@given(st.integers(1, 70), st.data())
def test_marks_say_who_contributed_and_who_was_dropped(num_workers: int, data: st.DataObject):
    workers = st.integers(0, num_workers - 1)
    contributors = sorted(data.draw(st.sets(workers)))
    dropped = sorted(data.draw(st.lists(workers, max_size=100)))
    verdict = Verdict(Kind.UPDATE, 0, wire.update_marks(num_workers, tuple(contributors), tuple(dropped)))
    assert list(verdict.contributors()) == contributors
    assert list(verdict.dropped()) == dropped


def test_a_proof_is_of_one_side_one_worker_and_one_conversation():
    claim = wire.claim(SECRET, 1, "a", "b")
    worker, answer = wire.read_claim(claim, SECRET, 3, "a")
    assert worker == 1
    wire.check_answer(answer, SECRET, 1, "a", "b")
    assert SECRET not in claim + answer
    for wrong, nonce in ((claim, "c"), (claim.replace(b" 1 ", b" 2 "), "a")):
        with pytest.raises(ProtocolError, match="secret"):
            wire.read_claim(wrong, SECRET, 3, nonce)
    # What a worker proves is no proof of the server's.
    with pytest.raises(ProtocolError, match="secret"):
        wire.check_answer(claim.split()[-1], SECRET, 1, "a", "b")
