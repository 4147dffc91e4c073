# SPDX-License-Identifier: Apache-2.0
"""Calls of Keras' loops while a `fit` is under way: from its callbacks, or from another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras


class Meanwhile(keras.callbacks.Callback):
    """Makes a call within the fourth step of a `fit`, once, and waits for its end.

    Args:
      call: the call to make.
      in_thread: whether another thread makes it.

    Attributes:
      result: what it returned.
      error: the message of the RuntimeError that it raised; empty if it did not.
    """

    def __init__(self, call: Callable[[], Any], in_thread: bool = True) -> None:
        super().__init__()
        self._call = call
        self._in_thread = in_thread
        self._is_due = True
        self.result: Any = None
        self.error = ""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch < 3 or not self._is_due:
            return
        self._is_due = False
        if self._in_thread:
            thread = threading.Thread(target=self._make_call, name="other")
            thread.start()
            thread.join()
        else:
            self._make_call()

    def _make_call(self) -> None:
        try:
            self.result = self._call()
        except RuntimeError as error:
            self.error = str(error)


def during_fit(fit: Callable[..., Any], call: Callable[[], Any], in_thread: bool = True) -> Meanwhile:
    """Makes `call` while `fit(callbacks=...)` is running."""
    meanwhile = Meanwhile(call, in_thread)
    fit(callbacks=[meanwhile])
    return meanwhile


def in_thread(call: Callable[[], Any]) -> None:
    """Makes a call in a thread of its own, to its end, whatever it raises."""

    def run() -> None:
        try:
            call()
        except BaseException:
            # The thread dies of it, as it would without a word in a thread pool.
            return

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
