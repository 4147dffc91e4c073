# SPDX-License-Identifier: Apache-2.0
"""Reports calls that do not complete, and lets Ctrl-C end a process that is blocked in one. No TensorFlow import."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from tfdist import _log

# The frames of all threads.
#
# CPython 3.11 collects garbage when `sys._current_frames` makes its dictionary, while it holds the lock on the list of
# threads. A collected object may wait for Python's lock, as TensorFlow's do when they are freed. The thread that holds
# this lock may be starting a thread, and wait for the list. Neither ever continues. So nothing is collected meanwhile.
#
# A frame keeps its locals, and those of its callers, alive: among them iterators over data. Freed by Python's end, an
# iterator waits for its thread, and this for Python, for ever (TensorFlow 2.21, `numpy_function` under way). So frames
# are let go at once: no dictionary of frames is left in a frame that it contains, and none outlives its call for long.


_lock = threading.Lock()


def by_thread() -> dict[int, FrameType]:
    """Returns the innermost frame of each thread but this one, by the thread's identity."""
    with _lock:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            frames = sys._current_frames()
            del frames[threading.get_ident()]
            return frames
        finally:
            if was_enabled:
                gc.enable()


def of(thread: threading.Thread) -> FrameType | None:
    """Returns the innermost frame of another thread; None if it does not run."""
    frames = by_thread()
    try:
        return frames.get(thread.ident or 0)
    finally:
        # Another thread that looks has a dictionary with this frame.
        frames.clear()


# Files of TensorFlow's that call an operation of a collective, or a function, or trace one.
_COLLECTIVES = "tensorflow/python/ops/gen_collective_ops.py"
_FUNCTIONS = "tensorflow/python/eager/polymorphic_function/"
_TRACING = "tensorflow/python/framework/func_graph.py"
_OF_TENSORFLOW = "tensorflow/python/"


class RuntimeCall(NamedTuple):
    """Call of TensorFlow's that a thread is in.

    Attributes:
      operation: the function that calls the operation of a collective, such as "collective_gather_v2"; "" for none.
      line: the line of the program that calls the outermost `tf.function`; "" for none.
      is_tracing: True while that function is traced, so that it runs no collective yet.
    """

    operation: str = ""
    line: str = ""
    is_tracing: bool = False


def runtime_call(frame: FrameType | None) -> RuntimeCall:
    """Returns the call that the thread of an innermost frame is in, or this thread for None."""
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    operation = next((each.name for each in stack if _COLLECTIVES in each.filename), "")
    is_tracing = any(_TRACING in each.filename for each in stack)
    line = ""
    for each in reversed(stack):
        if _FUNCTIONS in each.filename:
            return RuntimeCall(operation, line, is_tracing)
        if _OF_TENSORFLOW not in each.filename:
            line = f"{each.filename}:{each.lineno}"
    return RuntimeCall(operation)


_JOIN_SECS = 2.0
_LOOK_EVERY_SECS = 1.0


