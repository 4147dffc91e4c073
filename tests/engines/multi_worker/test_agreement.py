# SPDX-License-Identifier: Apache-2.0
"""State that an agreement's threads share: waits, their failures, and the published end of a worker."""

from __future__ import annotations

import pytest

from tfdist.cluster import Task
from tfdist.engines.agreement import Agreement
from tfdist.runtime.worker_states import State

TASKS = [Task("worker", 0), Task("worker", 1)]


@pytest.fixture
def agreement() -> Agreement:
    """Agreement of worker:1 without a cluster; its threads are not started."""
    return Agreement(TASKS[1], TASKS)


def test_state_after_the_end_is_not_published(agreement: Agreement, monkeypatch: pytest.MonkeyPatch):
    posted: list[str] = []
    monkeypatch.setattr(agreement, "post", lambda key, text: posted.append(text))
    agreement._watch.post(State("worker:1", "model.fit"))
    agreement._watch.post(State("worker:1", ended="has ended"))
    # Of the thread that has begun to look before the end.
    agreement._watch.post(State("worker:1", "model.fit"))
    assert len(posted) == 2 and "has ended" in posted[-1]


def test_failure_of_a_wait_that_is_over_ends_no_other_wait(agreement: Agreement):
    with agreement.joint("one"):
        looked_at = agreement.current_wait()
    assert looked_at is not None
    looked_at.failure = ConnectionError("worker:0 has ended")
    with agreement.joint("another"):
        agreement.check()
        with agreement.joint("inner"):
            agreement.current_wait().failure = ConnectionError("worker:0 has ended")
            with pytest.raises(ConnectionError, match="worker:0"):
                agreement.check()


def test_log_that_a_thread_has_taken_does_not_change(agreement: Agreement):
    agreement._next_key("first")
    taken, _ = agreement.state()
    for _ in range(20):
        agreement._next_key("later")
    assert dict(taken.log) == {1: "first"}
    assert list(agreement.state()[0].log) == [*range(14, 22)]
