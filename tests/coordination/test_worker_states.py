# SPDX-License-Identifier: Apache-2.0
"""The decision whether a wait for other workers can still end."""

from __future__ import annotations

import dataclasses

import pytest

from tfdist.coordination.worker_states import (
    A_VARIABLE,
    HAS_ENDED,
    LOST,
    OUTSIDE,
    PARTED,
    PARTED_SECS,
    STEP,
    WorkerStatus,
    ended_by,
    never,
    parted,
    step_of,
    verdict,
)

ALL = ["worker:0", "worker:1", "worker:2"]


def blocked(
    index: int, call: str, what: str = "", number: int = 0, secs: float = PARTED_SECS, **log: str
) -> WorkerStatus:
    of_log = {int(key[1:]): text for key, text in log.items()}
    return WorkerStatus(f"worker:{index}", call, what, number, secs, of_log)


def test_state_is_the_same_after_its_way_as_text():
    state = blocked(1, "model.evaluate", "comparing the data sets", 7, n6="model.fit", n7="model.evaluate")
    assert WorkerStatus.from_json("worker:1", state.to_json()) == state


def test_those_who_are_left_in_different_calls_are_a_deadlock_though_one_has_ended():
    one, other = blocked(0, "model.evaluate", "comparing", 9), blocked(1, "model.fit", "comparing the models", 9)
    gone = WorkerStatus("worker:2", ended="worker:2 ended with RuntimeError")
    for own, rest in ((one, other), (other, one)):
        # Neither waits for the one that has ended.
        text = verdict(own, [rest, gone], [rest.task])
        assert text and PARTED.match(text)
        assert "worker:0 in model.evaluate (comparing), and worker:1 in model.fit" in text
        assert "worker:2 (worker:2 ended" in str(verdict(own, [rest, gone], ALL))
    assert verdict(one, [dataclasses.replace(other, blocked_secs=1.0), gone], ["worker:1"]) is None


@pytest.mark.parametrize("what", ["", "comparing the data sets"])
def test_wait_for_worker_that_has_ended_names_it_and_remedy(what: str):
    own, other = blocked(0, "model.evaluate", what, 3, secs=2), WorkerStatus("worker:1", ended=HAS_ENDED)
    text = verdict(own, [other, WorkerStatus("worker:2")], ALL)
    assert text and "worker:1, which has ended" in text
    assert "every worker must call model.evaluate: remove the `if`" in text


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        ("", "must take part: "),
        ("the callback Resume", "must have the callback Resume: "),
        (A_VARIABLE, "must make the same models and variables: "),
    ],
)
def test_remedy_fits_what_the_worker_waits_in(call: str, remedy: str):
    text = verdict(blocked(0, call), [WorkerStatus("worker:1", ended=HAS_ENDED)], ALL)
    assert text and f"every worker {remedy}" in text


def test_wait_for_worker_that_failed_by_another_names_that_one():
    first = never(WorkerStatus("worker:0"), {"worker:2": LOST})
    text = verdict(
        blocked(1, ""), [WorkerStatus("worker:0", ended=f"worker:0 ended with ConnectionError: {first}")], ALL
    )
    assert text == first


def test_wait_for_worker_that_raised_has_its_words():
    own = blocked(0, "model.evaluate", "comparing the data sets", 3)
    text = verdict(own, [WorkerStatus("worker:1", ended="worker:1 ended with LookupError: my own words")], ALL)
    assert text and "worker:1 ended with LookupError: my own words" in text and "remove" not in text


@pytest.mark.parametrize("how", [HAS_ENDED, "worker:0 ended with LookupError: my own words"])
@pytest.mark.parametrize("awaited", [ALL, ["worker:0"]])
def test_worker_that_ended_after_all_had_parted_has_the_cause(how: str, awaited: list[str]):
    cause = parted({"worker:0": "model.fit (a step of 2 sums)", "worker:1": "model.fit (a step of 1 sum)"})
    for ended in (ended_by(how, cause), f"worker:0 ended with RuntimeError: {cause}"):
        others = [WorkerStatus("worker:0", ended=ended), WorkerStatus("worker:2", ended=HAS_ENDED)]
        # A worker whose collective has failed does not know its own part any more.
        own = WorkerStatus("worker:1", "model.fit")
        assert verdict(own, others, awaited) == cause
        # It was raised already, and the next wait can't end for another reason.
        again = verdict(own, others, awaited, known=cause)
        assert again and again != cause and "worker:0" in again
        assert ("which ha" in again) is (ended.startswith(HAS_ENDED))


