# SPDX-License-Identifier: Apache-2.0
"""Ends a training early, as an end of the program would."""

from __future__ import annotations

from typing import Any

import keras


class CutOffError(Exception):
    """Stands for whatever ends a program."""


class CutOff(keras.callbacks.Callback):
    """Ends the training within its `after`-th call of on_train_batch_end.

    Raises:
      CutOffError: that many calls were made.
    """

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if not self.left:
            raise CutOffError
