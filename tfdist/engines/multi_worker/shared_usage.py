# SPDX-License-Identifier: Apache-2.0
"""Counters of all workers' processes, such as bytes sent: each worker posts its own to the coordination service.

A worker may ask at any time, without the others: it gets its own counters as of now, and those of the others as of
their last post, which is `usage.EVERY_SECS` old at most.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable

from tfdist.engines.multi_worker.agreement import Agreement
from tfdist.runtime import usage
from tfdist.runtime.usage import Usage

# Longest time that `fetch` asks for others' counters.
_FETCH_SECS = 2.0
_JOIN_SECS = 2.0


class SharedUsage:
    """Posts this worker's counters until the program ends, and reads those of the others; any thread may call it.

    Args:
      agreement: of the workers.
      sample: returns the counters of this process.
    """

    def __init__(self, agreement: Agreement, sample: Callable[[], Usage]) -> None:
        self._agreement = agreement
        self._sample = sample
        self._lock = threading.Lock()
        self._known: dict[str, Usage] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfdist shared usage", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the thread: the service ends with the program."""
        self._ended.set()
        self._thread.join(_JOIN_SECS)

    def fetch(self) -> dict[str, Usage]:
        """Returns the counters of each worker that has posted some, by its name in reports."""
        found: dict[str, Usage] = {}
        until = time.monotonic() + _FETCH_SECS
        for index, task in enumerate(self._agreement.tasks):
            if task == self._agreement.task:
                found[f"worker:{index}"] = self._sample()
            # Each answer of a chief that stands still takes its own time limit.
            elif not self._ended.is_set() and time.monotonic() < until:
                text = self._agreement.peek(_key(task))
                if text is not None:
                    found[f"worker:{index}"] = Usage.from_json(text)
        with self._lock:
            self._known |= found
            return dict(sorted(self._known.items(), key=lambda each: int(each[0].partition(":")[2])))

    def _run(self) -> None:
        while True:
            # Posting fails while the chief is away; the next sample has all that this one has.
            with contextlib.suppress(Exception):
                self._agreement.post(_key(self._agreement.task), self._sample().to_json())
            if self._ended.wait(usage.EVERY_SECS):
                return


def _key(task: object) -> str:
    return f"usage/{task}"
