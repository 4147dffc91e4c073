# SPDX-License-Identifier: Apache-2.0
"""Counts the Python functions of tfdist that one step of `fit` calls on the chief, under parameter servers.

All of the chief's threads are counted, the workers' among them, by `sys.setprofile`; properties, lambdas and generators
count as functions do. The first steps, in which functions are traced, are left out. A step's share of what happens
now and then (logs are fetched 20 times a second) is why the counts are no whole numbers.

    python benchmarks/calls.py [--steps=400] [--json=calls.json] [--list]
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import sys
import threading
from types import FrameType
from typing import Any

import keras
import numpy as np

import tfdist

_PACKAGE = str(pathlib.Path(tfdist.__file__).parent)
_WARM_UP = 100
_CONTENDERS: dict[str, list[Any]] = {"no policy": [], "BackupWorkers(0)": [tfdist.BackupWorkers(spares=0)]}


class _Counter(keras.callbacks.Callback):
    """Counts between two steps of `fit`."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = steps
        self.calls: collections.Counter[str] = collections.Counter()
        self._is_counting = False

    def note(self, frame: FrameType, event: str, arg: Any) -> None:
        """For `sys.setprofile`."""
        del arg
        if self._is_counting and event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
            file = pathlib.Path(frame.f_code.co_filename).relative_to(_PACKAGE)
            self.calls[f"{file}:{frame.f_code.co_qualname}"] += 1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begins and ends to count, each before a step."""
        if batch in (_WARM_UP, _WARM_UP + self._steps):
            self._is_counting = batch == _WARM_UP


def _count(policies: list[Any], steps: int) -> dict[str, float]:
    counter = _Counter(steps)
    # Before the strategy: a thread that runs already has no profile.
    threading.setprofile(counter.note)
    strategy = tfdist.ParameterServerStrategy(num_workers=2, num_ps=1, policies=policies)
    examples = 8 * (_WARM_UP + steps + 100)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    sys.setprofile(counter.note)
    model.fit(np.zeros([examples, 8], "float32"), np.zeros([examples, 1]), batch_size=8, verbose=0, callbacks=[counter])
    sys.setprofile(None)
    threading.setprofile(None)
    strategy.close()
    return {name: count / steps for name, count in counter.calls.most_common()}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="steps that are counted")
    parser.add_argument("--json", help="file for the counts by function")
    parser.add_argument("--list", action="store_true", help="show each function")
    args = parser.parse_args()
    found = {name: _count(policies, args.steps) for name, policies in _CONTENDERS.items()}
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(found, indent=2))
    for name, counts in found.items():
        print(f"{name:20} {sum(counts.values()):6.1f} calls in a step, of {len(counts)} functions")
        for function, count in counts.items() if args.list else ():
            print(f"    {count:6.2f}  {function}")


if __name__ == "__main__":
    main()
