# SPDX-License-Identifier: Apache-2.0
"""Refuses calls of Keras' loops that overlap with others and would share their counts, before they train.

Keras tells a strategy that a call of `fit` begins, by asking it for data or for its scope, and never that it ends. So
the call is remembered by its frame, and it runs for as long as that frame is on the stack of its thread. There is
nothing to release: a call that raised, was interrupted, or whose thread died is on no stack, and nothing of the model
is kept alive.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import weakref
from types import CodeType, FrameType
from typing import Any

from tfdist.compat import running_loop
from tfdist.runtime import thread_frames

_lock = threading.Lock()
_calls: list[_Call] = []


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of one of a model's loops, such as `fit`, in one thread."""

    thread: threading.Thread
    frame: int
    code: CodeType
    model: weakref.ref[Any]
    strategy: weakref.ref[Any]

    @property
    def name(self) -> str:
        return self.code.co_name

    @property
    def counts(self) -> bool:
        """True if the loop trains, or writes metrics."""
        return not self.name.startswith("predict")

    @property
    def label(self) -> str:
        return f"{self.name} of model {getattr(self.model(), 'name', None)!r}"

    def is_running(self, stacks: dict[int, FrameType]) -> bool:
        frame = stacks.get(self.thread.ident or 0)
        while frame is not None and not (id(frame) == self.frame and frame.f_code is self.code):
            frame = frame.f_back
        model = self.model()
        # Frames that have ended make room for others at the same address. `f_locals` of another thread's frame is
        # only read. Since Python 3.13 it is a view of the variables (PEP 667); before, a copy that lives as long as the
        # call and is renewed at each look. `self`, which no loop of Keras rebinds, is the same in both.
        return frame is not None and model is not None and frame.f_locals.get("self") is model


def begin(strategy: Any, is_exclusive: bool, nests: bool = True) -> None:
    """Notes the call of Keras that is running here, if there is one, unless it was noted before.

    Args:
      strategy: the strategy that the call runs under.
      is_exclusive: whether the strategy's loops share more than their models: no two threads may be in one then.
        Otherwise two threads may not train or evaluate the same model, and on several replicas no two models: a sum
        over the replicas stands still now and then while another thread makes one.
      nests: whether `fit` may be called within a callback of another `fit`.

    Raises:
      RuntimeError: it overlaps with another call.
    """
    frame = running_loop.call_frame(sys._getframe(1))
    if frame is None:
        return
    model = frame.f_locals["self"]
    call = _Call(threading.current_thread(), id(frame), frame.f_code, weakref.ref(model), weakref.ref(strategy))
    with _lock:
        stacks = thread_frames.by_thread()
        _calls[:] = [known for known in _calls if known != call and known.is_running(stacks)]
        beside = [known for known in _calls if known.strategy() is strategy]
        for known in beside:
            if known.thread is call.thread:
                if not nests and known.name == call.name == "fit":
                    raise RuntimeError(_nested(call, known, strategy))
            elif reason := _reason(call, known, strategy, is_exclusive):
                raise RuntimeError(_overlapping(call, known, reason))
        _calls.append(call)


def _reason(call: _Call, known: _Call, strategy: Any, is_exclusive: bool) -> str:
    """Returns why two calls in two threads may not overlap; "" if they may."""
    kind = type(strategy).__name__
    if is_exclusive:
        return f"under this {kind} the loops of all models share one engine, or the order of collectives"
    if not (known.counts and call.counts):
        return ""
    if known.model() is call.model():
        return "both would write the same metrics and counts"
    if strategy.num_replicas_in_sync > 1:
        return f"under this {kind} TensorFlow's sums over the replicas can hang beside those of another thread"
    return ""


def _overlapping(call: _Call, known: _Call, reason: str) -> str:
    return (
        f"{call.label} overlaps with another thread's call, and {reason}; begin it when the other has ended, or run it "
        f"in another process. Received: a call in thread {call.thread.name!r} during {known.label} in thread "
        f"{known.thread.name!r}"
    )


def _nested(call: _Call, known: _Call, strategy: Any) -> str:
    return (
        f"{call.label} is called within a callback of {known.label}, and the policies of this "
        f"{type(strategy).__name__} can't leave a pass over the data and come back to it; begin it when the other has "
        f"ended, or train a model of another strategy there. Received: fit within fit"
    )
