# SPDX-License-Identifier: Apache-2.0
"""Preemption signals, and the agreement between workers on the step after which all of them save and end.

    worker:1                        the chief                          all workers
      SIGTERM
      end of step 146: request --->
                                      end of step 146 (or 147):
                                      last step is 147           --->  a thread of each worker reads it, and answers
                                      waits for the answers      <---
                                      step 147                         step 147: no worker can pass it before the chief
                                      saves, ends with code 75         end with code 75

The chief decides, because it saves. It broadcasts the last step before it begins this step, and begins the step once
all workers have answered. All workers take part in each step, so all end after the same step. TensorFlow's own
`PreemptionCheckpointHandler` uses the same protocol.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from tfdist import _forks

# Time for the other workers' answers: until a line is written, and until the chief continues without them.
_ANSWER_SECS = 5.0
_SILENT_SECS = 30.0
# Time for the other workers to reach the last step after the chief has saved.
_END_SECS = 5.0
# Time for a worker to end by itself once the chief has saved; shorter than `_END_SECS`.
_STRAY_SECS = 2.0
# Timeout of one read from the channel, which can't be interrupted.
_ASK_SECS = 0.2


class Signals:
    """Signal handler that notes the first signal during `fit`; other signals have their previous effect.

    Args:
      numbers: the signals.
      is_wanted: returns True while a signal is to be noted; called by the handler.

    Attributes:
      received: the first signal that was noted, or None.
    """

    def __init__(self, numbers: Sequence[int], is_wanted: Callable[[], bool]) -> None:
        self.numbers = tuple(numbers)
        self._is_wanted = is_wanted
        self._before: dict[int, Any] = {}
        self._process = os.getpid()
        self.received: int | None = None

    def install(self) -> bool:
        """Installs the handler; returns False outside of the main thread, where Python handles no signals."""
        self.uninstall()
        self.received = None
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in self.numbers:
            self._before[number] = signal.signal(number, self._note)
        return True

    def uninstall(self) -> None:
        """Restores the previous handlers; may be called again."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            # The program may have installed another handler since.
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None and os.getpid() == self._process and self._is_wanted():
            self.received = number
            return
        # The second signal, or a signal after fit, has its usual effect; so has one that a fork of the program gets.
        self.uninstall()
        os.kill(os.getpid(), number)


class Together:
    """Preemption of one of several workers, all of which save and end after the same step.

    Args:
      channel: key-value store between the workers: `tfdist.engines.agreement.Agreement`.
      name: unique name of this `fit`; the same on all workers.
      end: ends this process, if it does not end by itself.
      say: writes a line to the log.

    Attributes:
      asked_by: name of the other worker that has received a signal; "" if none is known.
    """

    def __init__(self, channel: Any, name: str, end: Callable[[], object], say: Callable[[str], object]) -> None:
        self._channel = channel
        self._name = name
        self._end = end
        self._say = say
        self.asked_by = ""
        self._is_asked = threading.Event()
        self._is_closed = threading.Event()
        self._last_step: int | None = None
        self._listener = threading.Thread(target=self._listen, name="tfdist preemption", daemon=True)
        self._listener.start()
        # A thread inside of TensorFlow would abort the process when Python ends.
        _forks.at_exit(self.close)

    def _request(self, step: int) -> None:
        if not self._channel.is_chief:
            self._channel.publish(self._key("request"), str(self._channel.task))
        elif self._last_step is None:
            self._last_step = step + 1
            self._channel.publish(self._key("last"), f"{self._last_step} {self.asked_by or self._channel.task}")
            late = self._await_all("acknowledged", _ANSWER_SECS)
            if late:
                self._say(f"{', '.join(late)} have not answered that training ends; waiting for them")
                # A worker without the message would begin a step without the chief. The loss of a worker ends the step.
                self._await_all("acknowledged", _SILENT_SECS)

    def is_due(self, step: int, is_requested: bool, is_synchronized: Callable[[], bool]) -> bool:
        """Returns True if the program must save and end after this step.

        Args:
          step: number of steps made.
          is_requested: whether this process has received a signal.
          is_synchronized: returns True if all workers are at the same step, because the step needed all of them.
            Called only if a request is pending.
        """
        is_asked = is_requested or (self._channel.is_chief and self._is_asked.is_set())
        if (self._last_step is None and not is_asked) or not is_synchronized():
            return False
        if self._last_step is None:
            self._request(step)
        return self._last_step is not None and step >= self._last_step

    def is_ending(self, is_requested: bool) -> bool:
        """Returns True if any worker has received a signal; all workers call it at the end of training."""
        own = is_requested or self._last_step is not None
        return any(self._channel.gather(own, "the end of training").values())

    def saved(self) -> None:
        """Notes that the checkpoint is written. The chief waits for the others: the channel ends with its process."""
        if self._channel.is_chief:
            self._channel.publish(self._key("saved"), "1")
            late = self._await_all("ending", _END_SECS)
            if late:
                self._say(f"{', '.join(late)} have not come to the same step within {_END_SECS:g} s; going on")
            return
        try:
            # A launcher ends all workers soon after the first one has ended, and the chief must have written by then.
            self._receive("saved", self._check_chief)
        except ConnectionError as error:
            self._say(f"not waiting for the chief's checkpoint any more: {error}")
            return
        self._channel.publish(self._key(f"ending/{self._channel.task}"), "1")

    def close(self) -> None:
        """Ends the thread."""
        _forks.not_at_exit(self.close)
        self._is_closed.set()
        if threading.current_thread() is not self._listener:
            self._listener.join(_END_SECS)

    def _await_all(self, what: str, secs: float) -> list[str]:
        """Waits for a message of each other worker; returns the workers without one."""
        deadline, late = time.monotonic() + secs, []
        for task in self._channel.tasks:
            if task == self._channel.task:
                continue
            answer = None
            with contextlib.suppress(ConnectionError):
                answer = self._channel.receive(self._key(f"{what}/{task}"), deadline - time.monotonic())
            late += [] if answer else [str(task)]
        return late

    def _listen(self) -> None:
        """Reads messages in a thread of its own, because the main thread may be blocked inside a step."""
        with contextlib.suppress(ConnectionError):
            if self._channel.is_chief:
                if (asking := self._receive("request")) is not None:
                    self.asked_by = asking
                    self._is_asked.set()
                return
            found = self._receive("last")
            if found is None:
                return
            last, self.asked_by = found.split()
            self._last_step = int(last)
            self._channel.publish(self._key(f"acknowledged/{self._channel.task}"), "1")
            # A worker that waits for the chief outside of a step never reaches the last step.
            if self._receive("saved") is not None and not self._is_closed.wait(_STRAY_SECS):
                self._channel.publish(self._key(f"ending/{self._channel.task}"), "1")
                self._end()

    def _receive(self, what: str, check: Callable[[], None] = lambda: None) -> str | None:
        while not self._is_closed.is_set():
            found = self._channel.receive(self._key(what), _ASK_SECS)
            if found is not None:
                return found
            check()
        return None

    def _check_chief(self) -> None:
        """Raises ConnectionError if the chief has failed or hangs: a stopped process keeps its connections."""
        chief = str(self._channel.tasks[0])
        reason = self._channel.lost().get(chief)
        if reason is not None:
            raise ConnectionError(f"{chief} has failed: {reason}")

    def _key(self, what: str) -> str:
        return f"{self._name}/{what}"
