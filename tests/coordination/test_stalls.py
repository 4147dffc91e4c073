# SPDX-License-Identifier: Apache-2.0
"""The stall reporter with a clock of its own: no waiting."""

from __future__ import annotations

import contextlib
import gc
import operator
import os
import pathlib
import signal
import sys
import threading
import types
import weakref
from typing import Any

import pytest
from waiting import Clock

from tfdist import _log
from tfdist.coordination import stalls
from tfdist.coordination.stalls import BlockedCall, Idleness, InterruptEscape, RuntimeCall, StallReporter, runtime_call


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(_log, "say", found.append)
    return found


def reporter(clock: Clock, **options):
    return StallReporter(lambda: "worker:1", clock=clock, **options)


def check_every_second(watched: StallReporter, clock: Clock, secs: int) -> None:
    for _ in range(secs):
        clock.now += 1
        watched.check()


def test_a_line_every_interval_and_none_after_the_end(lines: list[str]):
    clock = Clock()
    watched = reporter(clock)
    with watched.waiting("the step"):
        check_every_second(watched, clock, 65)
    check_every_second(watched, clock, 65)
    assert lines == [
        "the step has not completed for 30 s; waiting for worker:1",
        "the step has not completed for 60 s; waiting for worker:1",
    ]


def test_progress_is_no_stall(lines: list[str]):
    clock = Clock()
    watched = reporter(clock, progress=lambda: ("a step", clock.now // 20))
    check_every_second(watched, clock, 200)
    assert lines == []


def test_two_blocks_of_one_name_are_two_things(lines: list[str]):
    clock = Clock()
    watched = reporter(clock)
    for _ in range(4):
        with watched.waiting("the step"):
            check_every_second(watched, clock, 20)
    assert lines == []


def test_the_thread_ends_with_stop():
    looked, before = threading.Event(), {*threading.enumerate()}
    watched = reporter(Clock(), progress=looked.set)
    watched.start()
    assert looked.wait(30)
    watched.stop()
    watched.stop()
    assert {*threading.enumerate()} <= before


def test_an_interrupt_that_python_delivers_is_told_and_does_what_it_did_before():
    told = []
    escape = InterruptEscape(lambda: "nobody", on_interrupt=lambda: told.append("told"))
    before = signal.getsignal(signal.SIGINT)
    escape.install()
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        escape.uninstall()
    assert told == ["told"]
    assert signal.getsignal(signal.SIGINT) == before


def test_second_interrupt_before_the_first_is_seen_ends_no_process(monkeypatch: pytest.MonkeyPatch):
    handled, exits = threading.Event(), []

    def read(descriptor: int, size: int) -> bytes:
        assert handled.wait(10)
        return os.read(descriptor, 1)

    monkeypatch.setattr(stalls, "os", types.SimpleNamespace(**{**vars(os), "read": read, "_exit": exits.append}))
    escape, told = InterruptEscape(lambda: "nobody", grace_secs=0.1), []
    before = signal.signal(signal.SIGINT, lambda *_: told.append("told"))
    try:
        others = threading.enumerate()  # That of an earlier test may be ending.
        escape.install()
        (watch,) = [each for each in threading.enumerate() if each.name == "tfdist-interrupt" and each not in others]
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        handled.set()
        escape.uninstall()
        watch.join(10)
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == ["told"] * 2 and not watch.is_alive()
    assert exits == []


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_threads_are_looked_at(monkeypatch: pytest.MonkeyPatch, enabled: bool):
    """CPython would hold the list of threads meanwhile."""
    stock, states = sys._current_frames, []

    def look() -> dict[int, Any]:
        states.append(gc.isenabled())
        return stock()

    monkeypatch.setattr(sys, "_current_frames", look)
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        found = stalls.by_thread()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
    assert states == [False]
    assert threading.get_ident() not in found


@contextlib.contextmanager
def thread_in(filename: str, used: object = None):
    """A thread that waits within a function of such a file, with a local variable `used`; by its identifier."""
    names: dict = {"call": operator.call, "ready": threading.Lock(), "lock": threading.Lock()}
    for held in ("ready", "lock"):
        names[held].acquire()
    # In one instruction, and without frames below it: whoever sees `ready` sees the thread where it stays.
    exec(compile("def wait(used): list(map(call, (ready.release, lock.acquire)))", filename, "exec"), names)
    thread = threading.Thread(target=names["wait"], args=(used,), daemon=True)
    thread.start()
    assert names["ready"].acquire(timeout=10)
    try:
        yield thread.ident
    finally:
        names["lock"].release()
        thread.join(10)


def test_a_thread_in_the_runtime_is_in_one_call():
    with thread_in("/site-packages/tensorflow/python/eager/execute.py") as ident:
        blocked = BlockedCall("a step", ident)
        first = blocked()
        assert first is not None
        assert first == blocked()
    assert blocked() is None


def test_what_a_call_has_used_is_freed_when_it_has_ended():
    """An iterator over data that only the garbage collector frees keeps the end of a program waiting."""
    used = threading.Event()
    gc.collect()
    gc.disable()
    try:
        with thread_in("/site-packages/tensorflow/python/eager/execute.py", used=used) as ident:
            looking = [BlockedCall("a step", ident) for _ in range(2)]
            both = [threading.Thread(target=lambda each=each: [each() for _ in range(200)]) for each in looking]
            for thread in both:
                thread.start()
            for thread in both:
                thread.join(10)
            assert looking[0]() is not None
        for each in looking:
            each.forget()
        alive = weakref.ref(used)
        del used
        assert alive() is None
    finally:
        gc.enable()


def test_a_thread_that_waits_for_a_collective_in_another_is_in_that_call():
    go = threading.Event()
    waiting = threading.Thread(target=go.wait, daemon=True)
    waiting.start()
    try:
        blocked = BlockedCall("a step", waiting.ident)
        assert blocked() is None
        with thread_in("/site-packages/tensorflow/python/ops/gen_collective_ops.py"):
            first = blocked()
            assert first is not None
            assert first == blocked()
        with thread_in("/site-packages/tensorflow/python/ops/gen_collective_ops.py"):
            assert blocked() not in (None, first)
        assert blocked() is None
    finally:
        go.set()
        waiting.join(10)


@pytest.mark.parametrize(
    ("filename", "function", "expected"),
    [
        ("/x/tensorflow/python/ops/gen_collective_ops.py", "collective_gather_v2", ("collective_gather_v2", "")),
        ("/x/tensorflow/python/eager/polymorphic_function/atomic_function.py", "call_flat", ("", "train.py:7")),
        ("/x/tensorflow/python/ops/gen_dataset_ops.py", "iterator_get_next", ("", "")),
    ],
)
def test_runtime_call_is_told_by_the_stack(filename: str, function: str, expected: tuple[str, str]):
    """A program's line calls the wrapper that TensorFlow has around each function, and that what is told."""
    names: dict = {"here": lambda: found.append(runtime_call(None))}
    found: list[RuntimeCall] = []
    exec(compile(f"def {function}(): here()", filename, "exec"), names)
    wrapper = "/x/tensorflow/python/util/traceback_utils.py"
    exec(compile(f"def error_handler(): {function}()", wrapper, "exec"), names)
    exec(compile("\n" * 6 + "error_handler()", "train.py", "exec"), names)
    assert [each[:2] for each in found] == [expected] and not found[0].is_tracing


@pytest.mark.parametrize(
    ("state", "waited_secs", "is_counted", "is_idle"),
    [
        *(("S", 0.0, True, True), ("R", 0.4, True, True), ("S", 1.0, True, False), ("R", 0.0, True, False)),
        *(("R", 0.0, False, False), ("S", 0.0, False, True)),
    ],
)
def test_process_is_idle_unless_a_thread_wants_a_cpu(
    tmp_path: pathlib.Path, state: str, waited_secs: float, is_counted: bool, is_idle: bool
):
    """On a busy machine the threads of a blocked process are runnable at many looks, and wait for little time."""
    (tmp_path / "77").mkdir()
    secs = [0.0]
    idleness = Idleness(tmp_path, cpu_secs=lambda: 0.01 * secs[0], clock=lambda: secs[0])
    for secs[0] in (1.0, 2.0):
        (tmp_path / "77" / "stat").write_text(f"77 (a) R (b) {state} 1 2")
        if is_counted:
            (tmp_path / "77" / "schedstat").write_text(f"5 {int(secs[0] * waited_secs * 1e9)} 3\n")
        found = idleness.check()
    assert found is is_idle
