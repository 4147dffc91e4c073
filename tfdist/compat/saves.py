# SPDX-License-Identifier: Apache-2.0
"""Announces saved checkpoints to listeners: `model.save`, `model.save_weights`, and those of `callbacks.Resume`.

Keras' ModelCheckpoint and BackupAndRestore call these methods, and tell nobody. So they are wrapped, once in a process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfdist.compat import calls, replacing

# Given the strategy of the model, the path, the monotonic time of the begin, and the seconds that the save took.
Listener = Callable[[Any, str, float, float], None]
_listeners = calls.Listeners()


def listen(listener: Listener) -> None:
    """Calls a bound method after each save of this process, as long as its owner lives."""
    for name in ("save", "save_weights"):
        replacing.once(keras.Model, name, _announcing)
    _listeners.add(listener)


@contextlib.contextmanager
def announced(strategy: Any, path: str) -> Iterator[None]:
    """Announces the save that is made within the block, unless the block raises."""
    began = time.monotonic()
    yield
    _listeners.call(strategy, path, began, time.monotonic() - began)


def _announcing(original: Callable[..., Any]) -> Callable[..., Any]:
    def save(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        is_path = isinstance(filepath, str | os.PathLike)
        with announced(self.distribute_strategy, os.fspath(filepath)) if is_path else contextlib.nullcontext():
            return original(self, filepath, *args, **kwargs)

    return save
