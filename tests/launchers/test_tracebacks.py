# SPDX-License-Identifier: Apache-2.0
"""Each traceback is printed whole and once, however many tasks raise it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from waiting import Clock

from tfdist.launchers.supervise.output import TRACEBACK, TracebackFilter, Tracebacks

RAISED = [
    TRACEBACK,
    '  File "train.py", line 3, in <module>',
    "    fit()",
    "ValueError: of shape (16, 7)",
    "",
    "second line",
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


def test_what_tensorflow_logs_of_a_function_of_tfdist_is_left_out():
    lost = "ConnectionError: a sum over all workers will never come"
    of_tfdist, of_user = (
        '  File "/packages/tfdist/transport/sums.py", line 236, in call',
        '  File "load.py", line 7, in load',
    )
    logged = [
        TRACEBACK,
        "",
        '  File "script_ops.py", line 269, in __call__',
        "",
        of_tfdist,
        "",
        lost,
        "",
        "\t [[{{node}}]]",
    ]
    raised = [TRACEBACK, '  File "train.py", line 3, in <module>', lost]
    _, tracebacks, (task,) = job("worker:0")
    assert printed(task, [*logged, "loss: 1", *raised]) == ["loss: 1", *raised]
    assert tracebacks.has_raised("worker:0")
    other = [of_user if each == of_tfdist else each for each in logged]
    assert printed(task, other) == other


def test_what_follows_the_same_traceback_is_printed_of_each_task():
    _, tracebacks, tasks = job("worker:0", "worker:1", "worker:2")
    tracebacks.muted.add("worker:0")
    assert [printed(task, [*RAISED, f"loss {index}"]) for index, task in enumerate(tasks)] == [
        [*RAISED, "loss 0"],
        [*RAISED, "loss 1"],
        ["loss 2"],
    ]


def test_tracebacks_are_printed_whole_once_nothing_follows():
    clock, _, (first, second) = job("worker:0", "worker:1")
    assert first.feed(["before", *RAISED[:4]]) == ["before"]
    assert second.feed([*RAISED, "another line"]) == []
    clock.now = 0.2
    assert first.feed(RAISED[4:]) == []
    clock.now = 0.4
    assert first.due() == [] and second.due() == [*RAISED, "another line"]
    clock.now = 0.6
    assert first.due() == RAISED


def test_a_task_that_raises_the_same_twice_prints_it_twice():
    _, tracebacks, (task,) = job("worker:0")
    assert printed(task, RAISED) + printed(task, RAISED) == RAISED + RAISED
    assert tracebacks.raised_by_several() == []


def test_a_chain_of_exceptions_stays_together():
    _, _, tasks = job("worker:0", "worker:1")
    assert printed(tasks[0], CHAINED) == CHAINED
    assert printed(tasks[1], CHAINED) == []


def test_a_keyboard_interrupt_is_left_out_after_ctrl_c_alone():
    _, tracebacks, (task,) = job("worker:0")
    lines = [TRACEBACK, '  File "train.py", line 3, in <module>', "KeyboardInterrupt"]
    assert printed(task, lines) == lines
    tracebacks.is_interrupted = True
    assert printed(task, lines) == []
    assert printed(task, RAISED) == RAISED


@given(st.lists(st.sampled_from([*RAISED, *CHAINED, "a line", "  File", ""]), max_size=40), st.integers(1, 5))
def test_one_task_loses_no_line_and_keeps_their_order(lines, size):
    clock, _, (task,) = job("worker:0")
    shown = []
    for start in range(0, len(lines), size):
        clock.now += 0.2
        shown += task.feed(lines[start : start + size]) + task.due()
    assert shown + task.flush() == lines