class StallReporter:
    """Writes a line every `interval_secs` for which the same operation has not completed.

        reporter = StallReporter(describe=lambda: "worker:1")
        reporter.start()
        with reporter.waiting("the evaluation"):
            ...  # after 30 s: "the evaluation has not completed for 30 s; waiting for worker:1"

    Args:
      describe: returns the names of the tasks that are waited for; called only when there is a line to write.
      progress: returns the current operation outside of `waiting` blocks: (name, token), where the token changes with
        progress, or None for no operation.
      clock: returns the time in seconds.
    """

    # Time after which an operation is reported, and interval of the reports.
    interval_secs = 30.0

    def __init__(
        self,
        describe: Callable[[], str],
        progress: Callable[[], tuple[str, Any] | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._describe = describe
        self._progress = progress
        self._clock = clock
        self._blocks: list[tuple[str, Any]] = []
        self._last: tuple[str, Any] | None = None
        self._since = self._reported = clock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfdist-watch", daemon=True)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Declares that the operation `what` runs within this block."""
        block = (what, object())
        self._blocks.append(block)
        try:
            yield
        finally:
            self._blocks.remove(block)

    def check(self) -> None:
        """Checks once, and writes a line if one is due. Called by the thread, or by tests."""
        now, current = self._clock(), (self._blocks[-1] if self._blocks else self._progress())
        if current is None or self._last is None or current[1] != self._last[1]:
            self._last, self._since, self._reported = current, now, now
        elif now - self._reported >= self.interval_secs:
            self._reported = now
            secs = now - self._since
            _log.say(f"{current[0]} has not completed for {secs:.0f} s; waiting for {self._describe()}")

    def start(self) -> None:
        """Starts the thread that calls `check` until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; may be called again."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            # With a timeout, because `describe` may query a cluster that no longer answers.
            self._thread.join(_JOIN_SECS)

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_SECS):
            self.check()


class BlockedCall:
    """Detects that a thread is inside a call into TensorFlow's runtime; a `progress` argument of `StallReporter`.

    Calling the object returns (what, token) while the thread is inside a call, with a new token for each call, else
    None. A blocked synchronous step is always inside such a call, and inspecting the thread's frame from outside costs
    the step nothing. With `run_eagerly=True` TensorFlow reduces in threads of its own, for which the thread waits.
    """

    # Files of Python whose innermost frame means that the runtime is at work.
    _RUNTIME = ("tensorflow/python/eager/", "tensorflow/python/ops/gen_", "tensorflow/python/framework/ops.py")

    def __init__(self, what: str, thread_id: int | None = None) -> None:
        self._what = what
        self._thread_id = thread_id or threading.main_thread().ident
        # The frame, and the instruction in it.
        self._last: tuple[FrameType, int] | None = None
        self._token = 0

    def __call__(self) -> tuple[str, int] | None:
        """Returns (what, token), or None outside of a call."""
        frame = self._blocked_frame()
        if frame is None:
            self._last = None
            return None
        # The reference keeps the frame alive, so that no other frame gets its identity.
        if self._last is None or self._last[0] is not frame or self._last[1] != frame.f_lasti:
            self._token += 1
            self._last = frame, frame.f_lasti
        return self._what, self._token

    def forget(self) -> None:
        """Lets go of the frame of a call that has ended."""
        self._last = None

    @property
    def frame(self) -> FrameType | None:
        """Innermost frame of the call that was seen last; None outside of a call."""
        return None if self._last is None else self._last[0]

    def _blocked_frame(self) -> FrameType | None:
        frames = by_thread()
        try:
            frame = frames.get(self._thread_id or 0)
            if frame is None or any(part in frame.f_code.co_filename for part in self._RUNTIME):
                return frame
            if frame.f_code.co_filename != threading.__file__:
                return None
            return next((each for each in frames.values() if _COLLECTIVES in each.f_code.co_filename), None)
        finally:
            # Another thread that looks has a dictionary with this frame.
            frames.clear()


class Idleness:
    """Detects that this process computes nothing: it uses next to no CPU time, and its threads want none.

    A process that is blocked in a collective is idle. A process that computes a long step is not, also where others
    take the CPUs away from it. Then the kernel counts for how long its threads have waited for a CPU, in `schedstat`.
    The threads of a blocked process wake up often, too; on a busy machine one of them is runnable at every third look.

    Args:
      tasks: folder with the threads of this process.
      cpu_secs: returns the CPU time of this process.
      clock: returns the time in seconds.
    """

    _MOST_CPU_SHARE = 0.05
    # Of one CPU, over all threads. Measured at a load of 15 on 2 CPUs: 0.4 at most if blocked, over 1 if computing.
    _MOST_WANTED_SHARE = 0.7

    def __init__(
        self,
        tasks: pathlib.Path = pathlib.Path("/proc/self/task"),
        cpu_secs: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tasks, self._cpu_secs, self._clock = tasks, cpu_secs, clock
        self._used, self._at = cpu_secs(), clock()
        # The text of `schedstat` by thread; empty before the first look.
        self._last: dict[str, str] = {}

    def check(self) -> bool:
        """Returns True if the process has been idle since the last call, as far as is seen."""
        used, now = self._cpu_secs(), self._clock()
        secs, share = now - self._at, (used - self._used) / max(now - self._at, 1e-3)
        self._used, self._at = used, now
        if share >= self._MOST_CPU_SHARE:
            self._last = {}
            return False
        last, self._last, is_starved = self._last, {}, False
        own = str(threading.get_native_id())
        for path in self._tasks.glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state = "" if path.name == own else run_state(path)
                text = (path / "schedstat").read_text() if (path / "schedstat").exists() else ""
                self._last[path.name] = text
                # The kernel counts a wait for a CPU at its end. Kernels that don't count show runnable threads.
                is_starved = is_starved or (state == "R" and last.get(path.name, text) == text)
        wanted = sum(_delay_secs(text) - _delay_secs(last.get(name, text)) for name, text in self._last.items())
        return bool(last) and not is_starved and wanted < self._MOST_WANTED_SHARE * secs


def run_state(task: pathlib.Path) -> str:
    """Returns the letter by which the kernel shows the state of a process or thread with this folder in /proc."""
    text = (task / "stat").read_text(encoding="utf-8", errors="replace")
    # The name, in parentheses, may itself hold spaces and parentheses.
    return text.rpartition(")")[2].split()[0]


def _delay_secs(schedstat: str) -> float:
    return int(schedstat.split()[1]) / 1e9 if schedstat else 0.0


# No signal has this number.
_DELIVERED = 0


class InterruptEscape:
    """Ends the process on Ctrl-C if the main thread is blocked in a call that Python can't interrupt.

    Python raises KeyboardInterrupt only when the main thread returns from C code, which a thread that waits for other
    workers does not. So the process ends with exit code 130 if that has not happened after `grace_secs`. Does nothing
    outside of the main thread, nor if the program has set a wakeup descriptor of its own, as asyncio does.

    Args:
      describe: returns the names of the tasks that are waited for, for the last line written.
      grace_secs: time for Python to raise KeyboardInterrupt.
      on_interrupt: called when Python handles the signal.
    """

    def __init__(
        self, describe: Callable[[], str], grace_secs: float = 3.0, on_interrupt: Callable[[], object] = lambda: None
    ) -> None:
        self._describe = describe
        self._grace_secs = grace_secs
        self._on_interrupt = on_interrupt
        self._pipe: tuple[int, int] | None = None
        self._previous: Any = None

    def install(self) -> None:
        """Starts to watch for Ctrl-C."""
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            return
        if (programs_own := signal.set_wakeup_fd(-1)) != -1:
            signal.set_wakeup_fd(programs_own)
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._pipe, self._previous = (read, write), handler
        signal.signal(signal.SIGINT, self._deliver)
        threading.Thread(target=self._watch, args=(read,), name="tfdist-interrupt", daemon=True).start()

    def uninstall(self) -> None:
        """Restores the previous signal handler and wakeup descriptor; may be called again."""
        if self._pipe is None or threading.current_thread() is not threading.main_thread():
            return
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGINT) == self._deliver:
            signal.signal(signal.SIGINT, self._previous)
        os.close(self._pipe[1])  # ends the thread, which closes the other end
        self._pipe = None

    def _deliver(self, number: int, frame: Any) -> None:
        if self._pipe is not None:
            with contextlib.suppress(BlockingIOError):
                # Behind the bytes of all signals that this call answers.
                os.write(self._pipe[1], bytes([_DELIVERED]))
        self._on_interrupt()
        self._previous(number, frame)

    def _watch(self, read: int) -> None:
        poll = select.poll()
        poll.register(read, select.POLLIN)
        # Time at which Python must have handled the signals, if it has not yet.
        deadline: float | None = None
        while deadline is None or poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            received = os.read(read, 64)
            if not received:
                os.close(read)
                return
            for each in received:
                if each == _DELIVERED:
                    deadline = None
                elif each == signal.SIGINT:
                    deadline = deadline or time.monotonic() + self._grace_secs
        _log.say(f"interrupted while waiting for {self._describe()}")
        os._exit(130)


@contextlib.contextmanager
def interrupt_ends_process() -> Iterator[None]:
    """Within this block Ctrl-C ends the process at once: TensorFlow's start lets no Python run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
