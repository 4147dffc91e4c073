# SPDX-License-Identifier: Apache-2.0
"""A signal that says that this process will be ended soon, and what the workers of a job tell each other of it.

    worker:1                        the chief                          all workers
      SIGTERM
      end of step 146: asks   --->
                                      end of step 146 (or 147):
                                      says: after step 147       --->  a thread of each hears it, and answers
                                      waits for the answers      <---
                                      step 147                         step 147: nobody can pass it before the chief
                                      saves, ends with code 75         end with code 75

The chief decides, because it saves. It says so before it begins step 147, in which all must take part, and begins it
once all have heard; so all end after the same step. That is how TensorFlow's own `PreemptionCheckpointHandler` does it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

# How long the others may take to hear of it before that is said, and to end.
_ANSWER_SECS = 5.0
_END_SECS = 5.0
_SILENT_SECS = 30.0
# How long a worker may take to come to the end itself once the chief has saved; shorter than the chief waits for it.
_STRAY_SECS = 2.0
# How long one question takes, which can't be cut short.
_ASK_SECS = 0.2


class Channel(Protocol):
    """What workers tell each other by; see `tfdist.strategies.agreement.Agreement`."""

    is_chief: bool
    task: Any
    tasks: Sequence[Any]

    def tell(self, key: str, value: str) -> bool:
        """Puts `value` under `key`; False if there is one already, or nobody can be told any more."""
        ...

    def gather(self, value: Any, what: str) -> dict[Any, Any]:
        """The value (JSON data) of every worker; called by all at the same place."""
        ...

    def hear(self, key: str, timeout_secs: float) -> str | None:
        """What is under `key`; None if nothing is for so long. ConnectionError: nobody can be heard any more."""
        ...


class Signals:
    """Notes signals while `is_wanted`; at any other time they do what they did before.

    Args:
      numbers: which signals.
      is_wanted: given the frame that a signal has interrupted, whether it is to be noted.

    Attributes:
      numbers: which signals.
      received: the first signal that was noted, or None.
    """

    def __init__(self, numbers: Sequence[int], is_wanted: Callable[[FrameType | None], bool]) -> None:
        self.numbers = tuple(numbers)
        self._is_wanted = is_wanted
        self._before: dict[int, Any] = {}
        self.received: int | None = None

    def install(self) -> bool:
        """Begins to note them; False outside of the main thread, where Python hears of no signals."""
        self.uninstall()
        self.received = None
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in self.numbers:
            self._before[number] = signal.signal(number, self._note)
        return True

    def uninstall(self) -> None:
        """Puts back what was there before; may be called again."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            # Somebody else may have installed another one since.
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None and self._is_wanted(frame):
            self.received = number
            return
        # It comes for the second time, or fit is over: its usual effect.
        self.uninstall()
        os.kill(os.getpid(), number)


class Alone:
    """A process that saves by itself. See `Together` for the methods."""

    def is_due(self, step: int, is_requested: bool, is_level: Callable[[], bool]) -> bool:
        """Whether to save and end after so many steps.

        Args:
          step: how many were made.
          is_requested: whether this process has heard that it is to end.
          is_level: says whether all workers are at this step, because it needed all of them; asked if it matters.
        """
        del step, is_level
        return is_requested

    def is_ending(self, is_requested: bool) -> bool:
        """Asked by all at the end of training: whether any is to end."""
        return is_requested

    def saved(self) -> None:
        """Says that the checkpoint is written."""

    def close(self) -> None:
        """Ends what was started."""


class Together(Alone):
    """One of several workers, which save and end after the same step.

    Args:
      channel: what they tell each other by.
      name: what this `fit` is called; the same on all workers, and of no other.
      end: ends this process, if it does not end by itself.
      say: takes a line for the person who watches the run.
    """

    def __init__(self, channel: Channel, name: str, end: Callable[[], object], say: Callable[[str], object]) -> None:
        self._channel = channel
        self._name = name
        self._end = end
        self._say = say
        self._is_asked = threading.Event()
        self._is_closed = threading.Event()
        self._last_step: int | None = None
        self._listener = threading.Thread(target=self._listen, name="tfdist preemption", daemon=True)
        self._listener.start()
        # A thread that is inside of TensorFlow when Python ends aborts the process.
        atexit.register(self.close)

    def _request(self, step: int) -> None:
        if not self._channel.is_chief:
            self._channel.tell(self._key("request"), str(self._channel.task))
        elif self._last_step is None:
            self._last_step = step + 1
            self._channel.tell(self._key("last"), str(self._last_step))
            late = self._await_all("heard", _ANSWER_SECS)
            if late:
                self._say(f"{', '.join(late)} have not answered that training ends; waiting for them")
                # One that has not heard would go on into a step without the chief. One that has died ends the step.
                self._await_all("heard", _SILENT_SECS)

    def is_due(self, step: int, is_requested: bool, is_level: Callable[[], bool]) -> bool:
        """See `Alone.is_due`."""
        is_asked = is_requested or (self._channel.is_chief and self._is_asked.is_set())
        if (self._last_step is None and not is_asked) or not is_level():
            return False
        if self._last_step is None:
            self._request(step)
        return self._last_step is not None and step >= self._last_step

    def is_ending(self, is_requested: bool) -> bool:
        """See `Alone.is_ending`."""
        own = is_requested or self._last_step is not None
        return any(self._channel.gather(own, "the end of training").values())

    def saved(self) -> None:
        """See `Alone.saved`. The chief waits for the others: with it goes what they talk through."""
        if self._channel.is_chief:
            self._channel.tell(self._key("saved"), "1")
            late = self._await_all("ending", _END_SECS)
            if late:
                self._say(f"{', '.join(late)} have not come to the same step within {_END_SECS:g} s; going on")
            return
        with contextlib.suppress(ConnectionError):
            # A launcher that sees one end ends the others soon: not before the chief has written.
            self._hear("saved")
        self._channel.tell(self._key(f"ending/{self._channel.task}"), "1")

    def close(self) -> None:
        """See `Alone.close`."""
        atexit.unregister(self.close)
        self._is_closed.set()
        if threading.current_thread() is not self._listener:
            self._listener.join(_END_SECS)

    def _await_all(self, what: str, secs: float) -> list[str]:
        """Waits until all others have told; returns those who have not."""
        deadline, late = time.monotonic() + secs, []
        for task in self._channel.tasks:
            if task == self._channel.task:
                continue
            answer = None
            with contextlib.suppress(ConnectionError):
                answer = self._channel.hear(self._key(f"{what}/{task}"), deadline - time.monotonic())
            late += [] if answer else [str(task)]
        return late

    def _listen(self) -> None:
        """Hears, in a thread of its own, what the main thread can't: it may be waiting inside a step."""
        with contextlib.suppress(ConnectionError):
            if self._channel.is_chief:
                if self._hear("request") is not None:
                    self._is_asked.set()
                return
            last = self._hear("last")
            if last is None:
                return
            self._last_step = int(last)
            self._channel.tell(self._key(f"heard/{self._channel.task}"), "1")
            # One that waits for the chief, outside of a step, can't come to the same one.
            if self._hear("saved") is not None and not self._is_closed.wait(_STRAY_SECS):
                self._channel.tell(self._key(f"ending/{self._channel.task}"), "1")
                self._end()

    def _hear(self, what: str) -> str | None:
        while not self._is_closed.is_set():
            found = self._channel.hear(self._key(what), _ASK_SECS)
            if found is not None:
                return found
        return None

    def _key(self, what: str) -> str:
        return f"{self._name}/{what}"