def test_end_after_another_reason_is_published_as_it_is():
    assert ended_by(HAS_ENDED, never(WorkerStatus("worker:0"), {"worker:2": LOST})) == HAS_ENDED
    assert ended_by(HAS_ENDED, "") == HAS_ENDED


def test_wait_for_chief_goes_on_after_another_worker_ended():
    own = blocked(1, "model.save", "saving /x", secs=60)
    assert verdict(own, [WorkerStatus("worker:0"), WorkerStatus("worker:2", ended=HAS_ENDED)], ["worker:0"]) is None


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([WorkerStatus("worker:1"), WorkerStatus("worker:2")], id="others work on their own"),
        pytest.param([blocked(1, "model.fit"), WorkerStatus("worker:2")], id="one works on its own"),
        pytest.param([blocked(1, "model.fit"), blocked(2, "model.fit", secs=PARTED_SECS - 1)], id="not long enough"),
    ],
)
def test_slow_worker_is_no_deadlock(others: list[WorkerStatus]):
    assert verdict(blocked(0, "model.evaluate", "comparing the data sets", 3, secs=600), others, ALL) is None


@pytest.mark.parametrize("what", ["", "comparing the data sets"])
def test_workers_in_the_same_call_are_no_deadlock(what: str):
    states = [blocked(index, "model.fit", what, 3, secs=600) for index in range(3)]
    assert verdict(states[0], states[1:], ALL) is None


def test_workers_in_different_parts_of_the_same_call_are_a_deadlock():
    states = [dataclasses.replace(blocked(0, "model.fit"), part=part) for part in (STEP, OUTSIDE)]
    states = [dataclasses.replace(state, task=task) for state, task in zip(states, ALL, strict=False)]
    text = verdict(states[0], states[1:], ALL)
    assert text and "worker:0 in model.fit (a step), and worker:1 in model.fit (outside of its steps)" in text
    assert "give all workers the same number of steps" in text and "remove" not in text
    # In a message of TensorFlow's, which quotes it.
    told = PARTED.search(f'{{"Collective ops is aborted by: {text}\\nThe error could be"}}')
    assert told and told.group() == text


def test_workers_in_steps_of_different_collectives_are_a_deadlock():
    found = ("2 sums", "1 gather, 2 sums")
    states = [
        WorkerStatus(f"worker:{i}", "model.fit", blocked_secs=60, part=step_of(each)) for i, each in enumerate(found)
    ]
    text = verdict(states[0], states[1:], ALL)
    assert text and "worker:0 in model.fit (a step of 2 sums), and worker:1 in model.fit (a step of 1 gather, " in text
    assert text.endswith("every worker must make the same step: remove the `if` around what only some do in it")


@pytest.mark.parametrize(
    "parts",
    [(STEP, STEP), (STEP, ""), ("", OUTSIDE), (step_of("2 sums"), step_of("2 sums")), (step_of("2 sums"), STEP)],
)
def test_workers_in_parts_that_may_be_the_same_are_no_deadlock(parts: tuple[str, str]):
    states = [dataclasses.replace(blocked(i, "model.fit", secs=600), part=part) for i, part in enumerate(parts)]
    assert verdict(states[0], states[1:], ALL) is None


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
def test_all_workers_in_different_calls_are_a_deadlock(alone: WorkerStatus, together: str):
    others = [blocked(index, together) for index in (1, 2)]
    for own, rest in ((alone, others), (others[0], [alone, others[1]])):
        text = verdict(own, rest, ALL)
        assert text and f"worker:0 in {alone.doing}, and worker:1 and worker:2 in {together}" in text
        verb = "have" if alone.call.startswith("the callback") else "call"
        assert f"every worker must {verb} {alone.call}: remove the `if`" in text


def test_exchanges_out_of_step_name_the_first_difference():
    """The chief alone has a callback whose exchanges it does not wait for, so both wait in the next one of one name."""
    one = blocked(0, "model.fit", "comparing", 7, n5="model.fit (restoring a backup)", n7="model.fit (comparing)")
    other = blocked(1, "model.fit", "comparing", 5, n5="model.fit (comparing)")
    text = verdict(one, [other], ALL)
    assert text and "worker:0 in model.fit (restoring a backup), and worker:1 in model.fit (comparing)" in text


def test_remedy_is_for_the_call_of_the_fewest():
    assert "must call model.predict:" in parted({"worker:0": "model.predict", "worker:1": "", "worker:2": ""})
    assert "must call model.evaluate:" in parted({"worker:0": "model.fit", "worker:1": "model.evaluate"})
