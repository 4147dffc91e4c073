# SPDX-License-Identifier: Apache-2.0
"""`make fuzz`: trains random models on one device and under each strategy, and compares what comes of it.

One child process for each strategy (two workers for MultiWorkerMirroredStrategy) trains all seeds of that strategy,
until one fails; another trains the rest.
Each model is one line with its seed; `make fuzz FLAGS="--seed=N --count=1 --strategy=NAME"` repeats it. A program
that is refused with one line before it trains counts as refused, and is no failure.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import subprocess
import sys
import threading

HERE = pathlib.Path(__file__).resolve().parent
# A model that takes longer hangs: its child is ended, and the model is a failure.
_MODEL_SECS = 400.0
STRATEGIES = ("mirrored", "mirrored-policy", "multi", "ps-1-1", "ps-2-2")


def main() -> int:
    """Returns the exit code: 1 if any model trained differently."""
    arguments = _arguments()
    chosen = arguments.strategy or list(STRATEGIES)
    counts: collections.Counter[str] = collections.Counter()
    for index, name in enumerate(chosen):
        seeds = [arguments.seed + offset for offset in range(index, arguments.count, len(chosen))]
        counts.update(_run(name, seeds))
    shown = ", ".join(f"{counts[word]} {word}" for word in ("agree", "refused", "FAIL"))
    print(f"fuzz: {counts.total()} models, {shown}")
    return 1 if counts["FAIL"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=300, help="how many models, spread over the strategies")
    parser.add_argument("--strategy", action="append", choices=STRATEGIES, help="only this one; may be repeated")
    return parser.parse_args()


def _run(name: str, seeds: list[int]) -> list[str]:
    """Trains these seeds in child processes; returns their outcomes.

    A new child takes over where one ended before its last seed: a failed collective is of no more use.
    """
    found: list[str] = []
    while seeds:
        outcomes, last = _train(name, seeds)
        found += outcomes
        seeds = seeds[len(outcomes) :]
        if seeds and not (outcomes and outcomes[-1] == "FAIL"):
            print(f"fuzz {name} seed {seeds[0]}: FAIL: the child ended before it had trained: {last}", flush=True)
            found.append("FAIL")
            seeds = seeds[1:]
    return found


def _train(name: str, seeds: list[int]) -> tuple[list[str], str]:
    """Passes on the lines of one child; returns the outcomes of its first seeds, and its last line."""
    command = [sys.executable, str(HERE / "child.py"), name, *map(str, seeds)]
    if name == "multi":
        tfdist = str(pathlib.Path(sys.executable).with_name("tfdist"))
        command = [tfdist, "launch", "local", "--num_workers=2", *command[1:]]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR", "KERAS_BACKEND": "tensorflow"}
    outcomes: list[str] = []
    last = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as child:
        limit = _TimeLimit(child)
        for line in child.stdout or ():
            last = line.strip() or last
            if outcome := _outcome(line):
                limit.restart()
                outcomes.append(outcome)
                print(line.rstrip(), flush=True)
        limit.cancel()
    return outcomes, f"no outcome within {_MODEL_SECS:g} s; {last}" if limit.is_over else last


class _TimeLimit:
    """Ends a child that gives no outcome for too long."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child
        self.is_over = False
        self._timer = threading.Timer(0, lambda: None)
        self.restart()

    def restart(self) -> None:
        """Begins to count anew."""
        self.cancel()
        self._timer = threading.Timer(_MODEL_SECS, self._end)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """Counts no longer."""
        self._timer.cancel()

    def _end(self) -> None:
        self.is_over = True
        self._child.terminate()
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            self._child.kill()


def _outcome(line: str) -> str:
    """The outcome that a child's line tells, such as "fuzz mirrored seed 7: FAIL: ..."; empty if it tells none."""
    words = line.partition("fuzz ")[2].split(": ")
    return words[1].strip() if len(words) > 1 and " seed " in words[0] else ""


if __name__ == "__main__":
    sys.exit(main())
