# SPDX-License-Identifier: Apache-2.0
"""The decision whether a wait for other workers can still end."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.coordination import worker_waits
from tfdist.coordination.worker_waits import HAS_ENDED, LOST, OUTSIDE, PARTED, PARTED_SECS, STEP, Waits, WorkerStatus

ALL = ["worker:0", "worker:1", "worker:2"]
# "no wait on the dead longer than 10 s", less what TensorFlow takes.
MOST_SECS = 8


def blocked(
    index: int, call: str, what: str = "", number: int = 0, secs: float = PARTED_SECS, part: str = ""
) -> WorkerStatus:
    return WorkerStatus(f"worker:{index}", call, what, number, secs, part=part)


def later(status: WorkerStatus, secs: float) -> WorkerStatus:
    return dataclasses.replace(status, blocked_secs=status.blocked_secs and status.blocked_secs + secs)


def reason(own: WorkerStatus, others: list[WorkerStatus], awaited: list[str] = ALL) -> str | None:
    """The reason of a worker that has looked twice, as all have published a second time."""
    waits = Waits([each.task for each in others])
    for secs in (0, 1):
        waits.look(own, 100.0 + secs)
        for each in others:
            waits.hear(later(each, secs))
    return waits.reason(own, awaited)


class Job:
    """Workers that look once a second, at a store that they share; each is in a call, or its program has ended."""

    def __init__(self, count: int) -> None:
        names = [f"worker:{index}" for index in range(count)]
        self.waits = {name: Waits([other for other in names if other != name]) for name in names}
        self.calls: dict[str, tuple[str, int]] = {}
        self.store: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.ended: set[str] = set()
        self.now = 1000

    def work(self, name: str) -> None:
        self.calls.pop(name, None)

    def enter(self, name: str, call: str) -> None:
        self.calls[name] = call, self.now

    def end(self, name: str, how: str = HAS_ENDED) -> None:
        self.ended.add(name)
        self.store[name] = WorkerStatus(name, ended=how).to_json()

    def run(self, secs: int) -> None:
        for _ in range(secs):
            self.now += 1
            for name in self.waits.keys() - self.ended:
                self._look(name)

    def _look(self, name: str) -> None:
        waits, (call, since) = self.waits[name], self.calls.get(name, ("", self.now))
        own = WorkerStatus(name, call, blocked_secs=self.now - since)
        status, is_waiting = waits.look(own, self.now)
        if status is not None:
            self.store[name] = status.to_json()
        if not is_waiting:
            return
        for other, text in self.store.items():
            if other != name:
                waits.hear(WorkerStatus.from_json(text))
        if (found := waits.reason(own, [each for each in self.waits if each != name])) is not None:
            waits.failed(self.now)
            self.reasons.setdefault(name, found)


counts = st.integers(2, 5)
calls = st.sampled_from(["model.fit", "model.evaluate", "model.save", ""])


@given(counts, st.data())
def test_workers_in_different_calls_end_soon_with_one_message(count: int, data: st.DataObject):
    job = Job(count)
    of_each = data.draw(st.lists(calls, min_size=count, max_size=count).filter(lambda each: len(set(each)) > 1))
    delays = data.draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
    for secs in range(max(delays) + 1):
        for name, call, delay in zip(job.waits, of_each, delays, strict=True):
            if delay == secs:
                job.enter(name, call)
        job.run(1)
    job.run(MOST_SECS)
    assert len(set(job.reasons.values())) == 1 and job.reasons.keys() == job.waits.keys()
    assert all(name in str(job.reasons) for name in job.waits)


@given(counts, st.data())
def test_wait_continues_while_another_worker_is_slow(count: int, data: st.DataObject):
    """Whatever the others wait in, a worker that hangs for a while, or works, may still come."""
    job = Job(count)
    slow, *others = data.draw(st.permutations(list(job.waits)))
    for name in others:
        job.enter(name, data.draw(calls))
    for _ in range(data.draw(st.integers(1, 5))):
        # It waits for others for less than is a deadlock, and then goes on.
        job.enter(slow, data.draw(calls))
        job.run(data.draw(st.integers(0, 4)))
        job.work(slow)
        job.run(data.draw(st.integers(1, 30)))
    assert not job.reasons


@given(counts, st.sampled_from([HAS_ENDED, "worker:0 ended with LookupError: my own words"]), st.integers(0, 20))
def test_wait_for_worker_that_ended_fails_soon_and_names_it(count: int, how: str, secs: int):
    job = Job(count)
    first, *others = job.waits
    for name in others:
        job.enter(name, "model.fit")
    job.run(secs)
    job.end(first, how)
    job.run(MOST_SECS)
    assert job.reasons.keys() == set(others)
    assert all(first in text and ("own words" in text) is ("own words" in how) for text in job.reasons.values())


@given(st.data())
@settings(max_examples=50)
def test_status_is_the_same_after_its_way_as_text(data: st.DataObject):
    status = data.draw(st.builds(WorkerStatus, *[st.text(max_size=9)] * 3, st.integers(0, 99)))
    assert WorkerStatus.from_json(status.to_json()) == status


def test_wait_that_cannot_end_stays_published_for_a_while():
    waits = Waits(["worker:1"])
    assert waits.look(WorkerStatus("worker:0", "model.fit"), 1.0) == (None, False)
    shown, is_waiting = waits.look(blocked(0, "model.fit"), 2.0)
    assert is_waiting and shown and shown.blocked_secs == PARTED_SECS
    waits.failed(3.0)
    assert waits.look(WorkerStatus("worker:0"), 4.0) == (None, False)
    shown, _ = waits.look(WorkerStatus("worker:0"), 9.0)
    assert shown and not shown.blocked_secs and waits.look(WorkerStatus("worker:0"), 10.0) == (None, False)


def test_status_that_is_not_renewed_is_of_no_wait():
    """Its worker has stopped, or its wait has ended and it hangs: no deadlock, however long its last wait was."""
    own, other = blocked(0, "model.evaluate"), blocked(1, "model.fit")
    waits = Waits(["worker:1"])
    found = []
    for secs in (1, 2, 3, 3, 3, 3, 3):
        waits.look(own, 100.0)
        waits.hear(later(other, secs))
        found.append(waits.reason(own, ALL) is not None)
    assert found == [False, True, True, True, True, True, False]
    # Nor is it one for the next wait of this worker, before it is renewed.
    waits.hear(later(other, 4))
    assert waits.reason(own, ALL)
    waits.look(WorkerStatus("worker:0"), 101.0)
    waits.look(own, 102.0)
    waits.hear(later(other, 4))
    assert waits.reason(own, ALL) is None


def test_workers_left_in_different_calls_part_though_one_has_ended():
    one, other = blocked(0, "model.evaluate", "comparing", 9), blocked(1, "model.fit", "comparing the models", 9)
    gone = WorkerStatus("worker:2", ended="worker:2 ended with RuntimeError")
    for own, rest in ((one, other), (other, one)):
        # Neither waits for the one that has ended.
        text = reason(own, [rest, gone], [rest.task])
        assert text and PARTED.match(text)
        assert "worker:0 in model.evaluate (comparing), and worker:1 in model.fit" in text
        assert "worker:2 (worker:2 ended" in str(reason(own, [rest, gone], ALL))


def test_wait_for_worker_that_ended_names_its_call_and_a_remedy():
    own = blocked(0, "model.evaluate", "comparing the data sets", 3, secs=2)
    text = reason(own, [WorkerStatus("worker:1", ended=HAS_ENDED), WorkerStatus("worker:2")])
    assert text and text.startswith("model.evaluate (comparing the data sets) on worker:0 waits for worker:1, which")
    assert "remove the `if`" in text


def test_wait_for_worker_that_failed_by_another_names_that_one():
    first = worker_waits.never(WorkerStatus("worker:0"), {"worker:2": LOST})
    ended = WorkerStatus("worker:0", ended=f"worker:0 ended with ConnectionError: {first}")
    assert reason(blocked(1, ""), [ended]) == first


def test_wait_for_chief_goes_on_after_another_worker_ended():
    own = blocked(1, "model.save", "saving /x", secs=60)
    assert reason(own, [WorkerStatus("worker:0"), WorkerStatus("worker:2", ended=HAS_ENDED)], ["worker:0"]) is None


@pytest.mark.parametrize("what", ["", "comparing the data sets"])
def test_workers_in_the_same_call_are_no_deadlock(what: str):
    states = [blocked(index, "model.fit", what, 3, secs=600) for index in range(3)]
    assert reason(states[0], states[1:]) is None


@pytest.mark.parametrize(
    ("parts", "is_deadlock"),
    [
        ((STEP, OUTSIDE), True),
        ((worker_waits.step_of("2 sums"), worker_waits.step_of("1 gather, 2 sums")), True),
        *[((STEP, each), False) for each in (STEP, "", worker_waits.step_of("2 sums"))],
        (("", OUTSIDE), False),
        ((worker_waits.step_of("2 sums"), worker_waits.step_of("2 sums")), False),
    ],
)
def test_workers_in_different_parts_of_a_call_are_a_deadlock(parts: tuple[str, str], is_deadlock: bool):
    states = [blocked(i, "model.fit", secs=600, part=part) for i, part in enumerate(parts)]
    text = reason(states[0], states[1:])
    assert (text is not None) is is_deadlock
    if text:
        shown = f"worker:0 in model.fit ({parts[0]}), and worker:1 in model.fit ({parts[1]})"
        assert shown in text and "same models, calls and steps" in text
        # In a message of TensorFlow's, which quotes it.
        told = PARTED.search(f'{{"Collective ops is aborted by: {text}\\nThe error could be"}}')
        assert told and told.group() == text


@pytest.mark.parametrize(
    ("alone", "together"),
    [
        (blocked(0, "model.evaluate", "comparing the data sets", 3), "model.fit"),
        (blocked(0, "the callback ModelCheckpoint", "saving 1.keras"), "model.fit"),
        (blocked(0, "model.predict"), "model.fit"),
        (blocked(0, "model.evaluate"), "train_step"),
    ],
    ids=["exchange", "save", "collective", "custom loop"],
)
def test_message_has_the_call_of_each_and_a_remedy(alone: WorkerStatus, together: str):
    others = [blocked(index, together) for index in (1, 2)]
    for own, rest in ((alone, others), (others[0], [alone, others[1]])):
        text = reason(own, rest)
        assert text and f"worker:0 in {alone.doing}, and worker:1 and worker:2 in {together}" in text
        assert "remove the `if`" in text and "model.stop_training" in text


def test_mismatch_names_stop_training():
    """Workers that stop at different epochs make different calls next, such as a second model and a step."""
    assert "set model.stop_training in the same step" in worker_waits.mismatch(WorkerStatus("worker:0"))
