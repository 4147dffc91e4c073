# SPDX-License-Identifier: Apache-2.0
"""Estimates which number of spares, and of workers, would pay: measured times, replayed under the policies.

Each replicate of a block bootstrap draws blocks of consecutive gradients of each worker, so that slow phases stay
together. It simulates the current cluster and each alternative with the same times. The ratios of these pairs give the
interval.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.planning import simulation
from tfdist.policies import BackupWorkers
from tfdist.policies.records import Outcome
from tfdist.telemetry.update_log import Timeline
from tfdist.watching.tensorboard import worker_table

MIN_UPDATES = 200
# Gradients of each worker that are drawn from: the newest.
_NEWEST = 5_000
_BLOCK = 20
_REPLICATES = 24
# Simulated gradients in all; each takes a few microseconds.
_GRADIENTS = 300_000
# A smaller change of the gradients per second counts as none.
_CHANGE = 0.02


class Advisor:
    """Computes the advice of a timeline once, in a thread."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._answer: dict[str, Any] = {"state": "computing"}

    def answer(self) -> dict[str, Any]:
        """Returns the advice; "state": "computing" until it is there."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._compute, name="tfdist advice", daemon=True)
                self._thread.start()
        # Small clusters take less, and the page needn't ask twice.
        self._thread.join(0.5)
        return self._answer

    def _compute(self) -> None:
        try:
            self._answer = advise(self._timeline)
        except Exception as error:
            self._answer = {"state": "none", "reason": f"the simulation failed: {error!r}"}


def advise(timeline: Timeline, seed: int = 0) -> dict[str, Any]:
    """Returns the estimates, or "state": "none" and the reason why there are none."""
    workers, updates = len(timeline.workers), len(timeline.updates)
    if updates < MIN_UPDATES:
        return {
            "state": "none",
            "reason": f"not enough updates: {updates:,} in detail, and {MIN_UPDATES} are needed for an interval",
        }
    spares = _spares(timeline)
    if spares is None:
        return {
            "state": "none",
            "reason": "under these policies no update waits for a certain worker: a spare has no meaning, and one "
            "worker less costs its share of the gradients",
        }
    times = _times(timeline)
    short = [timeline.workers[worker] for worker, values in enumerate(times) if len(values) < _BLOCK]
    if short or workers < 2:
        reason = f"not enough gradients of {', '.join(short[:3])}" if short else "there is one worker only"
        return {"state": "none", "reason": reason}
    # Of workers that are equally fast, none is named: where intervals overlap there is no advice by name.
    slow = worker_table.report_of(timeline).slow
    cases = _cases(timeline.workers, spares, slow.names[0] if slow else None)
    found = _bootstrap(times, _overhead(timeline), cases, np.random.default_rng(seed))
    return {
        "state": "ready",
        "spares": spares,
        "workers": workers,
        "updates": updates,
        "measured": _measured(timeline),
        "confidence": 0.9,
        "best": _best(found["cases"], workers, spares),
        **found,
    }


def _cases(names: Sequence[str], spares: int, slow: str | None) -> dict[str, tuple[list[int], int]]:
    """Returns by name the workers and the spares of each alternative; "now" is the first one."""
    everybody = list(range(len(names)))
    cases = {"now": (everybody, spares)}
    cases |= {f"spares={each}": (everybody, each) for each in (spares + 1, spares - 1) if 0 <= each < len(names)}
    if slow is not None:
        rest = [worker for worker in everybody if names[worker] != slow]
        # Candidates with as many gradients in an update first.
        cases |= {
            f"without {slow}, spares={each}": (rest, each) for each in (spares - 1, spares) if 0 <= each < len(rest)
        }
    return cases


def _best(cases: Sequence[dict[str, Any]], workers: int, spares: int) -> str:
    """Returns a line: what to change, and what comes of it."""
    better = [case for case in cases if case["verdict"] == "helps"]
    if better:
        most = max(case["gradients"]["middle"] for case in better)
        # Of those that are as good, the one with the fewest workers.
        best = min(better, key=lambda case: (case["gradients"]["high"] < most, case["workers"]))
    else:
        # As fast with a worker less.
        same = [case for case in cases if abs(case["gradients"]["middle"] - 1) <= 2 * _CHANGE]
        fewer = [case for case in same if case["workers"] < workers]
        best = max(fewer, key=lambda case: case["gradients"]["middle"], default=None)
    if best is None:
        return f"keep {_counted(workers, 'worker')} and spares={spares}: no other number helps"
    rest = "" if best["spares"] == spares else f"set spares={best['spares']}"
    leave = f"leave out {best['without']}" if best["without"] else ""
    gain = 100 * (best["gradients"]["middle"] - 1)
    speed = "same speed" if best["verdict"] != "helps" else f"{gain:.0f} % more gradients per second"
    where = f" on {_counted(best['workers'], 'worker')}" if best["without"] else ""
    return f"{' and '.join(filter(None, (leave, rest)))}: {speed}{where}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _spares(timeline: Timeline) -> int | None:
    """Returns the number of spares of a synchronous training, None for an asynchronous one."""
    policies = " ".join(timeline.header.policies)
    found = re.search(r"BackupWorkers\(spares=(\d{1,4})\b", policies)
    if found:
        return min(int(found[1]), len(timeline.workers) - 1)
    if re.search(r"SoftSync|StalenessScaling|DropStale|BoundedStaleness", policies):
        return None
    # Without a policy: synchronous if updates have a gradient of each worker.
    accepted = np.count_nonzero(timeline.contributions.outcome == Outcome.ACCEPTED)
    if accepted > 0.8 * len(timeline.updates) * len(timeline.workers):
        return 0
    # "auto", or a policy of somebody's own: as many as did not enter, typically.
    per_update = accepted / len(timeline.updates)
    return len(timeline.workers) - round(per_update) if "BackupWorkers" in policies and per_update >= 1 else None


def _times(timeline: Timeline) -> list[np.ndarray]:
    """Returns the seconds of the newest gradients of each worker, in order."""
    rows = timeline.contributions
    # If the all-reduce is measured, a worker begins at its end, with update and callbacks.
    is_timed, opened = (
        np.repeat(each, timeline.updates.count) for each in (timeline.updates.reduce > 0, timeline.updates.opened)
    )
    rows = rows.replace(start=np.where(is_timed, np.negative(opened), rows.start))[-_NEWEST * len(timeline.workers) :]
    rows = rows[rows.outcome != Outcome.LOST]
    order = np.argsort(rows.worker, kind="stable")
    limits = np.searchsorted(rows.worker[order], np.arange(len(timeline.workers) + 1))
    secs = np.maximum(rows.arrival - rows.start, 1e-6).astype(np.float64)[order]
    return [secs[begin:end] for begin, end in itertools.pairwise(limits)]


def _overhead(timeline: Timeline) -> float:
    """Returns the typical time from the last gradient that entered an update to the update itself."""
    begins = timeline.updates.offsets[:-1][timeline.updates.count > 0]
    accepted = np.where(timeline.contributions.outcome == Outcome.ACCEPTED, timeline.contributions.arrival, -np.inf)
    latest = np.maximum.reduceat(accepted, begins)
    return float(max(0.0, np.median(-latest[np.isfinite(latest)]))) if np.isfinite(latest).any() else 0.0


def _measured(timeline: Timeline) -> float:
    """Returns the updates per second, without validations and checkpoints."""
    (begin, end), events = timeline.updates.time[[0, -1]], timeline.events
    inside = (events.event_time > begin) & (events.event_time < end)
    secs = end - begin - events.event_secs[inside].sum()
    return float((len(timeline.updates) - 1) / secs) if secs > 0 else 0.0


def _bootstrap(
    times: list[np.ndarray],
    overhead: float,
    cases: dict[str, tuple[list[int], int]],
    random: np.random.Generator,
) -> dict[str, Any]:
    num_updates = int(np.clip(_GRADIENTS / (len(cases) * _REPLICATES * len(times)), 40, 400))
    updates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(_REPLICATES):
        drawn = [_blocks(values, 2 * num_updates, random) for values in times]
        for name, (chosen, spares) in cases.items():
            secs = [drawn[worker] for worker in chosen]
            updates[name].append(_rate(secs, spares, num_updates, overhead))
    now = np.array(updates["now"])
    size = {name: len(chosen) - spares for name, (chosen, spares) in cases.items()}
    found = []
    for name, (chosen, spares) in list(cases.items())[1:]:
        ratio = np.array(updates[name]) / now
        gradients = _interval(ratio * size[name] / size["now"])
        found.append(
            {
                "name": name,
                "workers": len(chosen),
                "spares": spares,
                "without": name.partition("without ")[2].partition(",")[0],
                "gradients_per_update": size[name],
                "updates": _interval(ratio),
                "gradients": gradients,
                "verdict": _verdict(gradients),
            }
        )
    return {"simulated": _interval(now), "gradients_per_update": size["now"], "cases": found}


def _verdict(gradients: dict[str, float]) -> str:
    if gradients["low"] > 1 + _CHANGE:
        return "helps"
    return "costs" if gradients["high"] < 1 - _CHANGE else "same"


def _blocks(values: np.ndarray, count: int, random: np.random.Generator) -> list[float]:
    """Draws blocks of consecutive values."""
    begins = random.integers(0, max(1, len(values) - _BLOCK + 1), -(-count // _BLOCK))
    return values[(begins[:, None] + np.arange(_BLOCK)).ravel()[:count]].tolist()


def _rate(secs: list[list[float]], spares: int, num_updates: int, overhead: float) -> float:
    """Returns updates per second, with the time that the updates themselves take."""
    count = len(secs[0])
    policy = BackupWorkers(spares=spares)
    done = simulation.simulate_policy(
        policy, lambda replica, attempt: secs[replica][attempt % count], num_updates, len(secs)
    )
    return num_updates / (done.seconds + num_updates * overhead)


def _interval(values: np.ndarray) -> dict[str, float]:
    low, middle, high = np.percentile(values, (5, 50, 95))
    return {"low": float(low), "middle": float(middle), "high": float(high)}
