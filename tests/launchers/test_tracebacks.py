# SPDX-License-Identifier: Apache-2.0
"""Each traceback is printed whole and once, however many tasks raise it; an aborted sum is one line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import Clock

from tfdist.launchers.supervise.processes import TracebackFilter, Tracebacks

FIRST = "Traceback (most recent call last):"
RAISED = [
    FIRST,
    '  File "train.py", line 3, in <module>',
    "    fit()",
    "ValueError: of shape (16, 7)",
    "",
    "second line",
]
ABORTED = [
    FIRST,
    '  File "train.py", line 3, in <module>',
    "tensorflow.python.framework.errors_impl.UnavailableError: Graph execution error:",
    "",
    "Detected at node CollectiveGatherV2 defined at (most recent call last):",
    "Collective ops is aborted by: recvmsg:Connection reset by peer",
    "The error could be from a previous operation. Restart your program to reset.",
]
CHAINED = [*RAISED, "", "During handling of the above exception, another exception occurred:", "", *RAISED]


def job(*names):
    clock = Clock()
    tracebacks = Tracebacks(clock)
    return clock, tracebacks, [TracebackFilter(tracebacks, name) for name in names]


def printed(filter_, lines):
    return filter_.feed(lines) + filter_.flush()


def test_a_traceback_of_several_tasks_is_printed_once_and_counted():
    _, tracebacks, tasks = job("worker:0", "worker:1", "worker:2")
    # Numbers, such as addresses, differ between tasks.
    assert [printed(task, [*RAISED, f"at 0x{index}f"]) for index, task in enumerate(tasks)] == [
        [*RAISED, "at 0x0f"],
        [],
        [],
    ]
    assert tracebacks.raised_by_several() == [("ValueError", ["worker:0", "worker:1", "worker:2"])]
    assert tracebacks.has_raised("worker:2") and not tracebacks.has_raised("worker:3")


def test_tracebacks_that_differ_are_all_printed():
    _, tracebacks, tasks = job("worker:0", "worker:1")
    other = [*RAISED[:-1], "another line"]
    assert [printed(tasks[0], RAISED), printed(tasks[1], other)] == [RAISED, other]
    assert tracebacks.raised_by_several() == []


def test_a_task_that_raises_the_same_twice_prints_it_twice():
    _, tracebacks, (task,) = job("worker:0")
    assert printed(task, RAISED) + printed(task, RAISED) == RAISED + RAISED
    assert tracebacks.raised_by_several() == []


@pytest.mark.parametrize("text", ["UnavailableError", "InternalError", "AbortedError"])
def test_an_aborted_sum_is_one_line(text):
    _, tracebacks, (task,) = job("worker:0")
    lines = [line.replace("UnavailableError", text) for line in ABORTED]
    assert printed(task, lines) == [f"{text}: a sum over all workers was aborted: recvmsg:Connection reset by peer"]
    assert not tracebacks.has_raised("worker:0")


def test_a_sum_that_misses_a_worker_is_one_line():
    _, tracebacks, (task,) = job("worker:0")
    text = "ConnectionError: a sum over all workers will never come, as some have ended or failed: worker:1 (killed)"
    assert printed(task, [*RAISED[:-3], text]) == [text]
    assert not tracebacks.has_raised("worker:0")


def test_a_chain_of_exceptions_stays_together():
    _, _, tasks = job("worker:0", "worker:1")
    assert printed(tasks[0], CHAINED) == CHAINED
    assert printed(tasks[1], CHAINED) == []


def test_a_keyboard_interrupt_is_left_out_after_ctrl_c_alone():
    _, tracebacks, (task,) = job("worker:0")
    lines = [FIRST, '  File "train.py", line 3, in <module>', "KeyboardInterrupt"]
    assert printed(task, lines) == lines
    tracebacks.is_interrupted = True
    assert printed(task, lines) == []
    assert printed(task, RAISED) == RAISED


def test_a_traceback_is_held_until_nothing_follows_for_a_while():
    clock, _, (task,) = job("worker:0")
    assert task.feed(["before", *RAISED[:3]]) == ["before"] and task.is_holding
    clock.now = 0.5
    assert task.due() == []  # its exception has not arrived yet
    assert task.feed(RAISED[3:]) == []
    clock.now = 0.9
    assert task.due() == RAISED
    assert not task.is_holding and task.feed(["after"]) == ["after"]


def test_what_only_looks_like_a_traceback_is_not_held_for_ever():
    clock, _, (task,) = job("worker:0")
    assert task.feed([FIRST, "  nothing else"]) == []
    clock.now = 3.0
    assert task.due() == [FIRST, "  nothing else"]


@given(st.lists(st.sampled_from([*RAISED, *CHAINED, "a line", "  File", ""]), max_size=40), st.integers(1, 5))
def test_one_task_loses_no_line_and_keeps_their_order(lines, size):
    clock, _, (task,) = job("worker:0")
    shown = []
    for start in range(0, len(lines), size):
        clock.now += 0.2
        shown += task.feed(lines[start : start + size]) + task.due()
    assert shown + task.flush() == lines
